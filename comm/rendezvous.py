"""How the ranks of one host meet: a star of Unix sockets around rank 0, which passes descriptors to all.

The sockets are in the abstract namespace: nothing is left behind by a process that is killed. Both ends check
that the other runs as the same user. Rank 0 passes every rank a pidfd of each other rank: the one thing that
tells a death at once (a socket's end of file waits for forked children, `kill(pid, 0)` calls zombies alive).
"""

from __future__ import annotations

import json
import os
import select
import socket
import struct
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from overlap.comm.errors import PeerLost, StartError
from overlap.comm.world import World

_MESSAGE_BYTES = 64 * 1024
_LISTEN_BACKLOG = 512


class Processes:
    """Handles of the job's processes on this host, to ask whether they live; closed with the last user."""

    def __init__(self, handles: Sequence[int], own: int) -> None:
        self.handles, self._own = list(handles), own
        weakref.finalize(self, _close_all, self.handles).atexit = False

    def dead(self) -> list[int]:
        """Ranks whose processes have ended."""
        # A poll object serves one thread at a time, and every channel's thread asks: so a new one each time.
        poll = select.poll()
        for rank, handle in enumerate(self.handles):
            if rank != self._own:
                poll.register(handle, select.POLLIN)
        return [self.handles.index(handle) for handle, _ in poll.poll(0)]


def _close_all(descriptors: Sequence[int]) -> None:
    for descriptor in descriptors:
        os.close(descriptor)


@dataclass
class Links:
    """One group's sockets: the leader (rank 0) has one to each member, a member one to the leader.

    Attributes:
        sockets: by rank within the group.
        members: each member's rank in the job, in the group's order.
    """

    sockets: dict[int, socket.socket]
    members: list[int]
    processes: Processes = field(repr=False)

    def send(self, rank: int, message: Any, descriptors: Sequence[int] = ()) -> None:
        try:
            socket.send_fds(self.sockets[rank], [json.dumps(message).encode()], list(descriptors))
        except OSError as error:
            raise PeerLost(
                self.members[rank], f"closed its connection ({error.strerror})", "set-up"
            ) from error

    def receive(
        self, rank: int, descriptors: int, check: Callable[[], None] = lambda: None
    ) -> tuple[Any, list[int]]:
        """The next message from `rank`, with up to so many descriptors; PeerLost if it dies first.

        Args:
            check: called ten times a second; raises where no message will come.
        """
        poll = select.poll()
        poll.register(self.sockets[rank], select.POLLIN)
        poll.register(self.processes.handles[self.members[rank]], select.POLLIN)
        while not (events := poll.poll(100)):
            check()
        data, fds = b"", list[int]()
        if self.sockets[rank].fileno() in (descriptor for descriptor, _ in events):
            data, fds = _receive(self.sockets[rank], descriptors)
        if not data:
            raise PeerLost(self.members[rank], "was killed or ended without a word", "set-up")
        return json.loads(data), fds

    def close(self) -> None:
        _close_links(self.sockets)
        self.sockets = {}


def _receive(link: socket.socket, descriptors: int) -> tuple[bytes, list[int]]:
    """A message and its descriptors, which programs that this process starts don't inherit."""
    data, fds, _, _ = socket.recv_fds(link, _MESSAGE_BYTES, descriptors, socket.MSG_CMSG_CLOEXEC)
    return data, fds


def meet(world: World, generation: int, timeout_s: float) -> Links:
    """Find the other ranks of `world`, one at least, on this host.

    Args:
        generation: how often this process has met before (init, shutdown, init, ...).
        timeout_s: how long to wait for all of them.

    Raises:
        StartError: not all ranks came in time; names the ranks that are missing.
    """
    name = f"\0{world.address}-{generation}"
    deadline = time.monotonic() + timeout_s
    if world.local_rank == 0:
        return _gather(world, name, deadline, timeout_s)
    return _join(world, name, deadline, timeout_s)


def _gather(world: World, name: str, deadline: float, timeout_s: float) -> Links:
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        try:
            listener.bind(name)
        except OSError as error:
            raise StartError(
                f"rank 0 could not take the name {name[1:]!r} ({error.strerror}): is another job running "
                "under the same name?"
            ) from error
        listener.listen(_LISTEN_BACKLOG)
        found: dict[int, socket.socket] = {}
        unknown: dict[int, socket.socket] = {}
        try:
            _accept_all(world, listener, deadline, timeout_s, found, unknown)
            return _introduce(world, found)
        except BaseException:
            _close_links(found)
            raise
        finally:
            _close_links(unknown)


def _close_links(links: dict[int, socket.socket]) -> None:
    for link in links.values():
        link.close()


def _introduce(world: World, sockets: dict[int, socket.socket]) -> Links:
    """Send every rank a handle of each."""
    processes = Processes([os.pidfd_open(os.getpid())], 0)
    links = Links(sockets, list(range(world.size)), processes)
    rank = 0
    try:
        for rank in range(1, world.size):
            processes.handles.append(os.pidfd_open(_credentials(sockets[rank])[0]))
        for rank in range(1, world.size):
            links.send(rank, {"size": world.size}, processes.handles)
    except (OSError, PeerLost) as error:
        raise StartError(f"rank {rank} ended while the ranks met ({error}); its output says why") from error
    return links


def _accept_all(
    world: World,
    listener: socket.socket,
    deadline: float,
    timeout_s: float,
    found: dict[int, socket.socket],
    unknown: dict[int, socket.socket],
) -> None:
    """Accept every other rank into `found`; strangers are dropped, and can't hold up the others."""
    poll = select.poll()
    poll.register(listener, select.POLLIN)
    while len(found) < world.size - 1:
        events = poll.poll(max(0, deadline - time.monotonic()) * 1000)
        if not events:
            missing = sorted(set(range(1, world.size)) - found.keys())
            raise StartError(
                f"after {timeout_s:g} s rank 0 still waits for rank {', '.join(map(str, missing))} of "
                f"{world.size}: do all ranks call overlap.init()? OVERLAP_START_TIMEOUT_S sets the limit"
            )
        for descriptor, _ in events:
            if descriptor == listener.fileno():
                guest, _ = listener.accept()
                unknown[guest.fileno()] = guest
                poll.register(guest, select.POLLIN)
                continue
            poll.unregister(descriptor)
            guest = unknown.pop(descriptor)
            rank = _rank_of(guest, world)
            if rank is None or rank in found:
                guest.close()
            else:
                found[rank] = guest


def _rank_of(guest: socket.socket, world: World) -> int | None:
    """The rank that a connection belongs to, None for a stranger's."""
    if _credentials(guest)[1] != os.getuid():
        return None
    try:
        hello = json.loads(guest.recv(_MESSAGE_BYTES, socket.MSG_DONTWAIT))
        rank = hello["rank"]
    except (OSError, ValueError, TypeError, KeyError):
        return None
    return rank if type(rank) is int and 0 < rank < world.size else None


def _join(world: World, name: str, deadline: float, timeout_s: float) -> Links:
    link = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    for pause in _pauses():
        try:
            link.connect(name)
            break
        except OSError as error:
            if time.monotonic() > deadline:
                link.close()
                raise StartError(
                    f"rank {world.rank} waited {timeout_s:g} s for rank 0, which never came "
                    f"({error.strerror}): do all ranks call overlap.init()? OVERLAP_START_TIMEOUT_S sets "
                    "the limit"
                ) from error
            time.sleep(pause)
    if _credentials(link)[1] != os.getuid():
        link.close()
        raise StartError(f"another user holds the name {name[1:]!r}: start the job anew")
    try:
        link.send(json.dumps({"rank": world.rank}).encode())
        link.settimeout(max(0.1, deadline - time.monotonic()))
        data, handles = _receive(link, world.size)
    except OSError as error:
        data, handles = b"", []
        cause: OSError | None = error
    else:
        cause = None
    if not data:
        link.close()
        raise StartError(
            f"rank 0 did not bring all {world.size} ranks together within {timeout_s:g} s, or ended: do all "
            "ranks call overlap.init()? OVERLAP_START_TIMEOUT_S sets the limit"
        ) from cause
    link.settimeout(None)
    return Links({0: link}, list(range(world.size)), Processes(handles, world.local_rank))


def _pauses() -> Iterator[float]:
    """Between tries to reach rank 0, which may start later: short at first, then 20 ms."""
    pause = 0.001
    while True:
        yield pause
        pause = min(pause * 2, 0.02)


def _credentials(link: socket.socket) -> tuple[int, int]:
    """The process id and user id of the other end, as this process sees them."""
    pid, uid, _ = struct.unpack("3i", link.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
    return pid, uid
