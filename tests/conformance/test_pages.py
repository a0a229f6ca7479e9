"""The blocks of code in README and docs: programs print what the pages show, other Python runs, the rest is well-formed."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import pytest
from fragments import FRAGMENTS, NOT_RUN
from typer.testing import CliRunner

from xvcomm.cli import app

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
ENV = {name: value for name, value in os.environ.items() if not name.startswith("XVCOMM_")}
SIZES = {"numpy": 4, "torch": 2, "jax": 2}
pytestmark = pytest.mark.usefixtures("python")


@dataclass(frozen=True)
class Block:
    """A block of code.

    Attributes:
        page: path in the tree.
        kind: the word behind the fence.
        text: its lines.
        script: the name under which the page saves it, if it does.
    """

    page: str
    kind: str
    text: str
    script: str


def read(page: Path) -> Iterator[Block]:
    """The blocks of a page."""
    end = 0
    text = page.read_text()
    for found in re.finditer(r"^```(\w*)\n(.*?)^```$", text, re.MULTILINE | re.DOTALL):
        names = re.findall(r"`(\w+\.py)`", text[end : found.start()].strip().rpartition("\n\n")[2])
        yield Block(
            str(page.relative_to(ROOT)), found[1], found[2], names[-1] if names and found[1] == "python" else ""
        )
        end = found.end()


BLOCKS = {str(page.relative_to(ROOT)): list(read(page)) for page in PAGES}
SHOWN = [name for name, blocks in BLOCKS.items() if any(block.text.startswith("$ ") for block in blocks)]
SLOW = ("docs/tutorials/nccl-to-two-vendors.md", "docs/tutorials/jax-and-pytorch.md")
"""Pages whose jobs import frameworks in several ranks; the one of the quick start runs in any case."""
OTHERS = [block for blocks in BLOCKS.values() for block in blocks if block.kind == "python" and not block.script]


def comparable(lines: list[str]) -> list[str]:
    """Output without what differs from run to run: the order of ranks, times, names of hosts and jobs."""
    text = "\n".join(sorted(lines, key=lambda line: line[1:2] if line.startswith("[") else ""))
    return re.sub(r"\d+\.\d s\b|(?<= on )[\w.-]+(?=\))|(?<=: job )[\w-]+", "_", text).splitlines()


def execute(command: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """Run a command of a page."""
    python = shlex.quote(os.environ["TEST_PYTHON"])
    line = re.sub(r"\bxvcomm (?=\w)", lambda _: f"{python} -m xvcomm ", command, count=1)
    return subprocess.run(line, shell=True, cwd=folder, env=ENV, capture_output=True, text=True, timeout=250)


@pytest.mark.parametrize("page", [pytest.param(p, marks=[pytest.mark.slow] if p in SLOW else []) for p in SHOWN])
def test_programs_print_what_the_page_shows(page: str, tmp_path: Path) -> None:
    scripts = {block.script: block.text for block in BLOCKS[page] if block.script}
    for name in ("torch", "jax"):
        if any(re.search(rf"^\s*import {name}\b", text, re.MULTILINE) for text in scripts.values()) and not find_spec(
            name
        ):
            pytest.skip(f"{name} is not installed")
    for name, text in scripts.items():
        (tmp_path / name).write_text(text)
    for block in BLOCKS[page]:
        if block.text.startswith("$ "):
            command, *expected = block.text.splitlines()
            done = execute(command.removeprefix("$ "), tmp_path)
            if expected:
                assert done.returncode == 0, done.stdout + done.stderr
                assert comparable(done.stdout.splitlines()) == comparable(expected)


def test_hello_on_two_islands(tmp_path: Path) -> None:
    program, shown = (block for block in BLOCKS["README.md"] if "hello.py" in (block.script or block.text))
    (tmp_path / "hello.py").write_text(program.text)
    done = execute("xvcomm run --islands a:1,b:1 hello.py", tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    plain = [re.sub(r"^\[(\d) \w\]", r"[\1]", line) for line in done.stdout.splitlines()]
    assert comparable(plain) == comparable(shown.text.splitlines()[1:])


def test_every_program_is_run() -> None:
    for name, blocks in BLOCKS.items():
        commands = "\n".join(block.text for block in blocks if block.text.startswith("$ "))
        assert [block.script for block in blocks if block.script and block.script not in commands] == [], name


def programs() -> dict[str, list[tuple[str, str]]]:
    """For each job the blocks that it runs, with what comes before and after; each fragment is the first block that is left."""
    left = list(OTHERS)
    jobs: dict[str, list[tuple[str, str]]] = {}
    for fragment in FRAGMENTS:
        block = next((b for b in left if b.page == fragment.page and b.text.startswith(fragment.first)), None)
        assert block is not None, f"{fragment.page} has no block {fragment.first!r}"
        left.remove(block)
        text = "\n".join((fragment.before, block.text, fragment.after))
        jobs.setdefault(fragment.job, []).append((f"{fragment.page}: {fragment.first}", text))
    unknown = [b for b in left if not any(b.page == page and b.text.startswith(first) for page, first in NOT_RUN)]
    assert not unknown, f"add to fragments.py: {unknown}"
    return jobs


@pytest.mark.parametrize("job", ["numpy", *(pytest.param(job, marks=pytest.mark.slow) for job in ("torch", "jax"))])
def test_fragments_run(job: str, tmp_path: Path) -> None:
    if job != "numpy" and not (find_spec("torch") and find_spec("jax")):
        pytest.skip("torch or jax is not installed")
    blocks = tmp_path / "blocks.json"
    blocks.write_text(json.dumps(programs()[job]))
    script = shlex.quote(str(Path(__file__).parent / "fragments.py"))
    done = execute(f"XVCOMM_DEVICE=host xvcomm run -n {SIZES[job]} -- {script} {shlex.quote(str(blocks))}", tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr


def test_all_python_compiles() -> None:
    for block in (block for blocks in BLOCKS.values() for block in blocks if block.kind == "python"):
        compile(block.text, block.page, "exec")


def test_other_blocks_are_well_formed() -> None:
    for block in (block for blocks in BLOCKS.values() for block in blocks):
        if block.kind == "toml":
            assert tomllib.loads(block.text)
        elif block.kind == "console" and not block.text.startswith("$ "):
            done = subprocess.run(["bash", "-n"], input=block.text, capture_output=True, text=True)
            assert done.returncode == 0, f"{block.page}: {block.text}{done.stderr}"
        else:
            assert block.kind in ("", "text", "python", "console", "yaml"), f"{block.page}: {block.kind}"


def test_yaml_is_well_formed() -> None:
    yaml = pytest.importorskip("yaml")
    for block in (block for blocks in BLOCKS.values() for block in blocks if block.kind == "yaml"):
        assert yaml.safe_load(block.text)


def test_plans_are_printed() -> None:
    text = "\n".join(block.text for blocks in BLOCKS.values() for block in blocks if block.kind == "console")
    lines = re.findall(r"^xvcomm (plan .*)$", text, re.MULTILINE)
    assert len(lines) > 3
    for line in lines:
        done = CliRunner().invoke(app, shlex.split(line))
        assert done.exit_code == 0, f"{line}: {done.output}{done.exception}"
        assert "predicted" in done.output
