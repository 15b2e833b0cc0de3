"""Starts `overlap run` as users do, and makes sure that nothing it started outlives its test."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

DEADLINE_S = 20.0


class Run:
    """One `overlap run` in a process of its own, with its output in pipes."""

    def __init__(self, *arguments: str, env: dict[str, str] | None = None, cwd: Path | None = None) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "overlap.cli", "run", *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            bufsize=0,  # else what `line` has read ahead would be missing in `finish`
            env={**os.environ, **(env or {})},
            cwd=cwd,
        )

    def line(self, source: str = "stdout") -> str:
        """Wait for the next line of its output."""
        return getattr(self.process, source).readline().decode()

    def members(self) -> list[psutil.Process]:
        """Everything below the launcher, its guard included."""
        return psutil.Process(self.process.pid).children(recursive=True)

    def finish(self, stdin: str = "") -> tuple[int, str, str]:
        """Wait for its end; returns exit code, output and errors."""
        out, err = self.process.communicate(stdin.encode(), timeout=DEADLINE_S)
        return self.process.returncode, out.decode(), err.decode()

    def close(self) -> None:
        if self.process.poll() is None:
            for each in self.members():
                each.kill()
            self.process.kill()
        self.process.communicate()


def wait_until_gone(processes: list[psutil.Process], timeout_s: float) -> None:
    """Wait until none of `processes` runs; a zombie that nobody reaps does not."""
    deadline = time.monotonic() + timeout_s
    left = processes
    while left and time.monotonic() < deadline:
        _, left = psutil.wait_procs(left, timeout=0.05)
        left = [each for each in left if each.is_running() and each.status() != psutil.STATUS_ZOMBIE]
    for each in left:
        each.send_signal(signal.SIGKILL)
    assert not left


@pytest.fixture
def start() -> Iterator[Callable[..., Run]]:
    """`start("-np", "2", ...)` starts `overlap run` with these arguments."""
    runs: list[Run] = []

    def start(*arguments: str, env: dict[str, str] | None = None, cwd: Path | None = None) -> Run:
        runs.append(Run(*arguments, env=env, cwd=cwd))
        return runs[-1]

    yield start
    for run in runs:
        run.close()


@pytest.fixture
def script(tmp_path: Path) -> Callable[[str], str]:
    """`script(source)` writes a Python program, and returns its path."""

    def write(source: str, name: str = "train.py") -> str:
        path = tmp_path / name
        path.write_text(source)
        return str(path)

    return write
