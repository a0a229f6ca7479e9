"""Lets mkdocs show pages that lie outside of docs/, and leads links to them, which are written for readers of the tree."""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parent.parent
OUTSIDE = {
    "README.md": "overview.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changes.md",
    "SECURITY.md": "security.md",
    "LICENSE": "license.txt",
    **{f"tests/shims/{name}/README.md": f"shims/{name}.md" for name in ("hip", "rxe", "verbs")},
}
"""Their places in the site, by those in the tree."""
_WHERE = {page: file for file, page in OUTSIDE.items()}
_LINK = re.compile(r"(?<=\]\()(?!\w+:|#)([^)#\s]+)")


def on_files(files: Files, config: Any) -> Files:
    """Add the pages from outside."""
    for file, page in OUTSIDE.items():
        files.append(File.generated(config, page, abs_src_path=str(ROOT / file)))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Lead the links of a page to the pages of the site."""
    uri = page.file.src_uri
    place = _WHERE.get(uri, f"docs/{uri}")
    return _LINK.sub(lambda found: _target(found[1], place, uri), markdown)


def _target(link: str, place: str, uri: str) -> str:
    """Where a link of the page `place` leads in the site, from the page `uri`; mkdocs tells of those that lead nowhere."""
    file = posixpath.normpath(posixpath.join(posixpath.dirname(place), link))
    target = OUTSIDE.get(file) or file.removeprefix("docs/")
    return posixpath.relpath(target, posixpath.dirname(uri) or ".")
