"""Named operations on real ranks: random programs give numpy's answer, planted differences one error."""

from __future__ import annotations

import os
import random
import signal
import threading

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from overlap import runtime
from overlap.comm.dtype import DType, Op
from overlap.comm.errors import CommError, MismatchError, PeerLost
from overlap.comm.operations import rows_of
from overlap.comm.request import Kind, Request

PROGRAMS = 67  # a world size, of which there are three
PATIENCE_S = 30

DTYPES = (DType.FLOAT32, DType.FLOAT64, DType.FLOAT16, DType.INT32, DType.INT64, DType.UINT8)
KINDS = (
    Kind.ALLREDUCE,
    Kind.ALLGATHER,
    Kind.BROADCAST,
    Kind.ALLTOALL,
    Kind.REDUCESCATTER,
    Kind.ADASUM,
    Kind.BARRIER,
)
OPS = (Op.SUM, Op.AVERAGE, Op.MIN, Op.MAX, Op.PRODUCT)


@st.composite
def operations(draw, size):
    """One operation as all ranks ask for it: its kind, its group, and what differs by rank."""
    kind = draw(st.sampled_from(KINDS))
    ranks = draw(st.sampled_from([tuple(range(size)), *((0, last) for last in range(1, size))]))
    floats = DTYPES[:3]
    dtype = draw(st.sampled_from(floats if kind is Kind.ADASUM else DTYPES))
    shape = tuple(draw(st.lists(st.integers(0, 5), max_size=3)))
    if kind in (Kind.ALLGATHER, Kind.ALLTOALL, Kind.REDUCESCATTER) and not shape:
        shape = (3,)
    tensors = draw(st.integers(1, 3)) if kind in (Kind.ALLREDUCE, Kind.ALLGATHER, Kind.REDUCESCATTER) else 1
    rows = draw(st.lists(st.integers(0, 4), min_size=size * size, max_size=size * size))
    op = draw(st.sampled_from(OPS)) if kind in (Kind.ALLREDUCE, Kind.REDUCESCATTER) else None
    scales = draw(st.sampled_from([(1.0, 1.0), (2.0, 1.0), (1.0, 0.5), (4.0, 2.0)])) if op else (1.0, 1.0)
    root = draw(st.sampled_from(ranks)) if kind is Kind.BROADCAST else -1
    return kind, ranks, dtype, shape, tensors, rows, op, scales, root


def programs(size):
    """Operations, and a seed for the order of each rank."""
    return st.tuples(st.lists(operations(size), min_size=1, max_size=6), st.integers(0, 2**32))


def given_arrays(operation, number, rank, size):
    """What `rank` gives: small whole numbers, so that sums are exact."""
    kind, ranks, dtype, shape, tensors, rows, *_ = operation
    place = ranks.index(rank)
    if kind is Kind.ALLGATHER:
        shape = (rows[place], *shape[1:])
    elif kind is Kind.ALLTOALL:
        shape = (sum(rows[place * size : place * size + len(ranks)]), *shape[1:])
    elif kind is Kind.BARRIER:
        return []
    chance = np.random.default_rng([number, rank])
    return [chance.integers(0, 4, shape).astype(dtype.storage) for _ in range(tensors)]


def expected(operation, number, rank, size):
    """Numpy's answer."""
    kind, ranks, dtype, _, tensors, rows, op, (before, after), root = operation
    place, given_by = ranks.index(rank), [given_arrays(operation, number, r, size) for r in ranks]
    answers = []
    for index in range(tensors if kind is not Kind.BARRIER else 0):
        parts = [theirs[index] for theirs in given_by]
        if kind is Kind.ALLGATHER:
            answers.append(np.concatenate(parts))
        elif kind is Kind.BROADCAST:
            answers.append(parts[ranks.index(root)])
        elif kind is Kind.ALLTOALL:
            pieces = []
            for sender, part in enumerate(parts):
                counts = rows[sender * size : sender * size + len(ranks)]
                start = sum(counts[:place])
                pieces.append(part[start : start + counts[place]])
            answers.append(np.concatenate(pieces))
        elif kind is Kind.ADASUM:
            answers.append(
                adasum_of([part.astype(float).reshape(-1) for part in parts]).reshape(parts[0].shape)
            )
        else:
            folds = {Op.MIN: np.minimum, Op.MAX: np.maximum, Op.PRODUCT: np.multiply}
            total = folds.get(op, np.add).reduce([part.astype(float) * before for part in parts])
            total = total / len(ranks) if op is Op.AVERAGE else total
            total = total if dtype.is_floating else np.trunc(total)
            total = total * after if dtype.is_floating else np.trunc(total * after)
            if kind is Kind.REDUCESCATTER:
                counts = rows_of(len(total), len(ranks))
                total = total[sum(counts[:place]) :][: counts[place]]
            answers.append(total)
    return [answer.astype(dtype.storage) for answer in answers]


def adasum_of(parts):
    def both(a, b):
        shares = [1 - (a @ b) / (2 * (v @ v)) if v @ v else 1.0 for v in (a, b)]
        return shares[0] * a + shares[1] * b

    half = 1 << (len(parts).bit_length() - 1)
    values = [both(parts[r], parts[r + half]) if r + half < len(parts) else parts[r] for r in range(half)]
    while len(values) > 1:
        values = [both(a, b) for a, b in zip(values[::2], values[1::2], strict=True)]
    return values[0]


def groups_of(named, size):
    """The number of every pair's group, made once a pool."""
    known = {ranks: number for number, ranks in named.groups.items()}
    for last in range(1, size):
        if (0, last) not in known:
            known[0, last] = named.add_group((0, last))
    return known


def remove_groups():
    named = runtime.engine().named
    for number in sorted(named.groups.keys() - {0}):
        named.remove_group(number)


def request_of(operation, arrays, group, size, rank):
    kind, ranks, dtype, _, _, rows, op, (before, after), root = operation
    place = ranks.index(rank)
    splits = tuple(rows[place * size : place * size + len(ranks)]) if kind is Kind.ALLTOALL else ()
    tensors = tuple((dtype, array.shape) for array in arrays)
    return Request(kind, tensors, op, before, after, root, splits, group=group)


def run_program(program, threads):
    """Ask for all in an order of this rank's own; returns what is wrong."""
    operations, seed = program
    runtime.init()
    engine = runtime.engine()
    rank, size, named = engine.world.rank, engine.world.size, engine.named
    groups = groups_of(named, size)
    mine = [(number, each) for number, each in enumerate(operations) if rank in each[1]]
    random.Random(seed + rank).shuffle(mine)
    handles = {}

    def ask(share):
        for number, each in share:
            arrays = given_arrays(each, number, rank, size)
            request = request_of(each, arrays, groups[each[1]], size, rank)
            handles[number] = named.submit(f"op{number}", request, arrays)

    workers = [threading.Thread(target=ask, args=(mine[start::threads],)) for start in range(threads)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    wrong = []
    for number, each in mine:
        arrays = handles[number].wait(PATIENCE_S).arrays
        answers = expected(each, number, rank, size)
        for array, answer in zip(arrays, answers, strict=True):
            close = np.allclose(array, answer, rtol=2e-3 if each[0] is Kind.ADASUM else 0, atol=0)
            if array.shape != answer.shape or array.dtype != answer.dtype or not close:
                wrong.append((each, array.tolist(), answer.tolist()))
    return wrong


@pytest.mark.parametrize("size", [2, 3, 4])
def test_random_programs_give_numpys_answer(pools, size):
    ranks = pools(size)

    @settings(max_examples=PROGRAMS, deadline=None, suppress_health_check=list(HealthCheck))
    @given(programs(size), st.integers(1, 2))
    def check(program, threads):
        assert ranks.run(run_program, program, threads) == [[]] * size

    check()
    ranks.run(remove_groups)  # other tests share these ranks


DIFFERENCES = ("shape", "dtype", "kind", "op", "scale", "device", "count", "root")


def run_mismatch(what, odd, seed):
    """All ranks ask for "bad", of which one differs, among others; returns what each ended with."""
    runtime.init()
    engine = runtime.engine()
    rank, named = engine.world.rank, engine.named
    broadcast = what == "root"
    kind = Kind.BROADCAST if broadcast else Kind.ALLREDUCE
    tensors, op, before, device, root = [(DType.FLOAT32, (2, 3))], Op.SUM, 1.0, "cpu", 0
    if rank == odd:
        if what == "shape":
            tensors = [(DType.FLOAT32, (3, 2))]
        elif what == "dtype":
            tensors = [(DType.INT32, (2, 3))]
        elif what == "kind":
            kind = Kind.ALLGATHER
        elif what == "op":
            op = Op.MAX
        elif what == "scale":
            before = 0.5
        elif what == "device":
            device = "cuda:0"
        elif what == "count":
            tensors *= 2
        else:
            root = 1
    bad = Request(
        kind, tuple(tensors), None if broadcast else op, before, 1.0, root if broadcast else -1, (), device
    )
    fine = Request(Kind.ALLREDUCE, ((DType.FLOAT32, (4,)),), Op.SUM)
    order = ["one", "bad", "two"]
    random.Random(seed + rank).shuffle(order)
    handles = {}
    for name in order:
        request = bad if name == "bad" else fine
        arrays = [np.full(shape, rank + 1, dtype.storage) for dtype, shape in request.tensors]
        handles[name] = named.submit(name, request, arrays)
    sums = [handles[name].wait(PATIENCE_S).arrays[0].tolist() for name in ("one", "two")]
    try:
        handles["bad"].wait(PATIENCE_S)
    except MismatchError as error:
        return str(error), sums
    return "no error", sums


@pytest.mark.parametrize("size", [2, 3, 4])
def test_a_planted_difference_is_the_same_error_everywhere(pools, size):
    ranks = pools(size)
    total = [float(size * (size + 1) // 2)] * 4

    @settings(max_examples=PROGRAMS, deadline=None, suppress_health_check=list(HealthCheck))
    @given(st.sampled_from(DIFFERENCES), st.integers(0, size - 1), st.integers(0, 2**32))
    def check(what, odd, seed):
        answers = ranks.run(run_mismatch, what, odd, seed)
        assert len({message for message, _ in answers}) == 1
        message = answers[0][0]
        assert message.startswith("'bad': rank 0 asks for ") and f"rank {odd or 1} for " in message
        assert all(sums == [total, total] for _, sums in answers)

    check()


def use_names_twice():
    runtime.init()
    engine = runtime.engine()
    rank, named = engine.world.rank, engine.named
    request = Request(Kind.ALLREDUCE, ((DType.FLOAT32, (1,)),), Op.AVERAGE)
    first = np.array([rank + 1], np.float32)
    if rank:  # "x" stays in flight on rank 0 until this barrier
        named.submit("asked twice", Request(Kind.BARRIER)).wait(PATIENCE_S)
    handle = named.submit("x", request, [first])
    if rank == 0:
        with pytest.raises(ValueError, match="'x' is in flight already"):
            named.submit("x", request, [first])
        named.submit("asked twice", Request(Kind.BARRIER))
    handle.wait(PATIENCE_S)
    again = np.array([rank + 2], np.float32)
    named.submit("x", request, [again]).wait(PATIENCE_S)
    with pytest.raises(ValueError, match="there is no process set 99"):
        named.submit("y", Request(Kind.BARRIER, group=99))
    return first.tolist(), again.tolist()


def test_names_in_flight_and_groups_that_are_none_are_refused(pools):
    assert pools(2).run(use_names_twice) == [([1.5], [2.5])] * 2


def join_and_fold():
    """Rank 0 joins; rank 1's operations give what it has alone, averages divided by all."""
    runtime.init()
    engine = runtime.engine()
    rank, named = engine.world.rank, engine.named
    answers = []
    if rank:
        for number, op in enumerate(OPS):
            values = np.array([3.0, -2.0], np.float32)
            request = Request(Kind.ALLREDUCE, ((DType.FLOAT32, (2,)),), op)
            answers.append(
                named.submit(f"fold{number}", request, [values]).wait(PATIENCE_S).arrays[0].tolist()
            )
        rows = np.ones((2, 2), np.float32)
        gather = Request(Kind.ALLGATHER, ((DType.FLOAT32, (2, 2)),))
        answers.append(named.submit("rows", gather, [rows]).wait(PATIENCE_S).arrays[0].tolist())
        refused = Request(Kind.ALLGATHER, ((DType.FLOAT32, (2, 2)),), joinable=False)
        with pytest.raises(CommError, match="'refused': allgather is not possible while a rank has joined"):
            named.submit("refused", refused, [rows]).wait(PATIENCE_S)
    last = named.submit("join", Request(Kind.JOIN)).wait(PATIENCE_S).number
    return answers, last


def test_a_joined_rank_changes_nothing(pools):
    """C058, in the engine."""
    (_, last), (answers, also_last) = pools(2).run(join_and_fold)
    assert last == also_last == 1
    assert answers == [
        [3.0, -2.0],
        [1.5, -1.0],
        [3.0, -2.0],
        [3.0, -2.0],
        [3.0, -2.0],
        [[1.0, 1.0], [1.0, 1.0]],
    ]


def ask_many(count):
    """So many operations, in flight at once, and more than a socket holds."""
    runtime.init()
    engine = runtime.engine()
    rank, named = engine.world.rank, engine.named
    request = Request(Kind.ALLREDUCE, ((DType.INT64, (1,)),), Op.SUM)
    order = list(range(count))
    random.Random(rank).shuffle(order)
    handles = {number: named.submit(f"n{number}", request, [np.array([number])]) for number in order}
    return all(handles[number].wait(PATIENCE_S).arrays[0][0] == 2 * number for number in order)


def test_ten_thousand_in_flight(pools):
    assert pools(2).run(ask_many, 10_000) == [True, True]


def ask_while(dies):
    runtime.init()
    engine = runtime.engine()
    named = engine.named
    request = Request(Kind.ALLREDUCE, ((DType.FLOAT32, (1,)),), Op.SUM)
    if engine.world.rank == dies:
        named.submit("ready", Request(Kind.BARRIER)).wait(PATIENCE_S)
        os.kill(os.getpid(), signal.SIGKILL)
    handles = [named.submit(f"lonely{n}", request, [np.ones(1, np.float32)]) for n in range(3)]
    named.submit("ready", Request(Kind.BARRIER)).wait(PATIENCE_S)
    errors = []
    for handle in handles:
        with pytest.raises(PeerLost) as error:
            handle.wait(PATIENCE_S)
        errors.append(error.value.rank)
    # Whoever asks once more is told the same, not that overlap was shut down.
    with pytest.raises(PeerLost):
        named.submit("later", Request(Kind.BARRIER)).wait(PATIENCE_S)
    return errors


@pytest.mark.parametrize("victim", [0, 2])
def test_a_killed_rank_is_named_by_all_that_wait_for_it(start_ranks, victim):
    ranks = start_ranks(3)
    ranks.start(ask_while, victim)
    rest = [rank for rank in range(3) if rank != victim]
    assert ranks.results(rest, timeout_s=20) == [[victim] * 3] * 2
