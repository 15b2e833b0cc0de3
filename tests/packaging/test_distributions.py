"""The sdist and the wheel hold what they must, and the wheel works in an empty environment."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tarfile
import venv
import zipfile
from pathlib import Path

import pytest

import overlap

pytest.importorskip("build")

ROOT = Path(__file__).resolve().parents[2]
NAME = f"overlap_training-{overlap.__version__}"
# Built and installed once, by whichever test comes first; on a slow disk and network that takes a while.
pytestmark = pytest.mark.timeout(300)


def started(*command: str | Path, cwd: Path) -> subprocess.CompletedProcess[str]:
    # Without variables that lead Python or a launched rank to the checkout's own modules.
    environ = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
    return subprocess.run(
        [str(part) for part in command], cwd=cwd, env=environ, capture_output=True, text=True, timeout=280
    )


def checked(*command: str | Path, cwd: Path) -> str:
    done = started(*command, cwd=cwd)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def sdist(tmp_path_factory):
    """Built from a copy: a build leaves its metadata beside the sources."""
    source = tmp_path_factory.mktemp("source") / "overlap-training"
    left_out = shutil.ignore_patterns(".*", "build", "dist", "*.egg-info", "__pycache__")
    shutil.copytree(ROOT, source, symlinks=True, ignore=left_out)
    checked(sys.executable, "-m", "build", "--no-isolation", "--sdist", cwd=source)
    return source / f"dist/{NAME}.tar.gz"


@pytest.fixture(scope="module")
def wheel(sdist, tmp_path_factory):
    """Built from the sdist, as packagers do."""
    folder = tmp_path_factory.mktemp("unpacked")
    with tarfile.open(sdist) as archive:
        archive.extractall(folder, filter="data")
    source = folder / NAME
    checked(sys.executable, "-m", "build", "--no-isolation", "--wheel", cwd=source)
    (built,) = (source / "dist").iterdir()
    return built


@pytest.fixture(scope="module")
def empty(wheel, tmp_path_factory):
    """An environment with the wheel and its dependencies, and nothing else."""
    folder = tmp_path_factory.mktemp("empty")
    venv.create(folder / "venv", with_pip=True)
    python = folder / "venv/bin/python"
    pins = ROOT / "requirements/test.txt"
    checked(python, "-m", "pip", "install", "--quiet", "--constraint", pins, wheel, cwd=folder)
    return folder


def modules(room: str, prefix: str) -> set[str]:
    return {prefix + str(path.relative_to(ROOT / room)) for path in (ROOT / room).rglob("*.py")}


def test_sdist_holds_the_sources(sdist):
    with tarfile.open(sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    assert {"pyproject.toml", "README.md", "LICENSE", "overlap/py.typed", "overlap/comm/engine.py"} <= names


def test_wheel_holds_every_module_and_nothing_compiled(wheel):
    assert wheel.name == f"{NAME}-py3-none-any.whl"
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        assert not any(info.external_attr >> 28 == 0o12 for info in archive.infolist()), "a symbolic link"
    wanted = modules("overlap", "overlap/") | modules("comm", "overlap/comm/")
    wanted |= modules("frameworks", "overlap/frameworks/")
    packaged = [name for name in names if ".dist-info/" not in name]
    assert sorted(packaged) == sorted(wanted | {"overlap/py.typed"})
    assert any(name.endswith("/entry_points.txt") for name in names)
    assert any(name.endswith("licenses/LICENSE") for name in names)


def test_wheel_needs_no_framework(empty):
    code = "import overlap; print(overlap.__file__); overlap.init(); print(overlap.size()); import torch"
    done = started(empty / "venv/bin/python", "-P", "-c", code, cwd=empty)
    where, size = done.stdout.splitlines()
    assert where.startswith(str(empty))
    assert size == "1"
    assert "No module named 'torch'" in done.stderr


def test_every_public_name_loads_where_it_can(empty):
    code = (
        "import overlap\n"
        "for name in set(overlap.__all__) - {'Attached'}: getattr(overlap, name)\n"
        "try: overlap.attach(object())\n"
        "except TypeError as error: print(error)"
    )
    out = checked(empty / "venv/bin/python", "-c", code, cwd=empty)
    assert out == "model must be a torch.nn.Module, not object\n"


def test_the_command_works(empty):
    command = empty / "venv/bin/overlap"
    assert overlap.__version__ in checked(command, "--version", cwd=empty)
    code = "import overlap; overlap.init(); print('rank', overlap.rank(), 'of', overlap.size())"
    out = checked(command, "run", "-np", "2", empty / "venv/bin/python", "-c", code, cwd=empty)
    assert "rank 0 of 2" in out
    assert "rank 1 of 2" in out


def test_a_function_runs_on_two_ranks(empty):
    script = empty / "script.py"
    script.write_text(
        "import overlap\n"
        "def place():\n    overlap.init()\n    return overlap.rank(), overlap.size()\n"
        "if __name__ == '__main__':\n    print(overlap.run(place, np=2))\n"
    )
    assert checked(empty / "venv/bin/python", script, cwd=empty) == "[(0, 2), (1, 2)]\n"
