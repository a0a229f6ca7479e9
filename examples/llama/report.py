"""Output of the trainer: a progress bar, a log, a comparison, a plot."""

from __future__ import annotations

import json
from collections.abc import Sequence
from importlib.util import find_spec
from math import inf, isnan
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

LINES = 10
ROWS = 12


class Log:
    """A JSON-lines file: a header that describes the run, then one line per step. A context manager."""

    def __init__(self, path: Path, header: dict[str, Any]) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = path.open("w", encoding="utf-8")
        self.write(header)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._file.close()

    def write(self, record: dict[str, Any]) -> None:
        """Append and flush one line, so that a run can be followed."""
        self._file.write(json.dumps(record) + "\n")
        self._file.flush()


class Meter:
    """Shows progress as a bar on a terminal and as about ten lines elsewhere, and logs each step."""

    def __init__(self, console: Console, what: str, steps: int, tokens: int, log: Log | None = None) -> None:
        """Start timing.

        Args:
            console: where to print.
            what: name of the run.
            steps: number of steps.
            tokens: tokens per step.
            log: log file of the steps; none by default.
        """
        self._console = console
        self._what = what
        self._steps = steps
        self._tokens = tokens
        self._log = log
        self._bar = Progress(
            TextColumn(what),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("loss {task.fields[loss]:.4f}"),
            TextColumn("{task.fields[speed]:,.0f} tokens/s"),
            TimeRemainingColumn(),
            console=console,
            disable=not console.is_terminal,
        )
        self._task = self._bar.add_task(what, total=steps, loss=float("nan"), speed=0.0)

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._bar.stop()

    def step(self, step: int, loss: float, seconds: float) -> None:
        """Report a finished step that took `seconds`; `step` counts from 1."""
        speed = self._tokens / seconds
        self._bar.update(self._task, completed=step, loss=loss, speed=speed)
        if not self._console.is_terminal and (step in (1, self._steps) or step % max(1, self._steps // LINES) == 0):
            place = f"{step:>{len(str(self._steps))}}/{self._steps}"
            self._console.print(f"{self._what}  step {place}  loss {loss:.4f}  {speed:,.0f} tokens/s")
        if self._log is not None:
            self._log.write({"step": step, "loss": loss, "tokens_per_s": round(speed, 1), "seconds": round(seconds, 4)})


def show_header(console: Console, header: dict[str, Any]) -> None:
    """Print the settings of the run."""
    table = Table(title=f"xvcomm training{_rehearsal(header)}", show_header=False, title_justify="left")
    for name, value in header.items():
        table.add_row(name.replace("_", " "), _plain(value))
    console.print(table)


def compare(console: Console, losses: Sequence[float], reference: Sequence[float], tolerance: float) -> float:
    """Print the losses of both runs side by side; returns the largest relative difference."""
    table = Table(title="distributed against one process", title_justify="left")
    for column in ("step", "distributed loss", "one-process loss", "relative difference"):
        table.add_column(column, justify="right")
    differences = [abs(a - b) / abs(b) for a, b in zip(losses, reference, strict=True)]
    worst = max(range(len(differences)), key=lambda i: inf if isnan(differences[i]) else differences[i])
    every = max(1, len(losses) // ROWS)
    for i, difference in enumerate(differences):
        if i % every == 0 or i in (worst, len(losses) - 1):
            mark = "  <- worst" if i == worst else ""
            table.add_row(str(i + 1), f"{losses[i]:.7f}", f"{reference[i]:.7f}", f"{difference:.1e}{mark}")
    console.print(table)
    passed = differences[worst] <= tolerance
    word = "[green]same loss as one process" if passed else "[red]NOT the loss of one process"
    sign = "<=" if passed else ">"
    console.print(f"{word}[/]: worst relative difference {differences[worst]:.1e} {sign} {tolerance:.0e}")
    return differences[worst]


def plot(path: Path, header: dict[str, Any], losses: Sequence[float], reference: Sequence[float] | None) -> str:
    """Write the loss curves as a PNG file; returns the path, or the reason why there is none."""
    if find_spec("matplotlib") is None:
        return "none; pip install 'xvcomm[plot]' for one"
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4.8), layout="constrained")
    axes = figure.subplots()
    steps = range(1, len(losses) + 1)
    axes.plot(steps, losses, linewidth=2.5, color="tab:blue", label=f"{len(header['ranks'])} ranks")
    if reference is not None:
        axes.plot(steps, reference, linewidth=1.5, color="tab:orange", linestyle=(0, (4, 3)), label="one process")
    axes.set(xlabel="step", ylabel="loss (nats per byte)")
    axes.set_title(
        f"LLaMA-style decoder, {header['parameters']:,} parameters, {_plain(header['framework'])}\n"
        f"{_plain(header['islands'])}: {header['pp']} stages x {header['dp']} replicas, {header['schedule']}"
        f"{_rehearsal(header)}",
        fontsize=11,
    )
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path, dpi=130)
    return str(path)


def _rehearsal(header: dict[str, Any]) -> str:
    return " (rehearsal: labels given by hand)" if header["rehearsal"] else ""


def _plain(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{key}: {_plain(item)}" for key, item in value.items())
    return ", ".join(map(str, value)) if isinstance(value, list | tuple) else str(value)
