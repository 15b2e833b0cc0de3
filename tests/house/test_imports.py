"""Imports go one way, overlap -> frameworks -> comm, and `import overlap` loads next to nothing."""

from __future__ import annotations

import ast
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import overlap

ROOT = Path(__file__).resolve().parents[2]
# Libraries that comm, which knows bytes only, imports inside the function that needs them.
FRAMEWORKS = {"torch", "tensorflow", "keras", "mxnet", "jax", "cupy", "mpi4py"}


def room(name: str) -> list[Path]:
    return sorted((ROOT / name).rglob("*.py"))


def imports(path: Path, module_level: bool = False) -> Iterator[str]:
    """Absolute names that a file imports; with `module_level`, only those that its own import runs."""
    package = path.parent.relative_to(ROOT).parts
    if package[0] != "overlap":
        package = ("overlap", *package)
    nodes: list[ast.AST] = [ast.parse(path.read_text())]
    while nodes:
        node = nodes.pop()
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else ()
            origin = ".".join((*base, *([node.module] if node.module else [])))
            yield from (f"{origin}.{alias.name}" for alias in node.names)
        elif module_level and isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.If)):
            if isinstance(node, ast.If) and "TYPE_CHECKING" not in ast.unparse(node.test):
                nodes += [*node.body, *node.orelse]
        else:
            nodes += ast.iter_child_nodes(node)


def within(name: str, *packages: str) -> bool:
    return any(name == package or name.startswith(package + ".") for package in packages)


@pytest.mark.parametrize("path", room("comm"), ids=lambda path: str(path.relative_to(ROOT)))
def test_comm_imports_nothing_above_it(path):
    ours = [name for name in imports(path) if within(name, "overlap", "comm", "frameworks")]
    assert [name for name in ours if not within(name, "overlap.comm")] == []
    assert [name for name in imports(path, module_level=True) if name.split(".")[0] in FRAMEWORKS] == []


@pytest.mark.parametrize("path", room("frameworks"), ids=lambda path: str(path.relative_to(ROOT)))
def test_frameworks_import_comm_only(path):
    ours = [name for name in imports(path) if within(name, "overlap", "comm", "frameworks")]
    assert [name for name in ours if not within(name, "overlap.comm", "overlap.frameworks")] == []


def test_each_framework_has_a_room_of_its_own():
    for path in room("frameworks"):
        here = path.relative_to(ROOT / "frameworks").parts[0]
        foreign = {name.split(".")[0] for name in imports(path)} & FRAMEWORKS - {here}
        assert not foreign, f"{path} imports {foreign}"
        siblings = [name for name in imports(path) if within(name, "overlap.frameworks")]
        assert all(within(name, f"overlap.frameworks.{here}") for name in siblings), path


@pytest.mark.parametrize("name", ["comm", "frameworks"])
def test_short_names_are_refused(name):
    done = subprocess.run(
        [sys.executable, "-c", f"import {name}"], cwd=ROOT, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 1
    assert f"import overlap.{name}, not {name}" in done.stderr


def test_import_is_quick_and_loads_no_framework():
    code = (
        "import time; started = time.perf_counter(); import overlap; took = time.perf_counter() - started;"
        "import json, sys; print(json.dumps([took, sorted(sys.modules)]))"
    )
    times = []
    for _ in range(20):
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
        took, modules = json.loads(done.stdout)
        assert not {"numpy", "sklearn", "typer", *FRAMEWORKS} & set(modules)
        times.append(took)
        # A busy machine makes single runs slow, never fast: the first quick one will do.
        if took <= 0.15:
            return
    pytest.fail(f"import overlap took {min(times):.3f} s at best, 0.15 s are allowed")


def interpreter(version: str) -> str | None:
    """A Python of this version: the one that runs, one on the PATH, or one of pyenv's."""
    versions = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")) / "versions"
    candidates = [sys.executable, shutil.which(f"python{version}")]
    candidates += [str(path) for path in versions.glob(f"{version}.*/bin/python{version}")]
    code = "import sys; print('%d.%d' % sys.version_info[:2])"
    for candidate in filter(None, candidates):
        # Asked, for pyenv has a stand-in on the PATH for each version, which may lead nowhere.
        done = subprocess.run([candidate, "-c", code], capture_output=True, text=True, timeout=60)
        if done.stdout.strip() == version:
            return candidate
    return None


@pytest.mark.parametrize("version", ["3.10", "3.11", "3.12", "3.13"])
def test_c092_import_warns_of_nothing(version, tmp_path):
    """Compiled anew, for a warning about syntax comes only then; without any library."""
    python = interpreter(version)
    if python is None:
        pytest.skip(f"no Python {version} on this machine")
    command = [python, "-W", "error", "-S", "-X", f"pycache_prefix={tmp_path}", "-c", "import overlap"]
    done = subprocess.run(
        command, env={"PYTHONPATH": str(ROOT)}, cwd=tmp_path, capture_output=True, text=True, timeout=60
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    # The files that this import has not loaded must compile without a warning, too.
    rooms = [str(ROOT / name) for name in ("overlap", "comm", "frameworks")]
    command[-2:] = ["-m", "compileall", "-q", "-f", *rooms]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_public_names_are_sorted_importable_and_documented():
    assert overlap.__all__ == sorted(overlap.__all__)
    assert set(overlap.__all__) <= set(dir(overlap))
    for name in overlap.__all__:
        assert getattr(overlap, name).__doc__, f"overlap.{name} has no docstring"


def test_every_public_name_is_known_to_type_checkers():
    tree = ast.parse((ROOT / "overlap/__init__.py").read_text())
    (block,) = [node for node in tree.body if isinstance(node, ast.If) and "TYPE" in ast.unparse(node.test)]
    declared = {alias.asname for node in block.body for alias in node.names}
    assert declared == set(overlap.__all__)


def test_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="'atach'"):
        overlap.atach  # noqa: B018


def test_links_that_came_as_text_files_are_told(tmp_path):
    package = tmp_path / "overlap"
    package.mkdir()
    (package / "__init__.py").write_text((ROOT / "overlap/__init__.py").read_text())
    for name in ("comm", "frameworks"):
        (package / name).write_text(f"../{name}")
    done = subprocess.run(
        [sys.executable, "-c", "import overlap"],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 1
    assert "clone the repository with symbolic links" in done.stderr


def test_each_doctest_is_collected_once_under_its_long_name():
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "--collect-only", "-q", "overlap"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=100,
    )
    found = [line.split("::") for line in done.stdout.splitlines() if "::" in line]
    assert "overlap.comm.plan.make_plan" in [name for _, name in found]
    assert len({name for _, name in found}) == len(found)
    assert all(file.startswith("overlap/") and name.startswith("overlap.") for file, name in found)
