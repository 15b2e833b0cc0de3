"""Overlap's warnings in a job of several ranks: equal ones once, with a count; filters are obeyed."""

from __future__ import annotations

import re
import sys
import warnings

import pytest

import overlap
from overlap.comm import warn as comm_warn
from overlap.comm.warn import warn

PYTHON = sys.executable

TRAINING = """
import torch
import overlap

torch.manual_seed(0)
model = torch.nn.Linear(4, 1)
attached = overlap.attach(model)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
data = torch.utils.data.TensorDataset(torch.ones(16, 4), torch.ones(16, 1))
for x, y in overlap.shard(torch.utils.data.DataLoader(data, batch_size=2)):
    optimizer.zero_grad()
    torch.nn.functional.mse_loss(model(x), y).backward()
    FAULT
    optimizer.step()
"""
FAULT = "with attached.no_sync(): model(x).sum().backward()"

WARNING = """
import overlap
from overlap.comm.warn import warn

overlap.init()
warn(TEXT)
overlap.shutdown()
print("went on")
"""


def test_c091_plain_training_says_nothing_of_its_own(start, script):
    run = start("-np", "4", PYTHON, script(TRAINING.replace("FAULT", "pass")))
    assert run.finish() == (0, "", "")


def test_c091_equal_warnings_are_shown_once_with_a_count(start, script):
    path = script(TRAINING.replace("FAULT", FAULT))
    code, out, err = start("-np", "4", PYTHON, path).finish()
    assert (code, out) == (0, "")
    *shown, last = err.splitlines()
    (rank,) = {re.match(r"\[(\d)\] ", line)[1] for line in shown}
    assert sum("UserWarning: the optimizer steps on gradients" in line for line in shown) == 1
    others = ", ".join(other for other in "0123" if other != rank)
    assert last.startswith(
        f"overlap run: 3 more ranks ({others}) warned of the same: the optimizer steps on "
    )


def test_c091_different_warnings_are_each_shown_with_their_rank(start, script):
    path = script(WARNING.replace("TEXT", "f'rank {overlap.rank()} is odd'"))
    code, _, err = start("-np", "4", PYTHON, path).finish()
    assert code == 0
    assert sorted(re.findall(r"(?m)^\[(\d)\] .*UserWarning: rank (\d) is odd$", err)) == [
        (r, r) for r in "0123"
    ]
    assert "overlap run:" not in err


def test_c091_a_warning_names_the_line_of_the_caller(start, script):
    path = script(WARNING.replace("TEXT", "'odd'"))
    _, _, err = start("-np", "1", PYTHON, path).finish()
    assert err == f"[0] {path}:6: UserWarning: odd\n[0]   warn('odd')\n"


@pytest.mark.parametrize(("action", "went_on"), [("error", 0), ("ignore", 4)])
def test_c091_filters_hold_on_each_rank(start, script, action, went_on):
    path = script(WARNING.replace("TEXT", "'odd'"))
    code, out, err = start("-np", "4", PYTHON, "-W", f"{action}:odd", path).finish()
    assert out.count("went on") == went_on
    assert "of the same" not in err
    if action == "error":
        assert code == 1
        assert "UserWarning: odd" in err
    else:
        assert (code, err) == (0, "")


def test_c091_a_warning_that_is_recorded_or_logged_goes_there(start, script):
    path = script(
        "import logging, warnings\n"
        "import overlap\n"
        "from overlap.comm.warn import warn\n"
        "overlap.init()\n"
        "warnings.simplefilter('always')\n"
        "warn('first')\n"
        "with warnings.catch_warnings(record=True) as seen:\n"
        "    warn('second')\n"
        "print([str(each.message) for each in seen])\n"
        "logging.captureWarnings(True)\n"
        "logging.basicConfig(format='%(levelname)s logged')\n"
        "warn('third')\n"
        "logging.captureWarnings(False)\n"
        "warnings.warn('of others')\n"
    )
    code, out, err = start("-np", "2", PYTHON, path).finish()
    assert (code, sorted(out.splitlines())) == (0, ["[0] ['second']", "[1] ['second']"])
    assert err.count("UserWarning: first") == 1
    assert "1 more rank (" in err and "warned of the same: first" in err
    assert err.count("WARNING logged\n") == 2
    assert "third" not in err.replace("warn('third')", "")
    assert err.count("UserWarning: of others") == 2


def test_c091_in_a_function_on_ranks(capfd):
    def work():
        overlap.init()
        with warnings.catch_warnings():
            warnings.simplefilter("always")
            warn("odd")

    overlap.run(work, np=3)
    err = capfd.readouterr().err
    assert err.count("UserWarning: odd") == 1
    assert re.search(r"(?m)^overlap\.run: 2 more ranks \(\d, \d\) warned of the same: odd$", err)


def test_without_a_launcher_it_is_pythons(capsys, monkeypatch):
    assert comm_warn.show_for_job is None
    with pytest.warns(FutureWarning, match="odd") as seen:
        warn("odd", FutureWarning)
    assert seen[0].filename == __file__
