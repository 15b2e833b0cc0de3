"""`overlap.allreduce` and its sisters: the kind of what is given comes back, and what can't be is refused."""

from __future__ import annotations

import numpy as np
import pytest

import overlap
from overlap.comm.errors import MismatchError

torch = pytest.importorskip("torch")


def kinds():
    overlap.init()
    rank = overlap.rank()
    given = [rank + 1.0, np.float32(rank), np.arange(3) * (rank + 1.0), torch.ones(2) * rank]
    return [overlap.allreduce(x) for x in given] + [overlap.allreduce(rank, overlap.Sum)]


def test_the_kind_that_is_given_comes_back(pools):
    for number, scalar, array, tensor, whole in pools(2).run(kinds):
        assert type(number) is float and number == 1.5
        assert type(scalar) is np.float32 and scalar == 0.5
        assert array.tolist() == [0.0, 1.5, 3.0]
        assert type(tensor) is torch.Tensor and tensor.tolist() == [0.5, 0.5]
        assert type(whole) is int and whole == 1


def strided_and_swapped():
    overlap.init()
    rank = overlap.rank()
    whole = np.arange(12.0).reshape(3, 4) + rank
    return (
        overlap.allreduce(whole.T, overlap.Sum).tolist(),
        overlap.allreduce(whole.astype(">f8"), overlap.Sum).tolist(),
        whole.tolist() == (np.arange(12.0).reshape(3, 4) + rank).tolist(),
        overlap.allreduce(np.zeros((0, 3))).shape,
        overlap.allreduce(np.array(2.5)).shape,
    )


def test_any_strides_and_byte_order_and_the_input_is_not_changed(pools):
    total = 2 * np.arange(12.0).reshape(3, 4) + 1
    for strided, swapped, kept, empty, scalar in pools(2).run(strided_and_swapped):
        assert (strided, swapped, kept) == (total.T.tolist(), total.tolist(), True)
        assert (empty, scalar) == ((0, 3), ())


def sisters():
    overlap.init()
    rank = overlap.rank()
    return (
        overlap.allgather(rank).tolist(),
        overlap.allgather(np.full((rank, 2), rank)).tolist(),
        overlap.broadcast(rank * 1.0, 1),
        overlap.alltoall(np.arange(3) + 10 * rank, [1, 2]).tolist(),
        overlap.reducescatter(np.arange(3.0) + rank).tolist(),
        overlap.allreduce(np.array([1.0, 2.0]) * (1, -1)[rank], overlap.Adasum).tolist(),
        overlap.barrier(),
        overlap.join(),
    )


def test_sisters(pools):
    first, second = pools(2).run(sisters)
    assert first[:6] == ([0, 1], [[1, 1]], 1.0, [0, 10], [0.5, 1.5], [0.0, 0.0])
    assert second[:6] == ([0, 1], [[1, 1]], 1.0, [1, 2, 11, 12], [2.5], [0.0, 0.0])
    assert first[6] is second[6] is None
    assert first[7] == second[7] and first[7] in (0, 1)


def refusals():
    overlap.init()
    rank = overlap.rank()
    for wrong, error, says in (
        (lambda: overlap.allreduce(3), ValueError, "Average is not defined for int64: use op=overlap.Sum"),
        (
            lambda: overlap.allreduce(torch.ones(1).int()),
            ValueError,
            "Average is not defined for torch.int32",
        ),
        (lambda: overlap.allreduce("x"), TypeError, "a numpy array, a torch tensor or a number, not str"),
        (lambda: overlap.allreduce(1.0, "sum"), ValueError, "op must be one of overlap.Average"),
        (lambda: overlap.allreduce(np.array(["x"])), TypeError, "dtype must be one of"),
        (lambda: overlap.allgather(np.array(1.0)), ValueError, "at least one dimension"),
        (lambda: overlap.broadcast(1.0, 9), ValueError, "root_rank must be one of the ranks"),
        (lambda: overlap.alltoall(np.ones(3)), ValueError, "splits must be 2 numbers of rows, at most 3"),
        (lambda: overlap.allreduce(1.0, process_set=overlap.ProcessSet([0])), ValueError, "not registered"),
        (lambda: overlap.add_process_set([0, 7]), ValueError, "from 0 to 1"),
    ):
        with pytest.raises(error, match=says):
            wrong()
    # Nothing of it was sent, and unnamed operations still match.
    with pytest.raises(MismatchError, match=r"rank 0 asks for shape \(1,\), rank 1 for shape \(2,\)"):
        overlap.allreduce(np.ones(rank + 1))
    return overlap.allreduce(1.0, overlap.Sum)


def test_what_cannot_be_is_refused_before_anything_is_sent(pools):
    """C026, the native face."""
    assert pools(2).run(refusals) == [2.0, 2.0]


def in_sets():
    overlap.init()
    pair = overlap.add_process_set([2, 0])
    with pytest.raises(ValueError, match="already"):
        overlap.add_process_set(overlap.ProcessSet([0, 2]))
    answer = None
    if pair.included():
        answer = overlap.allreduce(float(overlap.rank()), process_set=pair)
        overlap.barrier(pair)
    # What some ranks did among themselves does not count in the names of what all do.
    assert overlap.allreduce(1.0, overlap.Sum) == 3.0
    if not pair.included():
        with pytest.raises(ValueError, match="rank 1 is not in process set"):
            overlap.allreduce(1.0, process_set=pair)
        with pytest.raises(ValueError, match="not part of provided process set"):
            pair.rank()
    size = pair.size()
    assert overlap.remove_process_set(pair) is True
    assert overlap.remove_process_set(pair) is False
    assert pair.size() is None
    return answer, size


def test_process_sets(pools):
    assert pools(3).run(in_sets) == [(1.0, 2), (None, 2), (1.0, 2)]
