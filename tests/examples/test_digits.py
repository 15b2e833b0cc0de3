"""Examples run as their docstrings say, and two processes learn as well as one."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")
pytest.importorskip("sklearn")

EXAMPLE = Path(__file__).resolve().parents[2] / "examples/torch_digits.py"


FEATURES = sorted(EXAMPLE.parent.glob("torch_digits_*.py"))


def run(*command: str, script: Path = EXAMPLE) -> str:
    # One thread a rank, as the launcher would give two ranks on two cores.
    environ = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [*command, sys.executable, str(script)], capture_output=True, text=True, timeout=110, env=environ
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Warning" not in done.stderr
    return done.stdout


def accuracy(output: str, ranks: int) -> float:
    (found,) = re.findall(rf"test accuracy (\d\.\d+) on {ranks} rank", output)
    return float(found)


@pytest.mark.timeout(240)
def test_two_ranks_learn_as_well_as_one():
    one = run()
    two = run(sys.executable, "-m", "overlap.cli", "run", "-np", "2")
    assert accuracy(one, 1) >= 0.95
    assert accuracy(two, 2) >= 0.95
    assert abs(accuracy(one, 1) - accuracy(two, 2)) <= 0.015
    # Progress is shown once, and the cost of communication at the end.
    assert len(re.findall(r"epoch +\d+/\d+  loss", two)) == len(re.findall(r"epoch +\d+/\d+  loss", one)) > 5
    assert re.search(r"ms a step: [\d.]+ ms hidden behind backward \(\d+%\), [\d.]+ ms exposed", two)


@pytest.mark.parametrize("script", FEATURES, ids=lambda path: path.stem)
def test_features_train_too(script):
    assert accuracy(run(sys.executable, "-m", "overlap.cli", "run", "-np", "2", script=script), 2) >= 0.93


@pytest.mark.parametrize("script", FEATURES, ids=lambda path: path.stem)
def test_features_differ_from_the_base_at_marked_lines_only(script):
    base = EXAMPLE.read_text().splitlines()
    lines = script.read_text().partition("from __future__")[2].splitlines()
    added = [line for line in lines if line not in base and "__future__" not in line]
    assert all("# <-" in line for line in added[1:]), added
    assert len(added) > 2


@pytest.mark.parametrize("script", [EXAMPLE, *FEATURES], ids=lambda path: path.stem)
def test_the_docstring_has_the_launch_line(script):
    assert f"overlap run -np 2 python examples/{script.name}" in script.read_text()
