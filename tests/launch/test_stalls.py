"""Named operations that some rank never asks for: a warning that says so, and an end where one is wanted."""

from __future__ import annotations

import sys

import pytest

DIFFERENT_NAMES = """
import numpy as np, overlap
overlap.init()
overlap.allreduce(1.0, name=("model_1/w", "model/w")[overlap.rank()])
"""

NEVER_COMES = """
import threading, overlap
overlap.init()
if overlap.rank() == 1:
    threading.Event().wait()
overlap.allreduce(1.0, name="t")
"""


@pytest.mark.timeout(60)
def test_c041_names_that_differ_end_in_the_same_error_on_both(start, script):
    limits = {"OVERLAP_STALL_WARN_S": "0.5", "OVERLAP_STALL_ABORT_S": "1"}
    code, _, errors = start("-np", "2", sys.executable, script(DIFFERENT_NAMES), env=limits).finish()
    assert code == 1
    warned = [line for line in errors.splitlines() if "has waited for" in line and "StallError" not in line]
    assert warned and all(line.startswith("[0] ") for line in warned)
    assert "allreduce 'overlap.allreduce.model_1/w' has waited" in warned[0]
    assert "allreduce 'overlap.allreduce.model/w' has waited" in warned[0]
    assert "asked for by rank 0, not by rank 1" in warned[0] and "the names look alike" in warned[0]
    ended = [line for line in errors.splitlines() if "StallError: " in line]
    assert any("'overlap.allreduce.model/w' has waited" in line for line in ended)


@pytest.mark.timeout(60)
@pytest.mark.parametrize("name", ["OVERLAP_STALL_ABORT_S", "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS"])
def test_c050_a_rank_that_never_comes_is_named_and_the_job_ends(start, script, name):
    code, _, errors = start("-np", "2", sys.executable, script(NEVER_COMES), env={name: "1"}).finish()
    assert code == 1
    assert "StallError: allreduce 'overlap.allreduce.t' has waited for 1 s" in errors
    assert "asked for by rank 0, not by rank 1" in errors


@pytest.mark.timeout(60)
def test_horovodruns_flag_for_it(start, script):
    flag = ("--stall-check-shutdown-time-seconds", "1")
    code, _, errors = start("-np", "2", *flag, sys.executable, script(NEVER_COMES)).finish()
    assert code == 1 and "StallError" in errors
