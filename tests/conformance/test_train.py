"""The trainer on real ranks: three launchers, all frameworks, schedules and layouts, with the loss of one process."""

from __future__ import annotations

import contextlib
import json
import os
import runpy
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from xvcomm.testing import World

TRAIN = str(Path(__file__).parents[2] / "examples" / "train.py")
ENV = {k: v for k, v in os.environ.items() if not k.startswith(("XVCOMM_", "OMPI_"))} | {"COLUMNS": "120"}
STEPS = 5
SMALL = (
    *("--layers", "4", "--dim", "16", "--heads", "4", "--kv-heads", "2", "--hidden", "24", "--context", "16"),
    *("--sequences", "1", "--steps", str(STEPS)),
)
BIN = Path(sys.executable).parent
BORDER = "cuda:2,rocm:2"
pytestmark = pytest.mark.usefixtures("python")
PAIR = ("--islands", "cuda:1,rocm:1", "--micro-batches", "8")


def run(*command: str, timeout: float = 90) -> tuple[int, str]:
    """Exit code and output of a command in a session of its own, which is killed if it hangs."""
    process = subprocess.Popen(
        command, env=ENV, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True
    )
    try:
        out, _ = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGTERM)
        try:
            out, _ = process.communicate(timeout=10)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            out, _ = process.communicate()
        pytest.fail(f"{' '.join(command)} hangs:\n{out}")
    return process.returncode, out


Begin = Callable[..., tuple[int, str]]


def command_on_rank(comm: object, *arguments: str) -> tuple[int, str]:
    """Exit code and output of the trainer's command in a rank of a `World`; it joins its job once more by itself."""
    folder = str(Path(TRAIN).parent)
    if folder not in sys.path:
        sys.path.insert(0, folder)
    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
    app.command()(runpy.run_path(TRAIN)["main"])
    done = CliRunner().invoke(app, arguments, env={"COLUMNS": "120"})
    if done.exception is not None and not isinstance(done.exception, SystemExit):
        raise done.exception
    return done.exit_code, done.output


def launched(labels: str, *arguments: str) -> tuple[str, ...]:
    return (os.environ["TEST_PYTHON"], "-m", "xvcomm", "run", "--islands", labels, "--", TRAIN, *SMALL, *arguments)


def read(folder: Path) -> tuple[dict, list[dict], dict]:
    """Header, steps and check of a log."""
    header, *steps, check = map(json.loads, (folder / "log.jsonl").read_text().splitlines())
    return header, steps, check["check"]


def train(folder: Path, *command: str, begin: Begin = run) -> tuple[dict, list[float]]:
    """Run with `--check`; returns the header and the losses."""
    code, out = begin(*command, "--check", "--out", str(folder))
    assert code == 0, out
    assert "same loss as one process" in out
    header, steps, check = read(folder)
    assert check["passed"] and check["worst_relative_difference"] <= 1e-5
    assert [step["step"] for step in steps] == list(range(1, STEPS + 1))
    return header, [step["loss"] for step in steps]


@contextlib.contextmanager
def ranks(islands: str | None) -> Iterator[Begin]:
    """Calls the trainer's command on ranks that stay; gives its exit code and output on the first of them."""
    with World(islands=islands, env={"XVCOMM_DEVICE": "host"}, preload=["typer.testing", "matplotlib.figure"]) as world:

        def begin(*arguments: str) -> tuple[int, str]:
            done = world.run(command_on_rank, *arguments, timeout=90)
            assert len({code for code, _ in done}) == 1, done
            return done[0]

        yield begin


@pytest.fixture(scope="module")
def four() -> Iterator[Begin]:
    """Two islands of two ranks, which the tests of schedules and layouts share: launchers have tests of their own."""
    with ranks(BORDER) as begin:
        yield begin


@pytest.fixture(scope="module")
def one() -> Iterator[Begin]:
    """A job of one rank, without labels."""
    with ranks(None) as begin:
        yield begin


@pytest.fixture(scope="module")
def alone(one: Begin, tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    """Losses of one numpy process with as many sequences per step as two replicas of four micro-batches."""
    return train(tmp_path_factory.mktemp("alone"), *SMALL, "--micro-batches", "8", begin=one)[1]


def assert_like(losses: list[float], alone: list[float]) -> None:
    assert losses == pytest.approx(alone, rel=1e-4)


def test_xvcomm_run(tmp_path: Path, alone: list[float]) -> None:
    header, losses = train(tmp_path, *launched(BORDER))
    assert_like(losses, alone)
    assert losses[-1] < losses[0]
    assert header["rehearsal"] is True
    assert header["ranks"] == ["cuda", "cuda", "rocm", "rocm"]
    assert header["stages"] == [[0, 1], [2, 3]]
    assert (header["pp"], header["dp"], header["layers_per_stage"]) == (2, 2, [2, 2])
    _, steps, _ = read(tmp_path)
    assert all(step["tokens_per_s"] > 0 and step["seconds"] > 0 for step in steps)
    assert (tmp_path / "loss.png").read_bytes().startswith(b"\x89PNG")


def test_torchrun(tmp_path: Path, alone: list[float]) -> None:
    pytest.importorskip("torch")
    torchrun = (os.environ["TEST_PYTHON"], "-m", "torch.distributed.run", "--nproc-per-node", "2")
    header, losses = train(tmp_path, *torchrun, TRAIN, *SMALL, *PAIR)
    assert_like(losses, alone)
    assert header["rehearsal"] is True
    assert header["stages"] == [[0], [1]]


@pytest.mark.skipif(not (BIN / "mpirun").exists(), reason="mpirun is not installed beside this Python")
def test_mpirun(tmp_path: Path, alone: list[float]) -> None:
    pytest.importorskip("mpi4py")
    mpirun = (str(BIN / "mpirun"), "--allow-run-as-root", "--oversubscribe", "-n", "2")
    header, losses = train(tmp_path, *mpirun, sys.executable, TRAIN, *SMALL, *PAIR)
    assert_like(losses, alone)
    assert header["stages"] == [[0], [1]]


@pytest.mark.parametrize(
    "names", [pytest.param("torch", marks=pytest.mark.slow), pytest.param("jax", marks=pytest.mark.slow), "torch,jax"]
)
def test_frameworks_across_the_border(tmp_path: Path, alone: list[float], names: str) -> None:
    for name in names.split(","):
        pytest.importorskip(name)
    header, losses = train(tmp_path, *launched("cuda:1,rocm:1", "--framework", names, "--micro-batches", "8"))
    assert_like(losses, alone)
    assert header["framework"] == names.split(",")


@pytest.mark.slow
@pytest.mark.parametrize("names", ["jax,numpy", "torch,jax"])
@pytest.mark.parametrize("layout", [("--pp", "2"), ("--dp", "4", "--micro-batches", "2")])
def test_frameworks_mixed_on_four_ranks(
    tmp_path: Path, alone: list[float], names: str, layout: tuple[str, ...]
) -> None:
    for name in names.split(","):
        pytest.importorskip(name)
    assert_like(train(tmp_path, *launched(BORDER, "--framework", names, *layout))[1], alone)


@pytest.mark.parametrize("schedule", ["gpipe", "interleaved", "zero-bubble"])
def test_schedules(four: Begin, tmp_path: Path, alone: list[float], schedule: str) -> None:
    header, losses = train(tmp_path, *SMALL, "--schedule", schedule, begin=four)
    assert_like(losses, alone)
    assert header["schedule"] == schedule
    assert header["layers_per_stage"] == ([1, 1, 1, 1] if schedule == "interleaved" else [2, 2])


@pytest.mark.slow
@pytest.mark.parametrize("name", ["torch", "jax"])
@pytest.mark.parametrize("schedule", ["interleaved", "zero-bubble"])
def test_schedules_of_frameworks(tmp_path: Path, alone: list[float], schedule: str, name: str) -> None:
    pytest.importorskip(name)
    command = launched("cuda:1,rocm:1", "--schedule", schedule, "--framework", name, "--micro-batches", "8")
    assert_like(train(tmp_path, *command)[1], alone)


@pytest.mark.parametrize(
    ("islands", "arguments", "stages"),
    [
        (BORDER, ("--pp", "4", "--micro-batches", "8"), [[0], [1], [2], [3]]),
        (BORDER, ("--dp", "4", "--micro-batches", "2"), [[0, 1, 2, 3]]),
        ("cuda:1,rocm:1,cuda:1,rocm:1", ("--layers-per-stage", "3,1"), [[0, 2], [1, 3]]),
        pytest.param("cuda:1,rocm:3", ("--pp", "2"), [[0, 1], [2, 3]], marks=pytest.mark.slow),
        pytest.param("cuda:1,rocm:1,host:2", ("--pp", "2"), [[0, 1], [2, 3]], marks=pytest.mark.slow),
        pytest.param("cuda:1,rocm:1,host:1", ("--micro-batches", "8"), [[0], [1], [2]], marks=pytest.mark.slow),
    ],
)
def test_layouts(
    four: Begin, tmp_path: Path, alone: list[float], islands: str, arguments: tuple[str, ...], stages: list[list[int]]
) -> None:
    with contextlib.nullcontext(four) if islands == BORDER else ranks(islands) as begin:
        header, losses = train(tmp_path, *SMALL, *arguments, begin=begin)
    assert_like(losses, alone)
    assert header["stages"] == stages


def test_one_process_without_labels_is_no_rehearsal(one: Begin, tmp_path: Path) -> None:
    header, _ = train(tmp_path, *SMALL, begin=one)
    assert header["rehearsal"] is False


def test_a_failed_check_fails_the_run(tmp_path: Path) -> None:
    script = tmp_path / "strict.py"
    script.write_text(
        f"import sys; sys.path.insert(0, {str(Path(TRAIN).parent)!r})\n"
        "import train, typer\n"
        "train.TOLERANCE = -1.0\n"
        "typer.run(train.main)\n"
    )
    code, out = run(os.environ["TEST_PYTHON"], str(script), *SMALL, "--check", "--out", str(tmp_path))
    assert code == 1
    assert "NOT the loss of one process" in out
    assert read(tmp_path)[2]["passed"] is False


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--pp", "2", "--dp", "1"), "2 stages x 1 replicas need 2 ranks, the job has 1"),
        (("--layers", "4", "--layers-per-stage", "1,2"), "expected 1 positive numbers with sum 4"),
        (("--layers", "1", "--schedule", "interleaved"), "1 layers cannot fill 2 pipeline stages"),
        (("--heads", "3"), "multiple of heads"),
        (("--framework", "caffe"), "unknown framework 'caffe'; use one of numpy, torch, jax"),
        (("--framework", "numpy,torch"), "expected one, or one for each of 1 islands"),
        (("--islands", BORDER), "labels 4 ranks, the job has 1"),
    ],
)
def test_invalid_settings_are_rejected(one: Begin, tmp_path: Path, arguments: tuple[str, ...], words: str) -> None:
    code, out = one(*SMALL, *arguments, "--out", str(tmp_path))
    assert code == 1
    assert words in " ".join(out.split())


KILLED, AWAY, ELASTIC_STEPS = 4, 3, 16
"""Step in which rank 1 dies; how many steps the others take without it; all steps."""

DISTURBED = f"""
import os, signal, sys, time
sys.path.insert(0, {str(Path(TRAIN).parent)!r})
import train, typer
from llama import elastic
from xvcomm.errors import PeerLost

def step(self, real=elastic.Elastic._step):
    if not os.environ.get("XVCOMM_REJOIN") and self.comm.job_ranks[self.comm.rank] == 1 and self.progress.step == {KILLED}:
        os.kill(os.getpid(), signal.SIGKILL)
    real(self)

def awaited(self, real=elastic.Elastic._awaited):
    if self.comm.size == 4:
        return real(self)
    if self.progress.step < {KILLED + AWAY}:
        return False
    while not real(self):
        time.sleep(0.02)
    return True

elastic.Elastic._step, elastic.Elastic._awaited = step, awaited
typer.run(train.main)
"""


def elastic(folder: Path, begin: Begin, *command: str) -> list[dict]:
    """The steps of an elastic run on four ranks."""
    sizes = *SMALL[:-1], str(ELASTIC_STEPS), "--micro-batches", "2"
    code, out = begin(*command, *sizes, "--elastic", "--out", str(folder))
    assert code == 0, out
    header, *steps = map(json.loads, (folder / "log.jsonl").read_text().splitlines())
    assert header["dp"] == 4
    return steps


REFERENCE = f"""
import json, sys
sys.path.insert(0, {str(Path(TRAIN).parent)!r})
import numpy as np
from llama.config import AdamW, Model, Part
from llama.data import Batches, corpus
from llama.numpy_stage import NumpyPart
from llama.stage import Stage
ranks = json.loads(sys.argv[1])
model = Model(4, 16, 4, 2, 24, 16)
part, batches = NumpyPart(model, Part(0, 4, True, True), 0, AdamW(1e-3)), Batches(corpus(), 8, 16, 0)
for step, there in enumerate(ranks, 1):
    windows = np.concatenate([batches.step(step).reshape(4, 2, 1, -1)[rank] for rank in there])
    stage = Stage(part, model, len(windows), 1)
    stage.begin(windows)
    losses = []
    for i in range(len(windows)):
        losses.append(float(stage.forward(None, i)))
        stage.backward(None, i)
    stage.update(step)
    print(sum(losses) / len(losses))
"""


def test_elastic(tmp_path: Path) -> None:
    """A rank that is killed costs its samples and nothing else, until it is back."""
    script = tmp_path / "disturbed.py"
    script.write_text(DISTURBED)
    launcher = sys.executable, "-m", "xvcomm", "run", "-n", "4", "--survive", "--max-restarts", "1", "--"
    disturbed = elastic(tmp_path / "disturbed", run, *launcher, str(script))
    with ranks("host:4") as begin:
        usual = elastic(tmp_path / "usual", begin)
    there = [step["ranks"] for step in disturbed]
    assert there == [
        [0, 1, 2, 3] if not KILLED <= i < KILLED + AWAY else [0, 2, 3] for i in range(1, ELASTIC_STEPS + 1)
    ]
    code, out = run(sys.executable, "-c", REFERENCE, json.dumps(there))
    assert code == 0, out
    losses, undisturbed = [step["loss"] for step in disturbed], [step["loss"] for step in usual]
    assert losses == pytest.approx([float(line) for line in out.split()], rel=1e-4)
    assert losses[: KILLED - 1] == pytest.approx(undisturbed[: KILLED - 1], rel=1e-6)
    assert losses[-1] == pytest.approx(undisturbed[-1], rel=0.02) and losses[-1] < losses[0]


@pytest.mark.parametrize("arguments", [("--pp", "2"), ("--check",)])
def test_elastic_refuses(one: Begin, tmp_path: Path, arguments: tuple[str, ...]) -> None:
    code, out = one(*SMALL, "--elastic", *arguments, "--out", str(tmp_path))
    assert code == 1 and "--elastic has one stage and no --check" in " ".join(out.split())
