"""Threads as ranks of one process: for tests and docs, with delays and failures to order."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np

from ..errors import MismatchError, PeerLost
from ..span import Buffer, Span
from .base import Communicator
from .direct import Call, DirectCommunicator, check_equal


class Meeting:
    """Where the threads of one communicator wait for each other."""

    def __init__(self, size: int) -> None:
        self.size = size
        # One condition for all: a few ranks that meet often need no finer lock.
        self.changed = threading.Condition()
        self.arrived = [0] * size
        self.calls: list[Call] = [Call("barrier")] * size
        self.offers: list[Any] = [None] * size
        self.lost: dict[int, tuple[int, str]] = {}
        self.ended: dict[int, str] = {}
        self.children: dict[Any, Meeting] = {}
        self.mail: dict[tuple[int, int], list[np.ndarray]] = {}

    def wait(self, rank: int, ready: Callable[[], bool], needed: Callable[[], set[int]], doing: str) -> None:
        """Wait until `ready()`; raise PeerLost where one of the `needed()` ranks can't come any more."""
        with self.changed:
            while not ready():
                for culprit, reason in self.lost.values():
                    raise PeerLost(culprit, reason, doing)
                for peer in needed() & self.ended.keys():
                    raise PeerLost(peer, self.ended[peer], doing)
                self.changed.wait()


class InprocCommunicator(DirectCommunicator):
    """One thread's end of a Meeting.

    Args:
        before: called with (rank, what is called) ahead of every call; may sleep or raise.
    """

    def __init__(
        self, meeting: Meeting, rank: int, before: Callable[[int, str], None] | None = None
    ) -> None:
        self.rank, self.size = rank, meeting.size
        self._meeting_place, self._before = meeting, before
        self._buffers = 0

    def _sync(self) -> None:
        place = self._meeting_place
        with place.changed:
            place.arrived[self.rank] += 1
            target = place.arrived[self.rank]
            place.changed.notify_all()

        def late() -> set[int]:
            return {rank for rank, count in enumerate(place.arrived) if count < target}

        place.wait(self.rank, lambda: not late(), late, self.doing)

    def _arrive(self, call: Call) -> None:
        if self._before is not None:
            self._before(self.rank, call.kind)
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
        offers = self._all_offers(np.zeros(nbytes, np.uint8))
        self._arrive(Call("allocate", count=nbytes))
        parts = tuple(offers)
        self._leave()
        self._buffers += 1
        return Buffer(self._buffers, parts, self.rank)

    def sendrecv(
        self, send: Span | None, dest: int | None, recv: Span | None, source: int | None
    ) -> None:
        place = self._meeting_place
        if send is not None and dest is not None:
            self._check_rank("dest", dest)
            with place.changed:
                place.mail.setdefault((self.rank, dest), []).append(send.array.copy())
                place.changed.notify_all()
        if recv is not None and source is not None:
            self._check_rank("source", source)
            box = place.mail.setdefault((source, self.rank), [])
            place.wait(self.rank, lambda: bool(box), lambda: {source}, self.doing)
            with place.changed:
                came = box.pop(0)
            if came.nbytes != recv.array.nbytes:
                raise MismatchError(
                    f"rank {source} sends {came.nbytes} bytes, but rank {self.rank} receives "
                    f"{recv.array.nbytes}; give the same number on both"
                )
            np.copyto(recv.array, came)

    def split(self, color: int | None, key: int = 0) -> Communicator | None:
        offers = self._all_offers((color, key))
        self._arrive(Call("split"))
        group = sorted((theirs[1], rank) for rank, theirs in enumerate(offers) if theirs[0] == color)
        ranks = tuple(rank for _, rank in group)
        if color is None:
            self._leave()
            return None
        with self._meeting_place.changed:
            name = ("group", color, self._meeting_place.arrived[self.rank])
            child = self._meeting_place.children.setdefault(name, Meeting(len(ranks)))
        self._leave()
        return InprocCommunicator(child, ranks.index(self.rank), self._before)

    def abort(self, reason: str, culprit: int | None = None) -> None:
        place = self._meeting_place
        with place.changed:
            place.lost[self.rank] = (self.rank if culprit is None else culprit, reason)
            place.changed.notify_all()

    def close(self, reason: str = "ended without an error") -> None:
        place = self._meeting_place
        with place.changed:
            place.ended.setdefault(self.rank, reason)
            place.changed.notify_all()


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
    meeting = Meeting(size)

    def rank_main(rank: int) -> Any:
        communicator = InprocCommunicator(meeting, rank, before)
        try:
            return work(communicator)
        except BaseException as error:
            communicator.abort(f"raised {type(error).__name__}: {error}")
            raise
        finally:
            communicator.close()

    with ThreadPoolExecutor(size, "rank") as threads:
        futures = [threads.submit(rank_main, rank) for rank in range(size)]
    errors = [error for future in futures if (error := future.exception()) is not None]
    for error in sorted(errors, key=lambda error: isinstance(error, PeerLost)):
        raise error
    return [future.result() for future in futures]
