"""Ends every process of a job whose launcher is gone; runs as a script of its own, one a job.

It must start fast and outlive everything else, so it imports nothing but the standard library's core. On its
standard input the launcher, which alone holds the other end, writes `+PID` for each session it starts and
`done` when it has ended them itself. End of file without `done` means that the launcher was killed.
"""

from __future__ import annotations

import os
import select
import signal
import sys
import time
from collections.abc import Iterable


def end_sessions(sessions: Iterable[int], job: str = "") -> None:
    """Kill every process of `sessions`, and with `job` every session whose leader carries that job's id."""
    sessions = set(sessions)
    killed: set[int] = set()
    while True:
        for session in sessions:
            try:
                os.killpg(session, signal.SIGKILL)
            except OSError:
                pass  # gone already
        found = _members(sessions, job) - killed
        # Again until nobody new turns up: a process may have forked between the listing and its end.
        if not found:
            return
        for pid in found:
            try:
                os.kill(pid, signal.SIGKILL)
            except OSError:
                pass
        killed |= found


def _members(sessions: set[int], job: str) -> set[int]:
    """List the processes of `sessions`: a shell may have put some in process groups of their own."""
    found = set()
    for entry in os.listdir("/proc") if os.path.isdir("/proc") else []:
        if not entry.isdigit() or int(entry) == os.getpid():
            continue
        try:
            with open(f"/proc/{entry}/stat", "rb") as file:
                state, _, _, session = file.read().rpartition(b")")[2].split()[:4]
            if state in (b"Z", b"X"):
                continue
            if int(session) in sessions or (job and session == entry.encode() and _carries(entry, job)):
                found.add(int(entry))
        except (OSError, ValueError):
            pass  # ended while it was looked at, or another user's
    return found


def _carries(pid: str, job: str) -> bool:
    with open(f"/proc/{pid}/environ", "rb") as file:
        return b"OVERLAP_JOB=" + job.encode() in file.read().split(b"\0")


def _watch(launcher: int) -> tuple[set[int], bool]:
    """Read sessions until the launcher is done or dead; returns them and whether it was done."""
    poll = select.poll()
    poll.register(0, select.POLLIN)
    # Should a fork of the launcher hold the pipe too, there is no end of file: watch its own end as well.
    if hasattr(os, "pidfd_open"):
        try:
            poll.register(os.pidfd_open(launcher), select.POLLIN)
        except OSError:
            pass
    text, dead = b"", os.getppid() != launcher
    os.set_blocking(0, False)
    while True:
        try:
            data = os.read(0, 65536)
            text, dead = text + data, dead or not data
        except BlockingIOError:
            if not dead:
                # The pipe is read once more after this: what the launcher wrote before it died counts.
                dead = any(fd != 0 for fd, _ in poll.poll())
                continue
        lines = text.split(b"\n")[:-1]
        if dead or b"done" in lines:
            return {int(line) for line in lines if line.startswith(b"+")}, b"done" in lines


def main(launcher: int, job: str) -> None:
    """Watch the launcher, and end its job if it dies."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT):
        signal.signal(number, signal.SIG_IGN)
    sessions, done = _watch(launcher)
    if not done:
        end_sessions(sessions, job)
        # A rank that was just being started is found by the job's id, once it runs its own program; and on a
        # busy machine that takes its time.
        for pause_s in (0.1, 0.2, 0.4, 0.8):
            time.sleep(pause_s)
            end_sessions(sessions, job)


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2])
