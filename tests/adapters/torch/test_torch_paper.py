"""`examples/paper.py`: its models, and losses that depend neither on the libraries nor on how the layers are divided."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.utils.flop_counter import FlopCounterMode
from torchjobs import Job, launch

sys.path.insert(0, str(Path(__file__).parents[3] / "examples"))

import paper
from joint import model as joint_model
from joint.balance import divide
from joint.links import COMMS, GroupPeers, add_up_on_host
from joint.model import Decoder
from joint.settings import Phase, Settings, Variant
from joint.shapes import SHAPES
from joint.stage import Optimizer
from joint.training import CLIP, Text, Training
from llama.config import Part

from xvcomm.errors import ArgumentError

SCRIPT = Path(__file__).parents[3] / "examples" / "paper.py"
CONTEXT, MICRO_BATCHES, STEPS = 16, 3, 20
TINY = ("tiny-llama", "tiny-qwen2")


def settings(model: str, *variants: Variant, **more: Any) -> Settings:
    """A job in which each variant begins anew."""
    phase = Phase("train", variants, 1, STEPS, 0, 60.0, CONTEXT, 1, MICRO_BATCHES, fresh=True)
    return Settings(model, (phase,), **{"lr": 1e-2, "warmup": 5, "dtype": "float32", "state": "float32", **more})


def trained(given: Settings) -> list[dict[str, Any]]:
    """The records of a job on this rank."""
    records: list[dict[str, Any]] = []
    training = Training(given, paper.place_of(given), records.append)
    training.run()
    training.close()
    return records


def losses(job: Job, given: Settings) -> dict[str, list[float]]:
    """Losses of each variant, which all ranks know."""
    answers = job.run(trained, given)
    found: list[dict[str, list[float]]] = []
    for records in answers:
        found.append({variant.name: [] for variant in given.phases[0].variants})
        for record in records:
            if record["event"] == "step":
                found[-1][record["variant"]].append(record["loss"])
    assert all(other == found[0] for other in found[1:])
    assert all(len(each) == STEPS for each in found[0].values())
    return found[0]


def trained_alone(given: Settings, replicas: int) -> list[float]:
    """Losses of the undivided model in this process, with all replicas' text."""
    phase, shape = given.phases[0], SHAPES[given.model]
    decoder = Decoder(shape, Part(0, shape.layers, embeds=True, predicts=True), CONTEXT)
    decoder.initialise(torch.device("cpu"), torch.float32, given.seed)
    rule = Optimizer(decoder.units(), torch.float32, given.lr, given.warmup)
    text = Text(phase, replicas, given.seed)
    found = []
    for number in range(1, STEPS + 1):
        total = 0.0
        decoder.zero_grad()
        for replica in range(replicas):
            for window in text.windows(number, replica):
                loss = decoder(window[:, :-1], window[:, 1:]) / (replicas * MICRO_BATCHES)
                loss.backward()
                total += loss.item()
        torch.nn.utils.clip_grad_norm_(decoder.parameters(), CLIP)
        rule.step(number)
        found.append(total)
    return found


@pytest.mark.parametrize(("name", "others"), [("tiny-llama", ["xvcomm"]), ("tiny-qwen2", ["xvcomm", "rails-1"])])
def test_losses_do_not_depend_on_the_libraries(four: Job, name: str, others: list[str]) -> None:
    found = losses(four, settings(name, *(Variant(comm, comm) for comm in ("nccl", *others))))
    assert all(found[comm] == found["nccl"] for comm in others)
    alone = trained_alone(settings(name), 2)
    assert found["nccl"] == pytest.approx(alone, rel=1e-5)
    assert alone[-1] < alone[0] - 0.3


def test_losses_in_bfloat16_are_within_noise(four: Job) -> None:
    given = settings("tiny-llama", Variant("gloo", "gloo"), Variant("xvcomm", "xvcomm"), dtype="bfloat16")
    found = losses(four, given)
    assert found["xvcomm"] == pytest.approx(found["gloo"], rel=7e-3)
    assert found["xvcomm"][-1] < found["xvcomm"][0] - 0.3


def test_losses_do_not_depend_on_the_division(four: Job) -> None:
    variants = [
        Variant(layers, "xvcomm", layers, slow) for layers, slow in (("even", ""), ("1,3", ""), ("3,1", "amd:2"))
    ]
    found = losses(four, settings("tiny-qwen2", *variants))
    assert found["1,3"] == pytest.approx(found["even"], rel=1e-5)
    assert found["3,1"] == pytest.approx(found["even"], rel=1e-5)


def test_layers_are_measured_and_divided(four: Job) -> None:
    given = settings("tiny-llama", Variant("balanced", "xvcomm", "balanced", "amd:300"))
    records = four.run(trained, replace(given, phases=(replace(given.phases[0], iterations=1),)))[0]
    said = next(record for record in records if record["event"] == "variant")
    (fast, _), (slow, head) = said["pace"]
    assert slow > fast > 0 and head > 0
    assert sum(said["layers"]) == 4 and said["layers"][0] > said["layers"][1] >= 1


def staged() -> tuple[list[float], list[float]]:
    """What a rank gets from the other one, alone and in a group, and a sum over both, all by way of host memory."""
    group = dist.new_group([0, 1], backend="gloo")
    peers = GroupPeers(group, group, [0, 1], staged=True)
    other, mine = 1 - peers.rank, torch.full((3,), float(peers.rank + 1))
    buffers = [torch.zeros(3) for _ in range(2)]
    if peers.rank == 0:
        peers.isend(mine, other, 7).wait()
    else:
        assert peers.irecv(buffers[0], other, 7).wait() is buffers[0]
    with peers.group():
        transfers = [peers.irecv(buffers[1], other, 8), peers.isend(mine, other, 8)]
    mine.zero_()  # a copy is on its way
    for transfer in transfers:
        transfer.wait()
    assert all(transfer.done() for transfer in transfers)
    total = torch.arange(5.0)
    add_up_on_host(total, group)
    dist.destroy_process_group(group)
    return [float(buffer[0]) for buffer in buffers], total.tolist()


def test_arrays_go_through_host_memory(pair: Job) -> None:
    assert pair.run(staged) == [([0.0, 2.0], [0.0, 2.0, 4.0, 6.0, 8.0]), ([1.0, 1.0], [0.0, 2.0, 4.0, 6.0, 8.0])]


def test_the_head_counts_as_layers() -> None:
    assert divide("balanced", 32, [(1.0, 2.4), (1.0, 2.4)]) == (17, 15)
    assert divide("balanced", 32, [(1.0, 2.4), (1.3, 2.4)]) == (19, 13)
    assert divide("even", 28, [(1.0, 9.0), (5.0, 9.0)]) == (14, 14)
    assert divide("12,16", 28, []) == (12, 16)


@pytest.mark.parametrize(("name", "published"), [("llama-8b", 8_030_261_248), ("qwen2-7b", 7_615_616_512)])
def test_models_have_the_published_sizes(name: str, published: int) -> None:
    shape = SHAPES[name]
    whole = Decoder(shape, Part(0, shape.layers, embeds=True, predicts=True), context=8)
    assert all(parameter.is_meta for parameter in whole.parameters())
    assert sum(parameter.numel() for parameter in whole.parameters()) == shape.parameters == published


def products(name: str, slow: float, checkpointing: bool) -> int:
    """Operations of all matrix products of a micro-batch, forward and backward, as torch counts them."""
    shape = SHAPES[name]
    decoder = Decoder(shape, Part(0, shape.layers, embeds=True, predicts=True), CONTEXT, checkpointing)
    decoder.initialise(torch.device("cpu"), torch.float32, 1)
    decoder.slow_down(slow)
    tokens = torch.zeros((1, CONTEXT), dtype=torch.int64)
    with FlopCounterMode(display=False) as counter:
        decoder(tokens, tokens).backward()
    counts = counter.get_flop_counts()["Global"]
    return sum(count for operation, count in counts.items() if str(operation) in ("aten.mm", "aten.addmm"))


@pytest.mark.parametrize("name", TINY)
def test_operations_are_those_of_the_formula(name: str) -> None:
    shape = SHAPES[name]
    attention = 6 * shape.layers * CONTEXT * shape.dim
    head_again = 2 * shape.vocabulary * shape.dim
    assert products(name, 1.0, checkpointing=False) == CONTEXT * (
        shape.flops_per_token(CONTEXT) - attention + head_again
    )


@pytest.mark.parametrize("checkpointing", [False, True])
def test_a_slow_island_computes_so_much_more(checkpointing: bool) -> None:
    shape = SHAPES["tiny-llama"]
    usual, slow = (products("tiny-llama", factor, checkpointing) for factor in (1.0, 1.5))
    passes = 4 if checkpointing else 3
    blocks = passes * 2 * CONTEXT * shape.layers * shape.block_matrices
    assert slow - usual == pytest.approx(0.5 * blocks, rel=0.01)


def test_pieces_of_logits_give_the_same_loss(monkeypatch: pytest.MonkeyPatch) -> None:
    shape = SHAPES["tiny-llama"]
    head = Decoder(shape, Part(0, 0, embeds=False, predicts=True), CONTEXT)
    head.initialise(torch.device("cpu"), torch.float32, 1)
    x, targets = torch.randn(2, CONTEXT, shape.dim), torch.randint(shape.vocabulary, (2, CONTEXT))
    found = []
    for tokens in (1024, 5):
        monkeypatch.setattr(joint_model, "LOSS_TOKENS", tokens)
        head.zero_grad()
        loss = head(x, targets)
        loss.backward()
        found.append([loss.detach(), *(parameter.grad.clone() for parameter in head.parameters())])
    for whole, pieces in zip(*found, strict=True):
        torch.testing.assert_close(whole, pieces)


def test_wrong_names_are_refused() -> None:
    for wrong in (
        lambda: Variant("v", "mpi"),
        lambda: Settings("llama-9b", ()),
        lambda: Settings("llama-8b", (), dtype="f8"),
    ):
        with pytest.raises(ArgumentError, match="use "):
            wrong()


def test_settings_survive_their_file() -> None:
    given = settings("tiny-llama", *(Variant(comm, comm, "1,3", "amd:2") for comm in COMMS), islands=())
    assert Settings.parse(given.text()) == given


def test_the_script_writes_all_fields(tmp_path: Path, python: str) -> None:
    out = tmp_path / "records.jsonl"
    options = (
        "--model", "tiny-qwen2", "--comm", "nccl,xvcomm", "--turns", "2", "--iterations", "2", "--context", "16",
        "--micro-batches", "2", "--layers", "1,3", "--out", str(out),
    )  # fmt: skip
    launch(python, "-m", "xvcomm", "run", "-n", "2", "--", str(SCRIPT), *options)
    header, *records = map(json.loads, out.read_text().splitlines())
    assert header["rehearsal"] and header["parameters"] == SHAPES["tiny-qwen2"].parameters
    assert (header["stages"], header["replicas"]) == (2, 1)
    steps = [record for record in records if record["event"] == "step"]
    assert [(s["variant"], s["turn"], s["warmup"]) for s in steps] == [
        ("nccl", 0, True), ("nccl", 0, False), ("nccl", 0, False), ("xvcomm", 0, True), ("xvcomm", 0, False),
        ("xvcomm", 0, False), ("nccl", 1, False), ("nccl", 1, False), ("xvcomm", 1, False), ("xvcomm", 1, False),
    ]  # fmt: skip
    assert [step["step"] for step in steps] == list(range(1, 11))
    for step in steps:
        assert step["tokens_per_second_per_gpu"] == pytest.approx(2 * 16 / step["seconds"] / 2)
        flops = step["tokens_per_second_per_gpu"] * SHAPES["tiny-qwen2"].flops_per_token(16)
        assert step["tflops_per_gpu"] == pytest.approx(flops / 1e12)
        assert step["loss"] > 0 and step["peak_memory_gib"] > 0
    said = {record["variant"]: record for record in records if record["event"] == "variant"}
    assert said["xvcomm"]["backends"] == ["xvcomm", "xvcomm: shared memory"] and said["nccl"]["layers"] == [1, 3]
    assert records[-1] == {"event": "end"}
