"""One rank of `overlap.run`: runs what its launcher sends, until the launcher hangs up."""

from __future__ import annotations

import json
import os
import pickle
import socket
import sys
from collections.abc import Callable
from typing import Any

import cloudpickle

from . import wire
from .report import describe

_CONNECT_TIMEOUT_S = 30.0


def main() -> None:
    """Serve the launcher named in the environment."""
    job, rank = os.environ["OVERLAP_JOB"], int(os.environ["OVERLAP_RANK"])
    sock = wire.connect(os.environ["OVERLAP_LAUNCHER"], _CONNECT_TIMEOUT_S)
    with sock:
        sock.settimeout(None)
        wire.send(sock, json.dumps({"kind": "hello", "job": job, "rank": rank, "path": sys.path}).encode())
        call = 0
        while (task := wire.receive(sock)) is not None:
            # Each call is a job of its own to the engine: one in which not every rank called init would else
            # leave the ranks with different ideas of how often they have met.
            os.environ["OVERLAP_JOB"] = f"{job}-{call}"
            runtime = sys.modules.get("overlap.runtime")
            if runtime is not None:
                runtime._generation = 0  # type: ignore[attr-defined]
            call += 1
            answer(sock, rank, task)


def answer(sock: socket.socket, rank: int, task: bytes) -> None:
    """Run one task and send what came of it: a head in JSON, then the pickled result or exception."""
    result = b""
    try:
        result = _result(rank, task)
        head: dict[str, Any] = {"ok": True}
    except BaseException as error:  # also SystemExit: it must not end a rank that others wait for
        head = {"ok": False, **_failure(rank, error)}
        _tell_engine("abort", error)
        result = _pickled(error)
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (OSError, ValueError, AttributeError):
            pass  # fn has closed or replaced it
    wire.send(sock, json.dumps(head).encode())
    wire.send(sock, result)
    if not head["ok"]:
        _tell_engine("shutdown")


def _result(rank: int, task: bytes) -> bytes:
    try:
        # Sent by this job's launcher, whose user the kernel vouched for.
        fn, args, kwargs = pickle.loads(task)  # noqa: S301
    except Exception as error:
        raise TypeError(
            f"rank {rank} can't load the function or its arguments: {type(error).__name__}: {error}"
        ) from error
    value = fn(*args, **kwargs)
    if "overlap.runtime" in sys.modules:
        import overlap

        overlap.shutdown()
    try:
        return bytes(cloudpickle.dumps(value, protocol=pickle.HIGHEST_PROTOCOL))
    except Exception as error:
        name = getattr(fn, "__qualname__", repr(fn))
        raise TypeError(
            f"what {name} returned on rank {rank} can't be sent back: a {type(value).__name__} that pickle "
            f"refuses ({error}); return arrays, numbers, strings, or containers of them"
        ) from error


def _failure(rank: int, error: BaseException) -> dict[str, Any]:
    """Describe an exception, without the frames of this file above the caller's function."""
    traceback = error.__traceback__
    while traceback is not None and traceback.tb_frame.f_code.co_filename == __file__:
        traceback = traceback.tb_next
    described = describe(error, traceback or error.__traceback__)
    if isinstance(error, SystemExit):
        code = error.code
        # As the interpreter has it: None is 0, and a text is 1.
        described["code"] = 0 if code is None else code if isinstance(code, int) else 1
        described["exits"] = True
    return described


def _pickled(error: BaseException) -> bytes:
    try:
        return bytes(cloudpickle.dumps(error.with_traceback(None), protocol=pickle.HIGHEST_PROTOCOL))
    except Exception:
        return b""  # its text and traceback are in the head


def _tell_engine(verb: str, *arguments: Any) -> None:
    function: Callable[..., Any] | None = getattr(sys.modules.get("overlap.runtime"), verb, None)
    if function is not None:
        try:
            function(*arguments)
        except Exception:  # the failure that is being reported is the one that matters
            pass


if __name__ == "__main__":
    main()
    # Not the interpreter's own end: threads that fn left behind, not daemons, would keep the process.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)
