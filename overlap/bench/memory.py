"""What attaching costs in memory: peak proportional set size in a job without it, and in one with it."""

from __future__ import annotations

import threading
from typing import Any

import psutil

import overlap

from .job import new_ranks

# What a rank may have on top of plain training's peak and its largest parameter.
_ALLOWANCE_MB = 16.0
_PERIOD_S = 0.002


class _Peak:
    """Samples this process's proportional set size, from a thread of its own, until it is stopped."""

    def __init__(self) -> None:
        self.nbytes = 0
        self._stop = threading.Event()
        # Backward can't be asked where its peak is: hooks would change it.
        self._thread = threading.Thread(target=self._sample, daemon=True)
        self._thread.start()

    def _sample(self) -> None:
        process = psutil.Process()
        while not self._stop.wait(_PERIOD_S):
            self.nbytes = max(self.nbytes, process.memory_full_info().pss)

    def stop(self) -> int:
        self._stop.set()
        self._thread.join()
        return self.nbytes


def report(num_proc: int, steps: int) -> dict[str, Any]:
    """Run both jobs; a record that JSON can hold, in MB (1e6 bytes) a rank, of the rank that has most."""
    results = []
    for attaches in (False, True):
        # New processes each time: what the first one's allocator keeps would serve the second.
        with new_ranks(num_proc) as ranks:
            results.append(ranks.run(_measure, steps, attaches))
    largest = results[0][0][1] / 1e6
    plain_mb, attach_mb = (max(peak for peak, _ in result) / 1e6 for result in results)
    return {
        "model": "wide",
        "plain_peak_mb": plain_mb,
        "attach_peak_mb": attach_mb,
        "added_mb": attach_mb - plain_mb,
        "largest_parameter_mb": largest,
        "target_added_mb": largest + _ALLOWANCE_MB,
    }


def _measure(steps: int, attaches: bool) -> tuple[int, int]:
    """In each rank: the peak above what was there before the model, and the largest parameter, in bytes."""
    import torch

    from .models import wide

    overlap.init()
    from overlap import runtime

    # What other jobs on this host share of torch's code counts less in the set, so a difference is taken.
    runtime.engine().communicator.barrier()
    before = psutil.Process().memory_full_info().pss
    workload = wide()
    attached = overlap.attach(workload.model) if attaches else None
    optimizer = torch.optim.SGD(workload.model.parameters(), lr=1e-4)
    runtime.engine().communicator.barrier()
    peak = _Peak()
    for _ in range(steps):
        optimizer.zero_grad()
        workload.loss(workload.model).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    nbytes = peak.stop()
    # Pages that are shared count less while more processes have them: nobody leaves early.
    runtime.engine().communicator.barrier()
    if attached is not None:
        attached.detach()
    overlap.shutdown()
    return nbytes - before, max(p.numel() * p.element_size() for p in workload.model.parameters())
