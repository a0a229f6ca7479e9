"""Words that xvcomm does not use: the field has others. CONTRIBUTING.md explains those of xvcomm's own."""

from __future__ import annotations

import io
import re
import tokenize
from pathlib import Path

ROOT = Path(__file__).parents[2]
NOWHERE = {
    "aboard": "in a batch, logged", "boarding": "launch log", "borrow": "import", "borrowed": "import", "contest": "tuning",
    "contests": "tunings", "courier": "message mover", "couriers": "message movers", "culprit": "failed", "dispute": "mismatch",
    "errand": "task", "farewell": "close", "lend": "export", "lends": "exports", "lent": "exported", "lodger": "user",
    "manifest": "contents of a batch", "passenger": "logged operation", "passengers": "logged operations", "quarrel": "mismatch",
    "witness": "reporter, nonce",
}  # fmt: skip
"""In no identifier, docstring, comment, message or page; by what stands in their place."""
NO_NAME = {
    "blame": "diagnosis", "blamed": "failed", "board": "contract check, bootstrap store", "company": "group",
    "door": "launch gate", "promise": "deferred Work", "site": "call site", "sites": "call sites",
}  # fmt: skip
"""In no identifier, whose meaning prose may have."""
_BEFORE = {"site": "call", "sites": "call"}
_PART = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+")


def parts(text: str) -> list[str]:
    """The words of a text, of `snake_case` and of `CamelCase`."""
    return [part.lower() for part in _PART.findall(text)]


def names(source: str) -> list[str]:
    """The words of a Python file's identifiers."""
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    found = {token.string for token in tokens if token.type == tokenize.NAME}
    pairs = [(before, part) for name in found for before, part in zip(["", *parts(name)], parts(name), strict=False)]
    return [part for before, part in pairs if before != _BEFORE.get(part, "-")]


def sources() -> list[Path]:
    """All files that people write, but the history of changes and this one: rglob follows no links."""
    tops = ("xvcomm", "backends", "adapters", "tests", "benchmarks", "examples", "docs")
    found = [*ROOT.glob("*.md"), *(path for top in tops for path in (ROOT / top).rglob("*"))]
    unwanted = {ROOT / "CHANGELOG.md", Path(__file__)}
    return [path for path in found if path.suffix in (".py", ".md", ".cu", ".h", ".cpp", ".c") and path not in unwanted]


def test_plain_words() -> None:
    wrong = []
    for path in sources():
        source = path.read_text(encoding="utf-8")
        wrong += [
            f"{path.relative_to(ROOT)}: {word}: write {NOWHERE[word]}" for word in {*parts(source)} & NOWHERE.keys()
        ]
        if path.suffix == ".py":
            wrong += [
                f"{path.relative_to(ROOT)}: {word}: write {NO_NAME[word]}" for word in {*names(source)} & NO_NAME.keys()
            ]
    assert not wrong, "\n".join(wrong)


def test_words_are_found() -> None:
    assert parts("HostCourier_sites of ABCBoard") == ["host", "courier", "sites", "of", "abc", "board"]
    assert names("my_site = call_site; callSites(a.board)  # site").count("site") == 1
