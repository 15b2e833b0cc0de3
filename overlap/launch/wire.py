"""Frames between the launcher and its ranks: a length, then that many bytes, over an abstract Unix socket."""

from __future__ import annotations

import os
import secrets
import socket
import struct

_LENGTH = struct.Struct(">Q")
_CHUNK = 1 << 20
# What somebody may send before they have shown the job's id.
_STRANGERS_LIMIT = 1 << 20


def same_user(sock: socket.socket) -> bool:
    """Say whether the process at the other end runs as this user; the kernel vouches for it."""
    credentials = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    uid: int = struct.unpack("3i", credentials)[1]
    return uid == os.geteuid()


def connect(name: str, timeout_s: float | None) -> socket.socket:
    """Connect to the launcher that listens as `name`; every later call on it has `timeout_s`.

    Raises:
        OSError: nobody listens there, or another user does.
    """
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        sock.settimeout(timeout_s)
        sock.connect("\0" + name)
        if not same_user(sock):
            raise PermissionError("another user listens on this job's socket")
    except BaseException:
        sock.close()
        raise
    return sock


def send(sock: socket.socket, payload: bytes) -> None:
    """Send one frame on a blocking socket."""
    sock.sendall(_LENGTH.pack(len(payload)))
    sock.sendall(payload)


def receive(sock: socket.socket) -> bytes | None:
    """Receive one frame from a blocking socket; None at its end."""
    head = _exactly(sock, _LENGTH.size)
    return None if head is None else _exactly(sock, _LENGTH.unpack(head)[0])


def _exactly(sock: socket.socket, size: int) -> bytes | None:
    data = bytearray()
    while len(data) < size:
        part = sock.recv(min(_CHUNK, size - len(data)))
        if not part:
            return None
        data += part
    return bytes(data)


class Connection:
    """The launcher's end of one connection; it never blocks.

    Attributes:
        trusted: the job's id was shown; until then a frame may not be large.
        rank: who is at the other end, once known.
    """

    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        self.sock, self.trusted, self.rank = sock, False, -1
        self._received = bytearray()
        self._unsent: list[memoryview] = []

    def receive(self) -> tuple[list[bytes], bool]:
        """Read what there is: whole frames, and whether the connection is over.

        Raises:
            ValueError: a stranger announces a frame larger than strangers may send.
        """
        over, frames = False, []
        while True:
            try:
                data = self.sock.recv(_CHUNK)
            except BlockingIOError:
                break
            except OSError:
                data = b""
            if not data:
                over = True
                break
            self._received += data
            if not self.trusted and len(self._received) >= _LENGTH.size:
                break  # look at it before reading on
        while len(self._received) >= _LENGTH.size:
            (size,) = _LENGTH.unpack_from(self._received)
            if size > _STRANGERS_LIMIT and not self.trusted:
                raise ValueError(f"it announced a message of {size} bytes")
            end = _LENGTH.size + size
            if len(self._received) < end:
                break
            with memoryview(self._received) as view:
                frames.append(bytes(view[_LENGTH.size : end]))
            del self._received[:end]
        return frames, over

    def send(self, payload: bytes) -> None:
        """Send one frame, as far as the other end takes it now; `flush` sends the rest."""
        self._unsent += [memoryview(_LENGTH.pack(len(payload))), memoryview(payload)]
        self.flush()

    def flush(self) -> bool:
        """Send what can be sent; says whether anything is left."""
        try:
            while self._unsent:
                part = self._unsent[0]
                sent = self.sock.send(part[:_CHUNK])
                self._unsent[0] = part[sent:]
                if not self._unsent[0]:
                    del self._unsent[0]
        except BlockingIOError:
            pass
        except OSError:
            self._unsent.clear()  # the other end is gone; its process's end says why
        return bool(self._unsent)

    def close(self) -> None:
        """Close the socket; what was not sent is dropped."""
        self._unsent.clear()
        self.sock.close()


class Listener:
    """The socket on which a job's launcher listens; its name vanishes with it."""

    def __init__(self) -> None:
        # Not the job's id: names of abstract sockets can be read by every user of the host.
        self.name = f"overlap-launcher-{secrets.token_hex(8)}"
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.bind("\0" + self.name)
        self.sock.listen(128)
        self.sock.setblocking(False)

    def accept(self) -> Connection | None:
        """Take the next connection of this user; None when there is none waiting.

        Raises:
            PermissionError: another user connected, and was dropped.
        """
        try:
            sock, _ = self.sock.accept()
        except (BlockingIOError, ConnectionAbortedError):
            return None
        if not same_user(sock):
            sock.close()
            raise PermissionError("it belongs to another user")
        return Connection(sock)

    def close(self) -> None:
        """Stop listening."""
        self.sock.close()
