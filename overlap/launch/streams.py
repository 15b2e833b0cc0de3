"""What a rank prints: cut into whole lines, each with the rank before it, tracebacks held for a moment."""

from __future__ import annotations

import os
import re
from collections.abc import Callable

_LINE = re.compile(rb"[^\r\n]*(?:\r\n|\r|\n)")
_CHUNK = 65536
# A line longer than this is shown in pieces: whoever never ends a line must not fill the launcher's memory.
_LONGEST_LINE = 8 << 20
_TRACEBACK = tuple(start + b"Traceback (most recent call last):" for start in (b"", b"  + Exception Group "))
# Seconds without a further line after which a held traceback did not end its rank; and in all, and bytes, for
# a rank that goes on writing after one.
_QUIET_S, _HELD_S, _HELD_BYTES = 1.0, 3.0, 1 << 20


class Lines:
    """Cuts bytes into lines that end in a newline, a carriage return (progress bars) or both.

    >>> lines = Lines()
    >>> lines.feed(b"a\\nb"), lines.feed(b"c\\r"), lines.rest()
    ([b'a\\n'], [b'bc\\r'], b'')
    """

    def __init__(self) -> None:
        self._tail = bytearray()

    def feed(self, data: bytes) -> list[bytes]:
        """Add what was read; returns the lines that it completes."""
        # A line may come in many pieces: only the new one is searched.
        cut = max(data.rfind(b"\n"), data.rfind(b"\r")) + 1
        if not cut:
            self._tail += data
            return [self.rest()] if len(self._tail) > _LONGEST_LINE else []
        whole, self._tail = bytes(self._tail) + data[:cut], bytearray(data[cut:])
        return _LINE.findall(whole)

    def rest(self) -> bytes:
        """Take the unfinished line."""
        tail, self._tail = bytes(self._tail), bytearray()
        return tail


class Stream:
    """One output of one rank, from the pipe to `show`, which gets whole prefixed lines.

    With `hold`, a traceback is held back until the stream is quiet or the rank has ended: it may be the
    reason why the rank ends, and then belongs into the launcher's last words, once, and not N times.
    """

    def __init__(self, fd: int, rank: int, show: Callable[[bytes], None], hold: bool) -> None:
        os.set_blocking(fd, False)
        self.fd, self.ended = fd, False
        self._prefix, self._show, self._hold = b"[%d] " % rank, show, hold
        self._lines = Lines()
        self._held: list[bytes] = []
        self._held_size = 0
        self._held_since = self._held_last = 0.0

    def read(self, now: float, most: int = 1) -> bool:
        """Pass on what the rank has written, in at most `most` pieces; says whether that was its end."""
        for _ in range(most):
            try:
                data = os.read(self.fd, _CHUNK)
            except BlockingIOError:
                return False
            if not data:
                self.finish(now)
                os.close(self.fd)
                self.ended = True
                return True
            self._take(self._lines.feed(data), now)
        return False

    def finish(self, now: float) -> None:
        """Pass on an unfinished last line, ended."""
        rest = self._lines.rest()
        if rest:
            self._take([rest + b"\n"], now)

    def _take(self, lines: list[bytes], now: float) -> None:
        ready = []
        for line in lines:
            if self._hold and not self._held and line.startswith(_TRACEBACK):
                self._held_since, self._held_size = now, 0
                self._held = [line]
            elif self._held:
                self._held.append(line)
                self._held_size += len(line)
            else:
                ready.append(line)
        self._held_last = now
        if ready:
            self._show(b"".join([self._prefix + line for line in ready]))
        if self._held_size > _HELD_BYTES:
            self.release()

    def due(self) -> float | None:
        """When a held traceback must be shown, on the clock of `read`; None where there is none."""
        return min(self._held_last + _QUIET_S, self._held_since + _HELD_S) if self._held else None

    def take_held(self) -> str:
        """Take the held traceback out of the stream."""
        held, self._held = self._held, []
        return b"".join(held).decode(errors="replace")

    def release(self) -> None:
        """Show a held traceback as ordinary output."""
        held, self._held = self._held, []
        if held:
            self._show(b"".join([self._prefix + line for line in held]))

    def close(self, now: float) -> None:
        """Pass on everything that is still there, and close the pipe."""
        if not self.ended and not self.read(now, most=1 << 10):
            self.finish(now)
            os.close(self.fd)
            self.ended = True
        self.release()
