"""The comm engine: channels, each a communicator with a queue and a thread of its own.

Work that must not wait for each other's order goes on different channels: every attached model has one, named
operations another. A channel runs its work in the order of submission, which must be the same on every rank.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any, TypeAlias, TypeVar
from weakref import WeakSet

from overlap.comm.backends.base import Communicator
from overlap.comm.errors import CommError, MismatchError, account_of
from overlap.comm.handle import Handle
from overlap.comm.named import NamedOperations
from overlap.comm.request import WORLD
from overlap.comm.world import World

T = TypeVar("T")
_Item: TypeAlias = "tuple[Callable[[Communicator], object], str, int, Handle[Any]]"

# Errors after which every rank is still at the same place: the channel goes on.
_HARMLESS = (MismatchError, ValueError, TypeError)
_JOIN_S = 2.0


class Channel:
    """A queue of work for one communicator, done by one thread.

    Guarantees: work runs in the order of `submit`; a handle is always finished, with a result or an error.
    Assumes: `submit` is called in the same order on every rank.

    Attributes:
        last_words: tells peers that still need this rank how far it came, where it ends without an error.
    """

    def __init__(self, communicator: Communicator, name: str) -> None:
        self.name = name
        self._communicator = communicator
        self._queue: SimpleQueue[_Item | None] = SimpleQueue()
        self._broken: BaseException | None = None
        self._closed = False
        self.last_words: Callable[[], str] = lambda: "ended without an error"
        # A daemon: a script that raises must end although this thread waits for a peer.
        self._thread = threading.Thread(target=self._run, name=f"overlap-{name}", daemon=True)
        self._thread.start()

    def submit(self, work: Callable[[Communicator], T], doing: str, tag: int = 0) -> Handle[T]:
        """Put `work(communicator)` on the queue and return at once.

        Args:
            doing: what it is, in words, for errors.
            tag: see `Communicator.tag`.

        Raises:
            CommError: the channel is closed.
        """
        if self._closed:
            raise CommError(
                "overlap was shut down, or this model detached: call overlap.init() and attach anew"
            )
        handle: Handle[T] = Handle(time.perf_counter())
        self._queue.put((work, doing, tag, handle))
        return handle

    def _run(self) -> None:
        while (item := self._queue.get()) is not None:
            work, doing, tag, handle = item
            handle.started_s = time.perf_counter()
            result, error = None, self._broken
            if error is None:
                self._communicator.doing, self._communicator.tag = doing, tag
                try:
                    result = work(self._communicator)
                except BaseException as raised:
                    error = raised
                    if not isinstance(raised, _HARMLESS):
                        self._break(raised)
            handle.finish(result, error, time.perf_counter())
            # Not to keep the last bucket's memory alive while the queue is empty.
            del item, work, handle, result, error
        self._communicator.close(self.last_words())

    def _break(self, error: BaseException) -> None:
        self._broken = error
        self._communicator.abort(*account_of(error))

    def abort(self, reason: str, culprit: int | None = None) -> None:
        self._communicator.abort(reason, culprit)

    def run(self, work: Callable[[Communicator], T]) -> T:
        """Run `work` on the channel's thread, in order with the rest, and wait for it."""
        return self.submit(work, "set-up").wait()

    def close(self) -> None:
        """Finish what is queued if peers allow, leave the group and end the thread."""
        if self._closed:
            return
        self._closed = True
        self._queue.put(None)
        self._thread.join(_JOIN_S if self._broken is None else 0)
        self._communicator.close(self.last_words())
        self._thread.join(_JOIN_S)

    def let_go(self) -> None:
        """`close`, done by the thread itself: waits for nothing, so that a finalizer may call it."""
        self._queue.put(None)


class Engine:
    """The communicators of one process in one job.

    Attributes:
        world: who is in the job.
        communicator: joins all ranks; for set-up, from the main thread.
        named: operations in any order, from any thread.
    """

    def __init__(self, world: World, communicator: Communicator, named: NamedOperations) -> None:
        self.world, self.communicator, self.named = world, communicator, named
        # A channel lives as long as its thread, whatever becomes of its user.
        self._channels: WeakSet[Channel] = WeakSet()
        # Channels are opened and closed by the main thread while `abort` may come from any.
        self._lock = threading.Lock()
        self._closed = False

    def open_channel(self, name: str, group: int = WORLD) -> Channel:
        """Collective over a process set (the world, unless given): a channel of its ranks."""
        if self._closed:
            raise CommError("overlap was shut down: call overlap.init() again")
        communicator = self.communicator.split(0) if group == WORLD else self.named.duplicate(group)
        assert communicator is not None  # every rank gave a color
        channel = Channel(communicator, name)
        with self._lock:
            self._channels.add(channel)
        return channel

    def close_channel(self, channel: Channel) -> None:
        """End a channel's thread; ranks need not do so at the same time."""
        with self._lock:
            self._channels.discard(channel)
        channel.close()

    def abort(self, reason: str, culprit: int | None = None) -> None:
        """Tell all ranks that this one can't go on; callable from any thread."""
        with self._lock:
            channels = list(self._channels)
        self.communicator.abort(reason, culprit)
        for channel in channels:
            channel.abort(reason, culprit)
        self.named.abort(reason, culprit)

    def close(self) -> None:
        """End all channels and leave the job. Idempotent."""
        self._closed = True
        with self._lock:
            channels = list(self._channels)
            self._channels.clear()
        for channel in channels:
            channel.close()
        self.named.close()
        self.communicator.close()
