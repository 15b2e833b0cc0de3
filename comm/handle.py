"""What starting an operation returns: wait on it for the result."""

from __future__ import annotations

import threading
from typing import Generic, TypeVar

T = TypeVar("T")


class Handle(Generic[T]):
    """An operation that was put on a channel's queue.

    Attributes:
        submitted_s, started_s, finished_s: `time.perf_counter()` at each; 0.0 until then.
    """

    __slots__ = ("_error", "_finished", "_result", "finished_s", "started_s", "submitted_s")

    def __init__(self, submitted_s: float) -> None:
        self.submitted_s, self.started_s, self.finished_s = submitted_s, 0.0, 0.0
        # Held until the operation is finished: a waiter sleeps in `acquire`, without the GIL.
        self._finished = threading.Lock()
        self._finished.acquire()
        self._result: T | None = None
        self._error: BaseException | None = None

    def done(self) -> bool:
        """Whether `wait` would return at once."""
        return not self._finished.locked()

    def wait(self, timeout_s: float | None = None) -> T:
        """Sleep until the operation is finished; return its result or raise its error.

        Raises:
            TimeoutError: it is not finished after `timeout_s`; it goes on.
        """
        if not self._finished.acquire(timeout=-1 if timeout_s is None else max(0.0, timeout_s)):
            raise TimeoutError(f"not finished after {timeout_s:g} s")
        self._finished.release()
        if self._error is not None:
            raise self._error
        return self._result  # type: ignore[return-value]  # set by `finish` before the lock opened

    def finish(self, result: T | None, error: BaseException | None, finished_s: float) -> None:
        """For the channel: set what `wait` gives, once."""
        self._result, self._error, self.finished_s = result, error, finished_s
        self._finished.release()
