"""A compiled function's digest changes when a source file that its module imports, directly or not, changes."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from xvcomm.jit.sources import digest

FILES = {
    "above": "from mine.inner import (\n    NUMBER,  # a comment (in brackets)\n    text,\n)\nimport mine.plain as p\n",
    "inner/__init__": "from mine.inner.deep import NUMBER\ntext = 'abc'\n",
    "inner/deep": "from mine import back\nNUMBER = 3\n",
    "back": "import mine.above\n",
    "plain": "def helper(x):\n    from mine.late import more\n    return x + more\n",
    "late": "more = 1\n",
    "unused": "OTHER = 7\n",
    "closing": "def closed(f, n):\n    def within(x, more=4):\n        return f(x) + n + more\n    return within\n",
}
CODE = """
from xvcomm.jit.sources import digest
from mine import above, closing, plain, unused
def plainly(x): pass
plainly.__module__ = "mine.above"
print(digest(plainly))
print(digest(closing.closed(plain.helper, 2)))
print(digest(closing.closed(abs, 2)))
"""


@pytest.fixture
def digests(tmp_path: Path, root: Path):
    """Digests of three functions: of `above`, and of `closing` with a function of `plain` in its closure and without one."""

    def ask(changes: dict[str, str], seed: int = 0) -> list[str]:
        for name, text in (FILES | changes).items():
            file = tmp_path / "mine" / f"{name}.py"
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text)
        (tmp_path / "mine" / "__init__.py").write_text("")
        environment = os.environ | {
            "PYTHONPATH": f"{root}:{tmp_path}", "PYTHONHASHSEED": str(seed), "PYTHONDONTWRITEBYTECODE": "1",
        }  # fmt: skip
        done = subprocess.run(
            [sys.executable, "-c", CODE], env=environment, check=True, capture_output=True, text=True, timeout=60
        )
        return done.stdout.split()

    return ask


@pytest.mark.parametrize("name", FILES)
def test_a_change_of_a_file(digests, name: str) -> None:
    before = digests({}, 1)
    after = digests({name: f"{FILES[name]}# More.\n"}, 2)
    reaching = {"plain": [0, 1], "late": [0, 1], "closing": [1, 2], "unused": []}.get(name, [0])
    assert [i for i in range(3) if before[i] != after[i]] == reaching


def closed(function, number, step=1):
    def within(x, by=step):
        return function(x) + number + by

    return within


def test_closures_defaults_and_options_count() -> None:
    functions = [
        (closed(abs, 2),), (closed(abs, 3),), (closed(min, 2),), (closed(abs, 2, 2),), (closed(closed(abs, 2), 2),),
        (closed(closed(abs, 3), 2),), (closed(abs, 2), {"nogil": True}), (closed(abs, 2), {"nogil": False}),
    ]  # fmt: skip
    assert len({digest(*given) for given in functions}) == len(functions)
    assert digest(closed(abs, 2)) == digest(closed(abs, 2))


def test_a_closure_over_an_object_that_is_no_constant() -> None:
    with pytest.raises(TypeError, match=r"its closure holds <object.*make it a number"):
        digest(closed(object(), 2))
