"""What ranks do together beside training: work of rank 0, means, and the check of the first batch."""

from __future__ import annotations

import os
import pickle
import re
import time
import warnings
from pathlib import Path

import numpy as np
import pytest

torch = pytest.importorskip("torch")

import overlap

DOCUMENT = Path(__file__).resolve().parents[3] / "docs/coordination.md"


def test_c095_a_file_of_rank_zero_is_there_on_all_ranks_and_its_error_too(ranks, tmp_path):
    def work():
        overlap.init()

        def prepare():
            time.sleep(0.3)
            folder.mkdir()
            (folder / "data").write_text("ready")
            return {"path": str(folder), "rank": overlap.rank()}

        def fail():
            raise FileNotFoundError(2, "no such data", "train.bin")

        folder = tmp_path / "made"
        result = overlap.on_rank_zero(prepare)
        text = Path(result["path"], "data").read_text()
        try:
            overlap.on_rank_zero(fail)
        except FileNotFoundError as error:
            seen = type(error), str(error), error.errno
            cause = str(error.__cause__)
        return text, result["rank"], seen, cause, overlap.mean(overlap.rank())

    answers = ranks(4).run(work)
    error = (FileNotFoundError, "[Errno 2] no such data: 'train.bin'", 2)
    assert [answer[:3] for answer in answers] == [("ready", 0, error)] * 4
    assert all("on rank 0" in cause and "in fail" in cause for *_, cause, _ in answers[1:])
    assert [answer[4] for answer in answers] == [1.5] * 4


def test_result_and_arguments(ranks):
    def work():
        overlap.init()
        return overlap.on_rank_zero(lambda a, *, b: (overlap.rank(), a, b), overlap.rank(), b=[1])

    assert ranks(2).run(work) == [(0, 0, [1])] * 2


class Unloadable(Exception):
    def __init__(self, first, second):
        super().__init__(f"{first} and {second}")


def outcome(call, *args):
    """The type and text of what `call` raises."""
    try:
        call(*args)
    except BaseException as error:
        return type(error).__name__, str(error)
    return None


@pytest.mark.parametrize("size", [1, 2])
def test_what_cannot_be_pickled(ranks, size):
    def work():
        overlap.init()

        def fail():
            raise Unloadable("this", "that")

        seen = outcome(overlap.on_rank_zero, fail), outcome(overlap.on_rank_zero, lambda: lambda: None)
        return *seen, overlap.mean(1)

    for failed, refused, mean in ranks(size).run(work):
        if size == 1:
            assert failed == ("Unloadable", "this and that")
            assert refused is None
        else:
            assert failed == ("RuntimeError", "Unloadable: this and that")
            assert refused[0] == "TypeError"
            assert "must return what can be pickled" in refused[1]
        assert mean == 1


def test_exits_are_told_too(ranks):
    def work():
        overlap.init()

        def leave(error):
            raise error

        return outcome(overlap.on_rank_zero, leave, SystemExit(3)), outcome(
            overlap.on_rank_zero, leave, KeyboardInterrupt()
        )

    assert ranks(2).run(work) == [(("SystemExit", "3"), ("KeyboardInterrupt", ""))] * 2


@pytest.mark.parametrize("dies", [0, 1])
def test_a_rank_that_dies_leaves_no_one_waiting(start_ranks, dies):
    def work():
        overlap.init()
        if dies == overlap.rank() == 1:
            os._exit(1)
        return outcome(overlap.on_rank_zero, os._exit, 1)

    pool = start_ranks(2)
    pool.start(work)
    ((name, text),) = pool.results([1 - dies])
    assert name == "PeerLost"
    assert "while this rank was in on_rank_zero" in text


def test_rank_zero_runs_its_block_first(ranks, tmp_path):
    def work():
        overlap.init()
        with overlap.rank_zero_first():
            if overlap.rank() == 0:
                time.sleep(0.2)
                (tmp_path / "cache").write_text("full")
            text = (tmp_path / "cache").read_text()
        ran = False
        try:
            with overlap.rank_zero_first():
                ran = True
                raise KeyError("gone")
        except KeyError as error:
            seen = str(error)
        # What another rank's block raises is its own affair.
        others = overlap.rank() > 0
        try:
            with overlap.rank_zero_first():
                if others:
                    raise LookupError
        except LookupError:
            assert others
        return text, ran, seen, overlap.mean(overlap.rank())

    assert ranks(3).run(work) == [("full", rank == 0, "'gone'", 1.0) for rank in range(3)]


def test_collective_calls_where_rank_zero_is_alone_are_refused(ranks):
    def work():
        overlap.init()

        def attach():
            overlap.attach(torch.nn.Linear(2, 2))

        seen = [outcome(overlap.on_rank_zero, overlap.mean, 1.0), outcome(overlap.on_rank_zero, attach)]
        return *seen, overlap.mean(overlap.rank())

    for first, second, mean in ranks(2).run(work):
        assert first[0] == "ValueError"
        assert "overlap.mean is a collective call, but only rank 0 runs what is in on_rank_zero" in first[1]
        assert second[0] == "MismatchError"
        assert mean == 0.5


def test_ranks_that_call_different_things_are_told_which(ranks):
    def work():
        overlap.init()
        called = []
        rank = overlap.rank()
        seen = [
            outcome(overlap.on_rank_zero, called.append, 1) if rank else outcome(overlap.mean, 1.0),
            outcome(overlap.mean, torch.zeros(2, 3) if rank else torch.zeros(3, 2)),
            outcome(overlap.mean, np.zeros(2, np.float32) if rank else np.zeros(2)),
            outcome(overlap.mean, 1.0 if rank else np.zeros(2)),
        ]
        assert not called
        return seen, overlap.mean(rank)

    overlap_says = [
        "rank 0 mean of a number; rank 1 on_rank_zero",
        "rank 0 mean of a tensor of float32, shape (3, 2); rank 1 mean of a tensor of float32, shape (2, 3)",
        "rank 0 mean of an array of float64, shape (2,); rank 1 mean of an array of float32, shape (2,)",
        "rank 0 mean of an array of float64, shape (2,); rank 1 mean of a number",
    ]
    for seen, mean in ranks(2).run(work):
        assert [name for name, _ in seen] == ["MismatchError"] * 4
        for (_, text), said in zip(seen, overlap_says, strict=True):
            assert said in text
        assert mean == 0.5


def test_mean_of_numbers(ranks):
    def work():
        overlap.init()
        rank = overlap.rank()
        values = [rank, float(rank), rank == 1, np.float32(rank), np.int64(rank), np.bool_(rank == 1)]
        return [overlap.mean(value) for value in values]

    for means in ranks(3).run(work):
        assert all(type(each) is float for each in means)
        assert means == [1.0, 1.0, 1 / 3, 1.0, 1.0, 1 / 3]


def arrays(rank):
    """Arrays of many kinds and layouts, with values of this rank."""
    values = np.arange(12.0).reshape(3, 4) * (rank + 1)
    made = [values.astype(kind) for kind in ("f2", "f4", "f8", "c8", "c16", ">f4")]
    made += [values.T, values[:, ::2], values[::-1], np.array(float(rank)), np.zeros((0, 3))]
    return made


def test_mean_of_arrays(ranks):
    def work():
        overlap.init()
        given = arrays(overlap.rank())
        kept = pickle.dumps(given)
        given[0].flags.writeable = False
        means = [overlap.mean(array) for array in given]
        assert pickle.dumps(given) == kept
        return means

    expected = [np.mean(pair, axis=0) for pair in zip(arrays(0), arrays(1), strict=True)]
    for means in ranks(2).run(work):
        for mean, value, like in zip(means, expected, arrays(0), strict=True):
            assert isinstance(mean, np.ndarray)
            assert mean.shape == like.shape
            assert mean.dtype == like.dtype.newbyteorder("=")
            assert np.array_equal(mean, value)


def tensors(rank):
    values = torch.arange(12.0).reshape(3, 4) * (rank + 1)
    kinds = [torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64]
    made = [values.to(kind) for kind in kinds]
    made += [values.t(), values[:, ::2], values.to(torch.complex64).conj(), torch.tensor(float(rank))]
    return [*made, torch.zeros(0, 3), torch.nn.Parameter(values), values.expand(2, 3, 4)]


def test_mean_of_tensors(ranks):
    def work():
        overlap.init()
        given = tensors(overlap.rank())
        before = [tensor.clone() for tensor in given]
        means = [overlap.mean(tensor) for tensor in given]
        assert all(torch.equal(*pair) for pair in zip(given, before, strict=True))
        return means

    for means in ranks(2).run(work):
        for mean, zero, one in zip(means, tensors(0), tensors(1), strict=True):
            assert type(mean) is torch.Tensor
            assert (mean.dtype, mean.shape, mean.requires_grad) == (zero.dtype, zero.shape, False)
            assert torch.equal(mean, ((zero + one) / 2).detach())


@pytest.mark.parametrize(
    ("value", "error", "text"),
    [
        (np.arange(3), ValueError, "x is of int64, which holds no mean: convert it to float"),
        (torch.arange(3), ValueError, "convert it to float"),
        (np.array([True]), ValueError, "convert it to float"),
        (torch.zeros(2, device="meta"), ValueError, "x is on meta"),
        (torch.zeros(2).to_sparse(), ValueError, "to_dense"),
        (np.array(["a"]), TypeError, "dtype must be one of"),
        ("1", TypeError, "x must be a real number, a numpy array or a torch tensor, not str"),
        (1j, TypeError, "not complex"),
    ],
)
def test_what_has_no_mean(value, error, text):
    with pytest.raises(error, match=re.escape(text)):
        overlap.mean(value)
    assert not overlap.is_initialized()


def batch(value):
    """A batch of everything that can be in one."""
    return {
        "x": [torch.full((2, 3), 1.0).t(), (np.zeros(4), np.array(["a", None], object))],
        "y": torch.tensor([1, 2], dtype=torch.bfloat16),
        "empty": torch.zeros(0),
        "name": "sample",
        "odd": torch.zeros(2).to_sparse(),
        "last": value,
    }


def test_c074_a_first_batch_that_all_ranks_have_is_warned_of_once(ranks):
    def work():
        overlap.init()
        rank = overlap.rank()
        told = []
        # Only all of them equal are suspect.
        for value in (1, rank, torch.tensor([rank]), np.array([rank // 2]), [1] * (rank + 1), {rank: 1}):
            with warnings.catch_warnings(record=True) as seen:
                warnings.simplefilter("always")
                assert overlap.check_batch(batch(value)) is None
            told.append([(str(each.message), os.path.basename(each.filename)) for each in seen])
        return told

    first, *others = ranks(3).run(work)
    (((text, _),), *rest) = first
    assert "all 3 ranks have the same first batch" in text
    assert "overlap.shard" in text
    assert rest == [[]] * 5
    assert others == [[[]] * 6] * 2


def test_first_batch_of_one_rank_is_fine(ranks):
    assert ranks(1).run(overlap.check_batch, torch.zeros(2)) == [None]


def test_document_runs(ranks, tmp_path):
    snippets = re.findall(r"```python\n(.*?)```", DOCUMENT.read_text(), re.DOTALL)
    assert len(snippets) >= 5

    def work():
        os.chdir(tmp_path)
        for snippet in snippets:
            overlap.shutdown()
            exec(snippet, {})  # each stands alone

    ranks(2).run(work)
