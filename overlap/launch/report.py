"""Tells the launcher, from inside a rank, why that rank is about to end, and what it warns of."""

from __future__ import annotations

import json
import os
import time
import traceback
from collections.abc import Iterator
from types import TracebackType
from typing import Any

from overlap.comm.errors import CONSEQUENCES

from . import wire

_TIMEOUT_S = 2.0
# Characters of a text or traceback: a message that holds a whole tensor must not be lost for its size.
_LONGEST = 200_000
_LONGEST_WARNING = 20_000


def report_failure(
    exc_type: type[BaseException], exc: BaseException | None, tb: TracebackType | None
) -> bool:
    """Send this rank's failure to `overlap run`; says whether it will show it. Never raises.

    An interruption is not reported, and needs no traceback: whoever pressed Ctrl-C knows.
    """
    name = os.environ.get("OVERLAP_LAUNCHER")
    if not name:
        return False
    if issubclass(exc_type, KeyboardInterrupt):
        return True
    try:
        exc = exc_type() if exc is None else exc
        head = _head("report")
        sock = wire.connect(name, _TIMEOUT_S)
        with sock:
            wire.send(sock, json.dumps(head | describe(exc, tb)).encode())
            return wire.receive(sock) == b"shown"
    except Exception:  # the excepthook that calls this still has a traceback to print
        return False


def report_warning(message: str, text: str) -> bool:
    """Send a warning of this rank, formatted as `text`; says whether the launcher has it. Never raises."""
    warning = {"message": message[:_LONGEST_WARNING], "text": text[:_LONGEST_WARNING]}
    try:
        with wire.connect(os.environ["OVERLAP_LAUNCHER"], _TIMEOUT_S) as sock:
            wire.send(sock, json.dumps(_head("warning") | warning).encode())
            try:
                wire.receive(sock)  # what this rank prints next comes after it
            except OSError:
                pass  # the launcher is slow; it will show it
    except Exception:  # then Python prints it
        return False
    return True


def _head(kind: str) -> dict[str, Any]:
    return {"kind": kind, "job": os.environ["OVERLAP_JOB"], "rank": int(os.environ["OVERLAP_RANK"])}


def describe(exc: BaseException, tb: TracebackType | None) -> dict[str, Any]:
    """Put an exception into words that JSON can carry."""
    try:
        text = str(exc)
    except Exception:
        text = "(its text cannot be made)"
    lines = traceback.format_exception(type(exc), exc, tb)
    return {
        "time": time.monotonic(),  # one clock for all processes of a host: launchers compare it
        "type": type(exc).__name__,
        "text": text[:_LONGEST],
        "traceback": "".join(lines)[-_LONGEST:],
        "consequence": any(isinstance(cause, CONSEQUENCES) for cause in _causes(exc)),
    }


def _causes(exc: BaseException | None) -> Iterator[BaseException]:
    """Go through an exception and what it was raised from, or while handling."""
    seen: set[int] = set()
    while exc is not None and id(exc) not in seen:
        seen.add(id(exc))
        yield exc
        exc = exc.__cause__ or exc.__context__
