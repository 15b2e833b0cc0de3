"""Carries messages between every rank and rank 0, which orders named operations. On one host: Unix sockets.

A message is any picklable object; it is unpickled only because the kernel has said whose process sent it
(`rendezvous.meet` checks).
"""

from __future__ import annotations

import pickle
import select
import socket
import threading
from collections import deque
from dataclasses import replace
from typing import Any

from overlap.comm.rendezvous import Links, meet
from overlap.comm.world import World

# A packet must fit into a socket's buffer; longer messages go in several.
_PACKET_BYTES = 32 * 1024
_LAST, _MORE = b"\0", b"\1"


def _packets(message: Any) -> list[bytes]:
    data = pickle.dumps(message, pickle.HIGHEST_PROTOCOL)
    pieces = [data[start : start + _PACKET_BYTES] for start in range(0, len(data), _PACKET_BYTES)]
    return [_MORE + piece for piece in pieces[:-1]] + [_LAST + pieces[-1]]


class Control:
    """One rank's messages.

    Guarantees: messages between two ranks arrive in order; `send` of rank 0 never blocks, so that a rank
    which is busy with an operation that needs rank 0 can't stop it.

    Args:
        links: to rank 0, or rank 0's to all; None in a world of one.
    """

    def __init__(self, rank: int, links: Links | None) -> None:
        self._rank, self._links = rank, links
        self._sockets: dict[int, socket.socket] = {} if links is None else links.sockets
        self._ranks = {link.fileno(): rank for rank, link in self._sockets.items()}
        self._parts: dict[int, list[bytes]] = {rank: [] for rank in self._sockets}
        self._unsent: dict[int, deque[bytes]] = {rank: deque() for rank in self._sockets}
        # User threads send while this rank's own thread receives; a message's packets stay together.
        self._sending = threading.Lock()
        # What this process tells its own thread: the bytes in the pipe only wake it.
        self._own: deque[Any] = deque()
        self._wake, self._waker = socket.socketpair()
        self._waker.setblocking(False)
        self._poll = select.poll()
        self._poll.register(self._wake, select.POLLIN)
        for link in self._sockets.values():
            self._poll.register(link, select.POLLIN)
        self._dead = dict[int, int]()  # handle -> rank
        if links is not None:
            for member, handle in enumerate(links.processes.handles):
                if member != rank and member in self._sockets:
                    self._poll.register(handle, select.POLLIN)
                    self._dead[handle] = member

    def tell_self(self, message: Any) -> None:
        """A message to this rank's own `receive`; callable from any thread."""
        self._own.append(message)
        try:
            self._waker.send(b"\0")
        except OSError:  # there are wakes enough in the pipe, or it is closed
            pass

    def tell_leader(self, message: Any) -> None:
        """A message to rank 0; callable from any thread. It may block while rank 0 is busy.

        Raises:
            OSError: rank 0 is gone.
        """
        if self._rank == 0:
            self.tell_self(message)
            return
        with self._sending:
            for packet in _packets(message):
                self._sockets[0].send(packet)

    def send(self, rank: int, message: Any) -> None:
        """Rank 0's message to `rank`; what can't go now goes during a later `receive`."""
        if rank in self._unsent:
            self._unsent[rank].extend(_packets(message))
            self._flush(rank)

    def _flush(self, rank: int) -> None:
        queue, link = self._unsent[rank], self._sockets[rank]
        try:
            while queue:
                link.send(queue[0], socket.MSG_DONTWAIT)
                queue.popleft()
        except BlockingIOError:
            self._poll.modify(link, select.POLLIN | select.POLLOUT)
            return
        except OSError:  # it is gone, which `receive` reports
            queue.clear()
        self._poll.modify(link, select.POLLIN)

    def receive(self, timeout_s: float | None) -> tuple[list[tuple[int, Any]], list[int]]:
        """Sleep until there are messages, and return all there are, with their senders; and ranks that ended.

        Args:
            timeout_s: after which to return nothing; None is never.
        """
        events = self._poll.poll(None if timeout_s is None else max(0.0, timeout_s) * 1000 + 1)
        messages: list[tuple[int, Any]] = []
        ended: list[int] = []
        for descriptor, what in events:
            if descriptor == self._wake.fileno():
                self._wake.recv(4096)
                while self._own:
                    messages.append((self._rank, self._own.popleft()))
            elif descriptor in self._ranks:
                rank = self._ranks[descriptor]
                if what & select.POLLOUT:
                    self._flush(rank)
                if what & ~select.POLLOUT and not self._drain(rank, messages):
                    self._poll.unregister(descriptor)
                    del self._ranks[descriptor], self._unsent[rank]
                    ended.append(rank)
            else:
                self._poll.unregister(descriptor)
                # What it sent before it died counts.
                rank = self._dead[descriptor]
                if self._sockets[rank].fileno() in self._ranks:
                    self._drain(rank, messages)
                ended.append(rank)
        return messages, ended

    def _drain(self, rank: int, messages: list[tuple[int, Any]]) -> bool:
        """Take all messages of `rank` that have come; whether more may come."""
        link, parts = self._sockets[rank], self._parts[rank]
        while True:
            try:
                packet = link.recv(_PACKET_BYTES + 1, socket.MSG_DONTWAIT)
            except BlockingIOError:
                return True
            except OSError:
                return False
            if not packet:
                return False
            parts.append(packet[1:])
            if packet[:1] == _LAST:
                messages.append((rank, pickle.loads(b"".join(parts))))  # noqa: S301  # from a rank of this job
                parts.clear()

    def close(self) -> None:
        if self._links is not None:
            self._links.close()
        self._wake.close()
        self._waker.close()


def connect(world: World, generation: int, timeout_s: float) -> Control:
    """Collective: this rank's messages to and from rank 0; arguments as of `rendezvous.meet`."""
    if world.size == 1:
        return Control(0, None)
    apart = replace(world, address=f"{world.address}-control")
    return Control(world.rank, meet(apart, generation, timeout_s))
