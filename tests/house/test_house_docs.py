"""The pages match the code: settings, make targets, commands, links."""

from __future__ import annotations

import ast
import os
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

from xvcomm import config


def pages(root: Path) -> list[Path]:
    """Every Markdown page of the project."""
    return [*sorted(root.glob("*.md")), *sorted((root / "docs").rglob("*.md"))]


def help_of(command: str) -> str:
    """Output of `xvcomm COMMAND --help`, without line breaks and colours."""
    environment = {**os.environ, "COLUMNS": "300", "NO_COLOR": "1", "TERM": "dumb"}
    line = [sys.executable, "-m", "xvcomm", command, "--help"]
    return subprocess.run(line, env=environment, capture_output=True, text=True, check=True, timeout=60).stdout


def texts(*files: Path) -> str:
    """The strings in these files, one a line, with `...` for what is filled in."""
    found = []
    for file in files:
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.JoinedStr):
                parts = [part.value if isinstance(part, ast.Constant) else "..." for part in node.values]
                found.append("".join(map(str, parts)))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.append(node.value)
    return "\n".join(found)


@pytest.mark.parametrize(
    ("name", "line"),
    [
        ("configuration", "| `XVCOMM_TIMEOUT` |"),
        ("floors", "\nerrors\n"),
        ("sections", "| `rails` |"),
        ("paper", "arXiv:2602.18007"),
    ],
)
def test_generated_parts_match_the_code(root: Path, name: str, line: str) -> None:
    generate = runpy.run_path(str(root / "docs" / "generate.py"))
    page, _ = generate["PARTS"][name]
    assert line in page.read_text()
    assert page.read_text() == generate["rendered"](name), "run `make docs`"


def test_all_pages_are_in_the_navigation(root: Path) -> None:
    named = set(re.findall(r"[\w/-]+\.md$", (root / "mkdocs.yml").read_text(), re.MULTILINE))
    assert {str(page.relative_to(root / "docs")) for page in (root / "docs").rglob("*.md")} - named == {
        f"figures/{page.name}" for page in (root / "docs" / "figures").glob("*.md")
    }


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


def test_variables_exist(root: Path) -> None:
    known = {name for name, _, _ in config.table()}
    for page in pages(root):
        named = set(re.findall(r"\bXVCOMM_[A-Z_]+[A-Z]\b", page.read_text()))
        assert named <= known, page.name


@pytest.mark.parametrize("folder", [".", "docs", "docs/tutorials", "docs/api"])
def test_links_between_pages_lead_to_files(root: Path, folder: str) -> None:
    """A folder is no page of the site, so that `make docs` fails on a link to one."""
    for page in (root / folder).glob("*.md"):
        for target in re.findall(r"\]\(([^)#]+)", page.read_text()):
            if "://" not in target:
                assert (page.parent / target).is_file(), f"{page.relative_to(root)}: {target}"


def test_texts_about_rdma_are_those_of_the_code(root: Path) -> None:
    tables = re.findall(r"^\| text \|.*\n\| --- \|.*\n((?:\|.*\n)+)", (root / "docs" / "rdma.md").read_text(), re.M)
    cells = [row.split(" | ")[0] for table in tables for row in table.splitlines()]
    told = [text for cell in cells for text in re.findall(r"`([^`]+)`", cell)]
    package = root / "xvcomm"
    known = texts(
        package / "cli" / "doctor.py", package / "backends" / "gpu" / "nic_memory.py",
        *(package / "backends" / "rdma").glob("*.py"), *(package / "wire").glob("*.py"),
    )  # fmt: skip
    assert len(told) > 40
    assert [text for text in told if text not in known] == []
