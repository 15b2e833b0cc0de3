"""`overlap run`: what ranks get, how their output looks, and what the launcher's exit code says."""

from __future__ import annotations

import os
import re
import signal
import sys
import time

import pytest

PYTHON = sys.executable


def test_every_rank_knows_its_place(start):
    names = "RANK SIZE LOCAL_RANK LOCAL_SIZE JOB LAUNCHER"
    program = f"import os; print(*[os.environ['OVERLAP_' + name] for name in {names!r}.split()])"
    code, out, err = start("-np", "3", PYTHON, "-c", program).finish()
    assert (code, err) == (0, "")
    found = sorted(line.split() for line in out.splitlines())
    assert [line[:5] for line in found] == [[f"[{r}]", str(r), "3", str(r), "3"] for r in range(3)]
    ((job, launcher),) = {tuple(line[5:]) for line in found}
    assert re.fullmatch("[0-9a-f]{32}", job)
    assert job not in launcher


@pytest.mark.parametrize(("given", "expected"), [(None, None), ("7", "7")])
def test_threads_share_the_cores(start, given, expected, monkeypatch):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    run = start(
        "-n",
        "2",
        PYTHON,
        "-c",
        "import os; print(os.environ['OMP_NUM_THREADS'], os.environ['PYTHONUNBUFFERED'])",
        env={"OMP_NUM_THREADS": given} if given else None,
    )
    threads = expected or str(max(1, len(os.sched_getaffinity(0)) // 2))
    assert sorted(run.finish()[1].splitlines()) == [f"[0] {threads} 1", f"[1] {threads} 1"]


def test_arguments_of_the_command_are_left_alone(start):
    program = "import sys; print(sys.argv[1:])"
    for dashes in ([], ["--"]):
        run = start("--num-proc", "1", *dashes, PYTHON, "-c", program, "-np", "9", "--", "--verbose", "a b")
        assert run.finish()[:2] == (0, "[0] ['-np', '9', '--', '--verbose', 'a b']\n")


def test_lines_are_whole_however_much_is_printed(start, script):
    path = script(
        "import os, sys\n"
        "rank = os.environ['OVERLAP_RANK']\n"
        "for number in range(4000):\n"
        "    line = f'{rank}:{number}:' + rank * (number % 300 if number % 1000 else 20000) + '\\n'\n"
        "    half = len(line) // 2\n"
        "    for part in (line[:half], line[half:]):\n"
        "        (sys.stdout if number % 2 else sys.stderr).write(part)\n"
    )
    code, out, err = start("-np", "4", PYTHON, path).finish()
    assert code == 0
    for text, odd in ((out, 1), (err, 0)):
        seen = {rank: [] for rank in "0123"}
        for line in text.splitlines():
            prefix, rank, number, rest = re.fullmatch(r"\[(.)\] (.):(\d+):(.*)", line).groups()
            expected = int(number) % 300 if int(number) % 1000 else 20000
            assert prefix == rank
            assert rest == rank * expected
            seen[rank].append(int(number))
        assert all(numbers == list(range(odd, 4000, 2)) for numbers in seen.values())


def test_progress_bars_and_unended_lines(start):
    program = r"import sys; sys.stdout.write('\r 10%\r 20%\r\n'); sys.stdout.write('end')"
    out = start("-np", "1", PYTHON, "-c", program).finish()[1]
    assert out == "[0] \r[0]  10%\r[0]  20%\r\n[0] end\n"


def test_only_rank_zero_reads_the_input(start):
    run = start("-np", "2", PYTHON, "-c", "import sys; print(repr(sys.stdin.read()))")
    code, out, _ = run.finish("hello")
    assert code == 0
    assert sorted(out.splitlines()) == ["[0] 'hello'", "[1] ''"]


@pytest.mark.parametrize(
    ("arguments", "message", "code"),
    [
        (["-np", "0", "true"], "overlap run: invalid value for .*'0' is not a positive integer", 2),
        (["-np", "x", "true"], "overlap run: invalid value for .*'x' is not a positive integer", 2),
        (["-np", "2", "--timeout", "-1", "true"], "overlap run: invalid value for '--timeout': '-1' is", 2),
        (["-np", "2", "--foo", "true"], r"overlap run: no such option: --foo \(see overlap run --help\)", 2),
        (["-np", "2"], "overlap run: missing argument 'COMMAND...'", 2),
        (["true"], "overlap run: missing option '-np'", 2),
        (["-np", "2", "no-such-command"], "overlap run: command not found: no-such-command$", 127),
        (["-np", "2", "/etc/passwd"], "overlap run: cannot start /etc/passwd: Permission denied$", 126),
    ],
)
def test_misuse_is_one_line(start, arguments, message, code):
    got, out, err = start(*arguments).finish()
    assert (got, out, err.count("\n")) == (code, "", 1)
    assert re.match(message, err)


def test_verbose_says_what_is_started_and_how_it_ended(start):
    code, out, err = start("-np", "2", "--verbose", "sh", "-c", "exit 0").finish()
    assert (code, out) == (0, "")
    assert all(line.startswith("overlap run: ") for line in err.splitlines())
    assert "starting 2 ranks: sh -c 'exit 0'" in err
    assert re.search(r"rank 1 is process \d+, with .*OVERLAP_RANK=1", err)
    assert "rank 1 ended with exit code 0" in err


def test_a_rank_may_end_before_the_others(start):
    run = start("-np", "2", "sh", "-c", "test $OVERLAP_RANK = 1 || { read line; echo $line; }")
    assert run.finish("later\n")[:2] == (0, "[0] later\n")


@pytest.mark.parametrize(
    ("end", "code", "said"),
    [
        ("exit 3", 3, "rank 1 exited with code 3"),
        ("kill -9 $$", 137, "rank 1 was killed by SIGKILL"),
        ("kill -11 $$", 139, "rank 1 was killed by SIGSEGV"),
    ],
)
def test_failure_is_the_exit_code(start, end, code, said):
    run = start("-np", "2", "sh", "-c", f"test $OVERLAP_RANK = 0 || {end}")
    assert run.finish() == (code, "", f"overlap run: {said}\n")


def test_ranks_that_do_not_learn_of_a_failure_are_ended(start):
    # Rank 0 ends at SIGTERM, with a code of its own, only because rank 1 has failed.
    program = "test $OVERLAP_RANK = 1 && exit 3; trap 'exit 5' TERM; sleep 100 & wait"
    began = time.monotonic()
    code, out, err = start("-np", "2", "sh", "-c", program).finish()
    assert (code, out) == (3, "")
    assert err.splitlines() == [
        "overlap run: rank 1 exited with code 3",
        "overlap run: rank 0 did not stop by itself, and was ended",
    ]
    assert 4.5 < time.monotonic() - began < 8


def test_timeout(start):
    run = start("-np", "2", "--timeout", "0.5", "sleep", "100")
    members = run.members()
    code, out, err = run.finish()
    assert (code, out) == (124, "")
    assert err == "overlap run: timed out: ranks [0, 1] still ran after 0.5 s\n"
    assert not [each for each in members if each.is_running()]


def test_output_that_nobody_reads_ends_the_job(start):
    run = start("-np", "2", "yes")
    run.line()
    run.process.stdout.close()
    assert run.process.wait(timeout=10) == 128 + signal.SIGPIPE
    assert run.process.stderr.read() == b""


def test_version_and_help_are_fast_and_plain():
    import subprocess

    done = subprocess.run(
        [PYTHON, "-m", "overlap.cli", "--version"], capture_output=True, text=True, timeout=20
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert re.fullmatch(r"overlap \d+\.\d+\.\d+\n", done.stdout)
