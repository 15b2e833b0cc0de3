"""Plans: every ordered parameter once, in buckets of one type that keep to their order and their limits."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from overlap.comm.dtype import DType
from overlap.comm.plan import Parameter, make_plan

F32, BF16 = DType.FLOAT32, DType.BFLOAT16
MIXED = st.sampled_from([F32, BF16, DType.FLOAT64, DType.COMPLEX64])


@st.composite
def cases(draw, dtypes=MIXED):
    drawn = draw(st.lists(st.tuples(st.integers(0, 500), dtypes), max_size=30))
    parameters = [Parameter(f"p{n}", count, dtype) for n, (count, dtype) in enumerate(drawn)]
    order = draw(st.permutations(range(len(drawn))))[: draw(st.integers(0, len(drawn)))]
    edge = draw(st.integers(1, 2000))
    return parameters, order, draw(st.integers(edge, 8000)), edge


@given(cases())
@settings(deadline=None)
def test_every_ordered_parameter_once_in_slices_of_its_own(case):
    parameters, order, _, _ = case
    plan = make_plan(*case)
    taken = []
    for bucket in plan.buckets:
        assert bucket.offset % bucket.dtype.itemsize == 0
        for index, start in zip(bucket.parameters, bucket.starts, strict=True):
            assert parameters[index].dtype is bucket.dtype
            assert start + parameters[index].count <= bucket.count
            first = bucket.offset + start * bucket.dtype.itemsize
            taken.append((first, first + parameters[index].nbytes))
    assert sorted(index for bucket in plan.buckets for index in bucket.parameters) == sorted(order)
    filled = sorted(piece for piece in taken if piece[0] < piece[1])
    assert all(end <= start for (_, end), (start, _) in itertools.pairwise(filled))
    assert all(start >= 0 and end <= plan.nbytes for start, end in taken)


@given(cases())
@settings(deadline=None)
def test_no_two_buckets_share_a_page(case):
    plan = make_plan(*case)
    ends = [0] + [bucket.offset + bucket.nbytes for bucket in plan.buckets]
    for end, bucket in zip(ends, plan.buckets, strict=False):
        assert bucket.offset % 4096 == 0
        assert bucket.offset >= end
    assert ends[-1] <= plan.nbytes


@given(cases())
@settings(deadline=None)
def test_each_type_keeps_its_order(case):
    parameters, order, _, _ = case
    planned = [index for bucket in make_plan(*case).buckets for index in bucket.parameters]
    for dtype in DType:
        of_type = [index for index in planned if parameters[index].dtype is dtype]
        assert of_type == [index for index in order if parameters[index].dtype is dtype]


@given(cases())
@settings(deadline=None)
def test_only_the_last_parameter_reaches_a_limit(case):
    parameters, _, bucket_bytes, edge_bytes = case
    for number, bucket in enumerate(make_plan(*case).buckets):
        before_last = bucket.nbytes - parameters[bucket.parameters[-1]].nbytes
        assert before_last < (bucket_bytes if number else edge_bytes)


@given(cases(st.just(F32)))
@settings(deadline=None)
def test_last_bucket_is_small_unless_one_parameter_is_larger(case):
    parameters, order, _, edge_bytes = case
    if order and parameters[order[-1]].nbytes <= edge_bytes:
        assert make_plan(*case).buckets[-1].nbytes <= edge_bytes


@given(cases(), cases())
@settings(deadline=None)
def test_digests_differ_where_plans_do(one, other):
    plans = make_plan(*one), make_plan(*other)
    assert (plans[0].digest() == plans[1].digest()) is (plans[0] == plans[1])
    assert all(0 <= plan.digest() < 1 << 63 for plan in plans)


def shapes(parameters, *args):
    return [bucket.parameters for bucket in make_plan(parameters, *args).buckets]


def test_nothing_to_plan():
    plan = make_plan([Parameter("a", 10, F32)], [])
    assert (plan.buckets, plan.nbytes) == ((), 0)


def test_edges_are_smaller_than_the_rest():
    parameters = [Parameter(f"p{n}", 10, F32) for n in range(10)]
    assert shapes(parameters, range(10), 160, 80) == [(0, 1), (2, 3, 4, 5), (6, 7), (8, 9)]


def test_types_have_buckets_of_their_own_that_leave_as_they_close():
    parameters = [Parameter("a", 10, F32), Parameter("b", 40, BF16), Parameter("c", 40, F32)]
    assert shapes(parameters, [0, 1, 2], 80, 80) == [(1,), (0, 2)]


def test_large_parameter_is_not_cut():
    parameters = [Parameter("a", 10, F32), Parameter("b", 10_000, F32), Parameter("c", 10, F32)]
    assert shapes(parameters, [2, 1, 0], 160, 80) == [(2, 1), (0,)]


@pytest.mark.parametrize(
    "other",
    [
        ([Parameter("a", 4, F32), Parameter("b", 5, F32)], [0, 1]),
        ([Parameter("a", 4, F32), Parameter("b", 4, DType.INT32)], [0, 1]),
        ([Parameter("a", 4, F32), Parameter("b", 4, F32)], [1, 0]),
        ([Parameter("a", 4, F32), Parameter("b", 4, F32)], [0]),
        ([Parameter("a", 4, F32), Parameter("b", 4, F32)], [0, 1], 16, 16),
    ],
)
def test_digest_sees_counts_types_order_and_cuts(other):
    plan = make_plan([Parameter("a", 4, F32), Parameter("b", 4, F32)], [0, 1])
    assert plan.digest() != make_plan(*other).digest()
