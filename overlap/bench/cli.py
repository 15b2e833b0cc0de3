"""The commands `overlap bench allreduce` and `overlap bench step`."""

from __future__ import annotations

import importlib.util
import json
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stdout
from enum import Enum
from typing import Annotated, Any

import typer
from rich.console import Console, RenderableType

app = typer.Typer(
    help="Measure overlap beside torch's own communication.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)

_DEFAULT_SIZES = "1KB,64KB,1MB,26MB,105MB"
_UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9}
_WIDTH = 100


class Model(str, Enum):
    SMALL = "small"
    WIDE = "wide"
    CONV = "conv"
    HOOKS = "hooks"
    MEMORY = "memory"


def positive(text: str | int) -> int:
    """Read a whole number of at least 1 (typer's own check does not say what was given).

    Raises:
        BadParameter: it is none.
    """
    if not re.fullmatch("0*[1-9][0-9]*", str(text)):
        raise typer.BadParameter(f"must be a whole number of at least 1, not {text!r}")
    return int(text)


def _count(*names: str, help: str) -> Any:
    return typer.Option(*names, parser=positive, metavar="N", help=help)


NumProc = Annotated[int, _count("-np", "--num-proc", help="Ranks, all on this host.")]
Json = Annotated[bool, typer.Option("--json", help="Write one JSON object to standard output, nothing else.")]


def parse_sizes(text: str) -> list[int]:
    """Bytes from "1KB,64KB" (1 KB is 1000 bytes), each a whole number of float32.

    Raises:
        BadParameter: one of them is no size; names it.

    >>> parse_sizes("1KB, 1.5mb")
    [1000, 1500000]
    """
    sizes = []
    for item in text.split(","):
        match = re.fullmatch(r"(\d+(?:\.\d+)?) *([KMG]?B|)", item.strip().upper())
        nbytes = round(float(match[1]) * _UNITS[match[2]]) if match else 0
        if nbytes < 4 or nbytes % 4:
            raise typer.BadParameter(
                f"must be sizes such as 1KB,26MB, each a multiple of 4 bytes, not {item.strip()!r}",
                param_hint="--sizes",
            )
        sizes.append(nbytes)
    return sizes


@app.command()
def allreduce(
    num_proc: NumProc = 2,
    sizes: Annotated[
        str, typer.Option("--sizes", help="What to average, comma-separated: bytes, KB, MB or GB (1e9).")
    ] = _DEFAULT_SIZES,
    elements: Annotated[
        int, _count("--elements", help="16-bit floats to average beside as many float32.")
    ] = 6_500_000,
    as_json: Json = False,
) -> None:
    """Time allreduce by size and type: communicator, channel, torch's gloo, and a memory copy."""
    wanted = parse_sizes(sizes)
    from . import allreduce, table

    with _working("allreduce"):
        record = allreduce.report(num_proc, wanted, elements)
    _write(record, as_json, table.allreduce)


@app.command()
def step(
    num_proc: NumProc = 2,
    model: Annotated[
        list[Model], typer.Option("--model", help="What to measure; give it once for each.")
    ] = list(Model),  # noqa: B006  # typer only reads it
    steps: Annotated[
        int | None, _count("--steps", help="Steps a round; 5 to 25 by model, unless given.")
    ] = None,
    rounds: Annotated[
        int, _count("--rounds", help="Rounds, in which plain, attached and DDP alternate.")
    ] = 7,
    as_json: Json = False,
) -> None:
    """Time training steps of PyTorch models: plain, attached, and in DistributedDataParallel."""
    if importlib.util.find_spec("torch") is None:
        raise typer.BadParameter(
            "torch is not installed, whose steps this measures: pip install 'overlap-training[torch]'"
        )
    from . import hook_cost, memory, table
    from . import step as steps_of_models
    from .job import new_ranks

    record: dict[str, Any] = {"benchmark": "step", "ranks": num_proc}
    timed = [name for name in dict.fromkeys(each.value for each in model) if name in steps_of_models.MODELS]
    with _working("step"):
        with new_ranks(num_proc) as ranks:
            record["models"] = steps_of_models.report(ranks, timed, steps, rounds)
            record["hooks"] = hook_cost.report(ranks, rounds) if Model.HOOKS in model else None
        record["memory"] = memory.report(num_proc, steps or 5) if Model.MEMORY in model else None
    _write(record, as_json, table.step)


def _write(
    record: dict[str, Any], as_json: bool, tables: Callable[[dict[str, Any]], list[RenderableType]]
) -> None:
    if as_json:
        print(json.dumps(record, indent=1))
        return
    console = Console(width=_WIDTH, highlight=False)
    for part in tables(record):
        console.print(part)


@contextmanager
def _working(what: str) -> Iterator[None]:
    """Show on a terminal that the benchmark runs; what ranks may print goes to standard error."""
    with redirect_stdout(sys.stderr):
        if sys.stderr.isatty():
            with Console(stderr=True).status(f"overlap bench {what}: measuring"):
                yield
        else:
            yield
