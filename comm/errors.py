"""Every error that overlap raises, in three families: the caller's, the world's, and ours.

The caller's errors are plain `ValueError` and `TypeError`. What the world did is a `CommError`. What we got
wrong is an `InternalError`, which asks for a report.
"""

from __future__ import annotations


class CommError(RuntimeError):
    """Communication failed because of what happened elsewhere: on another rank, or on the network."""


class PeerLost(CommError):
    """Another rank was killed, exited, or raised, so that nothing more can be exchanged with it.

    Attributes:
        rank: the lost rank.
        reason: what is known of its end, in words.
    """

    def __init__(self, rank: int, reason: str, doing: str = "") -> None:
        self.rank, self.reason, self.doing = rank, reason, doing
        super().__init__(f"rank {rank} {reason}" + (f", while this rank was in {doing}" if doing else ""))

    def __reduce__(self) -> tuple[type[PeerLost], tuple[int, str, str]]:
        return type(self), (self.rank, self.reason, self.doing)


class BackwardAborted(CommError):
    """Another rank's backward raised, so that this step's gradients can't be averaged; the next can.

    Attributes:
        rank: the rank whose backward raised.
    """

    def __init__(self, rank: int) -> None:
        self.rank = rank
        super().__init__(
            f"rank {rank}'s backward raised, so this step's gradients can't be averaged: see that rank's "
            "own error"
        )

    def __reduce__(self) -> tuple[type[BackwardAborted], tuple[int]]:
        return type(self), (self.rank,)


def account_of(error: BaseException) -> tuple[str, int | None]:
    """What a rank that ends with `error` tells its peers, as `Communicator.abort` takes it.

    Returns the reason, in one line, and the culprit: the rank that `error` blames, None for this one.

    >>> account_of(ValueError("bad sample"))
    ('raised ValueError: bad sample', None)
    """
    if isinstance(error, PeerLost):
        return error.reason, error.rank
    first_line = str(error).partition("\n")[0]
    return f"raised {type(error).__name__}: {first_line}".rstrip(": "), None


# Errors that tell of another rank's failure: a job's cause is sought elsewhere.
CONSEQUENCES = (PeerLost, BackwardAborted)


class MismatchError(CommError):
    """Ranks asked for different things where they must ask for the same; the engine goes on working."""


class StallError(CommError):
    """An operation waited longer for some ranks than OVERLAP_STALL_ABORT_S allows."""


class StartError(CommError):
    """The ranks of this job could not find each other."""


class RankFailed(RuntimeError):
    """A rank of `overlap.run` raised or died; the message ends with that rank's own traceback.

    Attributes:
        rank: the rank that failed first.
        exit_code: its exit code (128 + n for signal n), or None where the process lives on.
    """

    def __init__(self, message: str, rank: int, exit_code: int | None = None) -> None:
        super().__init__(message)
        self.rank, self.exit_code = rank, exit_code

    def __reduce__(self) -> tuple[type[RankFailed], tuple[str, int, int | None]]:
        return type(self), (str(self), self.rank, self.exit_code)


class InternalError(RuntimeError):
    """Overlap itself is wrong: please report it, with the traceback."""

    def __init__(self, message: str) -> None:
        super().__init__(f"{message} (this is a bug in overlap: please report it with this traceback)")
