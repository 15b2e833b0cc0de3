"""`overlap bench allreduce`: communicator and channel beside gloo and a memory copy, by size and type."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

import overlap
from overlap.comm.backends.base import Communicator
from overlap.comm.dtype import DType, Op
from overlap.comm.engine import Engine
from overlap.comm.span import Span

from .gloo import process_group
from .job import Timing, new_ranks, pooled

Samples = dict[str, list[float]]
HALVES = (DType.FLOAT32, DType.BFLOAT16, DType.FLOAT16)
_ROUNDS = 5


def report(num_proc: int, sizes: Sequence[int], elements: int) -> dict[str, Any]:
    """Run the benchmark in a job of its own; a record that JSON can hold, times in microseconds.

    Args:
        sizes: bytes of float32 to average.
        elements: how many 16-bit floats to average beside as many float32.
    """
    with new_ranks(num_proc) as ranks:
        results = ranks.run(_measure, sizes, elements)
    by_size = [_size_row(nbytes, [result[0][i] for result in results]) for i, nbytes in enumerate(sizes)]
    return {
        "benchmark": "allreduce",
        "ranks": num_proc,
        "gloo": by_size[0]["gloo_us"] is not None,
        "sizes": by_size,
        "dtypes": _dtype_rows(elements, [result[1] for result in results]),
        "import_overlap_ms": _import_ms(),
    }


def _size_row(nbytes: int, results: Sequence[Samples]) -> dict[str, Any]:
    row: dict[str, Any] = {"bytes": nbytes}
    for name in ("communicator", "channel", "gloo", "copy"):
        present = name in results[0]
        row[f"{name}_us"] = vars(Timing.of(pooled(results, name), 1e6)) if present else None
    ours = row["communicator_us"]["median"]
    row["times_faster_than_gloo"] = row["gloo_us"]["median"] / ours if row["gloo_us"] else None
    row["times_a_copy"] = ours / row["copy_us"]["median"]
    return row


def _dtype_rows(elements: int, results: Sequence[Samples]) -> list[dict[str, Any]]:
    timings = {dtype: Timing.of(pooled(results, dtype.value), 1e6) for dtype in HALVES}
    full = timings[DType.FLOAT32].median
    return [
        {
            "dtype": dtype.value,
            "elements": elements,
            "communicator_us": vars(timing),
            "times_float32": timing.median / full,
        }
        for dtype, timing in timings.items()
    ]


def _measure(sizes: Sequence[int], elements: int) -> tuple[list[Samples], Samples]:
    """In each rank: seconds of every call, by size, and by type."""
    overlap.init()
    from overlap import runtime

    engine = runtime.engine()
    with process_group(engine.communicator) as has_gloo:
        by_size = [_by_size(engine, nbytes, has_gloo) for nbytes in sizes]
    by_dtype = _by_dtype(engine.communicator, elements)
    overlap.shutdown()
    return by_size, by_dtype


def _by_size(engine: Engine, nbytes: int, has_gloo: bool) -> Samples:
    count = nbytes // 4
    channel = engine.open_channel("benchmark")
    direct = engine.communicator.allocate(nbytes).span(DType.FLOAT32, count)
    queued = channel.run(lambda communicator: communicator.allocate(nbytes)).span(DType.FLOAT32, count)
    source, target = np.ones(count, np.float32), np.zeros(count, np.float32)
    calls: dict[str, Callable[[], object]] = {
        "communicator": partial(_average, direct, engine.communicator),
        "channel": lambda: channel.submit(partial(_average, queued), "the benchmark").wait(),
    }
    if has_gloo:
        import torch
        import torch.distributed as dist

        calls["gloo"] = partial(dist.all_reduce, torch.from_numpy(np.zeros(count, np.float32) + 0))
    calls["copy"] = partial(np.copyto, target, source)
    samples = alternate(calls, engine.communicator, max(3, min(60, 30_000_000 // nbytes)))
    engine.close_channel(channel)
    return samples


def _by_dtype(communicator: Communicator, elements: int) -> Samples:
    buffer = communicator.allocate(4 * elements)
    calls = {dtype.value: partial(_average, buffer.span(dtype, elements), communicator) for dtype in HALVES}
    return alternate(calls, communicator, 5)


def _average(span: Span, communicator: Communicator) -> None:
    communicator.allreduce(span, Op.AVERAGE)


def alternate(calls: Mapping[str, Callable[[], object]], communicator: Communicator, repeats: int) -> Samples:
    """Seconds of each call, started by all ranks at once: `repeats` in a row, in rounds that alternate."""
    samples: Samples = {name: [] for name in calls}
    for _ in range(_ROUNDS):
        for name, call in calls.items():
            call()  # wakes threads, touches memory
            for _ in range(repeats):
                communicator.barrier()
                start_s = time.perf_counter()
                call()
                samples[name].append(time.perf_counter() - start_s)
    return samples


def _import_ms() -> float:
    """What `import overlap` takes in a fresh interpreter, beyond the interpreter's own start."""
    home = Path(overlap.__file__).parent.parent
    samples: dict[str, list[float]] = {"pass": [], "import overlap": []}
    for _ in range(5):
        for code, taken in samples.items():
            start_s = time.perf_counter()
            subprocess.run([sys.executable, "-c", code], cwd=home, check=True)
            taken.append(time.perf_counter() - start_s)
    return (median(samples["import overlap"]) - median(samples["pass"])) * 1e3
