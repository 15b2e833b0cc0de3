"""Contract: what moves memory without reducing it, groups, misuse, mismatches, and ranks that are lost."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest

from overlap.comm.backends.base import Communicator
from overlap.comm.dtype import DType, Op
from overlap.comm.errors import CommError, MismatchError, PeerLost
from overlap.comm.span import Span

COUNTS = (0, 1, 7, 1023, 65537)
SIZES = (1, 2, 3, 4, 7)


def numbers(dtype: DType, count: int, seed: int) -> np.ndarray:
    """Any bits at all: what moves is not computed with."""
    data = np.random.default_rng(seed).integers(0, 256, count * dtype.itemsize, np.uint8)
    return (data & 1).view(dtype.storage) if dtype is DType.BOOL else data.view(dtype.storage)


def pieces_of(count: int, size: int, shift: int = 0) -> list[int]:
    """Uneven pieces whose sum is `count`; one of them is empty where there are three ranks or more."""
    weights = [(rank + shift) % size for rank in range(size)] if size > 2 else [1] * size
    pieces = [count * weight // sum(weights) for weight in weights]
    pieces[max(range(size), key=weights.__getitem__)] += count - sum(pieces)
    return pieces


def same(got: np.ndarray, expected: np.ndarray, *about: Any) -> None:
    assert got.tobytes() == expected.tobytes(), about


def spans(comm: Communicator, dtype: DType, count: int, seed: int, most: int = 0) -> list[Span]:
    """This rank's numbers twice: in an allocated buffer, and in memory of its own."""
    values = numbers(dtype, count, seed)
    placed = comm.allocate(max(count, most) * dtype.itemsize + 64).span(dtype, count, 4 * dtype.itemsize)
    placed.array[:] = values
    return [placed, Span.wrap(values.copy(), dtype)]


def check_moves(comm: Communicator, counts: tuple[int, ...]) -> None:
    for dtype in DType:
        for count in counts:
            for span in spans(comm, dtype, count, comm.rank):
                for root in {0, comm.size - 1}:
                    span.array[:] = numbers(dtype, count, comm.rank)
                    comm.broadcast(span, root)
                    same(span.array, numbers(dtype, count, root), "broadcast", dtype, count, root)
                pieces = pieces_of(count, comm.size)
                span.array[:] = numbers(dtype, count, comm.rank)
                comm.allgather(span, pieces)
                ends = np.cumsum(pieces)
                gathered = [
                    numbers(dtype, count, r)[end - n : end]
                    for r, (n, end) in enumerate(zip(pieces, ends, strict=True))
                ]
                same(span.array, np.concatenate(gathered), "allgather", dtype, count, pieces)


@pytest.mark.parametrize("size", SIZES)
def test_broadcast_and_allgather(backend: Any, size: int) -> None:
    backend.run(size, check_moves, COUNTS)


def check_alltoall(comm: Communicator, counts: tuple[int, ...]) -> None:
    size, rank = comm.size, comm.rank
    for dtype in DType:
        for count in counts:
            sent = [pieces_of(count + 3 * r, size, r) for r in range(size)]
            wanted = []
            for source in range(size):
                start = sum(sent[source][:rank])
                theirs = numbers(dtype, sum(sent[source]), source)
                wanted.append(theirs[start : start + sent[source][rank]])
            expected = np.concatenate(wanted)
            received = Span.wrap(np.zeros(len(expected), dtype.storage), dtype)
            for send in spans(comm, dtype, sum(sent[rank]), rank, count + 3 * size):
                received.array[:] = 0
                comm.alltoall(send, sent[rank], received, [len(part) for part in wanted])
                same(received.array, expected, "alltoall", dtype, count)


@pytest.mark.parametrize("size", SIZES)
def test_alltoall(backend: Any, size: int) -> None:
    backend.run(size, check_alltoall, (0, 7, 1023, 65537))


def check_pairs(comm: Communicator, counts: tuple[int, ...]) -> None:
    size, rank = comm.size, comm.rank
    right, left = (rank + 1) % size, (rank - 1) % size
    for dtype in (DType.INT8, DType.BFLOAT16, DType.FLOAT64):
        for count in counts:
            ours, theirs = numbers(dtype, count, rank), numbers(dtype, count, left)
            into = Span.wrap(np.zeros(count, dtype.storage), dtype)
            comm.sendrecv(Span.wrap(ours, dtype), right, into, left)
            same(into.array, theirs, "ring", dtype, count)
            if size > 1 and rank == 0:
                comm.send(Span.wrap(ours, dtype), 1)
            if rank == 1:
                comm.recv(into, 0)
                same(into.array, numbers(dtype, count, 0), "send", dtype, count)


@pytest.mark.parametrize("size", SIZES)
def test_pairs(backend: Any, size: int) -> None:
    backend.run(size, check_pairs, (0, 1, 1023, 300_001))


def check_groups(comm: Communicator) -> list[Any]:
    twin = comm.split(0)
    group = comm.split(comm.rank % 2, key=-comm.rank)
    some = comm.split(0 if comm.rank else None)
    assert twin is not None
    assert group is not None
    assert (twin.rank, twin.size) == (comm.rank, comm.size)
    results: list[Any] = [(group.rank, group.size), None if some is None else (some.rank, some.size)]
    for each in (twin, group, some):
        if each is not None:
            span = Span.wrap(np.array([1 << comm.rank]))
            each.allreduce(span)
            results.append(int(span.array[0]))
            buffer = each.allocate(8).span(DType.INT64, 1)
            buffer.array[:] = 1
            each.allreduce(buffer)
            assert buffer.array[0] == each.size
            each.close()
    comm.barrier()
    return results


def test_groups(backend: Any) -> None:
    assert backend.run(4, check_groups) == [
        [(1, 2), None, 15, 5],
        [(1, 2), (0, 3), 15, 10, 14],
        [(0, 2), (1, 3), 15, 5, 14],
        [(0, 2), (2, 3), 15, 10, 14],
    ]


def check_misuse(comm: Communicator) -> None:
    floats, ints = Span.wrap(np.ones(4, np.float32)), Span.wrap(np.ones(4, np.int32))
    bools = Span.wrap(np.ones(4, np.bool_))
    empty = Span.wrap(np.ones(0, np.float32))
    calls = [
        (lambda: comm.allreduce(ints, Op.AVERAGE), ValueError, "Op.AVERAGE is not defined for int32"),
        (lambda: comm.allreduce(bools), ValueError, "Op.SUM is not defined for bool"),
        (lambda: comm.allreduce(Span.wrap(np.ones(1, complex)), Op.MIN), ValueError, "no order"),
        (
            lambda: comm.allreduce(floats, Op.SUM, 3),
            ValueError,
            "divisor must be positive and finite, and goes with",
        ),
        (lambda: comm.allreduce(floats, Op.AVERAGE, 0), ValueError, "divisor must be positive"),
        (lambda: comm.broadcast(floats, 2), ValueError, "root must be a rank from 0 to 1, not 2"),
        (lambda: comm.broadcast(floats, -1), ValueError, "root must be a rank from 0 to 1, not -1"),
        (lambda: comm.allgather(floats, [4]), ValueError, "counts must be 2 numbers"),
        (lambda: comm.allgather(floats, [5, -1]), ValueError, "counts must be 2 numbers"),
        (lambda: comm.reduce_scatter(floats, [1, 2]), ValueError, "whose sum is the span's 4 elements"),
        (lambda: comm.alltoall(floats, [2, 2], ints, [2, 2]), ValueError, "use one dtype"),
        (lambda: comm.alltoall(floats, [2, 1], floats, [2, 2]), ValueError, "send_counts must be 2"),
        (lambda: comm.send(floats, 2), ValueError, "dest must be a rank from 0 to 1, not 2"),
        (lambda: comm.sendrecv(floats, None, None, None), ValueError, "dest"),
        (lambda: comm.allocate(-1), ValueError, "nbytes must be at least 0"),
        (lambda: comm.allreduce(np.ones(3)), TypeError, "span must be a Span"),
        (lambda: Span.wrap(np.ones((4, 4))[:, 1]), ValueError, "array must be C-contiguous"),
        (lambda: Span.wrap(np.array(["a"])), TypeError, "dtype must be one of float64"),
    ]
    for call, kind, text in calls:
        with pytest.raises(kind, match=re.escape(text)):
            call()
        comm.allreduce(empty)
    comm.allreduce(floats)
    assert floats.array.tolist() == [2.0] * 4


def test_misuse_is_refused_before_anything_is_sent(backend: Any) -> None:
    backend.run(2, check_misuse)


def check_mismatches(comm: Communicator) -> list[str]:
    odd = comm.rank == comm.size - 1
    buffer = comm.allocate(1024)

    def floats(count: int = 4) -> Span:
        return Span.wrap(np.ones(count, np.float32))

    def placed(offset: int) -> Span:
        return buffer.span(DType.FLOAT32, 4, offset)

    def tagged(tag: int) -> None:
        comm.tag = tag
        try:
            comm.allreduce(floats())
        finally:
            comm.tag = 0

    pairs = [
        (lambda: comm.allreduce(floats()), lambda: comm.broadcast(floats(), 0)),
        (lambda: comm.allreduce(floats()), lambda: comm.allreduce(floats(), Op.MAX)),
        (lambda: comm.allreduce(floats()), lambda: comm.allreduce(Span.wrap(np.ones(4, np.int32)))),
        (lambda: comm.allreduce(floats()), lambda: comm.allreduce(floats(5))),
        (lambda: comm.allreduce(floats()), lambda: comm.allreduce(placed(0))),
        (lambda: comm.allreduce(placed(0)), lambda: comm.allreduce(placed(64))),
        (lambda: comm.allreduce(floats(), Op.AVERAGE), lambda: comm.allreduce(floats(), Op.AVERAGE, 5)),
        (lambda: comm.broadcast(floats(), 0), lambda: comm.broadcast(floats(), 1)),
        (lambda: comm.barrier(), lambda: comm.allocate(8)),
        (lambda: comm.allocate(16), lambda: comm.allocate(8)),
        (lambda: tagged(1 << 16), lambda: tagged(2 << 16)),
    ]
    texts = []
    for usual, other in pairs:
        with pytest.raises(MismatchError) as caught:
            (other if odd else usual)()
        texts.append(str(caught.value))
        span = floats()
        comm.allreduce(span)
        assert span.array.tolist() == [comm.size] * 4
    return texts


@pytest.mark.parametrize("size", [2, 3])
def test_mismatches_are_the_same_error_everywhere(backend: Any, size: int) -> None:
    first, *others = backend.run(size, check_mismatches)
    assert all(texts == first for texts in others)
    assert all(f"rank {size - 1}" in text and "rank 0" in text for text in first)
    assert "allreduce (sum) of 4 float32" in first[0]
    assert "broadcast" in first[0]
    assert "round 1" in first[-1]
    assert "round 2" in first[-1]


def check_abort(comm: Communicator) -> str:
    comm.doing = "a test"
    comm.barrier()
    if comm.rank == 1:
        comm.abort("raised ValueError: bad sample")
        with pytest.raises(CommError, match="this rank has told the others that it can't go on"):
            comm.barrier()
        return ""
    with pytest.raises(PeerLost) as caught:
        comm.barrier()
    assert caught.value.rank == 1
    return str(caught.value)


def test_abort_is_heard_by_all(backend: Any) -> None:
    first, _, third = backend.run(3, check_abort)
    assert first == third == "rank 1 raised ValueError: bad sample, while this rank was in a test"


def check_close(comm: Communicator) -> int | None:
    comm.barrier()
    if comm.rank == 0:
        comm.close("ended after 3 steps")
        comm.close()
        return None
    with pytest.raises(PeerLost, match="rank 0 ended after 3 steps") as caught:
        comm.barrier()
    return caught.value.rank


def test_close_is_heard_by_those_who_wait(backend: Any) -> None:
    assert backend.run(2, check_close) == [None, 0]


@pytest.mark.parametrize("end", ["kill", "exit", "kill with a forked child"])
def test_dead_process_is_named(start_ranks: Any, end: str) -> None:
    def work() -> str:
        import os
        import signal
        import time

        import overlap
        from overlap import runtime

        overlap.init()
        communicator = runtime.engine().communicator
        communicator.barrier()
        if communicator.rank == 1:
            if "child" in end and os.fork() == 0:
                # Holds every descriptor of its parent open for as long as the others wait.
                time.sleep(20)
                os._exit(0)
            if "kill" in end:
                os.kill(os.getpid(), signal.SIGKILL)
            os._exit(3)
        began = time.monotonic()
        try:
            communicator.barrier()
        except PeerLost as lost:
            assert time.monotonic() - began < 5
            return f"{lost.rank} {lost.reason}"
        return "nothing"

    ranks = start_ranks(3)
    ranks.start(work)
    assert ranks.results([0, 2], timeout_s=30) == ["1 was killed or ended without a word"] * 2


def check_pair_mismatch(comm: Communicator) -> str:
    long, short = Span.wrap(np.ones(5, np.int8)), Span.wrap(np.zeros(3, np.int8))
    with pytest.raises(MismatchError) as caught:
        comm.send(long, 1) if comm.rank == 0 else comm.recv(short, 0)
    with pytest.raises(ValueError, match="can send to itself only while it receives from itself"):
        comm.send(long, comm.rank)
    comm.sendrecv(long, 1 - comm.rank, long, 1 - comm.rank)
    return str(caught.value)


def test_pairs_that_disagree_are_told_on_both_ends(backend: Any) -> None:
    first, second = backend.run(2, check_pair_mismatch)
    assert first == second
    assert first.startswith("rank 0 sends 5 bytes, but rank 1 receives 3")


def check_other_buffers(comm: Communicator) -> list[int]:
    """A buffer of all ranks, in a group of two."""
    span = comm.allocate(64).span(DType.INT64, 2)
    span.array[:] = 1 << comm.rank
    group = comm.split(comm.rank // 2)
    assert group is not None
    group.allreduce(span)
    comm.barrier()
    group.close()
    result: list[int] = span.array.tolist()
    return result


def test_a_buffer_of_another_communicator_is_memory_like_any(backend: Any) -> None:
    assert backend.run(4, check_other_buffers) == [[3, 3], [3, 3], [12, 12], [12, 12]]


def check_raise(comm: Communicator) -> str:
    group = comm.split(0)
    assert group is not None
    group.barrier()
    if comm.rank == 1:
        raise ValueError("bad sample")
    with pytest.raises(PeerLost) as caught:
        group.barrier()
    return str(caught.value)


def test_a_rank_that_raises_ends_all_its_groups() -> None:
    from overlap.comm.backends.inproc import run_threads

    told: list[str] = []
    with pytest.raises(ValueError, match="bad sample"):
        run_threads(3, lambda comm: told.append(check_raise(comm)))
    assert told == ["rank 1 raised ValueError: bad sample, while this rank was in barrier"] * 2
