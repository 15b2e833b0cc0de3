"""What the benchmarks print: a table for each record, and a line that explains it and names the targets."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import RenderableType
from rich.table import Table

_NO_GLOO = "The gloo columns are empty: torch is not installed, or has no distributed package."


def allreduce(record: dict[str, Any]) -> list[RenderableType]:
    """The tables of `overlap bench allreduce`."""
    ranks = record["ranks"]
    columns = ["size", "communicator", "channel", "gloo", "copyto", "gloo /\noverlap", "overlap /\ncopyto"]
    sizes = _table(f"Average of float32, {ranks} ranks", columns)
    for row in record["sizes"]:
        times = [_micros(row[f"{name}_us"]) for name in ("communicator", "channel", "gloo", "copy")]
        ratios = [_ratio(row[name], 1) for name in ("times_faster_than_gloo", "times_a_copy")]
        sizes.add_row(_size(row["bytes"]), *times, *ratios)
    dtypes = _table(f"Average by type, {ranks} ranks", ["type", "elements", "communicator", "/ float32"])
    for row in record["dtypes"]:
        dtypes.add_row(
            row["dtype"],
            f"{row['elements']:,}",
            _micros(row["communicator_us"]),
            _ratio(row["times_float32"], 2),
        )
    return [
        sizes,
        "Median (minimum) of a call on any rank, all started at once; channel: through the engine's queue "
        "and thread. Targets for 2 ranks on 2 cores: 1 KB 20 us, through the channel 100 us; 64 KB, 1 MB 15 "
        "x faster than gloo; from 26 MB on 5 x, and 1.2 x np.copyto of that size.",
        *([] if record["gloo"] else [_NO_GLOO]),
        dtypes,
        "Beside as many float32. Target: 1.7 x; without torch, bfloat16 2.5 x.",
        f"import overlap: {record['import_overlap_ms']:.0f} ms beyond the start of python. Target: 150 ms.",
    ]


def step(record: dict[str, Any]) -> list[RenderableType]:
    """The tables of `overlap bench step`."""
    parts: list[RenderableType] = []
    if record["models"]:
        parts += _models(record["models"], record["ranks"])
    if hooks := record["hooks"]:
        parts.append(
            f"A hook and its copy: {hooks['hook_us']:.2f} us ({hooks['parameters']:,} parameters of one "
            f"element; shortest backward {hooks['attach_ms']:.1f} ms, plain {hooks['plain_ms']:.1f} ms). "
            f"Target: {hooks['target_us']:g} us."
        )
    if memory := record["memory"]:
        parts.append(
            f"Memory of `{memory['model']}` a rank (peak proportional set size, above that before): plain "
            f"{memory['plain_peak_mb']:.0f} MB, attach {memory['attach_peak_mb']:.0f} MB, "
            f"{memory['added_mb']:+.0f} MB. Target: {memory['target_added_mb']:+.0f} MB (the largest "
            f"parameter, {memory['largest_parameter_mb']:.0f} MB, and 16 MB)."
        )
    return parts


def _models(rows: Sequence[dict[str, Any]], ranks: int) -> list[RenderableType]:
    wall = _table(
        f"Step, {ranks} ranks, ms",
        ["model", "plain", "attach", "DDP", "/ plain", "target", "/ DDP", "DDP / plain"],
    )
    cost = _table(
        f"Cost of a step, {ranks} ranks, ms",
        ["model", "CPU plain", "CPU attach", "CPU DDP", "/ plain", "hidden", "exposed", "buckets"],
    )
    for row in rows:
        times = [_millis(row[f"{name}_ms"]) for name in ("plain", "attach", "ddp")]
        wall.add_row(
            row["model"],
            *times,
            _ratio(row["attach_to_plain"], 2),
            f"≤ {row['target']:.2f}",
            _ratio(row["attach_to_ddp"], 2),
            _ratio(row["ddp_to_plain"], 2),
        )
        cost.add_row(
            row["model"],
            *(f"{row[f'{name}_cpu_ms']:.1f}" for name in ("plain", "attach", "ddp")),
            _ratio(row["attach_cpu_to_plain"], 2),
            f"{row['hidden_ms']:.1f}",
            f"{row['exposed_ms']:.1f}",
            str(row["buckets"]),
        )
    return [
        wall,
        "Median (minimum) of all steps of all ranks. plain: as many processes that send nothing; attach: "
        "overlap.attach; DDP: DistributedDataParallel over gloo. Target: attach / plain; / DDP below 1.",
        cost,
        "CPU time of all threads of a rank; communication hidden behind backward, and exposed after it.",
    ]


def _table(title: str, columns: Sequence[str]) -> Table:
    table = Table(title=title, title_justify="left", box=SIMPLE_HEAD, pad_edge=False)
    for number, column in enumerate(columns):
        table.add_column(column, justify="right" if number else "left", no_wrap=True)
    return table


def _micros(timing: dict[str, float] | None) -> str:
    if timing is None:
        return ""
    scale, unit = (1e-3, "ms") if timing["median"] >= 1000 else (1, "us")
    middle, least = timing["median"] * scale, timing["min"] * scale
    digits = 1 if middle < 100 else 0
    return f"{middle:.{digits}f} ({least:.{digits}f}) {unit}"


def _millis(timing: dict[str, float]) -> str:
    return f"{timing['median']:.1f} ({timing['min']:.1f})"


def _ratio(value: float | None, digits: int) -> str:
    return "" if value is None else f"{value:.{digits}f} x"


def _size(nbytes: int) -> str:
    for unit, scale in (("GB", 10**9), ("MB", 10**6), ("KB", 10**3)):
        if nbytes >= scale:
            return f"{nbytes / scale:g} {unit}"
    return f"{nbytes} B"
