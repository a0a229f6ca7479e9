"""The pages say what the code does: settings, make targets, commands, links."""

from __future__ import annotations

import os
import re
import runpy
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from xvcomm import config


def pages(root: Path) -> list[Path]:
    """Every Markdown page of the project."""
    return [*sorted(root.glob("*.md")), *sorted((root / "docs").glob("*.md"))]


def help_of(command: str) -> str:
    """What `xvcomm COMMAND --help` prints, unbroken and uncoloured."""
    environment = {**os.environ, "COLUMNS": "300", "NO_COLOR": "1", "TERM": "dumb"}
    line = [sys.executable, "-m", "xvcomm", command, "--help"]
    return subprocess.run(line, env=environment, capture_output=True, text=True, check=True, timeout=60).stdout


def test_configuration_page_equals_the_table(root: Path) -> None:
    generate = runpy.run_path(str(root / "docs" / "generate.py"))
    page = (root / "docs" / "configuration.md").read_text()
    table = generate["configuration_table"]()
    assert all(f"| `{name}` |" in table for name, _, _ in config.table())
    assert page == generate["rendered"](page, "configuration", table), "run `make docs`"


def test_make_targets_exist(root: Path) -> None:
    targets = set(re.findall(r"^([a-z-]+):", (root / "Makefile").read_text(), re.MULTILINE))
    names = {name for page in pages(root) for name in re.findall(r"(?:^|`)make ([a-z-]+)", page.read_text(), re.M)}
    assert {"demo", "test", "check", "bench"} <= names
    assert names <= targets


def test_commands_exist(root: Path) -> None:
    command_line = re.compile(r"^xvcomm ([a-z]+)(.*?)(?: -- .*)?$", re.MULTILINE)
    used: dict[str, set[str]] = {}
    for page in pages(root):
        for command, options in command_line.findall(page.read_text()):
            used.setdefault(command, set()).update(re.findall(r"(?<=\s)--?[a-z][a-z-]*", options))
    assert {"run", "doctor", "bench", "plan"} <= used.keys()
    for command, options in used.items():
        words = set(re.findall(r"--?[a-z][a-z-]*", help_of(command)))
        assert options <= words, f"xvcomm {command}: no {options - words}"


def test_floors_are_told_as_they_are(root: Path) -> None:
    contracts = tomllib.loads((root / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    layers = next(contract["layers"] for contract in contracts if contract["name"] == "Floors")
    told = (root / "CONTRIBUTING.md").read_text().partition("## Floors")[2].split("```")[1].strip().splitlines()
    assert [re.findall(r"\w+", layer) for layer in layers] == [re.findall(r"\w+", line) for line in told]


def test_variables_exist(root: Path) -> None:
    known = {name for name, _, _ in config.table()}
    for page in pages(root):
        named = set(re.findall(r"\bXVCOMM_[A-Z_]+[A-Z]\b", page.read_text()))
        assert named <= known, page.name


@pytest.mark.parametrize("folder", [".", "docs"])
def test_links_between_pages_lead_somewhere(root: Path, folder: str) -> None:
    for page in (root / folder).glob("*.md"):
        for target in re.findall(r"\]\(([^)#]+)", page.read_text()):
            if "://" not in target:
                assert (page.parent / target).exists(), f"{page.relative_to(root)}: {target}"
