"""The report as one HTML page that needs nothing else."""

from __future__ import annotations

import html

from xvcomm.cli.certify.charts import chart
from xvcomm.cli.certify.contract import Finding, Report, Result, Table

_STYLE = """
body{font:15px/1.45 system-ui,sans-serif;max-width:70rem;margin:2rem auto;padding:0 1rem;color:#222;background:#fff}
h1{font-size:1.5rem}h2{font-size:1.15rem;margin-top:2.2rem;border-top:1px solid #ccc;padding-top:.8rem}
table{border-collapse:collapse;font-size:13px;margin:.4rem 0 1rem}th,td{padding:2px 9px;text-align:right;border:1px solid #ddd}
th:first-child,td:first-child{text-align:left}caption{text-align:left;font-weight:600;padding:.3rem 0}
.passed{color:#217a36}.failed,.bad{color:#b3261e;font-weight:600}.skipped{color:#666}.unfinished{color:#9a6700}
.wide{overflow-x:auto}li{margin:.3rem 0}svg{margin:.3rem;font:11px system-ui,sans-serif}svg .title{font-weight:600;font-size:12px}
svg .left{text-anchor:end}svg .below{text-anchor:middle}svg .grid{stroke:#ddd}
"""


def page(report: Report) -> str:
    """The whole page."""
    state = "passed" if report.code == 0 else "failed" if report.code == 1 else "unfinished"
    setting = "".join(
        f"<tr><td>{_text(k)}</td><td style='text-align:left'>{_text(v)}</td></tr>" for k, v in report.setting.items()
    )
    body = [
        f"<h1>xvcomm certify: <span class='{state}'>{_text(report.verdict)}</span></h1>",
        f"<p>{_text(report.date)}, {report.seconds:.0f} s, <code>{_text(report.command)}</code></p>",
        f"<table>{setting}</table>",
        _overview(report),
        *(_section(result) for result in report.results),
    ]
    head = f"<meta charset='utf-8'><title>xvcomm certify, {_text(report.date)}</title><style>{_STYLE}</style>"
    return f"<!doctype html><html lang='en'><head>{head}</head><body>{''.join(body)}</body></html>\n"


def _overview(report: Report) -> str:
    rows = "".join(
        f"<tr><td><a href='#{r.name}'>{r.name}</a></td><td class='{r.state}'>{r.state}</td><td>{r.done} of {r.planned}</td>"
        f"<td>{r.seconds:.1f}</td><td style='text-align:left'>{_text(r.reason or r.title)}</td></tr>"
        for r in report.results
    )
    return f"<table><tr><th>section</th><th>state</th><th>cases</th><th>s</th><th>what</th></tr>{rows}</table>"


def _section(result: Result) -> str:
    found = "".join(map(_finding, result.findings))
    parts = [
        f"<h2 id='{result.name}'>{_text(result.title)}: <span class='{result.state}'>{result.state}</span></h2>",
        f"<p>{_text(result.reason)}</p>" if result.reason else "",
        f"<ul>{found}</ul>" if found else "",
        *map(_table, result.tables),
        *map(chart, result.plots),
    ]
    return "".join(parts)


def _finding(finding: Finding) -> str:
    remedy = f"<br>What to do: {_text(finding.remedy)}" if finding.remedy else ""
    return f"<li><span class='{'bad' if finding.wrong else ''}'>{_text(finding.what)}</span>{remedy}</li>"


def _table(table: Table) -> str:
    if not table.rows:
        return ""
    head = "".join(f"<th>{_text(column)}</th>" for column in table.columns)
    rows = "".join(f"<tr>{''.join(map(_cell, row))}</tr>" for row in table.rows)
    return f"<div class='wide'><table><caption>{_text(table.title)}</caption><tr>{head}</tr>{rows}</table></div>"


def _cell(text: str) -> str:
    return f"<td class='bad'>{_text(text)}</td>" if text.startswith(("WRONG", "NOT")) else f"<td>{_text(text)}</td>"


def _text(text: str) -> str:
    return html.escape(text)
