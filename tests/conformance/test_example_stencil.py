"""The stencil example on real ranks gives the bits of one process for every tiling and island layout."""

from __future__ import annotations

import contextlib
import functools
import os
import re
import runpy
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import typer
from typer.testing import CliRunner

from xvcomm.testing import World

pytestmark = pytest.mark.usefixtures("python")
STENCIL = Path(__file__).parents[2] / "examples" / "cupy_stencil.py"


Begin = Callable[..., tuple[int, str]]


def run(islands: str, *arguments: str) -> tuple[int, str]:
    """Exit code and output of the example on ranks with these island labels, started by the launcher."""
    command = [os.environ["TEST_PYTHON"], "-m", "xvcomm", "run", "--islands", islands, "--", str(STENCIL), *arguments]
    environment = {k: v for k, v in os.environ.items() if not k.startswith("XVCOMM_")} | {"XVCOMM_DEVICE": "host"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=100)
    return done.returncode, done.stdout + done.stderr


def command_on_rank(comm: object, *arguments: str) -> tuple[int, str]:
    """Exit code and output of the example's command in a rank of a `World`; it joins its job once more by itself."""
    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
    app.command()(runpy.run_path(str(STENCIL))["main"])
    done = CliRunner().invoke(app, arguments, env={"COLUMNS": "120"})
    if done.exception is not None and not isinstance(done.exception, SystemExit):
        raise done.exception
    return done.exit_code, done.output


@contextlib.contextmanager
def ranks(islands: str) -> Iterator[Begin]:
    """Calls the example's command on ranks that stay; gives the highest exit code and all that they print."""
    with World(islands=islands, env={"XVCOMM_DEVICE": "host"}, preload=["typer.testing", "matplotlib.figure"]) as world:

        def begin(*arguments: str) -> tuple[int, str]:
            done = world.run(command_on_rank, *arguments)
            return max(code for code, _ in done), "".join(out for _, out in done)

        yield begin


@pytest.fixture(scope="module")
def three() -> Iterator[Begin]:
    """Three ranks in two islands."""
    with ranks("a,b,a") as begin:
        yield begin


def same_bits_as_one_process(folder: Path, begin: Begin, tiles: str, size: int) -> None:
    """Run with `--check`, and compare the mean of the plate too."""
    code, out = begin("--check", "--size", str(size), "--steps", "60", "--out", str(folder / "heat.png"))
    assert code == 0, out
    assert f"{tiles} tiles, 60 steps" in out and "same bits as one process" in out
    assert (folder / "heat.png").read_bytes().startswith(b"\x89PNG")
    alone = runpy.run_path(str(STENCIL))["alone"](size, 60)
    mean = re.search(r"mean temperature: ([\d.]+)", out)
    assert mean and float(mean[1]) == pytest.approx(alone.mean(), abs=1e-9)


def test_launched(tmp_path: Path) -> None:
    """Two ranks, by the command that the example's text names."""
    same_bits_as_one_process(tmp_path, functools.partial(run, "cuda:1,rocm:1"), "1 x 2", 40)


def test_tiles_of_unequal_sizes(three: Begin, tmp_path: Path) -> None:
    same_bits_as_one_process(tmp_path, three, "1 x 3", 37)


def test_tiles_in_both_directions(tmp_path: Path) -> None:
    with ranks("cuda:2,rocm:2") as begin:
        same_bits_as_one_process(tmp_path, begin, "2 x 2", 40)


@pytest.fixture(scope="module")
def example() -> dict[str, Any]:
    """The example as a module."""
    return runpy.run_path(str(STENCIL))


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 6, 7, 12])
def test_tiles_cover_the_plate_once(example: dict[str, Any], ranks: int) -> None:
    """Neighbourhood is symmetric."""
    tiling = example["Tiling"].of(29, ranks)
    plate = np.zeros((29, 29), int)
    for rank in range(ranks):
        (top, bottom), (left, right) = tiling.spans(rank)
        plate[top:bottom, left:right] += 1
        assert tiling.cells(rank) == (bottom - top) * (right - left)
        for side, other in tiling.neighbours(rank):
            assert (example["OPPOSITE"][side], rank) in list(tiling.neighbours(other))
    assert (plate == 1).all()


def test_heat_is_kept_and_spreads(example: dict[str, Any]) -> None:
    """Far from the rim the total is constant: what a step takes from a cell it gives to its neighbours."""
    old = np.zeros((11, 11))
    old[5, 5] = 1
    new = old.copy()
    example["relax"](old, new, slice(None), slice(None))
    assert new.sum() == pytest.approx(1) and new[5, 5] == pytest.approx(1 - 4 * example["SPREAD"])
    assert new[4, 5] == new[6, 5] == new[5, 4] == new[5, 6] == example["SPREAD"]


@pytest.mark.parametrize(
    ("arguments", "text"), [(("--array", "cupy"), "a rank with a GPU"), (("--size", "4"), "less than 2 cells")]
)
def test_refused(three: Begin, arguments: tuple[str, ...], text: str) -> None:
    """The messages contain a remedy."""
    code, out = three(*arguments)
    assert code != 0 and text in " ".join(out.replace("│", " ").split())
