"""Rules for all source files: a docstring for each public name, and limits of size."""

from __future__ import annotations

import ast
import importlib
import inspect
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

MODULE_LINES = 450
FUNCTION_LINES = 70  # "about 60", with room for a signature; the docstring is not counted
PACKAGES = ("xvcomm", "backends", "adapters")
Function = ast.FunctionDef | ast.AsyncFunctionDef


def sources(root: Path, *folders: str) -> list[Path]:
    """Every Python file of the folders, once: rglob does not follow links."""
    return sorted(file for folder in folders for file in (root / folder).rglob("*.py"))


def functions(tree: ast.AST) -> Iterator[Function]:
    """Every function and method, nested ones too."""
    return (node for node in ast.walk(tree) if isinstance(node, Function))


def is_public(name: str) -> bool:
    """Whether the name is public."""
    return not name.startswith("_")


def documented_methods(trees: dict[Path, ast.Module]) -> dict[str, tuple[set[str], set[str]]]:
    """For each class name its base names and the methods with a docstring."""
    classes: dict[str, tuple[set[str], set[str]]] = {}
    for tree in trees.values():
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef):
                bases, methods = classes.setdefault(node.name, (set(), set()))
                bases |= {ast.unparse(base).rpartition(".")[2].partition("[")[0] for base in node.bases}
                methods |= {f.name for f in node.body if isinstance(f, Function) and ast.get_docstring(f)}
    return classes


def inherits_docstring(owner: str, method: str, classes: dict[str, tuple[set[str], set[str]]], *below: str) -> bool:
    """Whether a base class of `owner` documents `method`; `below`: the classes that led to it, since two may share a name."""
    below = (owner, *below)
    return any(
        method in classes[base][1] or inherits_docstring(base, method, classes, *below)
        for base in classes[owner][0]
        if base in classes and base not in below
    )


def owes_docstring(method: ast.stmt, owner: str, classes: dict[str, tuple[set[str], set[str]]]) -> bool:
    """Whether a statement of class `owner` is a public method without a docstring, including those of base classes."""
    if not isinstance(method, Function) or not is_public(method.name) or ast.get_docstring(method):
        return False
    decorators = " ".join(ast.unparse(d) for d in method.decorator_list)
    return not ("overload" in decorators or ".setter" in decorators or inherits_docstring(owner, method.name, classes))


def undocumented(tree: ast.Module, classes: dict[str, tuple[set[str], set[str]]]) -> Iterator[tuple[int, str]]:
    """Line and name of each public definition of a module without a docstring."""
    for node in tree.body:
        if isinstance(node, Function | ast.ClassDef) and is_public(node.name):
            if not ast.get_docstring(node):
                yield node.lineno, node.name
            for part in node.body if isinstance(node, ast.ClassDef) else ():
                if owes_docstring(part, node.name, classes):
                    yield part.lineno, f"{node.name}.{ast.unparse(part).partition('(')[0].split()[-1]}"


def test_public_names_are_documented(root: Path) -> None:
    trees = {file: ast.parse(file.read_text()) for file in sources(root, *PACKAGES)}
    classes = documented_methods(trees)
    missing = [f"{f.relative_to(root)}:1 module" for f, tree in trees.items() if not ast.get_docstring(tree)]
    for file, tree in trees.items():
        missing += [f"{file.relative_to(root)}:{line} {name}" for line, name in undocumented(tree, classes)]
    assert not missing, "no docstring:\n" + "\n".join(missing)


@pytest.mark.parametrize("module", ["xvcomm", "xvcomm.pipeline", "xvcomm.pipeline.balance"])
def test_exported_names_exist_and_are_documented(module: str) -> None:
    namespace = importlib.import_module(module)
    for name in namespace.__all__:
        value = getattr(namespace, name)
        if inspect.isclass(value) or inspect.isroutine(value):
            assert inspect.getdoc(value), f"{module}.{name} has no docstring"


def test_decoders_are_made_at_import(root: Path) -> None:
    """msgspec 0.22 ends the process if several threads decode a Struct at once for the first time. Commands have one thread."""
    first = re.compile(r"decode\(.*type=_?[A-Z]\w*\)")
    files = [f for f in sources(root, *PACKAGES) if "cli" not in f.relative_to(root).parts]
    found = [
        f"{f.relative_to(root)}: {line.strip()}"
        for f in files
        for line in f.read_text().splitlines()
        if first.search(line)
    ]
    assert not found, "make a Decoder beside the class:\n" + "\n".join(found)


def test_modules_are_short(root: Path) -> None:
    lengths = {f: len(f.read_text().splitlines()) for f in sources(root, *PACKAGES, "examples", "benchmarks", "tests")}
    long = [f"{f.relative_to(root)}: {n} lines" for f, n in lengths.items() if n > MODULE_LINES]
    assert not long, f"more than {MODULE_LINES} lines:\n" + "\n".join(long)


def test_functions_are_short(root: Path) -> None:
    long = []
    for file in sources(root, *PACKAGES, "examples", "benchmarks", "tests"):
        for function in functions(ast.parse(file.read_text())):
            first = function.body[0]
            has_text = ast.get_docstring(function, clean=False) is not None
            text = first.end_lineno - first.lineno + 1 if has_text and first.end_lineno else 0
            lines = (function.end_lineno or function.lineno) - function.lineno + 1 - text
            if lines > FUNCTION_LINES:
                long.append(f"{file.relative_to(root)}:{function.lineno} {function.name}: {lines} lines")
    assert not long, f"more than {FUNCTION_LINES} lines:\n" + "\n".join(long)
