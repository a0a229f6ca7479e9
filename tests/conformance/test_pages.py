"""The programs in README and quickstart print the output that the pages show."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

ENV = {name: value for name, value in os.environ.items() if not name.startswith("XVCOMM_")}
FENCE = r"```python\n(?P<program>.*?)```\n+```console\n\$ xvcomm (?P<command>[^\n]*)\n(?P<output>.*?)```"


def example(page: Path, script: str) -> re.Match[str]:
    """Program, command and output of the page's example that is saved as `script`."""
    text = page.read_text()
    found = re.search(FENCE, text[text.index(f"`{script}`") :], re.DOTALL)
    assert found is not None, f"{page.name}: no program below `{script}`"
    assert found["command"].split()[-1] == script
    return found


def printed(folder: Path, found: re.Match[str], *options: str) -> list[str]:
    """The example's output in rank order; `options` replace those of the page."""
    *given, script = found["command"].split()
    (folder / script).write_text(found["program"])
    command = [sys.executable, "-m", "xvcomm", *(options or given), script]
    run = subprocess.run(command, cwd=folder, env=ENV, capture_output=True, text=True, timeout=300)
    assert run.returncode == 0, run.stdout + run.stderr
    return sorted(run.stdout.splitlines(), key=lambda line: line[1])


def test_hello(root: Path, tmp_path: Path) -> None:
    found = example(root / "README.md", "hello.py")
    assert printed(tmp_path, found) == found["output"].splitlines()


def test_hello_on_two_islands(root: Path, tmp_path: Path) -> None:
    found = example(root / "README.md", "hello.py")
    lines = printed(tmp_path, found, "run", "--islands", "a:1,b:1")
    plain = [re.sub(r"^\[(\d) \w\]", r"[\1]", line) for line in lines]
    assert plain == found["output"].splitlines()


@pytest.mark.skipif(find_spec("torch") is None, reason="torch is not installed")
def test_ddp(root: Path, tmp_path: Path) -> None:
    found = example(root / "docs" / "quickstart.md", "ddp.py")
    assert printed(tmp_path, found) == found["output"].splitlines()
