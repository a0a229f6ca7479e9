"""The experiment of "Joint Training on AMD and NVIDIA GPUs": LLaMA-8B and Qwen2-7B, a pipeline over two islands.

    python benchmarks/paper.py --out docs/figures --models llama-8b --phases speed,balance --budget 560
    python benchmarks/paper.py --out docs/figures --models llama-8b --phases loss --budget 560
    python benchmarks/paper.py --draw                                   # tables and curves again, of paper.json

Phases: `speed` has the libraries in turns in one job; `balance` one island slowed down, with even layers and with layers by
measured speed; `loss` 500 iterations of a smaller batch, mixed and all-NCCL. The ranks run `examples/paper.py`. A variant that
fails, or gives no sign for `--patience` seconds, is recorded with its error, and a new job goes on with the others. Nothing runs
longer than `--budget`; a plan with estimates is printed first. Writes paper.json, paper.md and paper.png; what is not measured
in this run keeps its entries. Exits with code 1 if a variant failed or was not run, or a bar is not met.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import paper_report as report
import psutil
from host import Bar

sys.path.append(str(Path(__file__).resolve().parents[1] / "examples"))

from joint.links import COMMS
from joint.settings import Phase, Settings, Variant
from joint.shapes import SHAPES

RANK = Path(__file__).resolve().parents[1] / "examples" / "paper.py"
START_SECONDS = 40.0
"""What a job takes before its first iteration, roughly."""
END_SECONDS = 12.0
"""What remains of the budget for the end of a job and the report."""
OVER = "the budget is over"
EVERY = 50
"""Of the iterations of the loss curves one of so many is printed."""
FLOPS, BYTES = 400e12, 1.2e9
"""For estimates: what a GPU computes in a second, and what Gloo carries."""


def phases(args: argparse.Namespace) -> dict[str, Phase]:
    """What is compared, by name."""
    usual = {
        "turns": args.turns, "iterations": args.iterations, "seconds": args.seconds, "context": args.context,
        "micro_batches": args.micro_batches,
    }  # fmt: skip
    comms = ("nccl", "xvcomm", "rails-1", "rails-4", "staged", "gloo")
    return {
        report.SPEED: Phase(report.SPEED, tuple(Variant(comm, comm, args.layers) for comm in comms), **usual),
        report.BALANCE: Phase(
            report.BALANCE,
            (
                Variant("nccl", "nccl", "even", args.slow), Variant("even", "xvcomm", "even", args.slow),
                Variant("balanced", "xvcomm", "balanced", args.slow),
            ),
            **{**usual, "turns": 1},
        ),
        report.LOSS: Phase(
            report.LOSS, tuple(Variant(comm, comm) for comm in (report.BASELINE, report.MIXED)), turns=1,
            iterations=args.loss_iterations, warmup=0, seconds=args.loss_seconds, context=args.loss_context,
            micro_batches=4, fresh=True,
        ),
    }  # fmt: skip


def jobs(args: argparse.Namespace) -> list[Settings]:
    """One for each model and phase, but speed and balance are one job."""
    known, wanted = phases(args), args.phases.split(",")
    parts = [[name for name in wanted if name != report.LOSS], [name for name in wanted if name == report.LOSS]]
    return [
        Settings(
            model, tuple(known[name] for name in names), tuple(filter(None, args.islands.split(","))),
            dtype=args.dtype, state=args.loss_state if report.LOSS in names else args.state,
            checkpointing=report.LOSS not in names, deterministic=report.LOSS in names,
        )
        for model in args.models.split(",") for names in parts if names
    ]  # fmt: skip


def estimate(settings: Settings, phase: Phase, variant: Variant, ranks: int) -> float:
    """Seconds of all iterations of a variant, roughly."""
    shape, comm = SHAPES[settings.model], variant.comm
    tokens, replicas = phase.micro_batches * phase.sequences * phase.context, ranks // 2
    again = 4 / 3 if settings.checkpointing else 1
    bubble = (phase.micro_batches + 1) / phase.micro_batches
    step = tokens * replicas * shape.flops_per_token(phase.context) * again * bubble / ranks / FLOPS + 0.1
    if comm in ("gloo", "staged"):
        step += 4 * tokens * shape.dim / BYTES
    if comm == "gloo" and replicas > 1:
        step += 2 * shape.parameters / BYTES
    return min(phase.seconds, step * (phase.turns * phase.iterations + phase.warmup))


def plan(todo: Sequence[Settings], ranks: int, budget: float) -> Iterator[str]:
    """The lines of the plan."""
    total = 0.0
    for settings in todo:
        total += START_SECONDS
        yield f"{settings.model}: start {START_SECONDS:.0f} s"
        for phase in settings.phases:
            times = {variant.name: estimate(settings, phase, variant, ranks) for variant in phase.variants}
            total += sum(times.values())
            yield f"  {phase.name}: " + ", ".join(f"{name} {seconds:.0f} s" for name, seconds in times.items())
    yield f"in all about {total:.0f} s of {budget:.0f} s" + ("; what does not fit is cut" if total > budget else "")


class Run:
    """A job while it runs, and what is known of it.

    Attributes:
        records: all of its lines.
        failed: variants that ended it, with the reason.
        left_out: variants for which no time was left.
    """

    def __init__(self, ranks: int, device: str, patience: float, begun: float, deadline: float) -> None:
        """Prepare to run.

        Args:
            ranks: number of ranks.
            device: their XVCOMM_DEVICE.
            patience: seconds without a record after which a job has failed.
            begun: when the program began, from which the printed seconds count.
            deadline: when everything must have ended; both as `time.monotonic` has it.
        """
        self._ranks, self._device, self._patience = ranks, device, patience
        self._begun, self._deadline = begun, deadline
        self.records: list[dict[str, Any]] = []
        self.failed: list[report.Entry] = []
        self.left_out: list[str] = []

    def complete(self, settings: Settings) -> None:
        """Run a job, and again without a variant that ended it, until all is done or the time is over."""
        todo = [(phase.name, variant) for phase in settings.phases for variant in phase.variants]
        while settings.phases and (left := self._deadline - time.monotonic()) > END_SECONDS:
            first = len(self.records)
            reason = self._once(replace(settings, budget=max(5.0, left - END_SECONDS - START_SECONDS / 2)))
            began = [record for record in self.records[first:] if record["event"] == "begin"]
            if not reason or reason == OVER:
                break
            phase, name = (began[-1]["phase"], began[-1]["variant"]) if began else (todo[0][0], todo[0][1].name)
            self._lost(*next((p, variant) for p, variant in todo if (p, variant.name) == (phase, name)), reason)
            if not began:
                break
            settings = remaining(settings, began)
        here = {(record["phase"], record["variant"]) for record in self.records if record["event"] == "step"}
        here |= {(entry["phase"], entry["variant"]) for entry in self.failed}
        self.left_out += [f"{phase}/{variant.name}" for phase, variant in todo if (phase, variant.name) not in here]
        for name in self.left_out:
            self._say(f"{name} was not run")

    def _lost(self, phase: str, variant: Variant, reason: str) -> None:
        self._say(f"{phase}/{variant.name} failed: {reason}")
        self.failed.append(
            {"phase": phase, "variant": variant.name, "slow": variant.slow, "text": COMMS[variant.comm].text,
             "error": reason}
        )  # fmt: skip

    def _once(self, settings: Settings) -> str:
        """Run one job to its end; returns why it failed, or nothing."""
        with tempfile.TemporaryDirectory() as name:
            file, lines, log = (Path(name) / part for part in ("settings.json", "records.jsonl", "log"))
            file.write_text(settings.text())
            lines.touch()
            launcher = (sys.executable, "-P", "-m", "xvcomm", "run", "-n", str(self._ranks), "--")
            argv = (*launcher, str(RANK), "--settings", str(file), "--out", str(lines))
            env = {**os.environ, "XVCOMM_DEVICE": self._device}
            with log.open("wb") as output, lines.open() as records:
                process = subprocess.Popen(argv, stdout=output, stderr=subprocess.STDOUT, env=env)
                try:
                    why = self._follow(process, records)
                finally:
                    stop(process)
            errors = [record for record in self.records if record["event"] == "error"]
            self.records = [record for record in self.records if record["event"] != "error"]
            if why == "" and process.returncode == 0:
                return ""
            tail = log.read_text(errors="replace").strip().splitlines()[-15:]
            print("\n".join(tail), flush=True)
            return why or (errors[0]["error"] if errors else f"exit code {process.returncode}: {' / '.join(tail[-3:])}")

    def _follow(self, process: subprocess.Popen[bytes], lines: Any) -> str:
        """Read records until the job ends; returns why it has to be stopped, or nothing."""
        heard, rest = time.monotonic(), ""
        while True:
            ended = process.poll() is not None
            rest += lines.read()
            *complete, rest = rest.split("\n")
            for line in complete:
                heard = time.monotonic()
                self._take(json.loads(line))
            if ended:
                return ""
            if time.monotonic() > self._deadline - END_SECONDS / 2:
                return OVER
            if time.monotonic() - heard > self._patience:
                return f"no sign for {self._patience:.0f} s"
            time.sleep(0.1)

    def _take(self, record: dict[str, Any]) -> None:
        self.records.append(record)
        if record["event"] == "begin":
            self._say(f"{record['phase']}/{record['variant']}, turn {record['turn'] + 1}")
        elif record["event"] == "step" and (record["phase"] != report.LOSS or record["step"] % EVERY in (0, 1)):
            self._say(
                f"  step {record['step']}{' (warm-up)' if record['warmup'] else ''}: {record['seconds']:.2f} s, "
                f"{record['tokens_per_second_per_gpu']:,.0f} tokens/s/GPU, {record['tflops_per_gpu']:.1f} TFLOP/s/GPU, "
                f"loss {record['loss']:.4f}, {record['peak_memory_gib']:.1f} GiB"
            )

    def _say(self, text: str) -> None:
        print(f"[{time.monotonic() - self._begun:5.0f} s] {text}", flush=True)


def remaining(settings: Settings, began: Sequence[dict[str, Any]]) -> Settings:
    """What is left of a job after the last variant that began ended it."""
    last = began[-1]
    names = [phase.name for phase in settings.phases]
    left = settings.phases[names.index(last["phase"]) :]
    gone = {last["variant"]}
    if left[0].fresh:
        gone |= {record["variant"] for record in began if record["phase"] == last["phase"]}
    first = replace(left[0].without(gone), turns=max(1, left[0].turns - last["turn"]))
    return replace(settings, phases=tuple(phase for phase in (first, *left[1:]) if phase.variants))


def stop(process: subprocess.Popen[bytes]) -> None:
    """End a job; its launcher ends the ranks, which do not survive it."""
    if process.poll() is None:
        process.terminate()
        try:
            process.wait(END_SECONDS / 2)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def common(settings: Settings, ranks: int) -> report.Entry:
    """What all entries of a job have."""
    return {
        "model": settings.model, "parameters": SHAPES[settings.model].parameters, "ranks": ranks, "state": settings.state,
        "deterministic": settings.deterministic, "rehearsal": bool(settings.islands),
        "date": f"{datetime.now(UTC):%Y-%m-%d}",
    }  # fmt: skip


def bars(found: Sequence[report.Entry]) -> list[Bar]:
    """The paper's throughput and HetCCL's bound, for what has both sides."""
    judged = []
    for model, ranks, phase, rows in report.groups(found):
        ratio, apart = report.part(rows), report.difference(rows)
        if phase == report.SPEED and ratio is not None and model in report.PAPER:
            judged.append(Bar(f"{model}, {ranks} ranks, part of all-NCCL's throughput", ratio, report.PAPER[model]))
        if phase == report.LOSS and apart is not None:
            judged.append(Bar(f"{model}, {ranks} ranks, losses apart", apart, report.LOSS_BOUND, most=True))
    return judged


def arguments() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("docs/figures"), help="folder for the three files")
    parser.add_argument("--earlier", type=Path, help="paper.json whose entries are kept; left out: that in --out")
    parser.add_argument("--draw", action="store_true", help="run nothing")
    parser.add_argument("--models", default="llama-8b,qwen2-7b")
    parser.add_argument("--phases", default=f"{report.SPEED},{report.BALANCE},{report.LOSS}")
    parser.add_argument("--ranks", type=int, default=0, help="left out: all GPUs")
    parser.add_argument("--device", default="", help="host: no GPUs")
    parser.add_argument("--budget", type=float, default=560.0, help="seconds for everything")
    parser.add_argument("--seconds", type=float, default=90.0, help="for the iterations of a variant")
    parser.add_argument("--iterations", type=int, default=2, help="in a turn")
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--patience", type=float, default=150.0)
    parser.add_argument("--context", type=int, default=4096)
    parser.add_argument("--micro-batches", type=int, default=16)
    parser.add_argument("--loss-iterations", type=int, default=500)
    parser.add_argument("--loss-seconds", type=float, default=200.0)
    parser.add_argument("--loss-context", type=int, default=256)
    parser.add_argument("--layers", default="balanced", help="of the stages in speed; see examples/paper.py")
    parser.add_argument("--slow", default="amd:1.2", help="in balance")
    parser.add_argument("--islands", default="nvidia,amd", help="labels; empty: what xvcomm finds")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--state", default="bfloat16", help="of the optimizer in speed and balance")
    parser.add_argument("--loss-state", default="float32", help="of the optimizer in loss")
    return parser.parse_args()


def main() -> int:
    """Run what is asked for, and write the report."""
    args = arguments()
    found = report.load(args.earlier or args.out / "paper.json")
    new: list[report.Entry] = []
    left_out: list[str] = []
    if not args.draw:
        from torch.cuda import device_count

        signal.signal(
            signal.SIGTERM, lambda number, frame: sys.exit(128 + number)
        )  # ends the ranks, and writes the report
        begun = time.monotonic() - (time.time() - psutil.Process().create_time())
        ranks = args.ranks or device_count()
        if ranks < 2 or ranks % 2:
            sys.exit(f"this takes an even number of GPUs, not {ranks}; or --device host --ranks 4")
        todo = jobs(args)
        print("\n".join(plan(todo, ranks, args.budget)), flush=True)
        for settings in todo:
            run = Run(
                ranks, args.device or os.environ.get("XVCOMM_DEVICE", ""), args.patience, begun, begun + args.budget
            )
            try:
                run.complete(settings)
            finally:
                made = report.entries(run.records, run.failed, common(settings, ranks))
                new, left_out = new + made, left_out + run.left_out
                found = report.merged(found, made)
                report.write(args.out, found)
    else:
        report.write(args.out, found)
    judged = bars(new or found)
    for bar in judged:
        print("{3:>8}: {0}: {2} ({1})".format(*bar.cells()))
    return 1 if left_out or any(entry["error"] for entry in new) or not all(bar.met for bar in judged) else 0


if __name__ == "__main__":
    sys.exit(main())
