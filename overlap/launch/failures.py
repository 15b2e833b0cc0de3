"""Which rank failed first, and what to say about the others (pure: no processes, no clocks)."""

from __future__ import annotations

import signal
from dataclasses import dataclass, field
from enum import Enum

from overlap.comm.errors import CONSEQUENCES

_LINE_LENGTH = 500


class Kind(Enum):
    """What ended a rank."""

    RAISED = "an exception of its own"
    SIGNALLED = "a signal"
    EXITED = "an exit code, and no word"
    CONSEQUENCE = "an exception that says that another rank is lost"
    ENDED = "the launcher, because another rank had failed"


@dataclass(frozen=True)
class Failure:
    """How one rank failed.

    Attributes:
        time: when, on the host's monotonic clock.
        type, text, traceback: of its exception; empty where none is known.
        code: the exit code for the whole job, should this be the first failure.
    """

    rank: int
    time: float
    kind: Kind
    type: str = ""
    text: str = ""
    traceback: str = ""
    code: int = 1

    def line(self) -> str:
        """Say it in one line."""
        if self.kind is Kind.ENDED:
            return f"rank {self.rank} did not stop by itself, and was ended"
        if self.kind is Kind.SIGNALLED:
            return f"rank {self.rank} was killed by {signal_name(self.code - 128)}"
        if not self.type:
            return f"rank {self.rank} exited with code {self.code}"
        text = " ".join(self.text.split())
        return f"rank {self.rank}: {self.type}: {text}".rstrip(": ")[:_LINE_LENGTH]


def signal_name(number: int) -> str:
    """Name a signal, SIGKILL for 9.

    >>> signal_name(9), signal_name(50)
    ('SIGKILL', 'signal 50')
    """
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def exit_code(status: int) -> int:
    """Turn a process's status, negative for a signal, into what a shell would say: 128 + n for signal n."""
    return status if status >= 0 else 128 - status


@dataclass
class FailureLog:
    """The failures of a job, one a rank, in the order in which they were learnt of."""

    failures: dict[int, Failure] = field(default_factory=dict)

    def reported(self, rank: int, report: dict[str, object]) -> None:
        """Note what a rank said itself; its first word counts."""
        kind = Kind.CONSEQUENCE if report.get("consequence") else Kind.RAISED
        code, time = report.get("code"), report.get("time")
        failure = Failure(
            rank,
            float(time) if isinstance(time, (int, float)) else 0.0,
            kind,
            str(report.get("type", "")),
            str(report.get("text", "")),
            str(report.get("traceback", "")),
            code if isinstance(code, int) else 1,
        )
        self.failures.setdefault(rank, failure)

    def ended(self, rank: int, status: int, time: float, block: str = "", by_launcher: bool = False) -> None:
        """Note a process's end that was not a success; `block` is a traceback found in its output."""
        if rank in self.failures:
            return
        if by_launcher:
            failure = Failure(rank, time, Kind.ENDED, code=exit_code(status))
        elif block:
            name, _, text = _last_line(block).partition(": ")
            kind = Kind.CONSEQUENCE if any(each.__name__ in name for each in CONSEQUENCES) else Kind.RAISED
            failure = Failure(rank, time, kind, name.rpartition(".")[2], text, block, exit_code(status))
        else:
            kind = Kind.SIGNALLED if status < 0 else Kind.EXITED
            failure = Failure(rank, time, kind, code=exit_code(status))
        self.failures[rank] = failure

    def first(self) -> Failure | None:
        """Find the failure to blame.

        An exception comes before a rank that left without a word, though that may be heard of earlier: peers
        learn of the exception before it reaches the launcher. But not before a rank that was killed earlier.
        """
        raised = self._earliest(Kind.RAISED)
        killed = self._earliest(Kind.SIGNALLED)
        if raised and killed and killed.time < raised.time:
            return killed
        return (
            raised
            or self._earliest(Kind.SIGNALLED, Kind.EXITED)
            or self._earliest(Kind.CONSEQUENCE)
            or self._earliest(Kind.ENDED)
        )

    def _earliest(self, *kinds: Kind) -> Failure | None:
        found = [failure for failure in self.failures.values() if failure.kind in kinds]
        return min(found, key=lambda failure: failure.time, default=None)


def _last_line(block: str) -> str:
    """Find the line that names the exception: the last one not indented that looks like `Name: text`."""
    lines = [line for line in block.splitlines() if line.strip()]
    for line in reversed(lines):
        name = line.partition(":")[0]
        if name and all(part.isidentifier() for part in name.split(".")):
            return line
    return lines[-1]
