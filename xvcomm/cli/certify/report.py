"""The report as JSON, as text, and as a page."""

from __future__ import annotations

import json
from pathlib import Path

from rich.console import Console

from xvcomm.cli.certify.contract import SKIPPED, Report, Result
from xvcomm.cli.certify.page import page
from xvcomm.cli.doctor import text_table

_WIDTH = 170


def write(report: Report, folder: Path) -> None:
    """Write `certify.json`, `certify.txt` and `certify.html` into a folder, which is made if it is missing."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "certify.json").write_text(json.dumps(report.plain(), indent=1) + "\n")
    (folder / "certify.html").write_text(page(report))
    with (folder / "certify.txt").open("w") as file:
        show(report, Console(file=file, width=_WIDTH), tables=True)


def line(result: Result) -> str:
    """A section in one line."""
    cases = "" if result.state == SKIPPED else f", {result.done} of {result.planned} cases, {result.seconds:.1f} s"
    return f"{result.name:>10}: {result.state}{f': {result.reason}' if result.reason else ''}{cases}"


def show(report: Report, console: Console, *, tables: bool = False) -> None:
    """Print the verdict and all findings, also the tables if asked for."""
    if tables:
        console.print(f"xvcomm certify, {report.date}, {report.command}", highlight=False, markup=False)
        for name, text in report.setting.items():
            console.print(f"{name}: {text}", highlight=False, markup=False)
    for result in report.results:
        if tables:
            console.print(f"\n{line(result)}\n{' ' * 12}{result.title}", highlight=False, markup=False)
        for finding in result.findings:
            mark = "WRONG" if finding.wrong else "note"
            remedy = f"\n{' ' * 12}What to do: {finding.remedy}" if finding.remedy else ""
            told = f"{result.name:>10}: {mark}: {finding.what}{remedy}"
            console.print(told, highlight=False, markup=False, soft_wrap=True)
        for table in result.tables if tables else ():
            if table.rows:
                shown = text_table(table.title, table.columns, table.rows)
                console.print(shown, highlight=False, markup=False)
    console.print(report.verdict, highlight=False, markup=False)
