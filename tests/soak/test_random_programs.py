"""An hour of random training programs: none wrong, none hanging, and nothing grows.

OVERLAP_SOAK_S is how many seconds instead.
"""

from __future__ import annotations

import os
import time

import pytest
from hypothesis import HealthCheck, given, seed, settings

from overlap.launch import Ranks
from tests.frameworks.torch.models import usage
from tests.frameworks.torch.test_programs import programs, run_program

SECONDS = float(os.environ.get("OVERLAP_SOAK_S", "3600"))
SIZES = (2, 3, 4)

pytestmark = [pytest.mark.soak, pytest.mark.timeout(SECONDS + 600)]


@pytest.mark.parametrize("size", SIZES)
def test_random_programs(size):
    deadline_s = time.monotonic() + SECONDS / len(SIZES)
    marks, number = [], int(time.time())  # printed by hypothesis where a program fails
    with Ranks(size) as ranks:
        while time.monotonic() < deadline_s or len(marks) < 3:
            number += 1
            check = settings(max_examples=100, deadline=None, suppress_health_check=list(HealthCheck))(
                given(programs(size))(lambda program: run_and_compare(ranks, program))
            )
            seed(number)(check)()
            marks.append(ranks.run(usage))
    for settled, last in zip(marks[1], marks[-1], strict=True):
        assert last[0] < settled[0] + 30e6
        assert last[1:] == settled[1:]


def run_and_compare(ranks, program):
    assert len(set(ranks.run(run_program, *program, timeout_s=60))) == 1
