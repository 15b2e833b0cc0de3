"""The linters are content, every file says what it is for, and what the documents name is there."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from dataclasses import fields
from pathlib import Path

import pytest

import overlap
from overlap.comm import errors
from overlap.config import Settings

ROOT = Path(__file__).resolve().parents[2]
ROOMS = ("overlap", "frameworks", "comm", "tests", "examples")
FILES = sorted(path for room in ROOMS for path in (ROOT / room).rglob("*.py"))
DOCUMENTS = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")])


@pytest.mark.timeout(300)
@pytest.mark.parametrize("tool", [["ruff", "check"], ["ruff", "format", "--check"], ["mypy"]], ids=" ".join)
def test_linter(tool):
    done = subprocess.run(
        [sys.executable, "-m", *tool], cwd=ROOT, capture_output=True, text=True, timeout=280
    )
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_file_opens_with_one_line_that_says_what_it_is_for(path):
    docstring = ast.get_docstring(ast.parse(path.read_text()))
    assert docstring, "no docstring"
    first = docstring.splitlines()[0]
    assert first.endswith("."), first
    assert path.read_text().startswith('"""' + first[:20])


def mapped_paths() -> list[str]:
    """The paths in README's map of the tree, each from the root."""
    (tree,) = re.findall(r"## The tree\n.*?```\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    paths, folders = [], []
    for line in tree.splitlines():
        indent = (len(line) - len(line.lstrip())) // 2
        # The names end where two spaces begin what is said of them.
        names = line.strip().split("  ")[0].split()
        paths += ["/".join([*folders[:indent], name]) for name in names]
        folders[indent:] = [names[0].rstrip("/")]
    return paths


@pytest.mark.parametrize("path", mapped_paths())
def test_readme_maps_what_is_there(path):
    found = ROOT / path
    assert found.is_dir() if path.endswith("/") else found.is_file()


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_between_documents_lead_somewhere(document):
    for target in re.findall(r"\]\(([^)#]+)[^)]*\)", document.read_text()):
        if "://" not in target:
            assert (document.parent / target).exists(), f"{document.name} links to {target}"


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_names_in_documents_exist(document):
    names = set(re.findall(r"\boverlap\.([a-zA-Z_]+)\(", document.read_text()))
    assert names <= set(overlap.__all__)
    settings = {setting.metadata["env"] for setting in fields(Settings)}
    told = set(re.findall(r"\bOVERLAP_[A-Z_]+", document.read_text()))
    source = "".join(path.read_text() for path in FILES)
    assert {name for name in told - settings if name not in source} == set()


def test_every_setting_is_documented():
    text = (ROOT / "docs/attach.md").read_text()
    for setting in fields(Settings):
        assert setting.metadata["help"], setting.name
        assert f"`{setting.metadata['env']}` | {setting.default:g} |" in text


def test_every_error_is_documented():
    text = (ROOT / "docs/errors.md").read_text()
    families = [each for each in vars(errors).values() if isinstance(each, type)]
    for error in families:
        assert f"`{error.__name__}`" in text
        assert error.__name__ in overlap.__all__


def test_version_is_said_once():
    project = (ROOT / "pyproject.toml").read_text()
    assert f'version = "{overlap.__version__}"' in project
    assert f"## {overlap.__version__}" in (ROOT / "CHANGELOG.md").read_text()


def test_every_pin_is_exact():
    lines = [
        line for line in (ROOT / "requirements/test.txt").read_text().splitlines() if line and line[0] != "#"
    ]
    assert all(re.fullmatch(r"[A-Za-z0-9_.-]+==[0-9.]+", line) for line in lines)
    assert len(lines) == len({line.lower() for line in lines})
