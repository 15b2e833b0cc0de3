"""A failed job says once why: one traceback, the first failure's, and a line for each other rank."""

from __future__ import annotations

import json
import os
import sys
import time

import pytest

from overlap.comm.errors import PeerLost
from overlap.launch import wire
from overlap.launch.failures import FailureLog, Kind
from overlap.launch.report import describe, report_failure

PYTHON = sys.executable
# What overlap's runtime does in a rank, without the engine.
HOOK = """
import os, sys
from overlap.comm.errors import PeerLost
from overlap.launch.report import report_failure
rank = int(os.environ["OVERLAP_RANK"])
before = sys.excepthook
def hook(*failure):
    if not report_failure(*failure):
        before(*failure)
sys.excepthook = hook
"""


def test_reported_traceback_is_shown_once_and_consequences_in_a_line(start, script):
    path = script(
        HOOK + "if rank == 1:\n    raise ValueError('bad batch')\n"
        "raise PeerLost(1, 'raised ValueError: bad batch')\n"
    )
    code, out, err = start("-np", "3", PYTHON, path).finish()
    assert (code, out) == (1, "")
    lines = err.splitlines()
    assert lines[:2] == ["overlap run: rank 1 failed:", "Traceback (most recent call last):"]
    assert err.count("Traceback") == 1
    assert lines[-3:] == [
        "ValueError: bad batch",
        "overlap run: rank 0: PeerLost: rank 1 raised ValueError: bad batch",
        "overlap run: rank 2: PeerLost: rank 1 raised ValueError: bad batch",
    ]


def test_same_import_error_everywhere_is_one_traceback(start, script):
    code, _, err = start("-np", "4", PYTHON, script("print('hi')\nimport no_such_module\n")).finish()
    assert code == 1
    assert err.count("Traceback") == 1
    assert err.count("rank") == 4
    assert err.count(": ModuleNotFoundError: No module named 'no_such_module'\n") == 3
    assert "[" not in err.replace("[Errno", "")


def test_traceback_that_ends_nobody_is_ordinary_output(start, script):
    path = script(
        "import sys, traceback\n"
        "try:\n    1 / 0\nexcept ZeroDivisionError:\n    traceback.print_exc()\n"
        "print('waiting', flush=True)\nsys.stdin.read()\n"
    )
    run = start("-np", "1", PYTHON, path)
    assert run.line() == "[0] waiting\n"
    # Quiet for a second: it is shown, though the rank runs on.
    assert run.line("stderr") == "[0] Traceback (most recent call last):\n"
    while (line := run.line("stderr")).startswith("[0]  "):
        pass
    assert line == "[0] ZeroDivisionError: division by zero\n"
    assert run.finish()[0] == 0


def test_interruption_is_not_reported(monkeypatch):
    monkeypatch.setenv("OVERLAP_LAUNCHER", "nobody-listens-here")
    assert report_failure(KeyboardInterrupt, KeyboardInterrupt(), None)


def test_report_without_launcher_is_not_delivered(monkeypatch):
    monkeypatch.delenv("OVERLAP_LAUNCHER", raising=False)
    assert not report_failure(ValueError, ValueError("x"), None)
    for name, value in {"LAUNCHER": "nobody-listens-here", "JOB": "0", "RANK": "0"}.items():
        monkeypatch.setenv(f"OVERLAP_{name}", value)
    assert not report_failure(ValueError, ValueError("x"), None)


def test_what_was_raised_from_a_lost_peer_is_its_consequence():
    class Mute(Exception):
        def __str__(self) -> str:
            raise RuntimeError("no text")

    try:
        try:
            raise PeerLost(1, "was killed")
        except PeerLost as error:
            raise Mute from error
    except Mute as error:
        described = describe(error, error.__traceback__)
    assert described["consequence"]
    assert "cannot be made" in described["text"]
    assert not describe(ValueError("x"), None)["consequence"]


def report(time, consequence=False):
    return {"time": time, "type": "E", "text": "t", "traceback": "tb", "consequence": consequence}


def test_first_failure():
    log = FailureLog()
    assert log.first() is None
    log.ended(4, -15, 0.5, by_launcher=True)
    assert log.first().rank == 4
    log.reported(0, report(1.0, consequence=True))
    assert log.first().rank == 0
    log.ended(1, 3, 2.0)
    assert (log.first().rank, log.first().code) == (1, 3)
    log.reported(2, report(3.0))  # peers may leave before the exception reaches the launcher
    assert log.first().rank == 2
    log.ended(3, -9, 2.5)  # but who was killed before it is the cause
    assert (log.first().rank, log.first().code) == (3, 137)
    log.reported(3, report(0.0))  # the first word counts
    assert log.first().kind is Kind.SIGNALLED


def test_traceback_in_the_output_names_the_error():
    log = FailureLog()
    log.ended(0, 1, 1.0, "Traceback (most recent call last):\n  File x\npkg.mod.Error: two\nlines: here\n\n")
    assert log.first().line().startswith("rank 0: ")
    log.ended(1, 1, 0.5, "Traceback (most recent call last):\noverlap.comm.errors.PeerLost: rank 0 died\n")
    assert log.failures[1].kind is Kind.CONSEQUENCE


GARBAGE = {
    "a huge length": b"\xff" * 64,
    "no json": (3).to_bytes(8, "big") + b"abc",
    "another job": (len(b'{"job": "0", "rank": 0}')).to_bytes(8, "big") + b'{"job": "0", "rank": 0}',
    "a wrong kind": (2).to_bytes(8, "big") + b"[]",
    "half a frame": b"\0\0\0",
}


@pytest.mark.parametrize("garbage", GARBAGE.values(), ids=GARBAGE)
def test_strangers_are_dropped(start, garbage):
    run = start("-np", "1", "--verbose", "sh", "-c", "echo $OVERLAP_LAUNCHER; read line; exit 3")
    name = run.line().split()[1]
    with wire.connect(name, 5.0) as sock:
        sock.sendall(garbage)
        if len(garbage) > 3:
            try:
                assert sock.recv(1) == b""
            except ConnectionResetError:
                pass
    code, _, err = run.finish("\n")
    assert code == 3
    assert ("dropped a connection: it" in err) == (len(garbage) > 3)


def test_report_is_acknowledged_and_starts_the_grace(start):
    run = start("-np", "2", "sh", "-c", "echo $OVERLAP_JOB $OVERLAP_LAUNCHER; exec sleep 100")
    _, job, name = run.line().split()
    head = {"kind": "report", "job": job, "rank": 1, **describe(ValueError("stuck at exit"), None)}
    with wire.connect(name, 5.0) as sock:
        wire.send(sock, json.dumps(head).encode())
        assert wire.receive(sock) == b"shown"
    began = time.monotonic()
    code, _, err = run.finish()
    assert code == 1
    assert "rank 1 failed:" in err
    assert time.monotonic() - began < 8


def test_engine_tells_peers(start, script):
    pytest.importorskip("overlap.runtime")
    path = script(
        "import overlap, os, sys\noverlap.init()\n"
        "if overlap.rank() == 1:\n    raise ValueError('bad batch')\n"
        "import numpy\n"
        "from overlap.runtime import engine\n"
        "print('rank 0 goes on', flush=True)\n"
    )
    code, _, err = start("-np", "2", PYTHON, path, env={"PYTHONPATH": os.pathsep.join(sys.path)}).finish()
    assert code == 1
    assert err.count("Traceback") == 1
    assert "overlap run: rank 1 failed:" in err
