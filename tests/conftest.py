"""Fixtures for all tests: pools of ranks that tests share, and the watch over what a test leaves behind."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.connection import Connection, Pipe, wait
from typing import Any

import cloudpickle
import pytest

# What a rank runs: functions that come through the pipe, until the pipe closes.
_RANK_MAIN = """
import os, sys, traceback
import cloudpickle
from multiprocessing.connection import Connection
link = Connection(int(sys.argv[1]))
while True:
    try:
        work, args = cloudpickle.loads(link.recv_bytes())
    except EOFError:
        sys.exit()
    try:
        answer = True, work(*args)
    except BaseException:
        answer = False, traceback.format_exc()
    link.send_bytes(cloudpickle.dumps(answer))
"""


class RankError(AssertionError):
    """A rank raised, died, or did not answer in time."""


class Ranks:
    """Processes that are the ranks of one job, to call functions in.

    Args:
        size: how many.
        environ: variables on top of this process's.
    """

    def __init__(self, size: int, environ: dict[str, str] | None = None) -> None:
        self.size, self.broken = size, False
        self.processes: list[subprocess.Popen[bytes]] = []
        self._links: list[Connection] = []
        job = uuid.uuid4().hex
        for rank in range(size):
            ours, theirs = Pipe()
            world = {"RANK": rank, "SIZE": size, "LOCAL_RANK": rank, "LOCAL_SIZE": size, "JOB": job}
            variables = {f"OVERLAP_{name}": str(value) for name, value in world.items()}
            # One thread a rank: the machine has fewer cores than these jobs have ranks.
            variables |= {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"} | (environ or {})
            self.processes.append(
                subprocess.Popen(
                    [sys.executable, "-c", _RANK_MAIN, str(theirs.fileno())],
                    env=os.environ | variables,
                    pass_fds=[theirs.fileno()],
                )
            )
            theirs.close()
            self._links.append(ours)

    def start(self, work: Callable[..., Any], *args: Any) -> None:
        """Let every rank call `work`."""
        cloudpickle.register_pickle_by_value(sys.modules[__name__])
        message = _by_value((work, args))
        for link in self._links:
            link.send_bytes(message)

    def results(self, ranks: Sequence[int] | None = None, timeout_s: float = 60) -> list[Any]:
        """What `work` returned on these ranks (all, unless given)."""
        deadline, answers = time.monotonic() + timeout_s, {}
        missing = {self._links[rank]: rank for rank in (range(self.size) if ranks is None else ranks)}
        while missing:
            ready = wait(list(missing), max(0, deadline - time.monotonic()))
            if not ready:
                self.broken = True
                raise RankError(f"ranks {sorted(missing.values())} gave no result within {timeout_s:g} s")
            for link in ready:
                rank = missing.pop(link)  # type: ignore[arg-type]
                try:
                    answers[rank] = cloudpickle.loads(link.recv_bytes())  # type: ignore[union-attr]
                except (EOFError, ConnectionError):
                    answers[rank] = False, "it died"
                if not answers[rank][0]:
                    # The others may wait for it: theirs would be a time-out only.
                    deadline = min(deadline, time.monotonic() + 10)
        for rank, (fine, value) in sorted(answers.items()):
            if not fine:
                self.broken = True
                raise RankError(f"rank {rank}: {value}")
        return [answers[rank][1] for rank in sorted(answers)]

    def run(self, work: Callable[..., Any], *args: Any, timeout_s: float = 60) -> list[Any]:
        """Call `work` on every rank and return the results in rank order."""
        self.start(work, *args)
        return self.results(timeout_s=timeout_s)

    def kill(self, rank: int) -> None:
        self.processes[rank].kill()
        self.processes[rank].wait()

    def close(self) -> None:
        for link in self._links:
            link.close()
        for process in self.processes:
            try:
                process.wait(1 if self.broken else 10)
            except subprocess.TimeoutExpired:
                process.send_signal(signal.SIGKILL)
                process.wait()

    def __enter__(self) -> Ranks:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _by_value(what: Any) -> bytes:
    """Pickle so that a process which can't import the tests can load it."""
    tests = os.path.dirname(__file__)
    for module in list(sys.modules.values()):
        if (getattr(module, "__file__", None) or "").startswith(tests):
            cloudpickle.register_pickle_by_value(module)
    return cloudpickle.dumps(what)


class Pools:
    """One pool of ranks a world size, started when first asked for and anew after one broke."""

    def __init__(self) -> None:
        self._pools: dict[int, Ranks] = {}

    def __call__(self, size: int) -> Ranks:
        pool = self._pools.get(size)
        if pool is None or pool.broken:
            if pool is not None:
                pool.close()
            pool = self._pools[size] = Ranks(size)
        return pool

    def close(self) -> None:
        for pool in self._pools.values():
            pool.close()


@pytest.fixture(scope="session")
def pools() -> Iterator[Pools]:
    """`pools(2).run(work)` calls `work` on the two ranks of a job that all tests share."""
    pools = Pools()
    yield pools
    pools.close()


@pytest.fixture
def start_ranks() -> Iterator[Callable[..., Ranks]]:
    """`start_ranks(3)`: ranks of this test's own, to be killed."""
    started: list[Ranks] = []

    def start(size: int, environ: dict[str, str] | None = None) -> Ranks:
        started.append(Ranks(size, environ))
        return started[-1]

    yield start
    for ranks in started:
        ranks.broken = True
        ranks.close()


def _held() -> tuple[set[str], set[int], set[str]]:
    """Threads, child processes and descriptors of this process."""
    gc.collect()
    threads = {f"{thread.name} ({thread.ident})" for thread in threading.enumerate() if thread.is_alive()}
    me = os.getpid()
    children = set()
    for task in os.listdir(f"/proc/{me}/task"):
        try:
            with open(f"/proc/{me}/task/{task}/children") as listing:
                children |= {int(child) for child in listing.read().split()}
        except OSError:
            continue
    descriptors = set()
    for descriptor in os.listdir("/proc/self/fd"):
        try:
            descriptors.add(f"{descriptor} -> {os.readlink(f'/proc/self/fd/{descriptor}')}")
        except OSError:
            continue
    return threads, children, {each for each in descriptors if "/proc/" not in each}


@pytest.fixture
def nothing_left() -> Iterator[None]:
    """Fails a test that leaves a thread, a child process or a descriptor behind."""
    before = _held()
    yield
    for what, had, has in zip(("threads", "processes", "descriptors"), before, _held(), strict=True):
        assert not has - had, f"the test left {what} behind: {has - had}"
