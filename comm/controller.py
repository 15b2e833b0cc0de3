"""Agrees what named operations run, and in what order: requests of all ranks in, decisions out.

Pure: no clocks, threads or sockets; rank 0's `NamedOperations` has one. An operation is ready when every rank
of its group that has not joined has asked for it under the same name. Ready ones are compared, and become
decisions in the order in which they became ready; small allreduces that are ready together become one.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from overlap.comm.dtype import DType
from overlap.comm.request import WORLD, Kind, Request, Shape

# What ranks give as the first dimension is theirs alone.
_ANY_ROWS = (Kind.ALLGATHER, Kind.ALLTOALL)
_ALWAYS_JOINABLE = (Kind.ALLREDUCE, Kind.ADASUM, Kind.BARRIER)


class Verdict(NamedTuple):
    """Why an operation does not run: the class of error, and what every rank is told.

    Attributes:
        rank: whom a lost peer's error names; -1 where nobody was lost.
    """

    error: str
    message: str
    rank: int = -1


class Decision(NamedTuple):
    """What the ranks of a group do next, the same on all of them.

    Attributes:
        names: of the operations; more than one are allreduces done as one.
        members: the ranks that take part.
        requests: by name, of a rank that has asked; what ranks that have joined stand in for.
        table: by rank of the group: of an allgather, the rows of each tensor; of an alltoall, its splits.
        number: of a join, the last rank; of ADD_GROUP, the new group's number.
        verdict: why it does not run.
    """

    names: tuple[str, ...]
    group: int
    members: tuple[int, ...]
    requests: tuple[Request, ...] = ()
    table: tuple[tuple[int, ...], ...] = ()
    number: int = -1
    verdict: Verdict | None = None


@dataclass
class _Pending:
    """An operation that not all ranks have asked for yet."""

    since_s: float
    requests: dict[int, Request] = field(default_factory=dict)
    warned_s: float = 0.0


class Controller:
    """The requests of all ranks.

    Args:
        size: of the job.
        fusion_bytes: how much at most becomes one operation.

    >>> controller = Controller(2)
    >>> request = Request(Kind.BARRIER)
    >>> controller.submit(0, "wait", request, now_s=0.0)
    >>> controller.decide()
    []
    >>> controller.submit(1, "wait", request, now_s=0.1)
    >>> [decision.names for decision in controller.decide()]
    [('wait',)]
    """

    def __init__(self, size: int, fusion_bytes: int = 0) -> None:
        self.groups: dict[int, tuple[int, ...]] = {WORLD: tuple(range(size))}
        self._fusion_bytes = fusion_bytes
        self._pending: dict[tuple[int, str], _Pending] = {}
        self._ready: dict[tuple[int, str], _Pending] = {}
        self._joined: dict[int, str] = {}  # rank -> the name of its join, in the order of joining
        self._left: dict[int, Verdict] = {}
        self._verdicts: list[Decision] = []

    @property
    def idle(self) -> bool:
        """Whether nothing waits for other ranks."""
        return not self._pending

    # -- events ------------------------------------------------------------------------------------------

    def submit(self, rank: int, name: str, request: Request, now_s: float) -> None:
        """`rank` asks for an operation."""
        if request.kind is Kind.JOIN:
            self._join(rank, name)
            return
        key = request.group, name
        members = self.groups.get(request.group)
        if members is None:
            self._refuse(
                key, (rank,), Verdict("ValueError", f"{name!r}: process set {request.group} was removed")
            )
            return
        pending = self._pending.get(key)
        if pending is None:
            pending = self._pending[key] = _Pending(now_s)
        pending.requests[rank] = request
        lost = [m for m in members if m in self._left and m not in pending.requests]
        if lost:
            self._refuse(key, tuple(pending.requests), self._left[lost[0]])
            del self._pending[key]
        elif len(pending.requests) == len(members):
            self._ready[key] = self._pending.pop(key)
        elif self._joined:
            self._look_for_ready(key, pending)

    def _join(self, rank: int, name: str) -> None:
        self._joined[rank] = name
        lost = next(iter(self._left.values()), None)
        if lost is not None:
            self._end_joins(lost)
            return
        for key, pending in list(self._pending.items()):
            self._look_for_ready(key, pending)

    def _look_for_ready(self, key: tuple[int, str], pending: _Pending) -> None:
        missing = set(self.groups[key[0]]) - pending.requests.keys()
        if missing <= self._joined.keys():
            self._ready[key] = self._pending.pop(key)

    def leave(self, rank: int, culprit: int, reason: str) -> None:
        """`rank` takes part in nothing any more: whoever waits for it is told."""
        if rank in self._left:
            return
        verdict = self._left[rank] = Verdict("PeerLost", reason, culprit)
        for key, pending in list(self._pending.items()):
            if rank in self.groups[key[0]] and rank not in pending.requests:
                del self._pending[key]
                self._refuse(key, tuple(pending.requests), verdict)
        if self._joined:
            self._end_joins(verdict)

    def _end_joins(self, verdict: Verdict) -> None:
        for rank, name in self._joined.items():
            self._refuse((WORLD, name), (rank,), verdict)
        self._joined.clear()

    def _refuse(self, key: tuple[int, str], ranks: Iterable[int], verdict: Verdict) -> None:
        group, name = key
        self._verdicts.append(Decision((name,), group, tuple(ranks), verdict=verdict))

    # -- decisions ---------------------------------------------------------------------------------------

    def decide(self) -> list[Decision]:
        """What became ready since the last call, in that order."""
        decisions: list[Decision] = []
        ready, self._ready = self._ready, {}
        batch = _Batch(self._fusion_bytes)
        for (group, name), pending in ready.items():
            decision = self._judge(group, name, pending.requests)
            if not batch.take(decision):
                decisions += batch.close()
                if not batch.take(decision):
                    decisions.append(decision)
        decisions += batch.close()
        if self._joined and len(self._joined) == len(self.groups[WORLD]):
            last = next(reversed(self._joined))
            # Each rank under its own name: how often it has joined before may differ.
            for rank, name in self._joined.items():
                decisions.append(Decision((name,), WORLD, (rank,), number=last))
            self._joined.clear()
        verdicts, self._verdicts = self._verdicts, []
        return verdicts + decisions

    def _judge(self, group: int, name: str, requests: dict[int, Request]) -> Decision:
        members = self.groups[group]
        first = requests[min(requests)]
        ranks = tuple(sorted(requests))
        message = find_difference(name, requests)
        if message:
            return Decision((name,), group, ranks, verdict=Verdict("MismatchError", message))
        joined = [rank for rank in members if rank not in requests]
        message = self._cannot_stand_in(name, first, joined)
        if message:
            return Decision((name,), group, ranks, verdict=Verdict("CommError", message))
        decision = Decision((name,), group, members, (first,))
        if first.kind in _ANY_ROWS:
            return decision._replace(table=tuple(_row(requests.get(rank), first) for rank in members))
        if first.kind is Kind.ADD_GROUP:
            return self._add_group(decision, first)
        if first.kind is Kind.REMOVE_GROUP:
            return self._remove_group(decision, first)
        return decision

    def _cannot_stand_in(self, name: str, request: Request, joined: Sequence[int]) -> str:
        if not joined or request.kind in _ALWAYS_JOINABLE:
            return ""
        if request.kind is Kind.BROADCAST and request.root in joined:
            return f"{name!r} can't be broadcast from rank {request.root}, which has joined: use another root"
        if request.joinable and request.kind not in (Kind.ADD_GROUP, Kind.REMOVE_GROUP, Kind.DUPLICATE):
            return ""
        return (
            f"{name!r}: {request.kind.value} is not possible while a rank has joined, and rank "
            f"{joined[0]} has: call it before the first rank joins"
        )

    def _add_group(self, decision: Decision, request: Request) -> Decision:
        ranks = tuple(sorted(request.splits))
        for number, members in self.groups.items():
            if members == ranks:
                message = (
                    f"there is a process set of ranks {list(ranks)} already (number {number}): use that one"
                )
                return decision._replace(verdict=Verdict("ValueError", message))
        number = next(number for number in range(len(self.groups) + 1) if number not in self.groups)
        self.groups[number] = ranks
        return decision._replace(number=number)

    def _remove_group(self, decision: Decision, request: Request) -> Decision:
        if request.root == WORLD or request.root not in self.groups:
            message = f"process set {request.root} can't be removed: it is the world, or was removed before"
            return decision._replace(verdict=Verdict("ValueError", message))
        members = self.groups.pop(request.root)
        for key, pending in list(self._pending.items()):
            if key[0] == request.root:
                del self._pending[key]
                message = (
                    f"{key[1]!r}: process set {request.root} (ranks {list(members)}) was removed meanwhile"
                )
                self._refuse(key, tuple(pending.requests), Verdict("ValueError", message))
        return decision

    # -- stalls ------------------------------------------------------------------------------------------

    def next_look_s(self, warn_s: float, abort_s: float) -> float | None:
        """When `find_stalled` may find something; None while nothing waits."""
        times = [
            time
            for pending in self._pending.values()
            for time, limit in (
                (max(pending.since_s, pending.warned_s) + warn_s, warn_s),
                (pending.since_s + abort_s, abort_s),
            )
            if limit > 0
        ]
        return min(times, default=None)

    def find_stalled(self, warn_s: float, abort_s: float, now_s: float) -> str:
        """A warning of operations that have waited too long, "" where there is none (limits of 0: never).

        Those that have waited for `abort_s` come out of `decide`, as errors.
        """
        waited = {
            key: now_s - max(pending.since_s, pending.warned_s) for key, pending in self._pending.items()
        }
        stalled = {}
        if any(0 < warn_s <= seconds for seconds in waited.values()):
            # With it all that have waited nearly as long: what belongs together is told together.
            stalled = {key: self._pending[key] for key, seconds in waited.items() if 2 * seconds >= warn_s}
        if any(0 < abort_s <= now_s - pending.since_s for pending in self._pending.values()):
            # With it all that wait long: one fault shall be one error on all ranks.
            long_s = min(warn_s or abort_s, abort_s / 2)
            ended = {key: p for key, p in self._pending.items() if long_s <= now_s - p.since_s}
            text = self._describe(ended, now_s)
            for key, pending in ended.items():
                del self._pending[key]
                stalled.pop(key, None)
                self._refuse(key, tuple(pending.requests), Verdict("StallError", text))
        for pending in stalled.values():
            pending.warned_s = now_s
        return self._describe(stalled, now_s) if stalled else ""

    def _describe(self, stalled: dict[tuple[int, str], _Pending], now_s: float) -> str:
        lines = []
        for (group, name), pending in stalled.items():
            missing = [r for r in self.groups[group] if r not in pending.requests and r not in self._joined]
            kind = next(iter(pending.requests.values())).kind.value
            line = (
                f"{kind} {name!r} has waited for {now_s - pending.since_s:.0f} s: asked for by "
                f"{_ranks(pending.requests)}, not by {_ranks(missing)}"
            )
            others = [
                n for (g, n), p in self._pending.items() if n != name and set(p.requests) & set(missing)
            ]
            alike = difflib.get_close_matches(name, others, 1, 0.6)
            if alike:
                line += f" (which asked for {alike[0]!r}: the names look alike; use the same on every rank)"
            lines.append(line)
        return "; ".join(lines[:10]) + (f"; and {len(lines) - 10} more" if len(lines) > 10 else "")


class _Batch:
    """Allreduces that can be done as one."""

    def __init__(self, limit: int) -> None:
        self._limit, self._decisions, self._nbytes = limit, list[Decision](), 0
        self._key: object = None

    def take(self, decision: Decision) -> bool:
        """Whether it fits with the ones taken before."""
        if decision.verdict is not None or decision.requests[0].kind is not Kind.ALLREDUCE:
            return False
        request = decision.requests[0]
        dtypes = {dtype for dtype, _ in request.tensors}
        size = sum(nbytes(dtype, shape) for dtype, shape in request.tensors)
        key = (decision.group, request.op, request.prescale, request.postscale, request.device, dtypes)
        if len(dtypes) != 1 or size + self._nbytes > self._limit or (self._decisions and key != self._key):
            return False
        self._key, self._nbytes = key, self._nbytes + size
        self._decisions.append(decision)
        return True

    def close(self) -> list[Decision]:
        """The ones taken, as one; the batch is empty then."""
        decisions, self._decisions, self._nbytes = self._decisions, [], 0
        if len(decisions) < 2:
            return decisions
        names = tuple(decision.names[0] for decision in decisions)
        requests = tuple(decision.requests[0] for decision in decisions)
        return [decisions[0]._replace(names=names, requests=requests)]


def nbytes(dtype: DType, shape: Shape) -> int:
    size = dtype.itemsize
    for dimension in shape:
        size *= dimension
    return size


def _row(request: Request | None, like: Request) -> tuple[int, ...]:
    """A rank's row of a decision's table; one that has joined has no rows."""
    if like.kind is Kind.ALLTOALL:
        return (0,) * len(like.splits) if request is None else request.splits
    if request is None:
        return (0,) * len(like.tensors)
    return tuple(shape[0] for _, shape in request.tensors)


def _ranks(ranks: Iterable[int]) -> str:
    numbers = sorted(ranks)
    return (
        ("rank " if len(numbers) == 1 else "ranks ") + ", ".join(map(str, numbers)) if numbers else "no rank"
    )


def find_difference(name: str, requests: dict[int, Request]) -> str:
    """The first thing in which ranks' requests differ, in words equal on all ranks; "" if in nothing."""
    ranks = sorted(requests)
    first = requests[ranks[0]]
    for rank in ranks[1:]:
        other = requests[rank]
        if other is first:
            continue
        for what, mine, theirs in _compared(first, other):
            if mine != theirs:
                return (
                    f"{name!r}: rank {ranks[0]} asks for {what} {mine}, rank {rank} for {what} {theirs}; "
                    "ask for the same on every rank"
                )
    return ""


def _compared(first: Request, other: Request) -> Iterable[tuple[str, object, object]]:
    yield "operation", first.kind.value, other.kind.value
    if first.kind is Kind.ADD_GROUP:
        yield "ranks", list(first.splits), list(other.splits)
    yield "number of tensors", len(first.tensors), len(other.tensors)
    for index, ((dtype, shape), (dtype2, shape2)) in enumerate(
        zip(first.tensors, other.tensors, strict=True)
    ):
        of = f" of tensor {index}" if len(first.tensors) > 1 else ""
        yield f"dtype{of}", dtype.value, dtype2.value
        if first.kind not in _ANY_ROWS or shape[1:] != shape2[1:]:
            yield f"shape{of}", shape, shape2
    yield "op", first.op and first.op.value, other.op and other.op.value
    yield "root", first.root, other.root
    yield "prescale factor", first.prescale, other.prescale
    yield "postscale factor", first.postscale, other.postscale
    yield "device", first.device, other.device
