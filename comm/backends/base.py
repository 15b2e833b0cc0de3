"""The contract that every backend meets: the communicator.

A communicator joins `size` ranks. Its calls are collective: every rank makes the same calls in the same
order, from one thread at a time, and a call returns when this rank's part is done and its memory may be used
again. `PeerLost` counts ranks as the job does, everything else as the communicator does.

Guarantees, which `tests/contract` checks for every backend:
- What can be judged locally is judged before anything is sent (ValueError, TypeError).
- Ranks that call different things all get the same MismatchError, and the communicator goes on working.
- A rank that is killed, exits or aborts makes every call that needs it raise PeerLost, within seconds.
- Elements are reduced in rank order, whatever their place: equal bits on every rank, from run to run.
- 16-bit floats are accumulated in float32 and rounded once.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

from overlap.comm.dtype import Op
from overlap.comm.span import Buffer, Span


class Communicator(ABC):
    """A group of ranks that can reduce and exchange memory; MPI's words mean what they mean in MPI.

    Attributes:
        rank, size: of this process within the group.
        doing: what the caller is at, in words; appears in PeerLost ("while this rank was in ...").
        tag: round << 16 | bucket; must be equal on all ranks at each collective call: ranks that are apart
            get a MismatchError, never each other's bytes. 0 where there is no round.
    """

    rank: int
    size: int
    doing: str = ""
    tag: int = 0

    @abstractmethod
    def allocate(self, nbytes: int) -> Buffer:
        """Collective: a zeroed buffer of `nbytes` on every rank, in the memory that this backend likes best.

        Raises:
            MemoryError: a rank can't have it (on all ranks).
        """

    @abstractmethod
    def allreduce(self, span: Span, op: Op = Op.SUM, divisor: float | None = None) -> None:
        """Reduce in place: afterwards every rank's span holds the same result.

        Args:
            span: the same count, dtype and place on every rank.
            op: AVERAGE is the sum divided by `divisor`.
            divisor: what an average divides by (the size, unless given); equal on all ranks.
        """

    @abstractmethod
    def reduce_scatter(
        self, span: Span, counts: Sequence[int], op: Op = Op.SUM, divisor: float | None = None
    ) -> None:
        """Reduce in place, one piece a rank: piece r of `counts[r]` elements holds the result on rank r.

        The other pieces of `span` are undefined afterwards.
        """

    @abstractmethod
    def allgather(self, span: Span, counts: Sequence[int]) -> None:
        """Gather in place: piece r of `span`, `counts[r]` elements, comes from rank r."""

    @abstractmethod
    def broadcast(self, span: Span, root: int) -> None:
        """Copy rank `root`'s span to every rank's."""

    @abstractmethod
    def alltoall(
        self, send: Span, send_counts: Sequence[int], recv: Span, recv_counts: Sequence[int]
    ) -> None:
        """Piece j of `send` goes to rank j; piece i of `recv` comes from rank i.

        The spans must not overlap.
        """

    @abstractmethod
    def sendrecv(self, send: Span | None, dest: int | None, recv: Span | None, source: int | None) -> None:
        """Send to `dest` while receiving from `source`; either may be left out. Pairs match in order.

        To itself a rank can send only while it receives from itself. Lengths that differ are a MismatchError
        on both ends.
        """

    def send(self, span: Span, dest: int) -> None:
        """Send to rank `dest`, which calls `recv`."""
        self.sendrecv(span, dest, None, None)

    def recv(self, span: Span, source: int) -> None:
        """Receive from rank `source`, which calls `send`."""
        self.sendrecv(None, None, span, source)

    @abstractmethod
    def barrier(self) -> None:
        """Return when every rank has called it."""

    @abstractmethod
    def split(self, color: int | None, key: int = 0) -> Communicator | None:
        """Collective: a communicator of the ranks that gave this `color`, ordered by (`key`, rank).

        Ranks that gave None get None. `split(0)` is a duplicate, whose calls are independent of this one's.
        """

    @abstractmethod
    def abort(self, reason: str, culprit: int | None = None) -> None:
        """Tell the others that this rank can't go on; their calls raise PeerLost. Callable from any thread.

        This rank's own calls raise CommError from then on: taking part, it could let the others pass.

        Args:
            reason: what happened, to be read after "rank 2 " ("raised ValueError: ...").
            culprit: the rank that caused it, where it is not this one.
        """

    @abstractmethod
    def close(self, reason: str = "ended without an error") -> None:
        """Leave the group; calls of others that need this rank raise PeerLost with `reason`. Idempotent."""
