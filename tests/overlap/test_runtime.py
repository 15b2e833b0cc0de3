"""init, shutdown, rank and size: what they do, in which order, and what they say when the order is wrong."""

from __future__ import annotations

import subprocess
import sys

import pytest

import overlap
from overlap import runtime
from overlap.comm.world import discover
from overlap.config import Settings

PLACE = ("rank", "size", "local_rank", "local_size", "cross_rank", "cross_size", "world")


@pytest.fixture(autouse=True)
def alone(monkeypatch):
    """Each test starts and ends in no job, whatever started the tests."""
    for name in ("OVERLAP_SIZE", "WORLD_SIZE", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)
    overlap.shutdown()
    hook, sys.excepthook = sys.excepthook, sys.__excepthook__
    yield
    overlap.shutdown()
    sys.excepthook = hook


def run_alone(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)


def test_a_world_of_one():
    overlap.init()
    assert [getattr(overlap, name)() for name in PLACE[:-1]] == [0, 1, 0, 1, 0, 1]
    assert overlap.world().source == "alone"
    assert overlap.is_initialized()


def test_init_twice_is_once():
    overlap.init()
    engine = runtime.engine()
    overlap.init()
    assert runtime.engine() is engine


def test_shutdown_without_init_and_twice():
    overlap.shutdown()
    overlap.init()
    overlap.shutdown()
    overlap.shutdown()
    assert not overlap.is_initialized()


def test_init_after_shutdown_meets_anew():
    overlap.init()
    first = runtime.engine()
    overlap.shutdown()
    overlap.init()
    assert runtime.engine() is not first
    assert overlap.size() == 1


@pytest.mark.parametrize("name", PLACE)
def test_before_init_the_error_says_what_to_call(name):
    with pytest.raises(ValueError, match=r"call overlap\.init\(\) first"):
        getattr(overlap, name)()


@pytest.mark.parametrize("name", PLACE)
def test_after_shutdown_the_error_says_what_to_call(name):
    overlap.init()
    overlap.shutdown()
    with pytest.raises(ValueError, match=r"call overlap\.init\(\) first"):
        getattr(overlap, name)()


@pytest.mark.parametrize(
    ("name", "value", "least"),
    [
        ("OVERLAP_BUCKET_MB", "big", "0"),
        ("OVERLAP_BUCKET_MB", "-1", "0"),
        ("OVERLAP_BUCKET_MB", "", "0"),
        ("OVERLAP_BUCKET_MB", "nan", "0"),
        ("OVERLAP_EDGE_BUCKET_MB", "-0.5", "0"),
        ("OVERLAP_START_TIMEOUT_S", "0", "0.1"),
        ("OVERLAP_SPIN_US", "ten", "0"),
    ],
)
def test_a_bad_setting_is_named_with_what_it_was(monkeypatch, name, value, least):
    monkeypatch.setenv(name, value)
    with pytest.raises(ValueError, match=f"{name} must be a number of at least {least}.*, not {value!r}"):
        overlap.init()
    assert not overlap.is_initialized()
    monkeypatch.delenv(name)
    overlap.init()


def test_settings_come_from_the_environment():
    assert Settings.read({}) == Settings()
    read = Settings.read({"OVERLAP_BUCKET_MB": "2.5", "OVERLAP_SPIN_US": "0"})
    assert (read.bucket_mb, read.spin_us) == (2.5, 0)


@pytest.mark.parametrize(
    ("environ", "named"),
    [
        ({"OVERLAP_SIZE": "2"}, "OVERLAP_RANK"),
        ({"OVERLAP_SIZE": "two", "OVERLAP_RANK": "0"}, "OVERLAP_SIZE must be an integer, not 'two'"),
        ({"WORLD_SIZE": "2", "LOCAL_RANK": "0"}, "LOCAL_WORLD_SIZE"),
        ({"OMPI_COMM_WORLD_SIZE": "4"}, "OMPI_COMM_WORLD_SIZE=4"),
        ({"SLURM_STEP_NUM_TASKS": "2"}, "srun"),
    ],
)
def test_a_launchers_variables_that_cant_be_honoured_are_named(environ, named):
    with pytest.raises(overlap.StartError, match=named):
        discover(environ)


@pytest.mark.parametrize("rank", ["-1", "2"])
def test_a_rank_outside_its_world_is_refused(rank):
    place = {"OVERLAP_RANK": rank, "OVERLAP_SIZE": "2", "OVERLAP_LOCAL_RANK": "0", "OVERLAP_LOCAL_SIZE": "2"}
    with pytest.raises(overlap.StartError, match=f"rank {rank} of 2"):
        discover(place | {"OVERLAP_JOB": "x"})


def test_excepthook_is_wrapped_once():
    before = sys.excepthook
    overlap.init()
    wrapped = sys.excepthook
    assert wrapped is not before
    overlap.shutdown()
    overlap.init()
    overlap.init()
    assert sys.excepthook is wrapped


def test_an_uncaught_exception_still_reaches_the_hook_that_was_there():
    done = run_alone(
        "import sys; sys.excepthook = lambda kind, error, _: print('mine', error)\n"
        "import overlap; overlap.init(); raise ValueError('over')"
    )
    assert (done.stdout, done.returncode) == ("mine over\n", 1)


def test_an_uncaught_exception_is_told_once():
    done = run_alone("import overlap; overlap.init(); raise ValueError('over')")
    assert done.returncode == 1
    assert done.stderr.count("ValueError: over") == 1


def test_a_process_that_never_shuts_down_ends():
    done = run_alone("import overlap; overlap.init(); print(overlap.size())")
    assert (done.stdout, done.stderr, done.returncode) == ("1\n", "", 0)


def test_a_forked_child_is_told_that_it_cant_communicate():
    done = run_alone(
        "import os, sys, overlap; overlap.init()\n"
        "if os.fork() == 0:\n"
        "    try: overlap.rank()\n"
        "    except RuntimeError as error: print(error, flush=True)\n"
        "    overlap.shutdown(); os._exit(0)\n"
        "os.wait(); print(overlap.rank())"
    )
    first, second = done.stdout.splitlines()
    assert "was forked from a rank" in first
    assert second == "0"
