"""What `paper.py` measured: entries made of its records, the tables, and the loss curves.

It stands alone, without xvcomm and torch, because `docs/generate.py` uses it too.
"""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Iterable, Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

PAPER = {"llama-8b": 0.982, "qwen2-7b": 0.944}
"""Throughput of the paper's mixed cluster, as a part of that of NVIDIA's GPUs alone: arXiv:2602.18007."""
LOSS_BOUND = 7e-3
"""Largest relative difference of losses that HetCCL's authors accept: arXiv:2601.22585."""
BASELINE, MIXED = "nccl", "xvcomm"
SPEED, BALANCE, LOSS = "speed", "balance", "loss"
NOT_YET = "These jobs were not run yet on GPUs."
_TITLES = {SPEED: "Communication", BALANCE: "One island slowed down", LOSS: "Losses"}

Entry = dict[str, Any]


def entries(records: Sequence[dict[str, Any]], failed: Iterable[Entry], common: Entry) -> list[Entry]:
    """One entry for each variant of a phase, from the records of a job and the variants that failed in it.

    Args:
        common: what all entries have.
    """
    header = next((record for record in records if record["event"] == "job"), {})
    common = {**common, "device": header.get("device", "ranks"), "torch": header.get("torch", "unknown")}
    found: dict[tuple[str, str], Entry] = {}
    for record in records:
        if record["event"] in ("variant", "step"):
            entry = found.setdefault((record["phase"], record["variant"]), {**common, "steps": [], "error": ""})
            if record["event"] == "step":
                entry["steps"].append(record)
            else:
                entry |= {name: value for name, value in record.items() if name != "event"}
    for entry in found.values():
        entry |= _summary(entry.pop("steps"))
    for each in failed:
        key = each["phase"], each["variant"]
        found[key] = {**common, **_summary([]), **found.get(key, {}), **each}
    return list(found.values())


def _summary(steps: Sequence[dict[str, Any]]) -> Entry:
    measured = [step for step in steps if not step["warmup"]]
    names = ("seconds", "tokens_per_second_per_gpu", "tflops_per_gpu")
    typical = {name: statistics.median(step[name] for step in measured) if measured else 0.0 for name in names}
    peak = max((step["peak_memory_gib"] for step in steps), default=0.0)
    losses = [step["loss"] for step in steps]
    return {**typical, "peak_memory_gib": peak, "iterations": len(measured), "losses": losses}


def key(entry: Entry) -> tuple[Any, ...]:
    """What an entry is of; a new one replaces an old one with the same."""
    return entry["model"], entry["ranks"], entry["phase"], entry["variant"]


def merged(old: Sequence[Entry], new: Sequence[Entry]) -> list[Entry]:
    """All entries, the new ones in place of old ones of the same variants."""
    return list({key(entry): entry for entry in (*old, *new)}.values())


def load(path: Path) -> list[Entry]:
    """The entries of a file; none if there is no such file."""
    found: list[Entry] = json.loads(path.read_text())["entries"] if path.exists() else []
    return found


def groups(found: Sequence[Entry]) -> Iterator[tuple[str, int, str, dict[str, Entry]]]:
    """Model, ranks, phase and the entries by variant, for each that was run."""
    for model, ranks, phase in dict.fromkeys(key(entry)[:3] for entry in found):
        rows = {e["variant"]: e for e in found if key(e)[:3] == (model, ranks, phase)}
        yield model, ranks, phase, rows


def part(rows: dict[str, Entry], variant: str = MIXED) -> float | None:
    """A variant's throughput as a part of all-NCCL's; None if one of them has none."""
    mixed, baseline = rows.get(variant), rows.get(BASELINE)
    if not mixed or not baseline or mixed["error"] or baseline["error"] or not baseline["tokens_per_second_per_gpu"]:
        return None
    ratio: float = mixed["tokens_per_second_per_gpu"] / baseline["tokens_per_second_per_gpu"]
    return ratio


def difference(rows: dict[str, Entry]) -> float | None:
    """Largest relative difference of the losses of mixed and all-NCCL, step by step; None without both."""
    mixed, baseline = rows.get(MIXED), rows.get(BASELINE)
    if not mixed or not baseline or not mixed["losses"] or not baseline["losses"]:
        return None
    pairs = zip(mixed["losses"], baseline["losses"], strict=False)  # a job may end between the two
    return max(abs(a - b) / abs(b) if math.isfinite(a) and math.isfinite(b) else math.inf for a, b in pairs)


def markdown(found: Sequence[Entry], level: str = "##") -> str:
    """The tables of everything that was run."""
    if not found:
        return NOT_YET
    lines: list[str] = []
    for model, ranks, phase, rows in groups(found):
        first = next(iter(rows.values()))
        lines += ["", f"{level} {model}, {ranks} ranks: {_TITLES.get(phase, phase)}", "", *_about(first), ""]
        lines += _losses(rows) if phase == LOSS else _speeds(model, rows)
        lines += [f"\n`{name}` failed: {_cell(row['error'])}" for name, row in rows.items() if row["error"]]
    return "\n".join(lines).strip()


def _about(entry: Entry) -> list[str]:
    context, sequences, micro_batches = entry.get("batch") or (0, 0, 0)
    batch = f"{micro_batches} micro-batches of {sequences} x {context} tokens a replica and step. " if context else ""
    labels = "Islands are labels: a rehearsal. " if entry["rehearsal"] else ""
    exact = "Deterministic algorithms. " if entry["deterministic"] else ""
    return [
        f"{entry['ranks']} x {entry['device']}, two stages of {entry['ranks'] // 2} replicas, {entry['date']}. torch "
        f"{entry['torch']}, AdamW with state in {entry['state']}. {batch}{exact}{labels}".strip()
    ]


def _speeds(model: str, rows: dict[str, Entry]) -> list[str]:
    lines = [
        "| variant | what | layers | tokens/s/GPU | TFLOP/s/GPU | peak GiB | part of all-NCCL | paper |",
        "| --- | --- | --- | --: | --: | --: | --: | --: |",
    ]
    for name, row in rows.items():
        ratio = part(rows, name)
        slow = f", {row['slow'].replace(':', ' slowed down by ')}" if row.get("slow") else ""
        speed = f"{row['tokens_per_second_per_gpu']:,.0f}" if not row["error"] else "failed"
        tflops = f"{row['tflops_per_gpu']:.1f}" if not row["error"] else "failed"
        peak = f"{row['peak_memory_gib']:.1f}" if row["peak_memory_gib"] else "none"
        cells = [
            f"`{name}`", row.get("text", "did not begin") + slow, "/".join(map(str, row.get("layers", ()))) or "none",
            speed, tflops, peak, "no baseline" if ratio is None else f"{ratio:.3f}",
            f"{PAPER[model]:.3f}" if name == MIXED and model in PAPER else "no figure",
        ]  # fmt: skip
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def _losses(rows: dict[str, Entry]) -> list[str]:
    lines = ["| variant | iterations | first loss | last loss |", "| --- | --: | --: | --: |"]
    for name, row in rows.items():
        ends = [f"{row['losses'][end]:.4f}" for end in (0, -1)] if row["losses"] else ["none", "none"]
        lines.append(f"| `{name}` | {len(row['losses'])} | {' | '.join(ends)} |")
    largest = difference(rows)
    if largest is not None:
        lines += ["", f"Losses differ by at most {largest:.1e}, relative, in any iteration; HetCCL's bound is 7e-3."]
    return lines


def _cell(text: str) -> str:
    return text.replace("\n", " ").replace("|", "/")[:300]


def plot(path: Path, found: Sequence[Entry]) -> str:
    """Draw the loss curves of mixed and all-NCCL over each other; returns the path, or why there is no picture."""
    drawn = [(model, ranks, rows) for model, ranks, phase, rows in groups(found) if phase == LOSS]
    drawn = [each for each in drawn if difference(each[2]) is not None]
    if not drawn:
        return "none: no two losses to compare"
    if find_spec("matplotlib") is None:
        return "none: matplotlib is not installed; --draw makes it from paper.json elsewhere"
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6 * len(drawn), 6), layout="constrained")
    axes = figure.subplots(2, len(drawn), squeeze=False, sharex="col", height_ratios=(3, 1))
    for (model, ranks, rows), curves, below in zip(drawn, axes[0], axes[1], strict=True):
        for name, width, style in ((BASELINE, 3.0, "-"), (MIXED, 1.2, "--")):
            losses = rows[name]["losses"]
            curves.plot(range(1, len(losses) + 1), losses, style, linewidth=width, label=name)
        pairs = list(zip(rows[MIXED]["losses"], rows[BASELINE]["losses"], strict=False))
        apart = [abs(a - b) / abs(b) for a, b in pairs]
        below.plot(range(1, len(pairs) + 1), apart, linewidth=1, color="tab:red")
        below.set_ylim(0, 1.3 * max([LOSS_BOUND, *filter(math.isfinite, apart)]))
        below.axhline(LOSS_BOUND, linewidth=0.8, linestyle=":", color="black")
        label = " (rehearsal)" if rows[MIXED]["rehearsal"] else ""
        curves.set_title(f"{model}, {ranks} ranks{label}: at most {difference(rows):.1e} apart", fontsize=11)
        curves.set_ylabel("loss (nats per byte)")
        below.set(xlabel="iteration", ylabel="relative difference")
        curves.legend()
        curves.grid(alpha=0.3)
    figure.savefig(path, dpi=110)
    return str(path)


def write(out: Path, found: Sequence[Entry]) -> None:
    """Write paper.json, paper.md and paper.png."""
    out.mkdir(parents=True, exist_ok=True)
    (out / "paper.json").write_text(json.dumps({"entries": list(found)}, indent=1) + "\n")
    (out / "paper.md").write_text(f"# The paper's experiment: figures\n\n{markdown(found)}\n")
    print(f"plot: {plot(out / 'paper.png', found)}")


def page(root: Path) -> str:
    """The part of docs/paper.md that comes from the figures."""
    figures = root / "docs" / "figures"
    picture = "\n\n![losses of mixed and all-NCCL](figures/paper.png)" if (figures / "paper.png").exists() else ""
    return markdown(load(figures / "paper.json"), "###") + picture
