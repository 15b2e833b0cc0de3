"""`overlap.run` and `Ranks`: results, errors and what is left afterwards."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

import overlap.launch
from overlap.comm.errors import PeerLost, RankFailed
from overlap.launch.ranks import Ranks, run

pytestmark = pytest.mark.usefixtures("nothing_left")
DEADLINE_S = 20.0
OFFSET = 5


def rank() -> int:
    return int(os.environ["OVERLAP_RANK"])


def shifted(value, scale=1):
    return rank() * scale + value + OFFSET


class Loss:
    def __init__(self, value):
        self.value = value


class BadBatch(Exception):
    def __init__(self, number, why):
        super().__init__(f"batch {number}: {why}")
        self.number = number

    def __reduce__(self):
        return BadBatch, (self.number, "again")


@pytest.fixture(scope="module")
def pool():
    with Ranks(2) as ranks:
        yield ranks


@pytest.fixture
def two(pool):
    """Two ranks that live for many tests, as users' own tests would have them."""
    assert pool.alive
    return lambda fn, *args, **kwargs: pool.run(fn, *args, timeout_s=DEADLINE_S, **kwargs)


def test_results_come_in_rank_order():
    assert overlap.launch.run(shifted, 1, np=3, timeout_s=DEADLINE_S, scale=10) == [6, 16, 26]
    assert run(lambda: sys.stdin.read(), np=1, timeout_s=DEADLINE_S) == [""]


def test_function_of_this_module_travels_by_value(two):
    """This module is on no path of the ranks, or is there under another name."""
    captured = {"bias": 100}
    assert two(lambda: shifted(captured["bias"])) == [105, 106]
    losses = two(lambda: Loss(rank()))
    assert [(type(loss) is Loss, loss.value) for loss in losses] == [(True, 0), (True, 1)]


def test_modules_of_a_path_that_ranks_do_not_have(two, tmp_path, monkeypatch):
    (tmp_path / "far_module.py").write_text("import far_helper\ndef f(x):\n    return far_helper.g(x)\n")
    (tmp_path / "far_helper.py").write_text("def g(x):\n    return x + 1\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    import far_module

    try:
        assert two(far_module.f, 1) == [2, 2]
    finally:
        del sys.modules["far_module"], sys.modules["far_helper"]


def test_output_goes_where_the_callers_goes(two, capsys):
    def talk():
        print("hello\nthere")
        print("oh", file=sys.stderr)
        print("unended", end="")

    two(talk)
    out, err = capsys.readouterr()
    assert sorted(out.splitlines()) == sorted(
        f"[{rank}] {text}" for rank in range(2) for text in ("hello", "there", "unended")
    )
    assert sorted(err.splitlines()) == ["[0] oh", "[1] oh"]


def test_many_calls_and_large_values(two):
    for number in range(50):
        assert two(lambda number=number: number) == [number, number]
    block = b"x" * 50_000_000
    one, other = two(lambda data: data + b"y", block)
    assert len(one) == len(other) == 50_000_001


def test_exception_is_told_and_ranks_live_on(two):
    def fail():
        if rank() == 1:
            raise BadBatch(7, "torn")
        raise PeerLost(1, "raised BadBatch")

    with pytest.raises(RankFailed) as failure:
        two(fail)
    assert failure.value.rank == 1
    assert failure.value.exit_code is None
    assert str(failure.value).startswith(
        "rank 1: BadBatch: batch 7: torn\n\nTraceback (most recent call last):"
    )
    assert 'raise BadBatch(7, "torn")' in str(failure.value)  # the line in its file
    assert "overlap/launch" not in str(failure.value)
    assert isinstance(failure.value.__cause__, BadBatch)
    assert failure.value.__cause__.number == 7
    assert two(rank) == [0, 1]


def test_sys_exit(two):
    def leave(code):
        sys.exit(code)

    for code, expected in ((3, 3), (None, 0), ("text", 1)):
        with pytest.raises(RankFailed, match=r"called sys.exit\(.*\) in .*leave") as failure:
            two(leave, code)
        assert failure.value.exit_code == expected
    assert two(rank) == [0, 1]


def test_what_cannot_be_sent(two):
    lock = threading.Lock()
    with pytest.raises(
        TypeError, match=r"<lambda> or one of its arguments can't be sent to the ranks: .*lock"
    ):
        two(lambda: lock)

    def result():
        return threading.Lock()

    with pytest.raises(RankFailed, match=r"what .*result returned on rank [01] can't be sent back: a lock"):
        two(result)

    class Odd(Exception):
        def __init__(self, a, b):
            super().__init__(a)

    def raise_odd():
        raise Odd(1, 2)  # can be pickled, but not loaded

    with pytest.raises(RankFailed, match=r"rank [01]: Odd: 1") as failure:
        two(raise_odd)
    assert failure.value.__cause__ is None
    assert two(rank) == [0, 1]


def test_calls_from_threads_take_turns(two):
    results = [None] * 4

    def call(number):
        results[number] = two(lambda: number)

    threads = [threading.Thread(target=call, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(DEADLINE_S)
    assert results == [[number, number] for number in range(4)]


@pytest.mark.parametrize("code", [0, 7])
def test_dead_rank_breaks_the_ranks(code):
    def die():
        if rank() == 1:
            os._exit(code)
        time.sleep(100)

    with Ranks(2) as ranks:
        pids = ranks.run(os.getpid, timeout_s=DEADLINE_S)
        with pytest.raises(RankFailed, match=f"rank 1 exited with code {code} in .*die") as failure:
            ranks.run(die, timeout_s=DEADLINE_S)
        assert (failure.value.rank, failure.value.exit_code) == (1, code)
        assert not ranks.alive
        assert not [pid for pid in pids if os.path.exists(f"/proc/{pid}")]
        with pytest.raises(ValueError, match="closed, or one of them died"):
            ranks.run(rank)


def test_rank_killed_between_calls():
    with Ranks(2) as ranks:
        pids = ranks.run(os.getpid, timeout_s=DEADLINE_S)
        os.kill(pids[1], 9)
        os.waitid(os.P_PID, pids[1], os.WEXITED | os.WNOWAIT)
        with pytest.raises((RankFailed, ValueError), match=r"rank 1 was killed by SIGKILL|died"):
            ranks.run(rank, timeout_s=DEADLINE_S)
        assert not ranks.alive


def test_timeout_ends_the_ranks():
    def hang():
        if rank() == 1:
            time.sleep(100)

    began = time.monotonic()
    with pytest.raises(TimeoutError, match=r"hang did not return on ranks \[1\] within 0.5 s"):
        run(hang, timeout_s=0.5)
    assert time.monotonic() - began < 5


def test_grandchildren_are_ended():
    def spawn():
        return subprocess.Popen(["sleep", "1000"]).pid

    pids = run(spawn, timeout_s=DEADLINE_S)
    for pid in pids:
        stat = f"/proc/{pid}/stat"
        assert not os.path.exists(stat) or Path(stat).read_text().rpartition(")")[2].split()[0] == "Z"


def test_environment():
    assert run(lambda: os.environ["FLAVOUR"], np=1, env={"FLAVOUR": "sour"}, timeout_s=DEADLINE_S) == ["sour"]


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: run(rank, np=0), ValueError, "np must be a positive integer, not 0"),
        (lambda: run(rank, np=1.5), TypeError, "np must be a positive integer, not 1.5"),
        (lambda: Ranks(True), ValueError, "np must be a positive integer, not True"),
        (lambda: run("fn"), TypeError, "fn must be a function or another callable, not 'fn'"),
        (lambda: run(rank, timeout_s=-1), ValueError, "timeout_s must be a positive number"),
        (lambda: run(rank, env={"A": 1}), TypeError, "env must map texts to texts, not 'A' to 1"),
    ],
)
def test_bad_arguments(call, error, message):
    with pytest.raises(error, match=message):
        call()


def test_engine_starts_anew_in_every_call(two):
    pytest.importorskip("overlap.runtime")

    def meet(ranks):
        if rank() in ranks:
            import overlap

            overlap.init()
            return overlap.rank(), overlap.size()
        return None

    for _ in range(3):
        assert two(meet, [0, 1]) == [(0, 2), (1, 2)]


def test_failure_reaches_waiting_peers(two):
    pytest.importorskip("overlap.runtime")

    def fail():
        import numpy

        import overlap

        overlap.init()
        if overlap.rank() == 0:
            raise ValueError("bad batch")
        from overlap.runtime import engine

        engine().barrier() if hasattr(engine(), "barrier") else numpy.zeros(1)

    with pytest.raises(RankFailed, match="rank 0: ValueError: bad batch"):
        two(fail)
    assert two(rank) == [0, 1]
