"""Device-Direct between two hosts with Soft-RoCE, whose GPUs are the stand-in's: trials, rings in their memory, and a
training whose activations or gradients go through these.
"""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
from pathlib import Path

import job
import pytest

pytestmark = pytest.mark.rdma
pytest.importorskip("rocm.bindings", reason="hip-python is not installed: pip install hip-python")

FOLDER = Path(__file__).parent
SECONDS = 240
_ports = itertools.count(7600)
TRIALS = """
import os, sys
from xvcomm.backends.rdma.cards import open_cards
from xvcomm.config import Config
from xvcomm.engine.session import plugins
cards = open_cards(Config(), {os.environ[f"HOST_ADDR_{os.environ['HOST_INDEX']}_{n}"]: f"eth{n}" for n in range(2)},
                   plugins.backend("rocm").device(Config()), {})
for trial in cards.trials:
    print(trial.device, trial.direction, trial.grade, trial.reason, sep="|")
cards.close()
"""


@pytest.fixture
def run(other_host, rocm_path):
    """A function that runs Python with the stand-in; its memory is open to the host's kernel, as with peer memory, or closed."""

    def running(*arguments, is_open, **more):
        env = os.environ | {"ROCM_PATH": str(rocm_path), "HIPHOST_STRICT": str(int(not is_open))} | more
        command = [sys.executable, *map(str, arguments)]
        done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=SECONDS)
        assert done.returncode == 0, done.stderr
        return done.stdout

    return running


def test_trials(run):
    """All devices write and read the memory, registered by its address because Soft-RoCE takes no dma-buf."""
    found = [line.split("|") for line in run("-c", TRIALS, is_open=True).splitlines()]
    assert [trial[:3] for trial in found] == [
        [f"rxe{nic}", direction, "direct"] for nic in range(2) for direction in ("writes", "reads")
    ]
    assert all("registered by its address" in trial[3] and "dma-buf" in trial[3] for trial in found)


def test_trials_of_memory_that_no_device_reaches(run):
    """They say how far they came, and why no further."""
    found = [line.split("|") for line in run("-c", TRIALS, is_open=False).splitlines()]
    assert [trial[2] for trial in found] == ["exported"] * 4
    assert all("neither as a dma-buf" in trial[3] and "nor by its address" in trial[3] for trial in found)


@pytest.mark.parametrize("wanted", ["direct", "refused", "off"])
def test_topology(run, other_host, wanted):
    """It names the devices that a GPU uses alone, the nearest: here both; none where its rings lie in host memory."""
    more = job.settings(next(_ports), XVCOMM_DEVICE="rocm", XVCOMM_DEVICE_DIRECT=str(int(wanted != "off")))
    told = run("-m", "xvcomm", "topo", "--seconds", "0", is_open=wanted != "refused", **more)
    if other_host.index == 0:
        assert told.count("uses rxe0, rxe1\n") == told.count("uses") == (2 if wanted == "direct" else 0), told
    other_host.swap()


@pytest.mark.parametrize(
    "wanted",
    [("direct", "direct"), ("refused", "refused"), ("off", "off"), ("direct", "refused")],
    ids="-".join,
)
def test_job(run, other_host, wanted):
    """Bytes are right with rings in GPU memory, and in host memory where devices do not reach it or a setting wants that, also
    at one of the two hosts. The trace tells of each rank how far the devices came.
    """
    here = wanted[other_host.index]
    more = job.settings(next(_ports), XVCOMM_DEVICE="rocm", XVCOMM_DEVICE_DIRECT=str(int(here != "off")))
    told = run(FOLDER / "direct_rank.py", *wanted, is_open=here != "refused", **more)
    assert told.strip() == "all right"


@pytest.mark.parametrize(("pp", "dp"), [(2, 1), (1, 2)], ids=["stages", "replicas"])
def test_losses(run, pp, dp):
    """The trainer of examples/ has the same losses with rings in GPU memory as with rings in host memory, and as one process."""
    direct, on_host, alone = json.loads(run(FOLDER / "train_rank.py", pp, dp, next(_ports), next(_ports), is_open=True))
    assert direct == on_host and len(direct) == 3 and direct[-1] < direct[0]
    if pp > 1:
        assert direct == alone
    else:  # the gradients' mean is added up in another order
        assert direct == pytest.approx(alone, rel=1e-5)
