"""Threads as ranks of one process: for tests and docs, with delays and failures to order."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np

from overlap.comm.backends.base import Communicator
from overlap.comm.backends.direct import (
    Call,
    DirectCommunicator,
    check_allocation,
    check_color,
    check_equal,
    other_length,
)
from overlap.comm.errors import CommError, MismatchError, PeerLost, account_of
from overlap.comm.span import Buffer, Span


class Letter:
    """Bytes on their way between two ranks."""

    def __init__(self, data: np.ndarray) -> None:
        self.data = data
        self.expected: int | None = None  # how many bytes the receiver wanted; None until it has taken them


class Meeting:
    """Where the threads of one communicator wait for each other.

    Args:
        members: each rank's number in the job, for errors.
    """

    def __init__(self, members: Sequence[int]) -> None:
        self.members = members
        # One condition for all: a few ranks that meet often need no finer lock.
        self.changed = threading.Condition()
        self.arrived = [0] * len(members)
        self.calls: list[Call] = [Call("barrier")] * len(members)
        self.offers: list[Any] = [None] * len(members)
        self.lost: dict[int, tuple[int, str]] = {}
        self.ended: dict[int, str] = {}
        self.children: dict[Any, Meeting] = {}
        self.mail: dict[tuple[int, int], list[Letter]] = {}

    def wait(self, ready: Callable[[], bool], needed: Callable[[], set[int]], doing: str) -> None:
        """Wait until `ready()`; raise PeerLost where one of the `needed()` ranks can't come any more."""
        with self.changed:
            while not ready():
                for culprit, reason in self.lost.values():
                    raise PeerLost(culprit, reason, doing)
                for peer in sorted(needed() & self.ended.keys()):
                    raise PeerLost(self.members[peer], self.ended[peer], doing)
                self.changed.wait()


class InprocCommunicator(DirectCommunicator):
    """One thread's end of a Meeting.

    Args:
        before: called with (rank, what is called) ahead of every call; may sleep or raise.
        family: all communicators of this thread, this one among them from now on.
    """

    def __init__(
        self,
        meeting: Meeting,
        rank: int,
        before: Callable[[int, str], None] | None = None,
        family: list[InprocCommunicator] | None = None,
    ) -> None:
        self.rank, self.size = rank, len(meeting.members)
        self.group = object()
        self._meeting_place, self._before = meeting, before
        self._buffers = 0
        self._closed = False
        self._pair = ""  # what a sendrecv is at, for errors
        self._family = [] if family is None else family
        self._family.append(self)

    def _sync(self) -> None:
        place = self._meeting_place
        with place.changed:
            place.arrived[self.rank] += 1
            target = place.arrived[self.rank]
            place.changed.notify_all()

        def late() -> set[int]:
            return {rank for rank, count in enumerate(place.arrived) if count < target}

        place.wait(lambda: not late(), late, self._at())

    def _at(self) -> str:
        """What this rank is doing, in words."""
        return self.doing or self._pair or str(self._meeting_place.calls[self.rank])

    def _begin(self, kind: str) -> None:
        if self.rank in self._meeting_place.lost:
            raise CommError(f"this rank has told the others that it can't go on, before {kind}")
        if self._closed:
            raise CommError(f"this communicator was closed: call overlap.init() anew before {kind}")
        if self._before is not None:
            self._before(self.rank, kind)

    def _arrive(self, call: Call) -> None:
        self._begin(call.kind)
        self._pair = ""
        self._meeting_place.calls[self.rank] = call
        self._sync()
        try:
            check_equal(self._meeting_place.calls)
        except MismatchError:
            self._sync()
            raise

    def _leave(self) -> None:
        self._sync()

    def _all_offers(self, offer: Any) -> list[Any]:
        """Every rank's offer; made before arriving, read before leaving."""
        self._meeting_place.offers[self.rank] = offer
        return self._meeting_place.offers

    def _exposed(
        self, call: Call, span: Span, give: slice, take: slice
    ) -> Iterator[tuple[int, Sequence[np.ndarray]]]:
        offers = self._all_offers(span.array)
        self._arrive(call)
        yield 0, list(offers)
        self._leave()

    def _exchange_table(self, call: Call, numbers: Sequence[int]) -> list[list[int]]:
        offers = self._all_offers(list(numbers))
        self._arrive(call)
        tables = list(offers)
        self._leave()
        return tables

    def allocate(self, nbytes: int) -> Buffer:
        check_allocation(nbytes)
        offers = self._all_offers(np.zeros(nbytes, np.uint8))
        self._arrive(Call("allocate", length=nbytes, tag=self.tag))
        parts = tuple(offers)
        self._leave()
        self._buffers += 1
        return Buffer(self._buffers, parts, self.rank, self.group)

    def _exchange_pair(self, out: np.ndarray | None, dest: int, into: np.ndarray | None, source: int) -> None:
        self._begin("sendrecv")
        self._pair = "sendrecv"
        place, letter, mismatch = self._meeting_place, None, None
        if out is not None:
            letter = Letter(out)
            with place.changed:
                place.mail.setdefault((self.rank, dest), []).append(letter)
                place.changed.notify_all()
        if into is not None:
            mismatch = self._take(into, source)
        if letter is not None:
            taken = letter
            place.wait(lambda: taken.expected is not None, lambda: {dest}, self._at())
            expected = taken.expected or 0
            if expected != len(taken.data):
                mismatch = mismatch or other_length(self.rank, len(taken.data), dest, expected)
        if mismatch is not None:
            raise mismatch

    def _take(self, into: np.ndarray, source: int) -> MismatchError | None:
        place = self._meeting_place
        with place.changed:
            box = place.mail.setdefault((source, self.rank), [])
            place.wait(lambda: bool(box), lambda: {source}, self._at())
            letter = box.pop(0)
            if len(letter.data) == len(into):
                np.copyto(into, letter.data)
            letter.expected = len(into)
            place.changed.notify_all()
        if len(letter.data) == len(into):
            return None
        return other_length(source, len(letter.data), self.rank, len(into))

    def split(self, color: int | None, key: int = 0) -> Communicator | None:
        check_color(color, key)
        offers = self._all_offers((color, key))
        self._arrive(Call("split", tag=self.tag))
        group = sorted((theirs[1], rank) for rank, theirs in enumerate(offers) if theirs[0] == color)
        ranks = tuple(rank for _, rank in group)
        if color is None:
            self._leave()
            return None
        place = self._meeting_place
        with place.changed:
            name = (color, place.arrived[self.rank])
            child = place.children.setdefault(name, Meeting([place.members[rank] for rank in ranks]))
        self._leave()
        with place.changed:
            place.children.pop(name, None)
        return InprocCommunicator(child, ranks.index(self.rank), self._before, self._family)

    def abort(self, reason: str, culprit: int | None = None) -> None:
        place = self._meeting_place
        with place.changed:
            if not self._closed and self.rank not in place.lost:
                place.lost[self.rank] = (place.members[self.rank] if culprit is None else culprit, reason)
            place.changed.notify_all()

    def close(self, reason: str = "ended without an error") -> None:
        place = self._meeting_place
        self._closed = True
        with place.changed:
            place.ended.setdefault(self.rank, reason)
            place.changed.notify_all()

    def end(self, error: BaseException | None) -> None:
        """End this thread's part in all its communicators, as a process's end would."""
        for communicator in self._family:
            if error is not None:
                communicator.abort(*account_of(error))
            communicator.close()


def alone() -> Communicator:
    """The communicator of a world of one."""
    return InprocCommunicator(Meeting([0]), 0)


def run_threads(
    size: int,
    work: Callable[[Communicator], Any],
    before: Callable[[int, str], None] | None = None,
) -> list[Any]:
    """Call `work(communicator)` on `size` threads, one a rank, and return their results in rank order.

    A rank that raises aborts, so that the others do not wait for it; the first rank's exception that is no
    PeerLost is raised (else the first).

    >>> import numpy as np
    >>> from overlap.comm.span import Span
    >>> def work(comm):
    ...     span = Span.wrap(np.array([comm.rank + 1.0]))
    ...     comm.allreduce(span)
    ...     return float(span.array[0])
    >>> run_threads(3, work)
    [6.0, 6.0, 6.0]
    """
    meeting = Meeting(range(size))

    def rank_main(rank: int) -> Any:
        communicator = InprocCommunicator(meeting, rank, before)
        try:
            result = work(communicator)
        except BaseException as error:
            communicator.end(error)
            raise
        communicator.end(None)
        return result

    with ThreadPoolExecutor(size, "rank") as threads:
        futures = [threads.submit(rank_main, rank) for rank in range(size)]
    errors = [error for future in futures if (error := future.exception()) is not None]
    for error in sorted(errors, key=lambda error: isinstance(error, PeerLost)):
        raise error
    return [future.result() for future in futures]
