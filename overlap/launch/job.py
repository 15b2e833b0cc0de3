"""The processes of one job: started, watched, and ended together with everything they started.

*Guarantees.* Each rank leads a session of its own. After `close`, or 5 s after this process was killed, no
process of these sessions runs (`guard.py` sees to the second). A rank's output and frames that it wrote
before its end are handed on before its end is.

*Assumes.* One thread at a time calls a job. Ended ranks are not reaped before `close`, so that their process
ids, which name the sessions, can't pass to strangers meanwhile.
"""

from __future__ import annotations

import os
import secrets
import selectors
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from typing import Protocol

from . import guard
from .connections import Connections, Correspondent
from .failures import signal_name
from .streams import Stream

_FOREVER_S = 3600.0


class Owner(Correspondent, Protocol):
    """Who is told what happens in a job."""

    def on_output(self, source: str, lines: bytes) -> None:
        """Whole prefixed lines came from a rank's "stdout" or "stderr"."""

    def on_end(self, rank: Rank) -> None:
        """A rank's process has ended; its `status` is set."""


class Rank:
    """One rank's process and its two outputs; `status` is None, an exit code, or minus a signal."""

    def __init__(self, number: int, process: subprocess.Popen[bytes], owner: Owner, hold: bool) -> None:
        assert process.stdout is not None and process.stderr is not None
        self.number, self.process, self.pid = number, process, process.pid
        self.status: int | None = None
        # The streams own duplicates: Popen's file objects would close theirs, or warn, at their own time.
        with process.stdout, process.stderr:
            out, err = os.dup(process.stdout.fileno()), os.dup(process.stderr.fileno())
        self.stdout = Stream(out, number, lambda lines: owner.on_output("stdout", lines), hold=False)
        self.stderr = Stream(err, number, lambda lines: owner.on_output("stderr", lines), hold=hold)
        self.waiter = threading.Thread(target=lambda: None)


class Job:
    """The processes of one job on this host.

    Args:
        size: how many ranks.
        owner: is told what happens, within `turn` and `close`.
        hold_tracebacks: hold a traceback on a rank's standard error, so that the owner can take it.
    """

    def __init__(self, size: int, owner: Owner, hold_tracebacks: bool = False) -> None:
        self.size, self.id = size, secrets.token_hex(16)
        self.ranks: list[Rank] = []
        self._owner, self._hold = owner, hold_tracebacks
        # poll, not epoll: the launcher's own standard output, also watched here, may be a plain file.
        self.selector = selectors.PollSelector()
        self.connections = Connections(self.id, size, self.selector, owner)
        self._ends, self._ended = os.pipe()
        os.set_blocking(self._ends, False)
        self._over = self._closed = self._paused = False
        try:
            self._guard = self._start_guard()
        except BaseException:
            self.connections.close()
            self.selector.close()
            os.close(self._ends)
            os.close(self._ended)
            raise
        self.selector.register(self._ends, selectors.EVENT_READ, self._note_ends)

    def _start_guard(self) -> subprocess.Popen[bytes]:
        # Without overlap's variables it does not look like a process of a job, that a guard should end.
        environ = {name: value for name, value in os.environ.items() if not name.startswith("OVERLAP_")}
        return subprocess.Popen(
            [sys.executable, "-S", "-E", guard.__file__, str(os.getpid()), self.id],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            env=environ,
            cwd="/",
            bufsize=0,
            start_new_session=True,
        )

    def _tell_guard(self, line: str) -> None:
        assert self._guard.stdin is not None
        try:
            self._guard.stdin.write(line.encode() + b"\n")
        except BrokenPipeError:
            pass  # somebody killed it; the job goes on without

    def variables(self, rank: int) -> dict[str, str]:
        """The environment variables that tell a process that it is `rank` of this job."""
        return {
            "OVERLAP_RANK": str(rank),
            "OVERLAP_SIZE": str(self.size),
            "OVERLAP_LOCAL_RANK": str(rank),
            "OVERLAP_LOCAL_SIZE": str(self.size),
            "OVERLAP_JOB": self.id,
            "OVERLAP_LAUNCHER": self.connections.name,
        }

    def start(self, command: Sequence[str], environ: Mapping[str, str], stdin: int | None) -> Rank:
        """Start the next rank; `stdin` is None for this process's own, or as for Popen.

        Raises:
            OSError: the command can't be started.
        """
        number = len(self.ranks)
        process = subprocess.Popen(
            command,
            stdin=stdin,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env={**environ, **self.variables(number)},
            start_new_session=True,
        )
        self._tell_guard(f"+{process.pid}")
        rank = Rank(number, process, self._owner, self._hold)
        self.ranks.append(rank)
        for stream in (rank.stdout, rank.stderr):
            self.selector.register(stream.fd, selectors.EVENT_READ, stream)
        # A thread blocked in wait, not a pidfd: many builds of Python have no os.pidfd_open. It ends with its
        # process; a daemon, so that a process that forgot to close its job can end.
        rank.waiter = threading.Thread(target=self._wait, args=(rank,), daemon=True)
        rank.waiter.name = f"overlap-wait-{number}"
        rank.waiter.start()
        return rank

    def _wait(self, rank: Rank) -> None:
        try:
            os.waitid(os.P_PID, rank.pid, os.WEXITED | os.WNOWAIT)
        except ChildProcessError:
            pass  # reaped by somebody who waits for any child: the status is lost, not the news
        os.write(self._ended, b"%d\n" % rank.number)

    @property
    def running(self) -> list[Rank]:
        """The ranks whose processes have not ended."""
        return [rank for rank in self.ranks if rank.status is None]

    def turn(self, until: float | None, paused: bool = False) -> None:
        """Wait for something to happen, at the latest until `until` on the monotonic clock; handle it.

        While `paused`, the ranks' output is left where it is.
        """
        self._pause(paused)
        now = time.monotonic()
        dues = [due for rank in self.ranks if (due := rank.stderr.due()) is not None]
        last = min(dues + [now + _FOREVER_S if until is None else until])
        for key, events in self.selector.select(max(0.0, last - now)):
            if isinstance(key.data, Stream):
                self._read(key.data)
            else:
                key.data(events)
        now = time.monotonic()
        for rank in self.ranks:
            due = rank.stderr.due()
            if due is not None and due <= now:
                rank.stderr.release()

    def _pause(self, paused: bool) -> None:
        if paused == self._paused:
            return
        self._paused = paused
        for rank in self.ranks:
            for stream in (rank.stdout, rank.stderr):
                if not stream.ended and paused:
                    self.selector.unregister(stream.fd)
                elif not stream.ended:
                    self.selector.register(stream.fd, selectors.EVENT_READ, stream)

    def _read(self, stream: Stream, most: int = 1) -> None:
        if not stream.ended and stream.read(time.monotonic(), most) and not self._paused:
            self.selector.unregister(stream.fd)

    def _note_ends(self, events: int) -> None:
        try:
            numbers = [int(number) for number in os.read(self._ends, 65536).split()]
        except BlockingIOError:
            return
        self.catch_up()
        for number in numbers:
            rank = self.ranks[number]
            if rank.status is None:
                rank.status = self._status(rank)
                self._owner.on_end(rank)

    @staticmethod
    def _status(rank: Rank) -> int:
        try:
            end = os.waitid(os.P_PID, rank.pid, os.WEXITED | os.WNOWAIT)
        except ChildProcessError:
            end = None
        if end is None:
            return rank.process.wait()
        return end.si_status if end.si_code == os.CLD_EXITED else -end.si_status

    def catch_up(self) -> None:
        """Handle all output and frames that are there now, without waiting."""
        for rank in self.ranks:
            self._read(rank.stdout, most=1 << 10)
            self._read(rank.stderr, most=1 << 10)
        self.connections.catch_up()

    def signal(self, number: int) -> str:
        """Send a signal to the process groups of all ranks that still run; says in words what was done."""
        if number == signal.SIGKILL:
            guard.end_sessions(rank.pid for rank in self.ranks)
        else:
            for rank in self.running:
                try:
                    os.killpg(rank.pid, number)
                except OSError:
                    pass  # ended by itself
        return f"sent {signal_name(number)} to ranks {[rank.number for rank in self.running]}"

    def end(self) -> None:
        """End every process of the job, and hand on what they last wrote."""
        if self._over:
            return
        self._over = True
        guard.end_sessions(rank.pid for rank in self.ranks)
        for rank in self.ranks:
            rank.waiter.join()
            if rank.status is None:
                rank.status = self._status(rank)
            rank.process.wait()
        self._tell_guard("done")
        self._pause(True)
        now = time.monotonic()
        for rank in self.ranks:
            rank.stdout.close(now)
            rank.stderr.close(now)

    def close(self) -> None:
        """End the job, and free everything."""
        if self._closed:
            return
        self._closed = True
        try:
            self.end()
        finally:
            self._free()

    def _free(self) -> None:
        self.connections.close()
        self.selector.close()
        os.close(self._ends)
        os.close(self._ended)
        assert self._guard.stdin is not None
        self._guard.stdin.close()
        self._guard.wait()
