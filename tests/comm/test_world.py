"""Worlds: found from each launcher's variables, refused where these are wrong, never silently of one."""

from __future__ import annotations

import os
import re

import pytest

from overlap.comm.errors import StartError
from overlap.comm.world import World, discover

OVERLAP = {
    "OVERLAP_RANK": "1",
    "OVERLAP_SIZE": "3",
    "OVERLAP_LOCAL_RANK": "1",
    "OVERLAP_LOCAL_SIZE": "3",
    "OVERLAP_JOB": "abc",
}
TORCHRUN = {
    "RANK": "1",
    "WORLD_SIZE": "3",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "3",
    "MASTER_ADDR": "localhost",
    "MASTER_PORT": "1234",
}
OTHERS = ["OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "PMIX_SIZE", "SLURM_STEP_NUM_TASKS"]


def without(environ, name):
    return {key: value for key, value in environ.items() if key != name}


def test_overlap():
    assert discover(OVERLAP) == World(1, 3, 1, 3, 0, 1, "overlap-abc", "overlap")


def test_torchrun():
    address = f"overlap-torchrun-localhost-1234-{os.getppid()}"
    assert discover(TORCHRUN) == World(1, 3, 1, 3, 0, 1, address, "torchrun")


def test_overlap_comes_before_torchrun_and_both_before_others():
    assert discover(TORCHRUN | OVERLAP).source == "overlap"
    assert discover(TORCHRUN | {"PMI_SIZE": "2"}).source == "torchrun"
    assert discover(OVERLAP | {"PMI_SIZE": "2"}).source == "overlap"


def test_two_torchruns_of_one_run_id_do_not_meet():
    assert discover(TORCHRUN).address != discover(TORCHRUN | {"MASTER_PORT": "1235"}).address


@pytest.mark.parametrize("environ", [OVERLAP, TORCHRUN])
def test_a_launcher_may_start_one(environ):
    zeros = {name: "0" for name in environ if name.endswith("RANK")}
    ones = {name: "1" for name in environ if name.endswith("SIZE")}
    world = discover(environ | zeros | ones)
    assert (world.rank, world.size) == (0, 1)
    assert world.source != "alone"


def test_none():
    assert discover({}) == World()
    assert discover({"PATH": "/bin", "SLURM_NTASKS": "2"}).source == "alone"


@pytest.mark.parametrize("name", OVERLAP)
def test_overlap_variable_is_missing(name):
    with pytest.raises(StartError, match=name):
        discover(without(OVERLAP, name))


@pytest.mark.parametrize("name", without(TORCHRUN, "LOCAL_RANK"))
def test_torchrun_variable_is_missing(name):
    with pytest.raises(StartError, match=name):
        discover(without(TORCHRUN, name))


@pytest.mark.parametrize("value", ["", "x", "1.5"])
@pytest.mark.parametrize(
    ("environ", "name"),
    [(OVERLAP, name) for name in OVERLAP if name != "OVERLAP_JOB"]
    + [(TORCHRUN, name) for name in TORCHRUN if not name.startswith("MASTER")],
)
def test_no_integer(environ, name, value):
    with pytest.raises(StartError, match=re.escape(f"{name} must be an integer, not {value!r}")):
        discover(environ | {name: value})


@pytest.mark.parametrize(
    ("environ", "wrong"),
    [
        (OVERLAP, {"OVERLAP_RANK": "3"}),
        (OVERLAP, {"OVERLAP_RANK": "-1"}),
        (OVERLAP, {"OVERLAP_SIZE": "0"}),
        (OVERLAP, {"OVERLAP_LOCAL_RANK": "3"}),
        (OVERLAP, {"OVERLAP_LOCAL_RANK": "-1"}),
        (OVERLAP, {"OVERLAP_LOCAL_SIZE": "4"}),
        (OVERLAP, {"OVERLAP_LOCAL_SIZE": "0"}),
        (TORCHRUN, {"RANK": "3"}),
        (TORCHRUN, {"RANK": "-1"}),
        (TORCHRUN, {"WORLD_SIZE": "2"}),
        (TORCHRUN, {"LOCAL_RANK": "3"}),
        (TORCHRUN, {"LOCAL_WORLD_SIZE": "0"}),
    ],
)
def test_contradictions(environ, wrong):
    with pytest.raises(StartError, match="contradict each other"):
        discover(environ | wrong)


@pytest.mark.parametrize("environ", [OVERLAP | {"OVERLAP_SIZE": "6"}, TORCHRUN | {"WORLD_SIZE": "6"}])
def test_several_hosts(environ):
    with pytest.raises(StartError, match="6 ranks, 3 of them on this host"):
        discover(environ)


@pytest.mark.parametrize("name", OTHERS)
def test_other_launchers(name):
    with pytest.raises(StartError, match=f"{name}=2 says"):
        discover({name: "2"})
    assert discover({name: "1"}) == World()


def test_several_processes_without_a_local_rank():
    """As some cluster schedulers start them."""
    with pytest.raises(StartError, match=r"LOCAL_RANK is missing|LOCAL_WORLD_SIZE is missing"):
        discover(without(TORCHRUN, "LOCAL_RANK"))
    assert discover({"WORLD_SIZE": "1", "RANK": "0"}).size == 1
