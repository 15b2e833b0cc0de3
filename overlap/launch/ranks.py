"""`overlap.run` and `Ranks`: a function on several ranks, from Python, a notebook or a test."""

from __future__ import annotations

import json
import operator
import os
import pickle
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

from overlap.comm.errors import RankFailed, StartError

from . import pickling
from .failures import Failure, FailureLog, Kind
from .job import Job, Rank
from .local import rank_environ
from .repeats import Repeats
from .wire import Connection

_START_TIMEOUT_S = 60.0
# Seconds in which the other ranks must answer after one has failed.
_GRACE_S = 5.0


class Ranks:
    """Rank processes that run one function after the other; a context manager.

    Args:
        np: how many ranks, at least 1.
        env: environment variables for them, beside this process's own.

    Calls from several threads take turns. What ranks print appears, with the rank before each line, in this
    process's `sys.stdout` and `sys.stderr` while a call runs.

    Raises:
        StartError: a rank did not start.
        ValueError, TypeError: an argument is not what it should be.
    """

    def __init__(self, np: int, env: Mapping[str, str] | None = None) -> None:
        self._lock = threading.RLock()
        self._size = _checked_size(np)
        self._answers: dict[int, Any] = {}
        self._heads: dict[int, dict[str, Any]] = {}
        self._errors: dict[int, bytes] = {}
        self._log, self._repeats = FailureLog(), Repeats()
        self._connections: dict[int, Connection] = {}
        self._path: list[str] | None = None
        self._open = True
        environ = _environ(_checked_env(env), self._size)
        self._job = Job(self._size, self)
        try:
            for _ in range(self._size):
                self._job.start([sys.executable, "-m", "overlap.launch.child"], environ, subprocess.DEVNULL)
            self._wait_for_hello()
        except BaseException:
            self.close()
            raise

    def _wait_for_hello(self) -> None:
        deadline = time.monotonic() + _START_TIMEOUT_S
        while len(self._connections) < self._size:
            dead = [rank for rank in self._job.ranks if rank.status is not None]
            if dead or time.monotonic() > deadline:
                why = f"ended with {dead[0].status}" if dead else f"did not start in {_START_TIMEOUT_S:g} s"
                rank = dead[0].number if dead else min(set(range(self._size)) - set(self._connections))
                raise StartError(f"rank {rank} {why}: its own output, above, says why")
            self._job.turn(deadline)

    @property
    def alive(self) -> bool:
        """Whether another function can be run."""
        with self._lock:
            if self._open:
                self._job.turn(0.0)  # takes note of ranks that ended since the last call
                if len(self._job.running) < self._size:
                    self.close()
            return self._open

    def run(
        self, fn: Callable[..., Any], *args: Any, timeout_s: float | None = None, **kwargs: Any
    ) -> list[Any]:
        """Run `fn(*args, **kwargs)` on every rank; returns the results in rank order.

        After a failure in which every rank still answered the ranks can be used again; otherwise they are
        ended, and `alive` is False.

        Raises:
            RankFailed: `fn` raised on a rank, or a rank died. The message ends with its traceback, and
                `__cause__` is its exception where that can be had here.
            TimeoutError: not every rank returned within `timeout_s` seconds; all were ended.
            TypeError: `fn` can't be called, or `fn` or an argument can't be sent.
            ValueError: these ranks are closed, or `timeout_s` is not a positive number.
        """
        _check_call(fn, timeout_s)
        with self._lock:
            if not self.alive:
                raise ValueError("these ranks are closed, or one of them died: make new ones with Ranks(np)")
            task = self._task(fn, args, kwargs)
            self._answers, self._heads, self._errors, self._log = {}, {}, {}, FailureLog()
            try:
                for connection in self._connections.values():
                    self._job.connections.send(connection, task)
                self._collect(fn, timeout_s)
            except BaseException:
                self.close()  # also for Ctrl-C: ranks in the middle of a call are of no use to a next one
                raise
            if self._log.failures:
                raise self._failed(fn)
            return [self._loaded(rank, fn) for rank in range(self._size)]

    def _task(self, fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> bytes:
        try:
            return pickling.dumps((fn, args, kwargs), self._path or [], fn)
        except Exception as error:
            raise TypeError(
                f"{_name(fn)} or one of its arguments can't be sent to the ranks: "
                f"{type(error).__name__}: {error}"
            ) from error

    def _collect(self, fn: Callable[..., Any], timeout_s: float | None) -> None:
        """Wait until every rank has answered, or until there is no point in waiting."""
        timeout = None if timeout_s is None else time.monotonic() + timeout_s
        grace: float | None = None
        while len(self._answers) < self._size:
            now = time.monotonic()
            if self._log.failures and grace is None:
                grace = now + _GRACE_S
            dead = any(rank.status is not None for rank in self._job.ranks)
            if dead or (grace is not None and now >= grace):
                self.close()
                return
            if timeout is not None and now >= timeout:
                late = [rank for rank in range(self._size) if rank not in self._answers]
                raise TimeoutError(
                    f"{_name(fn)} did not return on ranks {late} within {timeout_s:g} s; all ranks were ended"
                )
            self._job.turn(min((when for when in (timeout, grace) if when is not None), default=None))
        self._job.catch_up()  # what was printed before the answers were sent
        for rank in self._job.ranks:
            rank.stdout.finish(time.monotonic())
            rank.stderr.finish(time.monotonic())
        for line in self._repeats.lines():
            self.on_output("stderr", f"overlap.run: {line}\n".encode())

    def _failed(self, fn: Callable[..., Any]) -> RankFailed:
        first = self._log.first()
        assert first is not None
        head = self._heads.get(first.rank, {})
        if head.get("exits"):
            message = f"rank {first.rank} called sys.exit({first.text}) in {_name(fn)}"
        elif first.type:
            message = f"{first.line()}\n\n{first.traceback.rstrip()}"
        else:
            message = f"{first.line()} in {_name(fn)}"
        failure = RankFailed(message, first.rank, self._code(first, head))
        failure.__cause__ = _exception(self._errors.get(first.rank, b""))
        return failure

    def _code(self, first: Failure, head: Mapping[str, Any]) -> int | None:
        if first.kind in (Kind.SIGNALLED, Kind.EXITED) or head.get("exits"):
            return first.code
        return None

    def _loaded(self, rank: int, fn: Callable[..., Any]) -> Any:
        try:
            # Sent by a rank of this job, which has shown the job's id.
            return pickle.loads(self._answers[rank])  # noqa: S301
        except Exception as error:
            raise RankFailed(
                f"what {_name(fn)} returned on rank {rank} can't be loaded here: "
                f"{type(error).__name__}: {error}",
                rank,
            ) from error

    def on_output(self, source: str, lines: bytes) -> None:
        """Show lines of a rank where this process's own output goes now."""
        stream = sys.stdout if source == "stdout" else sys.stderr
        if stream is not None:
            try:
                stream.write(lines.decode(errors="replace"))
                stream.flush()
            except (OSError, ValueError):
                pass  # closed: as with the caller's own prints, there is nowhere to show it

    def on_frame(self, connection: Connection, head: dict[str, Any] | None, frame: bytes) -> None:
        """Take a rank's hello, then its answers: a head and a pickle each."""
        rank = connection.rank
        if head is not None:
            if head.get("kind") == "hello":
                self._connections[rank] = connection
                self._path = [str(place) for place in head["path"]]
            elif head.get("kind") == "report":
                self._log.reported(rank, head)
                self._job.connections.send(connection, b"shown")
            elif head.get("kind") == "warning":
                self.on_output("stderr", self._repeats.take(rank, head))
                self._job.connections.send(connection, b"shown")
        elif rank not in self._heads:
            self._heads[rank] = json.loads(frame)
            if not self._heads[rank]["ok"]:
                self._log.reported(rank, self._heads[rank])
        else:
            self._answers[rank] = frame
            if not self._heads[rank]["ok"]:
                self._errors[rank] = frame

    def on_end(self, rank: Rank) -> None:
        """Note a rank that died: in a call none may end, not even with success."""
        assert rank.status is not None
        if self._open and rank.number not in self._answers:
            self._log.ended(rank.number, rank.status, time.monotonic())

    def on_stranger(self, what: str) -> None:
        """A dropped connection is of no interest to the caller."""

    def close(self) -> None:
        """End all ranks, and everything they started; again does nothing."""
        with self._lock:
            self._open = False
            self._job.close()

    def __enter__(self) -> Ranks:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def run(
    fn: Callable[..., Any],
    *args: Any,
    np: int = 2,
    timeout_s: float | None = None,
    env: Mapping[str, str] | None = None,
    **kwargs: Any,
) -> list[Any]:
    """Run `fn(*args, **kwargs)` on `np` fresh processes of this host; returns the results in rank order.

    `fn` itself calls `overlap.init()`. It may be a closure, or come from a notebook. With `timeout_s`, a
    `TimeoutError` after so many seconds. `env` adds environment variables. Errors are those of `Ranks`.
    """
    _check_call(fn, timeout_s)
    with Ranks(np, env) as ranks:
        return ranks.run(fn, *args, timeout_s=timeout_s, **kwargs)


def _environ(env: Mapping[str, str], size: int) -> dict[str, str]:
    environ = {**rank_environ(os.environ, size), **env}
    # Where overlap was found by a path of this process alone, the ranks must find it too.
    root = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
    if os.path.basename(root) not in ("site-packages", "dist-packages"):
        environ["PYTHONPATH"] = os.pathsep.join(filter(None, [environ.get("PYTHONPATH"), root]))
    return environ


def _checked_size(np: int) -> int:
    try:
        size = operator.index(np)
    except TypeError:
        raise TypeError(f"np must be a positive integer, not {np!r}") from None
    if size < 1 or isinstance(np, bool):
        raise ValueError(f"np must be a positive integer, not {np!r}")
    return size


def _checked_env(env: Mapping[str, str] | None) -> dict[str, str]:
    env = dict(env or {})
    for name, value in env.items():
        if not isinstance(name, str) or not isinstance(value, str):
            raise TypeError(f"env must map texts to texts, not {name!r} to {value!r}")
    return env


def _check_call(fn: Callable[..., Any], timeout_s: float | None) -> None:
    if not callable(fn):
        raise TypeError(f"fn must be a function or another callable, not {fn!r}")
    if timeout_s is not None and not timeout_s > 0:
        raise ValueError(f"timeout_s must be a positive number of seconds or None, not {timeout_s!r}")


def _name(fn: Callable[..., Any]) -> str:
    return getattr(fn, "__qualname__", None) or repr(fn)


def _exception(data: bytes) -> BaseException | None:
    try:
        error = pickle.loads(data) if data else None  # noqa: S301 - as for results
    except Exception:
        return None
    return error if isinstance(error, BaseException) else None
