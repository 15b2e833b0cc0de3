"""`overlap bench`: tiny runs give complete records whose ratios fit their times; bad options, one line."""

from __future__ import annotations

import importlib.util
import io
import json
import sys
from collections.abc import Iterator
from contextlib import redirect_stderr, redirect_stdout
from typing import Any

import pytest
from rich.console import Console

from overlap import cli
from overlap.bench import table
from overlap.bench.cli import parse_sizes


def call(*arguments: str) -> tuple[int | str | None, str, str]:
    """The exit code, standard output and standard error of `overlap bench` with these arguments."""
    with (
        pytest.MonkeyPatch.context() as patch,
        redirect_stdout(io.StringIO()) as out,
        redirect_stderr(io.StringIO()) as err,
    ):
        patch.setattr(sys, "argv", ["overlap", "bench", *arguments])
        with pytest.raises(SystemExit) as exit:
            cli.main()
    return exit.value.code, out.getvalue(), err.getvalue()


def record_of(*arguments: str) -> dict[str, Any]:
    code, out, err = call(*arguments, "-np", "2", "--json")
    assert code == 0, err
    record: dict[str, Any] = json.loads(out)
    assert record["ranks"] == 2
    return record


def numbers(value: Any) -> Iterator[float]:
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, list):
        for each in value:
            yield from numbers(each)
    elif isinstance(value, (int, float)) and not isinstance(value, bool):
        yield value


def lines_of(parts: list[Any]) -> list[str]:
    out = io.StringIO()
    console = Console(width=100, file=out)
    for part in parts:
        console.print(part)
    return out.getvalue().splitlines()


@pytest.fixture(scope="module")
def allreduce() -> dict[str, Any]:
    pytest.importorskip("overlap.launch.ranks")
    return record_of("allreduce", "--sizes", "1KB,64KB", "--elements", "10000")


@pytest.fixture(scope="module")
def step() -> dict[str, Any]:
    pytest.importorskip("torch")
    pytest.importorskip("overlap.launch.ranks")
    models = ("--model", "small", "--model", "hooks", "--model", "memory")
    return record_of("step", *models, "--steps", "2", "--rounds", "1")


def test_allreduce_measures_every_size_and_type(allreduce: dict[str, Any]) -> None:
    assert [row["bytes"] for row in allreduce["sizes"]] == [1000, 64000]
    assert [row["dtype"] for row in allreduce["dtypes"]] == ["float32", "bfloat16", "float16"]
    assert allreduce["gloo"] is (importlib.util.find_spec("torch") is not None)
    timed = [allreduce["sizes"], allreduce["dtypes"], allreduce["import_overlap_ms"]]
    assert min(numbers(timed)) > 0
    assert max(numbers(timed)) < 10e6


def test_allreduce_ratios_are_those_of_the_medians(allreduce: dict[str, Any]) -> None:
    for row in allreduce["sizes"]:
        ours = row["communicator_us"]
        assert ours["min"] <= ours["median"]
        assert row["times_a_copy"] == pytest.approx(ours["median"] / row["copy_us"]["median"])
        if allreduce["gloo"]:
            assert row["times_faster_than_gloo"] == pytest.approx(row["gloo_us"]["median"] / ours["median"])
    full = allreduce["dtypes"][0]["communicator_us"]["median"]
    for row in allreduce["dtypes"]:
        assert row["times_float32"] == pytest.approx(row["communicator_us"]["median"] / full)


def test_allreduce_prints_tables_of_100_columns_with_and_without_torch(allreduce: dict[str, Any]) -> None:
    assert all(len(line) <= 100 for line in lines_of(table.allreduce(allreduce)))
    without = json.loads(json.dumps(allreduce)) | {"gloo": False}
    for row in without["sizes"]:
        row["gloo_us"] = row["times_faster_than_gloo"] = None
    lines = lines_of(table.allreduce(without))
    assert all(len(line) <= 100 and "…" not in line for line in lines)
    assert sum("torch is not installed" in line for line in lines) == 1


def test_step_measures_the_variants_side_by_side(step: dict[str, Any]) -> None:
    (row,) = step["models"]
    assert row["model"] == "small"
    plain, attach, ddp = (row[f"{name}_ms"]["median"] for name in ("plain", "attach", "ddp"))
    assert 1 < plain < 10_000
    assert row["attach_to_plain"] == pytest.approx(attach / plain)
    assert row["ddp_to_plain"] == pytest.approx(ddp / plain)
    assert row["attach_to_ddp"] == pytest.approx(attach / ddp)
    assert row["attach_cpu_to_plain"] == pytest.approx(row["attach_cpu_ms"] / row["plain_cpu_ms"])
    assert row["buckets"] > 1
    assert row["hidden_ms"] + row["exposed_ms"] > 0


def test_step_measures_hooks_and_memory(step: dict[str, Any]) -> None:
    hooks, memory = step["hooks"], step["memory"]
    cost = (hooks["attach_ms"] - hooks["plain_ms"]) / hooks["parameters"] * 1e3
    assert hooks["hook_us"] == pytest.approx(cost)
    assert hooks["plain_ms"] > 1
    assert memory["largest_parameter_mb"] == pytest.approx(2048 * 2048 * 4 / 1e6)
    # Six layers' weights and their gradients, at least.
    assert min(memory["plain_peak_mb"], memory["attach_peak_mb"]) > 190
    assert memory["added_mb"] == pytest.approx(memory["attach_peak_mb"] - memory["plain_peak_mb"])


def test_step_prints_tables_of_100_columns(step: dict[str, Any]) -> None:
    lines = lines_of(table.step(step))
    assert all(len(line) <= 100 and "…" not in line for line in lines)
    assert any("Target" in line for line in lines)


def test_sizes_are_read_in_any_case_and_with_fractions() -> None:
    assert parse_sizes("8, 1kb,2.5 MB,1GB") == [8, 1000, 2_500_000, 10**9]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["allreduce", "--sizes", "1KB,many"], ["--sizes", "'many'"]),
        (["allreduce", "--sizes", "6"], ["--sizes", "multiple of 4", "'6'"]),
        (["allreduce", "--sizes", ""], ["--sizes", "''"]),
        (["allreduce", "--elements", "0"], ["--elements", "0"]),
        (["allreduce", "-np", "0"], ["-np", "0"]),
        (["step", "--num-proc", "two"], ["--num-proc", "'two'"]),
        (["step", "--model", "large"], ["--model", "large", "small"]),
        (["step", "--steps", "0"], ["--steps", "0"]),
        (["step", "--fast"], ["--fast"]),
        (["nothing"], ["'nothing'"]),
    ],
)
def test_a_bad_option_gets_one_line_that_names_it(arguments: list[str], words: list[str]) -> None:
    code, out, err = call(*arguments)
    assert (code, out) == (2, "")
    assert err.count("\n") == 1
    assert all(word in err for word in words), err


def test_step_without_torch_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == "torch" else find_spec(name)
    )
    code, out, err = call("step")
    assert (code, out) == (2, "")
    assert err.count("\n") == 1
    assert "pip install 'overlap-training[torch]'" in err
