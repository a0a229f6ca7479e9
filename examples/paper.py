"""Trains LLaMA-8B or Qwen2-7B as a pipeline of two stages, one an island, with a choice of communication libraries.

    xvcomm run -n 8 -- examples/paper.py --model llama-8b --comm nccl,xvcomm --turns 3
    torchrun --nproc-per-node 4 examples/paper.py --model qwen2-7b --layers balanced --slow amd:1.2
    xvcomm run -n 4 -- examples/paper.py --model tiny-llama --context 64 --micro-batches 4          # without GPUs

The first half of the ranks is stage 0, the second half stage 1 (1F1B); inside a stage the ranks are replicas. The islands are
labels, a rehearsal; with `--islands ""` they are what xvcomm finds, one for each stage. Several libraries take turns in one
job. `--slow ISLAND:FACTOR` lets the layers of an island do FACTOR times their arithmetic, in matrix products of no use.

Each line of `--out` is JSON. A step has its loss, its seconds on the slowest rank, tokens a second and TFLOP/s of a GPU, and the
largest peak of memory. FLOP are those of the model, for each token 6 x the elements of its matrices + 6 x layers x context x
width; layers that are computed again do not count. `joint/shapes.py` has the memory that a rank needs.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path
from typing import Any

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # cuBLAS reads it when it loads, for `--deterministic`

import torch
import torch.distributed as dist
from joint.links import COMMS, PATIENCE, Place
from joint.settings import Phase, Settings, Variant
from joint.shapes import SHAPES
from joint.training import Training, failure

from xvcomm.errors import ArgumentError

STAGES = 2


def arguments() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=SHAPES, default="tiny-llama")
    parser.add_argument("--comm", default="xvcomm", help=f"one or several with commas between, of {', '.join(COMMS)}")
    parser.add_argument("--layers", default="even", help="of the stages: even, balanced by measured speeds, or 15,17")
    parser.add_argument("--slow", default="", metavar="ISLAND:FACTOR")
    parser.add_argument("--islands", default="nvidia,amd", help="labels of the stages' islands; empty: none")
    for name, default in {"turns": 1, "iterations": 4, "context": 4096, "sequences": 1, "micro-batches": 16}.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--seconds", type=float, default=600.0, help="of a library, after which its turns end")
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    parser.add_argument("--state", choices=("bfloat16", "float32"), default="bfloat16", help="of the optimizer")
    parser.add_argument("--no-checkpointing", action="store_true", help="keep all activations for backward")
    parser.add_argument("--deterministic", action="store_true", help="use torch's deterministic algorithms")
    parser.add_argument("--fresh", action="store_true", help="let each library begin with the initial parameters")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--out", type=Path, default=Path("runs/paper.jsonl"))
    parser.add_argument("--settings", type=Path, help="file with all of it but --out, as benchmarks/paper.py writes it")
    return parser.parse_args()


def settings_of(args: argparse.Namespace) -> Settings:
    """The settings of the command line."""
    if args.settings is not None:
        return Settings.parse(args.settings.read_text())
    variants = tuple(Variant(comm, comm, args.layers, args.slow) for comm in args.comm.split(","))
    phase = Phase(
        "train", variants, args.turns, args.iterations, 1, args.seconds, args.context, args.sequences,
        args.micro_batches, args.fresh,
    )  # fmt: skip
    islands = tuple(filter(None, args.islands.split(",")))
    return Settings(
        args.model, (phase,), islands, args.dtype, args.state, not args.no_checkpointing, args.deterministic,
        seed=args.seed,
    )  # fmt: skip


def place_of(settings: Settings) -> Place:
    """Where this rank is, and on which device.

    Raises:
        ArgumentError: the ranks do not fill two stages.
    """
    size, rank = dist.get_world_size(), dist.get_rank()
    if size % STAGES:
        raise ArgumentError(f"{size} ranks do not fill {STAGES} stages; start an even number")
    if settings.islands and len(settings.islands) != STAGES:
        raise ArgumentError(f"--islands {','.join(settings.islands)}: name {STAGES}, one for each stage")
    device = torch.device("cpu")
    if torch.cuda.is_available() and os.environ.get("XVCOMM_DEVICE") != "host":
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", rank)))
        torch.cuda.set_device(device)
    stage, replica = divmod(rank, size // STAGES)
    control = dist.new_group(timeout=PATIENCE, backend="gloo")
    return Place(stage, replica, STAGES, size // STAGES, settings.islands or None, device, control)


def main() -> None:
    """Train on this rank; the first rank writes the records, and each one its error."""
    args = arguments()
    settings = settings_of(args)
    if settings.deterministic:
        torch.use_deterministic_algorithms(True, warn_only=True)
        torch.utils.deterministic.fill_uninitialized_memory = False
    dist.init_process_group("gloo", timeout=PATIENCE)
    rank, training = dist.get_rank(), None
    args.out.parent.mkdir(parents=True, exist_ok=True)
    with args.out.open("a", encoding="utf-8") as file:

        def write(record: dict[str, Any]) -> None:
            file.write(json.dumps(record) + "\n")
            file.flush()

        try:
            training = Training(settings, place_of(settings), write if rank == 0 else lambda record: None)
            training.run()
            training.close()
        except BaseException as error:
            write(failure(training, rank, error))
            raise
    dist.destroy_process_group()


if __name__ == "__main__":
    sys.exit(main())
