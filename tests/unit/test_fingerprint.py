"""Functions have equal fingerprints where they compile to the same code, in whatever file it lies that they reach."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
import types
from collections.abc import Iterator
from pathlib import Path

import pytest

from xvcomm.jit.fingerprint import fingerprint

BELOW = """
import enum
import numpy as np
from numba import njit, types
from numba.extending import intrinsic, register_jitable

class Word(enum.IntEnum):
    HEAD = 8
    TAIL = 16

NUMBER, PAIR, TEXT, REAL = 3, (1, 2), "abc", 0.5
UNUSED = 7
DTYPE, SCALAR, ARRAY = np.dtype("i4"), np.int8(5), np.arange(3)
WIDE = types.int64
outside = types.ExternalFunction("usleep", types.int32(types.uint32))

def helper(x):
    return x - 1

@register_jitable
def inner(x):
    return helper(x) * 2

@intrinsic
def instruction(typingctx, x):
    def generate(context, builder, signature, args):
        return added(builder, args[0])
    return types.int64(types.int64), generate

def added(builder, x):
    return builder.add(x, x)

@njit
def compiled(x):
    return x + 40
"""
ABOVE = """
import below
from below import (
    ARRAY, DTYPE, NUMBER, PAIR, REAL, SCALAR, TEXT, WIDE, Word, compiled, inner, instruction, outside,
)

def plain(x):
    return x + NUMBER

def others(x):
    return plain(x), PAIR, TEXT, REAL, DTYPE, SCALAR, ARRAY, WIDE

def calls(x):
    outside(x)
    return inner(x) + instruction(x) + compiled(x)

def attribute(x):
    return x + below.Word.HEAD + Word.TAIL

def closed(step):
    def within(x, more=4):
        return x + step if x in {"a", "b", "c"} else more
    return within

by_two, by_three = closed(2), closed(3)
"""
FUNCTIONS = ("plain", "others", "calls", "attribute", "by_two", "by_three")


@pytest.fixture(autouse=True)
def forgotten() -> Iterator[None]:
    yield
    for name in ("below", "above"):
        sys.modules.pop(name, None)


def fingerprints(below: str = BELOW, above: str = ABOVE) -> dict[str, str]:
    """Of all functions of one module, which takes names from another."""
    for name, text in (("below", below), ("above", above)):
        sys.modules[name] = module = types.ModuleType(name)
        exec(text, module.__dict__)
    return {name: fingerprint(getattr(module, name)) for name in FUNCTIONS}


CHANGES = {
    "HEAD = 8": {"attribute"},
    "TAIL = 16": {"attribute"},
    "= 3,": {"plain", "others"},
    "(1, 2)": {"others"},
    '"abc"': {"others"},
    "0.5": {"others"},
    '"i4"': {"others"},
    "int8(5)": {"others"},
    "arange(3)": {"others"},
    "WIDE = types.int64": {"others"},
    '"usleep"': {"calls"},
    "uint32)": {"calls"},
    "x - 1": {"calls"},
    "* 2": {"calls"},
    "args[0]": {"calls"},
    "builder.add": {"calls"},
    "x + 40": {"calls"},
    "UNUSED = 7": set(),
}
REPLACEMENTS = {
    '"abc"': '"abd"', '"i4"': '"i8"', "WIDE = types.int64": "WIDE = types.int32", '"usleep"': '"sleep"', "uint32)": "uint64)",
    "builder.add": "builder.sub", "arange(3)": "arange(1, 4)",
}  # fmt: skip


@pytest.mark.parametrize("old", CHANGES)
def test_a_change_below(old: str) -> None:
    assert BELOW.count(old) == 1
    before = fingerprints()
    digit = next((c for c in reversed(old) if c.isdigit()), "")
    after = fingerprints(BELOW.replace(old, REPLACEMENTS.get(old) or old.replace(digit, "9")))
    assert {name for name in FUNCTIONS if before[name] != after[name]} == CHANGES[old]


def test_what_does_not_change_it() -> None:
    before = fingerprints()
    assert fingerprints(f"# A line more.\n{BELOW}", f"'''Lines more.'''\n\n{ABOVE}") == before
    assert len(set(before.values())) == len(FUNCTIONS), "closures over other values are other functions"


def test_options_and_defaults_count() -> None:
    before = fingerprints()
    function = sys.modules["above"].by_two
    assert fingerprint(function, {"nogil": True}) != fingerprint(function, {"nogil": False}) != before["by_two"]
    assert fingerprints(above=ABOVE.replace("more=4", "more=5"))["by_two"] != before["by_two"]


def test_functions_that_call_each_other() -> None:
    text = "def even(x):\n    return x == 0 or odd(x - 1)\ndef odd(x):\n    return x != 0 and even(x - 1)\n"
    found = []
    for source in (text, text.replace("x != 0", "x > 0")):
        module: dict[str, object] = {"__name__": "above"}
        exec(source, module)
        found.append(fingerprint(module["even"]))  # type: ignore[arg-type]
    assert found[0] != found[1]


def test_a_global_that_is_no_constant() -> None:
    module: dict[str, object] = {"__name__": "above", "state": object()}
    exec("def reads(x):\n    return state", module)
    with pytest.raises(TypeError, match=r"above\.reads cannot be cached: it reads <object.*make it a number"):
        fingerprint(module["reads"])  # type: ignore[arg-type]


def test_the_same_in_all_processes(root: Path) -> None:
    """Not by addresses, nor by hashes of strings, nor by what was asked before."""
    code = textwrap.dedent(
        f"""
        import sys
        sys.path[:0] = [{str(root)!r}, {str(Path(__file__).parent)!r}]
        import test_fingerprint
        print(test_fingerprint.fingerprints())
        """
    )
    outputs = {
        subprocess.run(
            [sys.executable, "-c", code], env={**os.environ, "PYTHONHASHSEED": seed}, check=True, capture_output=True, timeout=60
        ).stdout
        for seed in ("1", "2")
    }  # fmt: skip
    assert outputs == {f"{fingerprints()}\n".encode()}
