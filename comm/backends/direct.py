"""Collectives for ranks that can read each other's memory; backends add how they meet and expose it.

Every collective is: arrive (all ranks check that they call the same), work on what the others expose, leave.
Each rank reduces its own 1/N of the elements by reading all ranks' and writes the result to all of them, so
that a byte crosses the memory bus as seldom as it can (a direct reduce-scatter and all-gather in one pass).
"""

from __future__ import annotations

import operator
import struct
from abc import abstractmethod
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from overlap.comm.backends.base import Communicator
from overlap.comm.dtype import DType, Op, check_reducible
from overlap.comm.errors import MismatchError
from overlap.comm.reduce import reduce_into
from overlap.comm.span import Span

_KINDS = ("allocate", "allreduce", "reduce_scatter", "allgather", "broadcast", "alltoall", "barrier", "split")
_OPS, _DTYPES = tuple(Op), tuple(DType)
_FORMAT = struct.Struct("<BBBBIqqqdqq")


class Call(NamedTuple):
    """What a rank is about to do; must be equal on all ranks."""

    kind: str
    op: Op | None = None
    dtype: DType | None = None
    length: int = 0
    place: tuple[int, int] | None = None
    divisor: float = 0.0
    root: int = -1
    tag: int = 0

    def pack(self) -> bytes:
        number, offset = self.place or (-1, -1)
        op = 255 if self.op is None else _OPS.index(self.op)
        dtype = 255 if self.dtype is None else _DTYPES.index(self.dtype)
        kind = _KINDS.index(self.kind)
        fields = (kind, op, dtype, 0, 0, self.length, number, offset, self.divisor, self.root, self.tag)
        return _FORMAT.pack(*fields)

    @classmethod
    def unpack(cls, data: bytes) -> Call:
        kind, op, dtype, _, _, count, number, offset, divisor, root, tag = _FORMAT.unpack(data)
        return cls(
            _KINDS[kind],
            None if op == 255 else _OPS[op],
            None if dtype == 255 else _DTYPES[dtype],
            count,
            None if number < 0 else (number, offset),
            divisor,
            root,
            tag,
        )

    def __str__(self) -> str:
        text = self.kind
        if self.op is not None:
            text += f" ({self.op.value})"
        if self.kind in ("allocate", "alltoall"):
            text += f" of {self.length} bytes"
        elif self.dtype is not None:
            text += f" of {self.length} {self.dtype.value}"
        if self.divisor:
            text += f", divisor {self.divisor:g}"
        if self.root >= 0:
            text += f" from rank {self.root}"
        if self.place is not None:
            text += f" at byte {self.place[1]} of buffer {self.place[0]}"
        return text + (f" (round {self.tag >> 16}, bucket {self.tag & 0xFFFF})" if self.tag else "")


CALL_BYTES = _FORMAT.size


def check_equal(calls: Sequence[Call]) -> None:
    """Raise the same MismatchError on every rank where calls differ."""
    for rank, call in enumerate(calls):
        if call != calls[0]:
            raise MismatchError(
                f"ranks call different things: rank 0 {calls[0]}; rank {rank} {call}. Every rank must make "
                f"the same calls in the same order"
            )


def share(count: int, size: int, rank: int) -> slice:
    """The elements of `count` that rank `rank` reduces: whole cache lines, so that no two ranks write one."""
    step = (-(-count // size) + 63) // 64 * 64
    return slice(min(rank * step, count), min((rank + 1) * step, count))


class DirectCommunicator(Communicator):
    """What shared memory and threads have in common.

    Attributes:
        group: a mark that spans of this communicator's buffers carry.
    """

    group: object

    @abstractmethod
    def _arrive(self, call: Call) -> None:
        """Wait until every rank has arrived, and raise MismatchError (on all) where calls differ."""

    @abstractmethod
    def _leave(self) -> None:
        """Wait until every rank has done its part of the call."""

    @abstractmethod
    def _exposed(
        self, call: Call, span: Span, give: slice, take: slice
    ) -> Iterator[tuple[int, Sequence[np.ndarray]]]:
        """Arrive, yield (first element, every rank's elements from there), leave: in one piece or several.

        Args:
            give: the elements of this rank's span that others read.
            take: the elements that this rank wants to find in its span afterwards.
        """

    @abstractmethod
    def _exchange_table(self, call: Call, numbers: Sequence[int]) -> list[list[int]]:
        """Every rank's numbers (as many on each), in rank order."""

    @abstractmethod
    def _exchange_pair(self, out: np.ndarray | None, dest: int, into: np.ndarray | None, source: int) -> None:
        """Send and receive bytes, at the same time; neither peer is this rank."""

    def allreduce(self, span: Span, op: Op = Op.SUM, divisor: float | None = None) -> None:
        span = self._known(span)
        check_reducible(op, span.dtype, divisor)
        divide_by = self._divisor(op, divisor)
        if self.size == 1 and divide_by in (0, 1):
            return
        call = Call("allreduce", op, span.dtype, len(span), span.place, divide_by, tag=self.tag)
        everything = slice(0, len(span))
        for _, views in self._exposed(call, span, everything, everything):
            mine = share(len(views[0]), self.size, self.rank)
            parts = [view[mine] for view in views]
            reduce_into(parts, parts, op, span.dtype, divide_by or 1)

    def reduce_scatter(
        self, span: Span, counts: Sequence[int], op: Op = Op.SUM, divisor: float | None = None
    ) -> None:
        span = self._known(span)
        check_reducible(op, span.dtype, divisor)
        counts = self._checked_counts("counts", span, counts)
        mine = self._piece(counts)
        divide_by = self._divisor(op, divisor)
        call = Call("reduce_scatter", op, span.dtype, len(span), span.place, divide_by, tag=self.tag)
        for start, views in self._exposed(call, span, slice(0, len(span)), mine):
            piece = _within(mine, start, len(views[0]))
            parts = [view[piece] for view in views]
            reduce_into(parts, [parts[self.rank]], op, span.dtype, divide_by or 1)

    def allgather(self, span: Span, counts: Sequence[int]) -> None:
        span = self._known(span)
        counts = self._checked_counts("counts", span, counts)
        mine = self._piece(counts)
        call = Call("allgather", None, span.dtype, len(span), span.place, tag=self.tag)
        for start, views in self._exposed(call, span, mine, slice(0, len(span))):
            end = 0
            for rank, count in enumerate(counts):
                piece = _within(slice(end, end + count), start, len(views[0]))
                end += count
                if rank != self.rank:
                    np.copyto(views[self.rank][piece], views[rank][piece])

    def broadcast(self, span: Span, root: int) -> None:
        span = self._known(span)
        root = self._checked_rank("root", root)
        call = Call("broadcast", None, span.dtype, len(span), span.place, root=root, tag=self.tag)
        nothing, everything = slice(0, 0), slice(0, len(span))
        give, take = (everything, nothing) if self.rank == root else (nothing, everything)
        for _, views in self._exposed(call, span, give, take):
            if self.rank != root:
                np.copyto(views[self.rank], views[root])

    def alltoall(
        self, send: Span, send_counts: Sequence[int], recv: Span, recv_counts: Sequence[int]
    ) -> None:
        send, recv = self._known(send, "send"), self._known(recv, "recv")
        send_counts = self._checked_counts("send_counts", send, send_counts)
        recv_counts = self._checked_counts("recv_counts", recv, recv_counts)
        if send.dtype is not recv.dtype:
            raise ValueError(f"send is {send.dtype.value} but recv is {recv.dtype.value}: use one dtype")
        call = Call("alltoall", None, send.dtype, tag=self.tag)
        tables = self._exchange_table(call, [*send_counts, *recv_counts])
        self._check_tables(tables)
        # Spans differ in length and place: they are staged, in as many pieces as the longest needs.
        longest = max(sum(table[: self.size]) for table in tables)
        foreign = Span(send.array, send.dtype)
        for start, views in self._exposed(
            call._replace(length=longest), foreign, slice(0, len(send)), slice(0, 0)
        ):
            self._take_pieces(start, views, tables, recv, recv_counts)

    def _take_pieces(
        self,
        start: int,
        views: Sequence[np.ndarray],
        tables: list[list[int]],
        recv: Span,
        recv_counts: Sequence[int],
    ) -> None:
        landed = 0
        for rank, table in enumerate(tables):
            first = sum(table[: self.rank])
            theirs = _within(slice(first, first + table[self.rank]), start, len(views[rank]))
            begin = landed + start + theirs.start - first
            np.copyto(recv.array[begin : begin + theirs.stop - theirs.start], views[rank][theirs])
            landed += recv_counts[rank]

    def _check_tables(self, tables: list[list[int]]) -> None:
        for sender, table in enumerate(tables):
            for receiver, other in enumerate(tables):
                sent, expected = table[receiver], other[self.size + sender]
                if sent != expected:
                    raise MismatchError(
                        f"alltoall: rank {sender} sends {sent} elements to rank {receiver}, which expects "
                        f"{expected}; give the same number on both"
                    )

    def sendrecv(self, send: Span | None, dest: int | None, recv: Span | None, source: int | None) -> None:
        out = self._bytes("send", send, "dest", dest)
        into = self._bytes("recv", recv, "source", source)
        if (dest == self.rank) != (source == self.rank):
            raise ValueError(
                f"dest={dest!r} and source={source!r}: rank {self.rank} can send to itself only while it "
                "receives from itself, in one sendrecv"
            )
        if dest != self.rank:
            self._exchange_pair(out, -1 if dest is None else dest, into, -1 if source is None else source)
        elif out is not None and into is not None:
            if len(out) != len(into):
                raise ValueError(f"send has {len(out)} bytes, but recv {len(into)}; give the same number")
            np.copyto(into, out)

    def _bytes(self, name: str, span: Span | None, peer_name: str, peer: int | None) -> np.ndarray | None:
        if span is None and peer is None:
            return None
        if span is None or peer is None:
            raise ValueError(f"{name} goes with {peer_name}: give both or neither, not {peer_name}={peer!r}")
        self._checked_rank(peer_name, peer)
        return self._known(span, name).array.view(np.uint8)

    def barrier(self) -> None:
        self._arrive(Call("barrier", tag=self.tag))
        self._leave()

    def _known(self, span: Span, name: str = "span") -> Span:
        """The span as this communicator sees it: memory of another one's buffers has no place here."""
        if not isinstance(span, Span):
            raise TypeError(
                f"{name} must be a Span (Span.wrap(array), or a buffer's span), not {type(span).__name__}"
            )
        return span if span.group is self.group or span.place is None else Span(span.array, span.dtype)

    def _divisor(self, op: Op, divisor: float | None) -> float:
        if op is not Op.AVERAGE:
            return 0.0
        return float(self.size if divisor is None else divisor)

    def _piece(self, counts: Sequence[int]) -> slice:
        start = sum(counts[: self.rank])
        return slice(start, start + counts[self.rank])

    def _checked_counts(self, name: str, span: Span, counts: Sequence[int]) -> list[int]:
        counts = [_whole(name, count) for count in counts]
        if len(counts) != self.size or min(counts) < 0 or sum(counts) != len(span):
            raise ValueError(
                f"{name} must be {self.size} numbers of at least 0, one a rank, whose sum is the span's "
                f"{len(span)} elements, not {counts!r}"
            )
        return counts

    def _checked_rank(self, name: str, rank: int) -> int:
        if not 0 <= _whole(name, rank) < self.size:
            raise ValueError(f"{name} must be a rank from 0 to {self.size - 1}, not {rank!r}")
        return rank


def check_allocation(nbytes: int) -> None:
    """Refuse what no backend can allocate."""
    if not 0 <= _whole("nbytes", nbytes) < 1 << 48:
        raise ValueError(f"nbytes must be at least 0 and within the address space, not {nbytes!r}")


def check_color(color: int | None, key: int) -> None:
    """Refuse what no backend can split by."""
    for name, value in (("color", color), ("key", key)):
        if value is not None and not -(1 << 63) <= _whole(name, value) < 1 << 63:
            raise ValueError(f"{name} must be an integer of 64 bits, not {value!r}")


def other_length(source: int, sent: int, dest: int, expected: int) -> MismatchError:
    """What both ends of a pair raise where they disagree."""
    return MismatchError(
        f"rank {source} sends {sent} bytes, but rank {dest} receives {expected}; give the same number on both"
    )


def _whole(name: str, value: int) -> int:
    try:
        return operator.index(value)
    except TypeError:
        raise TypeError(f"{name} must be made of integers, not {value!r}") from None


def _within(piece: slice, start: int, count: int) -> slice:
    """The part of `piece` that lies in `count` elements from `start`, counted from there."""
    return slice(min(max(piece.start - start, 0), count), min(max(piece.stop - start, 0), count))
