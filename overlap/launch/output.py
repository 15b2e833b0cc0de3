"""The launcher's own outputs: whole lines, in order, without ever blocking the launcher."""

from __future__ import annotations

import os
import select
import selectors
from collections import deque
from collections.abc import Callable

# A pipe that poll calls writable takes at least this much without blocking (POSIX's PIPE_BUF on Linux).
_PIECE = 4096
# With more than this waiting to be written the ranks' output is not read: they wait, as in a pipe.
_FULL = 1 << 20


class Output:
    """One of the launcher's outputs.

    Whoever reads it may be slow, or gone, and the launcher must still hear Ctrl-C: it writes only what fits.
    The descriptor stays blocking, because other programs at the same terminal share that flag.
    """

    def __init__(self, fd: int, selector: selectors.BaseSelector, on_gone: Callable[[], None]) -> None:
        self._fd, self._selector, self._on_gone = fd, selector, on_gone
        self._waiting: deque[bytes] = deque()
        self._size = 0
        self._gone = self._watched = False
        self._poll = select.poll()
        self._poll.register(fd, select.POLLOUT)

    @property
    def empty(self) -> bool:
        """Whether all was written."""
        return not self._waiting

    @property
    def full(self) -> bool:
        """Whether so much waits that nothing should be added."""
        return self._size > _FULL

    def write(self, lines: bytes) -> None:
        """Add whole lines, and write as much as is taken now."""
        if not self._gone:
            self._waiting.append(lines)
            self._size += len(lines)
            self._write_some()

    def _write_some(self, events: int = 0) -> None:
        try:
            while self._waiting and self._poll.poll(0):
                data = self._waiting.popleft()
                sent = os.write(self._fd, data[:_PIECE] if len(data) > _PIECE else data)
                self._size -= sent
                if sent < len(data):
                    self._waiting.appendleft(data[sent:])
        except BlockingIOError:
            self._waiting.appendleft(data)
        except OSError:
            self._gone = True
            self._waiting.clear()
            self._size = 0
            self._on_gone()
        self._watch(bool(self._waiting))

    def _watch(self, wanted: bool) -> None:
        if wanted and not self._watched:
            self._selector.register(self._fd, selectors.EVENT_WRITE, self._write_some)
        elif self._watched and not wanted:
            self._selector.unregister(self._fd)
        self._watched = wanted
