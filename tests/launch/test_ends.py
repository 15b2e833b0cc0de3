"""Whatever ends a job, nothing that it started goes on: Ctrl-C, kill, kill -9 of the launcher."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from .conftest import wait_until_gone

PYTHON = sys.executable
# A training script with two workers, as a data loader has; says when all of them run.
WORKERS = """
import multiprocessing, os, sys, threading, time
def work(ready):
    ready.put(os.getpid())
    time.sleep(1000)
if __name__ == "__main__":
    context = multiprocessing.get_context("fork")
    ready = context.Queue()
    workers = [context.Process(target=work, args=(ready,), daemon=True) for _ in range(2)]
    for worker in workers:
        worker.start()
    pids = [ready.get() for _ in workers]
    print("ready", flush=True)
    time.sleep(1000)
"""


def ready(run, ranks=2):
    for _ in range(ranks):
        assert run.line().endswith("ready\n")
    return run.members()


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)]
)
def test_interruption_ends_everything(start, script, number, code):
    path = script(WORKERS)
    run = start("-np", "2", "bash", "-c", f"{PYTHON} {path}; true")
    members = ready(run)
    assert len(members) >= 1 + 2 + 2 + 4  # guard, shells, scripts, workers
    began = time.monotonic()
    run.process.send_signal(number)
    got, _, err = run.finish()
    assert got == code
    assert time.monotonic() - began < 5
    wait_until_gone(members, 0.5)
    assert "overlap/launch" not in err


def test_stubborn_ranks_are_killed(start):
    run = start("-np", "2", "sh", "-c", "trap '' INT TERM; echo ready; while :; do sleep 1; done")
    members = ready(run)
    began = time.monotonic()
    run.process.send_signal(signal.SIGINT)
    assert run.finish()[0] == 130
    assert time.monotonic() - began < 5
    wait_until_gone(members, 0.5)


def test_second_interruption_kills_at_once(start):
    run = start("-np", "2", "--verbose", "sh", "-c", "trap '' INT TERM; echo ready; sleep 100")
    members = ready(run)
    began = time.monotonic()
    run.process.send_signal(signal.SIGINT)
    while "sent SIGINT" not in run.line("stderr"):
        pass
    run.process.send_signal(signal.SIGINT)
    assert run.finish()[0] == 130
    assert time.monotonic() - began < 1.5
    wait_until_gone(members, 0.5)


def test_interruption_while_nobody_reads_the_output(start):
    run = start("-np", "2", "sh", "-c", "echo ready; exec yes")
    run.line()
    psutil.Process(run.process.pid).children()
    began = time.monotonic()
    run.process.send_signal(signal.SIGINT)
    assert run.process.wait(timeout=10) == 130
    assert time.monotonic() - began < 5


@pytest.mark.parametrize("tail", ["; true", ""])
def test_killed_launcher_takes_everything_along(start, script, tail):
    path = script(WORKERS)
    run = start("-np", "2", "bash", "-c", f"{PYTHON} {path}{tail}")
    members = ready(run)
    run.process.kill()
    wait_until_gone(members, 5)


def test_launcher_killed_while_it_starts_ranks(start):
    for _ in range(5):
        run = start("-np", "16", "--verbose", "sleep", "100")
        job = ""
        while not job:
            _, _, found = run.line("stderr").partition("OVERLAP_JOB=")
            job = found.partition(" ")[0]
        run.process.kill()
        deadline = time.monotonic() + 5
        while carriers(job) and time.monotonic() < deadline:
            pass
        assert not carriers(job)


def carriers(job):
    found = []
    for entry in Path("/proc").iterdir():
        try:
            if entry.name.isdigit() and f"OVERLAP_JOB={job}".encode() in (entry / "environ").read_bytes():
                found.append(entry.name)
        except OSError:
            pass
    return found


def test_what_a_rank_leaves_behind_is_ended(start):
    # Also what has a process group of its own, as a shell with job control makes them.
    program = "set -m; sleep 1000 & echo $!; exit 0"
    run = start("-np", "1", "bash", "-c", program)
    left = int(run.line().split()[1])
    assert run.finish()[0] == 0
    assert not psutil.pid_exists(left) or psutil.Process(left).status() == psutil.STATUS_ZOMBIE


def test_killed_rank_ends_the_job(start):
    run = start("-np", "3", "sh", "-c", "echo ready $$; exec sleep 100")
    victims = {int(line.split()[0][1:-1]): int(line.split()[2]) for line in (run.line() for _ in range(3))}
    os.kill(victims[2], signal.SIGKILL)
    code, _, err = run.finish()
    assert code == 137
    assert err.startswith("overlap run: rank 2 was killed by SIGKILL\n")


def test_two_jobs_at_once(start):
    runs = [start("-np", "2", "sh", "-c", f"echo job {number}") for number in range(3)]
    for number, run in enumerate(runs):
        assert run.finish()[:2] in [
            (0, f"[0] job {number}\n[1] job {number}\n"),
            (0, f"[1] job {number}\n[0] job {number}\n"),
        ]


def test_guard_leaves_with_the_job():
    with subprocess.Popen(
        [PYTHON, "-m", "overlap.cli", "run", "-np", "1", "sh", "-c", "echo up; read line"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    ) as launcher:
        assert launcher.stdout.readline() == b"[0] up\n"
        members = psutil.Process(launcher.pid).children(recursive=True)
        launcher.stdin.write(b"\n")
        launcher.stdin.close()
        assert launcher.wait(timeout=10) == 0
        assert not [each for each in members if each.is_running()]
