"""Training jobs that meet a fault: who is told what and how fast, the exit code, and that nothing is left."""

from __future__ import annotations

import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from .conftest import DEADLINE_S, Run, wait_until_gone

pytest.importorskip("torch")

pytestmark = pytest.mark.timeout(60)

PYTHON = sys.executable
LIMIT_S = 5.0  # within which a fault has ended its job
MARK = "TEST_MARK"  # not OVERLAP_*: the guard is started without those

# What every script begins with; the fault follows.
TRAINING = """
import itertools, os, signal, sys
import overlap, torch
overlap.init()
rank = overlap.rank()
torch.manual_seed(rank)
model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1))
attached = overlap.attach(model)
optimizer = torch.optim.SGD(model.parameters(), 0.01)
def step(x=None):
    optimizer.zero_grad()
    model(torch.randn(4, 8) if x is None else x).square().mean().backward()
    optimizer.step()
def say(*words):
    print(*words, flush=True)
"""
# Two workers a rank, alive until the rank ends.
LOADER = """
from torch.utils.data import DataLoader, TensorDataset
loader = DataLoader(
    TensorDataset(torch.randn(64, 8)),
    batch_size=4,
    num_workers=2,
    persistent_workers=True,
    multiprocessing_context="fork",
)
batches = itertools.chain.from_iterable(x for _ in itertools.count() for x in loader)
"""
FOREVER = """
for number in itertools.count():
    step()
    say("step", number, os.getpid())
"""
FOREVER_WITH_WORKERS = (
    LOADER
    + """
for number, x in enumerate(batches):
    step(x)
    if number == 3:
        say("training")
"""
)
BRIEF = "for _ in range(5):\n    step()\nsay('trained')\n"


class Job:
    """A started training script, whose processes and files can be told from those of others."""

    def __init__(self, start: Callable[..., Run], command: list[str], ranks: int, folder: Path) -> None:
        self.mark, self.temporary = uuid.uuid4().hex, folder / "tmp"
        self.temporary.mkdir(exist_ok=True)
        self._shared = set(os.listdir("/dev/shm"))
        environ = {
            MARK: self.mark,
            "TMPDIR": str(self.temporary),
            "TORCHINDUCTOR_CACHE_DIR": str(folder / "cache"),  # made by importing torch's optimizers
            "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
        }
        self.run = start("-np", str(ranks), *command, env=environ, cwd=folder)

    def wait_for(self, *lines: str) -> None:
        """Read its output until each of `lines` has come, in whatever order."""
        missing = set(lines)
        while missing:
            line = self.run.line()
            assert line, self.run.finish()
            missing.discard(line.rstrip("\n"))

    def processes(self) -> list[psutil.Process]:
        """Everything that inherited its environment and runs, whoever its parent is now."""
        found = []
        for process in psutil.process_iter():
            try:
                if process.environ().get(MARK) == self.mark and process.status() != psutil.STATUS_ZOMBIE:
                    found.append(process)
            except psutil.Error:
                pass  # it has ended, or is somebody else's
        return found

    def check_nothing_left(self, within_s: float = 0.5) -> None:
        wait_until_gone(self.processes(), within_s)
        assert not self.processes()
        # multiprocessing makes pymp-* for the sockets of a loader's workers; a killed process leaves its own.
        assert [each for each in os.listdir(self.temporary) if not each.startswith("pymp-")] == []
        # Other programs come and go: what is there for a moment is not ours.
        deadline = time.monotonic() + 2
        while (left := set(os.listdir("/dev/shm")) - self._shared) and time.monotonic() < deadline:
            pass
        assert not left

    def ends(self, fault: Callable[[], object] = lambda: None) -> tuple[int, list[str]]:
        """Let the fault happen; returns the exit code and the lines of errors, which came in time."""
        began = time.monotonic()
        fault()
        code, _, err = self.run.finish()
        assert time.monotonic() - began < LIMIT_S, err
        self.check_nothing_left()
        return code, err.splitlines()


@pytest.fixture
def train(
    start: Callable[..., Run], script: Callable[[str], str], tmp_path: Path
) -> Iterator[Callable[..., Job]]:
    """`train(fault, ranks=2)` starts ranks that run TRAINING, then the source `fault`."""
    jobs: list[Job] = []

    def train(fault: str, ranks: int = 2, command: Callable[[str], list[str]] | None = None) -> Job:
        path = script(TRAINING + fault)
        jobs.append(Job(start, command(path) if command else [PYTHON, path], ranks, tmp_path))
        return jobs[-1]

    yield train
    for job in jobs:
        for process in job.processes():
            process.kill()


def wait_for_step(job: Job, rank: int, step: int) -> int:
    """Wait until `rank` has done its step `step` of FOREVER; returns its process id."""
    while True:
        line = job.run.line().split()
        assert line, job.run.finish()
        if line[:3] == [f"[{rank}]", "step", str(step)]:
            return int(line[3])


def check_lost(errors: list[str], survivors: set[int], lost: int) -> None:
    """Each survivor has its one line, which names the lost rank."""
    for rank in survivors:
        lines = [line for line in errors if line.startswith(f"overlap run: rank {rank}")]
        assert len(lines) == 1, errors
        assert lines[0].startswith(f"overlap run: rank {rank}: PeerLost: rank {lost} "), errors


def test_killed_in_a_random_step(train):
    step = random.randint(0, 50)
    job = train(FOREVER)
    victim = wait_for_step(job, 1, step)
    code, errors = job.ends(lambda: os.kill(victim, signal.SIGKILL))
    assert code == 137
    assert errors[0] == "overlap run: rank 1 was killed by SIGKILL"
    check_lost(errors, {0}, 1)
    assert len(errors) == 2


def test_killed_within_backward_as_when_memory_runs_out(train):
    job = train(
        "step()\n"
        "if rank == 0:\n"
        "    kill = lambda grad: os.kill(os.getpid(), signal.SIGKILL)\n"
        "    model[0].weight.register_hook(kill)\n"
        "say('next')\nstep()\n"
    )
    job.wait_for("[0] next")
    code, errors = job.ends()
    assert code == 137
    assert errors[0] == "overlap run: rank 0 was killed by SIGKILL"
    check_lost(errors, {1}, 0)
    assert "was killed" in errors[1]


def test_exception_while_workers_live(train):
    fault = """
for number, x in enumerate(batches):
    if number == 3:
        say("training")
        if rank == 1:
            raise ValueError("bad batch")
    step(x)
"""
    job = train(LOADER + fault, ranks=3)
    job.wait_for("[1] training")
    code, errors = job.ends()
    assert code == 1
    assert errors[:2] == ["overlap run: rank 1 failed:", "Traceback (most recent call last):"]
    assert errors[-3] == "ValueError: bad batch"
    assert sum("Traceback" in line for line in errors) == 1
    for rank, line in zip((0, 2), errors[-2:], strict=True):
        assert line.startswith(f"overlap run: rank {rank}: PeerLost: rank 1 raised ValueError: bad batch")


def test_exit_while_a_peer_is_in_backward(train, tmp_path):
    fault = """
for number, x in enumerate(batches):
    if number == 3 and rank == 0:
        open("in_backward").read()  # until rank 1 is there
        sys.exit(1)
    if number == 3:
        model[0].weight.register_hook(lambda grad: open("in_backward", "w").close())
        say("training")
    step(x)
"""
    os.mkfifo(tmp_path / "in_backward")
    job = train(LOADER + fault)
    job.wait_for("[1] training")
    code, errors = job.ends()
    assert code == 1
    assert "overlap run: rank 0 exited with code 1" in errors
    check_lost(errors, {1}, 0)


def test_script_that_ends_before_its_peers(train):
    job = train(
        "for number in itertools.count():\n"
        "    if number == 3 and rank == 0:\n"
        "        say('done')\n"
        "        break\n"
        "    step()\n"
    )
    job.wait_for("[0] done")
    code, errors = job.ends()
    assert code == 1
    assert "PeerLost: rank 0 ended" in errors[-1]
    assert not [line for line in errors if line.startswith("overlap run: rank 0")]


@pytest.mark.parametrize("limited", [0, 1])
def test_rank_without_memory_for_buckets(train, limited):
    fault = f"""
import psutil, resource
big = torch.nn.Linear(1, 8_000_000, bias=False)  # 32 MB; the buckets of two ranks are 64
attached = overlap.attach(big)
with attached.no_sync():
    big.weight.sum().backward()  # its gradient has memory now
if rank == {limited}:
    most = psutil.Process().memory_info().vms + 48_000_000
    resource.setrlimit(resource.RLIMIT_AS, (most, most))
say("limited")
big.weight.sum().backward()
"""
    job = train(fault)
    job.wait_for("[0] limited", "[1] limited")
    code, errors = job.ends()
    assert code == 1
    expected = re.compile(
        r"MemoryError: 2 x 320\d+ bytes of shared memory could not be mapped on every rank: "
        rf"rank {limited} could not\. Free memory there"
    )
    assert sum(bool(expected.search(line)) for line in errors) == 2, errors


def test_killed_launcher_while_workers_live(train):
    job = train(FOREVER_WITH_WORKERS)
    job.wait_for("[0] training", "[1] training")
    processes = job.processes()
    assert len(processes) >= 2 + 2 + 4  # launcher and guard, ranks, workers
    job.run.process.kill()
    job.run.process.wait()
    # A second job need not wait until the first is gone.
    second = train(BRIEF)
    wait_until_gone(processes, LIMIT_S)
    code, out, err = second.run.finish()
    assert (code, err) == (0, "")
    assert sorted(out.splitlines()) == ["[0] trained", "[1] trained"]
    job.check_nothing_left(0)
    second.check_nothing_left()


def test_interruption_of_shells_while_workers_live(train):
    job = train(FOREVER_WITH_WORKERS, command=lambda path: ["bash", "-c", f"{PYTHON} {path}; true"])
    job.wait_for("[0] training", "[1] training")
    assert len(job.processes()) >= 2 + 4 + 4  # launcher and guard, shells and scripts, workers
    code, errors = job.ends(lambda: job.run.process.send_signal(signal.SIGINT))
    assert code == 130
    assert "overlap/launch" not in "".join(errors)


def test_collective_in_a_worker_is_refused_there(train):
    fault = """
from torch.utils.data import DataLoader, TensorDataset
def tries_a_collective(worker):
    try:
        overlap.attach(torch.nn.Linear(2, 2))
    except RuntimeError as error:
        say("worker", worker, error)
loader = DataLoader(
    TensorDataset(torch.randn(16, 8)),
    batch_size=4,
    num_workers=2,
    worker_init_fn=tries_a_collective,
    multiprocessing_context="fork",
)
for epoch in range(3):
    for (x,) in loader:
        step(x)
weight = torch.nn.Linear(1, 1, bias=False)
overlap.attach(weight)
(weight.weight * (rank + 1)).sum().backward()
say("average", weight.weight.grad.item())
"""
    code, out, err = train(fault).run.finish()
    assert (code, err) == (0, "")
    lines = out.splitlines()
    assert (
        sum("was forked from a rank" in line and "can't communicate" in line for line in lines) == 2 * 2 * 3
    )
    assert {"[0] average 1.5", "[1] average 1.5"} <= set(lines)


@pytest.mark.parametrize("imports", ["", "import overlap\n"])
def test_script_that_does_not_use_overlap(start, script, imports):
    path = script(imports + "import os\nprint('rank', os.environ['OVERLAP_RANK'], flush=True)\n")
    environ = {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    code, out, err = start("-np", "2", PYTHON, path, env=environ).finish()
    assert (code, err) == (0, "")
    assert sorted(out.splitlines()) == ["[0] rank 0", "[1] rank 1"]


def mounted(*mounts: str) -> Callable[[str], list[str]]:
    """Commands that see these mounts, each in a mount namespace of its own."""
    if os.geteuid() != 0:
        pytest.skip("only root can mount")
    # A probe: containers often keep root from it.
    probe = ["unshare", "-m", "sh", "-c", " && ".join(mounts)]
    if shutil.which("unshare") is None or subprocess.run(probe, capture_output=True).returncode:
        pytest.skip("this system's root can't mount in a namespace of its own")
    return lambda path: ["unshare", "-m", "sh", "-c", " && ".join([*mounts, f"exec {PYTHON} {path}"])]


@pytest.mark.parametrize("options", ["size=64k", "ro"])
def test_shared_memory_and_temporary_folder_that_hold_nothing(train, tmp_path, options):
    (tmp_path / "tmp").mkdir()
    command = mounted(
        f"mount -t tmpfs -o {options} tmpfs /dev/shm", f"mount -t tmpfs -o ro tmpfs {tmp_path}/tmp"
    )
    job = train(BRIEF, command=command)
    code, out, err = job.run.finish()
    assert (code, err) == (0, "")
    assert sorted(out.splitlines()) == ["[0] trained", "[1] trained"]
    job.check_nothing_left()


def test_missing_temporary_folder(train, script):
    job = train(BRIEF, command=lambda path: ["env", "TMPDIR=/nowhere", PYTHON, path])
    code, out, err = job.run.finish()
    assert (code, err) == (0, "")
    assert sorted(out.splitlines()) == ["[0] trained", "[1] trained"]


# Variables of a job whose launcher is gone -> what the error must say.
ORPHANS = {
    "incomplete": ({}, ["OVERLAP_LOCAL_RANK is missing", "`overlap run -np N"]),
    "first": (
        {"RANK": "0", "LOCAL_RANK": "0", "LOCAL_SIZE": "2", "JOB": "nobody"},
        [
            "rank 0 still waits for rank 1 of 2",
            "do all ranks call overlap.init()?",
            "OVERLAP_START_TIMEOUT_S",
        ],
    ),
    "second": (
        {"LOCAL_RANK": "1", "LOCAL_SIZE": "2", "JOB": "nobody"},
        ["rank 0, which never came", "do all ranks call overlap.init()?", "OVERLAP_START_TIMEOUT_S"],
    ),
}


@pytest.mark.parametrize(("variables", "words"), ORPHANS.values(), ids=ORPHANS)
def test_variables_of_a_world_that_is_not_there(variables, words):
    world = {"RANK": "1", "SIZE": "2", "START_TIMEOUT_S": "0.5"} | variables
    environ = {f"OVERLAP_{name}": value for name, value in world.items()}
    environ["PYTHONPATH"] = os.pathsep.join(path for path in sys.path if path)
    ended = subprocess.run(
        [PYTHON, "-c", "import overlap; overlap.init()"],
        env=os.environ | environ,
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
    )
    assert ended.returncode == 1
    last = ended.stderr.splitlines()[-1]
    assert "StartError: " in last
    for each in words:
        assert each in last
