"""Ranks killed at random moments of training, again and again: their peers are told, and nothing is left."""

from __future__ import annotations

import os
import random
import signal
import time

import pytest

from tests.launch.conftest import script, start
from tests.launch.test_faults import FOREVER, check_lost, train, wait_for_step

__all__ = ["script", "start", "train"]  # fixtures

KILLS = 50

pytestmark = [pytest.mark.soak, pytest.mark.timeout(120)]


@pytest.mark.parametrize("seed", range(KILLS))
def test_killed_rank_is_named_by_its_peers(train, seed):
    chance = random.Random(seed)
    ranks = chance.randint(2, 4)
    victim, step, delay_s = chance.randrange(ranks), chance.randint(0, 100), chance.uniform(0, 2e-3)
    job = train(FOREVER, ranks)
    pid = wait_for_step(job, victim, step)
    time.sleep(delay_s)  # orders nothing: the moment within a step shall be a random one
    code, errors = job.ends(lambda: os.kill(pid, signal.SIGKILL))
    assert code == 137
    assert errors[0] == f"overlap run: rank {victim} was killed by SIGKILL"
    check_lost(errors, set(range(ranks)) - {victim}, victim)
    assert len(errors) == ranks
