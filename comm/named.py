"""Named operations of one rank: asked for on any thread, in any order; run by a thread of their own.

Rank 0's thread also leads: it feeds the `Controller` with all ranks' requests and sends out its decisions.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from overlap.comm.backends.base import Communicator
from overlap.comm.control import Control
from overlap.comm.controller import Controller, Decision, Verdict
from overlap.comm.errors import CommError, MismatchError, PeerLost, StallError, account_of
from overlap.comm.handle import Handle
from overlap.comm.names import Names
from overlap.comm.operations import FUSION_BYTES, Group
from overlap.comm.request import WORLD, Kind, Outcome, Request

_log = logging.getLogger("overlap")

# How many requests a rank sends by number; then it begins anew.
_REMEMBERED = 1024
_JOIN_S = 2.0
# Errors after which every rank of the group is still at the same place.
_HARMLESS = (MismatchError, ValueError, TypeError)
_VERDICTS: dict[str, Callable[[str], Exception]] = {
    "ValueError": ValueError,
    "MismatchError": MismatchError,
    "CommError": CommError,
    "StallError": StallError,
}


@dataclass(frozen=True)
class _Entry:
    """An operation that this rank has asked for."""

    request: Request
    arrays: tuple[np.ndarray, ...]
    handle: Handle[Outcome]


@dataclass(frozen=True)
class _Leave:
    """A rank's last message."""

    culprit: int
    reason: str


class NamedOperations:
    """Asks for operations, and runs what was decided.

    Guarantees: operations that all ranks of a group have asked for run, whatever else ranks asked for before;
    every handle is finished, with an outcome or an error.

    Args:
        communicator: of all ranks, for this object alone.
        warn_s, abort_s: how long an operation waits for ranks before they are named in a warning, and before
            it fails; 0 is never.

    Attributes:
        groups: the ranks of every process set, by its number; 0 is the world.
        names: for operations that have none.
    """

    def __init__(self, communicator: Communicator, control: Control, warn_s: float, abort_s: float) -> None:
        self.rank, size = communicator.rank, communicator.size
        self.groups: dict[int, tuple[int, ...]] = {WORLD: tuple(range(size))}
        self._limits = warn_s, abort_s
        self._control = control
        self._runners = {WORLD: Group(communicator)}
        self._entries: dict[tuple[int, str], _Entry] = {}
        self.names = Names()
        # Requests by number, as they are sent: the sender's, and rank 0's of every rank.
        self._known: dict[Request, int] = {}
        self._told: list[list[Request]] = [[] for _ in range(size)]
        self._controller = Controller(size, FUSION_BYTES) if self.rank == 0 else None
        self._broken: Exception | None = None
        self._closing = False  # the thread is to end, or has
        self._closed = False
        # User threads ask at the same time. This object's own thread never takes it: it must not wait for one
        # that waits for rank 0.
        self._lock = threading.Lock()
        # A daemon: a script that raises must end although this thread waits for a peer.
        self._thread = threading.Thread(target=self._run, name="overlap-named", daemon=True)
        self._thread.start()

    # -- asking ------------------------------------------------------------------------------------------

    def submit(self, name: str, request: Request, arrays: Sequence[np.ndarray] = ()) -> Handle[Outcome]:
        """Ask for an operation and return at once; it runs when all ranks of the group have asked for it.

        Args:
            name: the same on all ranks; not in flight on this one.
            arrays: one a tensor of `request`, C-contiguous, in its dtype's storage type; not to be touched
                until the handle is done. Allreduces and broadcasts write to them.

        Raises:
            ValueError: `name` is in flight already, or this rank is not in the group.
            CommError: overlap was shut down.
        """
        key = request.group, name
        handle: Handle[Outcome] = Handle(time.perf_counter())
        with self._lock:
            self._check(key)
            self._entries[key] = _Entry(request, tuple(arrays), handle)
            try:
                self._control.tell_leader((name, self._shortened(request)))
            except OSError:
                pass  # rank 0 is gone: this object's thread learns so too, and finishes the handle
        if self._broken is not None:
            self._finish(self._entries.pop(key, None), None, self._broken)
        return handle

    def _check(self, key: tuple[int, str]) -> None:
        group, name = key
        if self._closed:
            raise CommError("overlap was shut down: call overlap.init() again")
        if group not in self.groups:
            raise ValueError(f"{name!r}: there is no process set {group}: add it on all ranks before")
        if self.rank not in self.groups[group]:
            raise ValueError(
                f"{name!r}: rank {self.rank} is not in process set {group}, which has ranks "
                f"{list(self.groups[group])}: call it on those only"
            )
        if key in self._entries:
            raise ValueError(
                f"{name!r} is in flight already: wait for it before you use the name again, or use another"
            )

    def _shortened(self, request: Request) -> Request | int:
        number = self._known.get(request)
        if number is not None:
            return number
        if len(self._known) == _REMEMBERED:
            self._known.clear()
        self._known[request] = len(self._known)
        return request

    def _restored(self, rank: int, request: Request | int) -> Request:
        told = self._told[rank]
        if isinstance(request, int):
            return told[request]
        if len(told) == _REMEMBERED:
            told.clear()
        told.append(request)
        return request

    def add_group(self, ranks: Sequence[int]) -> int:
        """Collective over the world: make a process set of `ranks`; returns its number.

        Raises:
            ValueError: a rank is out of range or twice there, or such a set exists.
            MismatchError: ranks differ in what they give.
        """
        chosen = tuple(sorted(ranks))
        last = len(self.groups[WORLD]) - 1
        if not chosen or len(set(chosen)) != len(chosen) or not set(chosen) <= set(self.groups[WORLD]):
            raise ValueError(f"ranks must be different numbers from 0 to {last}, not {list(ranks)!r}")
        return self.submit("add_process_set", Request(Kind.ADD_GROUP, splits=chosen)).wait().number

    def remove_group(self, number: int) -> None:
        """Collective over the world: what is in flight in the process set fails."""
        self.submit("remove_process_set", Request(Kind.REMOVE_GROUP, root=number)).wait()
        self.names.forget(number)

    def duplicate(self, group: int) -> Communicator:
        """Collective over `group`: a communicator of its ranks, for the caller's own use."""
        asked = self.submit("open a channel", Request(Kind.DUPLICATE, group=group))
        made: Communicator = asked.wait().communicator
        return made

    # -- this object's thread ----------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while not self._closing:
                self._turn()
        except BaseException as error:
            self._break(error if isinstance(error, Exception) else CommError(repr(error)))

    def _turn(self) -> None:
        """Sleep until something comes, and do what it brings."""
        messages, ended = self._control.receive(self._patience_s())
        if self._controller is None:
            for _, message in messages:
                if isinstance(message, _Leave):
                    self._break(PeerLost(message.culprit, message.reason))
                elif message is not None:
                    for decision in message:
                        self._carry_out(decision)
            if ended:
                self._break(PeerLost(0, "was killed or ended without a word"))
            return
        self._lead(self._controller, messages, ended)

    def _patience_s(self) -> float | None:
        if self._controller is None:
            return None
        look_s = self._controller.next_look_s(*self._limits)
        return None if look_s is None else look_s - time.monotonic()

    def _lead(
        self, controller: Controller, messages: Sequence[tuple[int, Any]], ended: Sequence[int]
    ) -> None:
        now_s = time.monotonic()
        for rank, message in messages:
            if isinstance(message, _Leave):
                controller.leave(rank, message.culprit, message.reason)
            elif message is not None:
                name, request = message
                controller.submit(rank, name, self._restored(rank, request), now_s)
        for rank in ended:
            controller.leave(rank, rank, "was killed or ended without a word")
        warning = controller.find_stalled(*self._limits, now_s)
        if warning:
            _log.warning("%s", warning)
        decisions = controller.decide()
        if not decisions:
            return
        for rank in self.groups[WORLD][1:]:
            theirs = [decision for decision in decisions if rank in decision.members]
            if theirs:
                self._control.send(rank, theirs)
        for decision in decisions:
            if 0 in decision.members:
                self._carry_out(decision)

    def _carry_out(self, decision: Decision) -> None:
        entries = [self._entries.pop((decision.group, name), None) for name in decision.names]
        started_s = time.perf_counter()
        for entry in entries:
            if entry is not None:
                entry.handle.started_s = started_s
        outcomes: Sequence[Outcome | None] = [None] * len(entries)
        error: Exception | None = None
        if decision.verdict is not None:
            error = _error_of(decision.verdict, entries[0], decision.names[0])
        else:
            try:
                outcomes = self._run_decided(decision, entries)
            except Exception as raised:
                error = raised
                if not isinstance(raised, _HARMLESS):
                    self._runners[decision.group].communicator.abort(*account_of(raised))
        for entry, outcome in zip(entries, outcomes, strict=True):
            self._finish(entry, outcome, error)

    def _run_decided(self, decision: Decision, entries: Sequence[_Entry | None]) -> Sequence[Outcome]:
        if not decision.requests:  # all have joined
            return [Outcome(number=decision.number)]
        request = decision.requests[0]
        if request.kind is Kind.ADD_GROUP:
            return [self._add_group(decision.number, tuple(sorted(request.splits)))]
        if request.kind is Kind.REMOVE_GROUP:
            return [self._remove_group(request.root)]
        arrays = [None if entry is None else entry.arrays for entry in entries]
        return self._runners[decision.group].run(decision, arrays)

    def _add_group(self, number: int, ranks: tuple[int, ...]) -> Outcome:
        world = self._runners[WORLD].communicator
        communicator = world.split(0 if self.rank in ranks else None)
        if communicator is not None:
            self._runners[number] = Group(communicator)
        self.groups[number] = ranks
        return Outcome(number=number)

    def _remove_group(self, number: int) -> Outcome:
        del self.groups[number]
        runner = self._runners.pop(number, None)
        if runner is not None:
            runner.communicator.close()
        return Outcome(number=number)

    def _finish(self, entry: _Entry | None, outcome: Outcome | None, error: Exception | None) -> None:
        if entry is not None:
            entry.handle.finish(outcome, error, time.perf_counter())

    def _break(self, error: Exception) -> None:
        """Nothing can be asked for any more."""
        self._broken, self._closing = error, True
        while self._entries:
            _, entry = self._entries.popitem()
            self._finish(entry, None, error)

    # -- the end -----------------------------------------------------------------------------------------

    def abort(self, reason: str, culprit: int | None = None) -> None:
        """Tell all ranks that this one can't go on; callable from any thread."""
        for runner in list(self._runners.values()):
            runner.communicator.abort(reason, culprit)
        self._say(_Leave(self.rank if culprit is None else culprit, reason))

    def _say(self, last: _Leave) -> None:
        try:
            if self._controller is None:
                self._control.tell_leader(last)
            else:
                for rank in self.groups[WORLD][1:]:
                    self._control.send(rank, last)
        except OSError:
            pass  # nobody is left to be told

    def close(self) -> None:
        """End the thread and leave all groups; what is in flight fails. Idempotent."""
        with self._lock:
            if self._closed:
                return
            self._closed = self._closing = True
        self._say(_Leave(self.rank, "ended without an error"))
        self._control.tell_self(None)
        self._thread.join(_JOIN_S)
        for runner in self._runners.values():
            runner.communicator.close()
        self._thread.join(_JOIN_S)
        self._break(self._broken or CommError("overlap was shut down while this was in flight"))
        self._control.close()


def _error_of(verdict: Verdict, entry: _Entry | None, name: str) -> Exception:
    if verdict.error == "PeerLost":
        doing = f"{entry.request.kind.value} {name!r}" if entry is not None else name
        return PeerLost(verdict.rank, verdict.message, doing)
    return _VERDICTS[verdict.error](verdict.message)
