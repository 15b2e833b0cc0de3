"""`overlap run` on one host: starts a command once a rank, and says in the end who failed and why."""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from .escalation import AT_ONCE, FAILED, INTERRUPTED, STOPPED, Escalation
from .failures import Failure, FailureLog, Kind, exit_code, signal_name
from .job import Job, Rank
from .output import Output
from .repeats import Repeats
from .wire import Connection

_TIMED_OUT, _NOT_FOUND, _NOT_EXECUTABLE = 124, 127, 126
# Seconds that the reader of the launcher's output has to take the last of it after an interruption.
_HURRIED_S = 0.5


def rank_environ(environ: Mapping[str, str], size: int) -> dict[str, str]:
    """Make the environment that all ranks share: lines appear at once, and threads don't fight for cores.

    Torch is told to take large tensors from the system in huge pages: gradients are dropped one by one as
    they move into buckets, and glibc's heap would keep the holes, as large as all gradients together.
    """
    return {**_defaults(size), **environ}


def _defaults(size: int) -> dict[str, str]:
    threads = max(1, len(os.sched_getaffinity(0)) // size)
    return {"PYTHONUNBUFFERED": "1", "OMP_NUM_THREADS": str(threads), "THP_MEM_ALLOC_ENABLE": "1"}


class LocalRun:
    """One `overlap run`: a job, its output, and what is known of its failures."""

    def __init__(self, command: Sequence[str], size: int, verbose: bool, timeout_s: float | None) -> None:
        self._command, self._verbose, self._timeout_s = list(command), verbose, timeout_s
        self._log, self._repeats, self._escalation = FailureLog(), Repeats(), Escalation()
        # The exit code that the launcher's own end imposes (interrupted, timed out); None while ranks decide.
        self._imposed: int | None = None
        self._signalled = False  # from then on the ends of ranks are the launcher's doing
        self._job = Job(size, self, hold_tracebacks=True)
        # One object where both go to the same place: a long line of one is not cut by the other.
        self._stdout = self._stderr = self._output(1)
        if not os.path.sameopenfile(1, 2):
            self._stderr = self._output(2)

    def _output(self, fd: int) -> Output:
        return Output(fd, self._job.selector, self._on_gone)

    def run(self) -> int:
        """Start all ranks, wait for their ends, and return the job's exit code."""
        with _signals(self._job, self._on_signal):
            try:
                self._start()
                deadline = None if self._timeout_s is None else time.monotonic() + self._timeout_s
                while self._job.running:
                    self._turn(deadline)
            except OSError as error:
                if self._job.ranks and len(self._job.ranks) == self._job.size:
                    raise
                self._imposed = self._not_started(error)
            finally:
                self._job.end()
                self._conclude()
                self._job.close()
        return self._exit_code()

    def _start(self) -> None:
        environ = rank_environ(os.environ, self._job.size)
        self._tell(f"starting {self._job.size} ranks: {shlex.join(self._command)}")
        for number in range(self._job.size):
            # One reader a terminal or pipe: input that several ranks share would be split between them.
            rank = self._job.start(self._command, environ, None if number == 0 else subprocess.DEVNULL)
            shown = {**environ, **self._job.variables(number)}
            names = [*_defaults(self._job.size), *self._job.variables(number)]
            self._tell(
                f"rank {number} is process {rank.pid}, with "
                + " ".join(f"{name}={shlex.quote(shown[name])}" for name in names)
            )

    def _not_started(self, error: OSError) -> int:
        name = self._command[0]
        script = f"; for a script: overlap run -np {self._job.size} python {name}"
        hint = script if name.endswith(".py") else ""
        if isinstance(error, FileNotFoundError):
            self._say(f"command not found: {name}{hint}")
            return _NOT_FOUND
        self._say(f"cannot start {name}: {error.strerror}{hint}")
        return _NOT_EXECUTABLE

    def _turn(self, deadline: float | None) -> None:
        now = time.monotonic()
        if deadline is not None and now >= deadline and self._imposed is None:
            self._say(f"timed out: ranks {self._running()} still ran after {self._timeout_s:g} s")
            self._impose(_TIMED_OUT, STOPPED)
        for number in self._escalation.due(now):
            self._signalled = True
            self._tell(self._job.signal(number))
        times = [self._escalation.next, deadline if self._imposed is None else None]
        paused = self._stdout.full or self._stderr.full
        self._job.turn(min((when for when in times if when is not None), default=None), paused)

    def _impose(self, code: int, steps: Sequence[tuple[float, int]]) -> None:
        if self._imposed is None:
            self._imposed = code
        self._escalation.begin(steps, time.monotonic())

    def _on_signal(self, number: int) -> None:
        again = self._imposed is not None
        self._tell(f"got {signal_name(number)}")
        self._impose(128 + number, AT_ONCE if again else INTERRUPTED)

    def _on_gone(self) -> None:
        """End as programs do whose output nobody reads any more (`overlap run ... | head`)."""
        if self._imposed is None:
            self._impose(128 + signal.SIGPIPE, STOPPED)

    def on_output(self, source: str, lines: bytes) -> None:
        """Show whole lines of a rank."""
        (self._stdout if source == "stdout" else self._stderr).write(lines)

    def on_frame(self, connection: Connection, head: dict[str, Any] | None, frame: bytes) -> None:
        """Note a rank's report of its failure, or show a warning."""
        if head is not None and head.get("kind") == "report":
            self._log.reported(connection.rank, head)
            self._job.connections.send(connection, b"shown")
            self._failed()
        elif head is not None and head.get("kind") == "warning":
            self._stderr.write(self._repeats.take(connection.rank, head))
            self._job.connections.send(connection, b"shown")

    def on_end(self, rank: Rank) -> None:
        """Note a rank's end, and with it the traceback that it printed just before."""
        assert rank.status is not None
        how = "exit code" if rank.status >= 0 else "signal"
        self._tell(f"rank {rank.number} ended with {how} {abs(rank.status)}")
        if rank.status == 0:
            rank.stderr.release()
            return
        block = ""
        if rank.number not in self._log.failures:
            block = rank.stderr.take_held()
        else:
            rank.stderr.release()
        if self._imposed is None:
            self._log.ended(rank.number, rank.status, time.monotonic(), block, self._signalled)
            self._failed()
        elif block and "KeyboardInterrupt" not in block:
            self._stderr.write(block.encode())

    def _failed(self) -> None:
        if self._imposed is None and self._escalation.next is None:
            self._escalation.begin(FAILED, time.monotonic())

    def on_stranger(self, what: str) -> None:
        """Log a connection that was dropped."""
        self._tell(f"dropped a connection: {what}")

    def _running(self) -> list[int]:
        return [rank.number for rank in self._job.running]

    def _conclude(self) -> None:
        for line in self._repeats.lines():
            self._say(line)
        first = self._log.first()
        if self._imposed is None and first is not None:
            if first.traceback:
                self._say(f"rank {first.rank} failed:")
                self._stderr.write(first.traceback.rstrip("\n").encode() + b"\n")
            else:
                self._say(first.line())
            for failure in self._others(first):
                self._say(failure.line())
        # Whoever reads the launcher's output may be slow; who interrupted it does not wait for them.
        hurried: float | None = None
        while not (self._stdout.empty and self._stderr.empty):
            if self._imposed is not None and hurried is None:
                hurried = time.monotonic() + _HURRIED_S
            if hurried is not None and time.monotonic() >= hurried:
                break
            self._job.turn(hurried)

    def _others(self, first: Failure) -> list[Failure]:
        return [self._log.failures[rank] for rank in sorted(self._log.failures) if rank != first.rank]

    def _exit_code(self) -> int:
        if self._imposed is not None:
            return self._imposed
        first = self._log.first()
        if first is None:
            return 0
        # An exception's rank has exited by now; with 0 only where it was reported and then swallowed.
        status = self._job.ranks[first.rank].status
        if first.kind in (Kind.RAISED, Kind.CONSEQUENCE) and status is not None and status > 0:
            return exit_code(status)
        return first.code

    def _say(self, text: str) -> None:
        self._stderr.write(f"overlap run: {text}\n".encode())

    def _tell(self, text: str) -> None:
        if self._verbose:
            self._say(text)


@contextmanager
def _signals(job: Job, handle: Callable[[int], None]) -> Iterator[None]:
    """Let signals that ask the launcher to end wake the job's loop, which calls `handle` with each."""
    numbers = [signal.SIGINT, signal.SIGTERM]
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # under nohup it is to be ignored
        numbers.append(signal.SIGHUP)
    read, write = os.pipe()
    os.set_blocking(read, False)
    os.set_blocking(write, False)

    def pass_on(events: int) -> None:
        for number in os.read(read, 4096):
            if number in numbers:
                handle(number)

    # Before the handlers are set an interruption ends this process as any other, its guard the ranks.
    job.selector.register(read, 1, pass_on)
    before_fd = signal.set_wakeup_fd(write, warn_on_full_buffer=False)
    before = {number: signal.signal(number, lambda *_: None) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(before_fd)
        os.close(read)
        os.close(write)


def launch(command: Sequence[str], size: int, verbose: bool = False, timeout_s: float | None = None) -> int:
    """Run `command` as `size` ranks on this host, until all have ended.

    Args:
        command: a program and its arguments.
        size: how many ranks.
        verbose: say on standard error what is started and how each rank ends.
        timeout_s: end the job after so many seconds, with exit code 124.

    Returns:
        The exit code: 0, or that of the rank that failed first.
    """
    for fd in (0, 1, 2):
        try:
            os.fstat(fd)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # takes the lowest free number: else a pipe of ours would be it
    sys.stdout.flush()
    return LocalRun(command, size, verbose, timeout_s).run()
