"""The parts that need no ranks: plans, buckets, and the world found from variables."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from overlap.comm.bucket import Buckets, State
from overlap.comm.dtype import DType
from overlap.comm.errors import StartError
from overlap.comm.plan import Parameter, make_plan
from overlap.comm.world import discover

DTYPES = st.sampled_from([DType.FLOAT32, DType.FLOAT64, DType.BFLOAT16])


@given(st.lists(st.tuples(st.integers(0, 4000), DTYPES), max_size=40), st.randoms(), st.integers(1, 20_000))
@settings(deadline=None)
def test_plan(drawn, random, limit):
    parameters = [Parameter(f"p{n}", count, dtype) for n, (count, dtype) in enumerate(drawn)]
    order = random.sample(range(len(parameters)), random.randint(0, len(parameters)))
    plan = make_plan(parameters, order, limit, limit // 4 + 1)
    planned = [index for bucket in plan.buckets for index in bucket.parameters]
    assert sorted(planned) == sorted(order)
    end = 0
    for bucket in plan.buckets:
        assert bucket.offset >= end
        assert bucket.offset % 4096 == 0
        end = bucket.offset + bucket.nbytes
        place = 0
        for index, start in zip(bucket.parameters, bucket.starts, strict=True):
            assert start == place
            place += parameters[index].count
            assert parameters[index].dtype is bucket.dtype
        assert bucket.count == place
        without_last = bucket.nbytes - parameters[bucket.parameters[-1]].nbytes
        assert without_last < limit
        assert list(bucket.parameters) == sorted(bucket.parameters, key=order.index)
    assert end <= plan.nbytes


def test_plan_edges_are_small():
    parameters = [Parameter(f"p{n}", 100, DType.FLOAT32) for n in range(30)]
    plan = make_plan(parameters, range(30), bucket_bytes=4000, edge_bytes=800)
    assert [len(bucket.parameters) for bucket in plan.buckets] == [2, 10, 10, 6, 2]
    assert plan.digest() == make_plan(parameters, range(30), 4000, 800).digest()
    assert plan.digest() != make_plan(parameters, range(29, -1, -1), 4000, 800).digest()
    assert 0 <= plan.digest() < 1 << 63


def test_buckets_leave_in_plan_order():
    buckets = Buckets([1, 2, 1])
    assert list(buckets.filled(2)) == []
    assert buckets.states == [State.FILLING, State.FILLING, State.READY]
    assert list(buckets.filled(0)) == [0]
    assert list(buckets.filled(1)) == []
    assert list(buckets.filled(1)) == [1, 2]
    assert buckets.states == [State.IN_FLIGHT] * 3
    buckets.reduced()
    assert buckets.states == [State.REDUCED] * 3
    buckets.begin()
    assert buckets.states == [State.FILLING] * 3


OVERLAP = {
    "OVERLAP_RANK": "1",
    "OVERLAP_SIZE": "2",
    "OVERLAP_LOCAL_RANK": "1",
    "OVERLAP_LOCAL_SIZE": "2",
    "OVERLAP_JOB": "abc",
}
TORCHRUN = {
    "RANK": "1",
    "WORLD_SIZE": "2",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "2",
    "MASTER_ADDR": "localhost",
    "MASTER_PORT": "1234",
}


@pytest.mark.parametrize(("environ", "source"), [(OVERLAP, "overlap"), (TORCHRUN, "torchrun")])
def test_world_of_two(environ, source):
    world = discover(environ)
    assert (world.rank, world.size, world.local_rank, world.local_size) == (1, 2, 1, 2)
    assert (world.cross_rank, world.cross_size, world.source) == (0, 1, source)
    assert world.address


@pytest.mark.parametrize(
    ("environ", "text"),
    [
        ({**OVERLAP, "OVERLAP_RANK": "x"}, "OVERLAP_RANK must be an integer, not 'x'"),
        ({**OVERLAP, "OVERLAP_RANK": "2"}, "contradict each other: rank 2 of 2"),
        ({k: v for k, v in OVERLAP.items() if k != "OVERLAP_JOB"}, "OVERLAP_JOB is missing"),
        ({k: v for k, v in TORCHRUN.items() if k != "RANK"}, "RANK is missing"),
        ({**TORCHRUN, "WORLD_SIZE": "4"}, "runs on one host only"),
        ({"OMPI_COMM_WORLD_SIZE": "2"}, "OMPI_COMM_WORLD_SIZE=2"),
        ({"PMI_SIZE": "2"}, "PMI_SIZE=2"),
        ({"PMIX_SIZE": "3"}, "PMIX_SIZE=3"),
        ({"SLURM_STEP_NUM_TASKS": "2"}, "SLURM_STEP_NUM_TASKS=2"),
    ],
)
def test_worlds_that_cannot_be(environ, text):
    with pytest.raises(StartError, match=text):
        discover(environ)


@pytest.mark.parametrize("environ", [{}, {"PMI_SIZE": "1"}, {"SLURM_NTASKS": "2"}, {"RANK": "3"}])
def test_alone(environ):
    assert discover(environ).size == 1
