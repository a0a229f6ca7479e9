"""The stencil example on real ranks gives the bits of one process for every tiling and island layout."""

from __future__ import annotations

import os
import re
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

STENCIL = Path(__file__).parents[2] / "examples" / "cupy_stencil.py"


def run(folder: Path, islands: str, *arguments: str) -> tuple[int, str]:
    """Exit code and output of the example on ranks with these island labels."""
    command = [sys.executable, "-m", "xvcomm", "run", "--islands", islands, "--", str(STENCIL), *arguments]
    environment = {k: v for k, v in os.environ.items() if not k.startswith("XVCOMM_")} | {"XVCOMM_DEVICE": "host"}
    done = subprocess.run(command, env=environment, cwd=folder, capture_output=True, text=True, timeout=100)
    return done.returncode, done.stdout + done.stderr


@pytest.mark.parametrize(
    ("islands", "tiles", "size"),
    [("cuda:1,rocm:1", "1 x 2", 40), ("a,b,a", "1 x 3", 37), ("cuda:2,rocm:2", "2 x 2", 40)],
)
def test_same_bits_as_one_process(tmp_path: Path, islands: str, tiles: str, size: int) -> None:
    """Two to four ranks, with tiles of equal and unequal sizes."""
    code, out = run(
        tmp_path, islands, "--check", "--size", str(size), "--steps", "60", "--out", str(tmp_path / "heat.png")
    )
    assert code == 0, out
    assert f"{tiles} tiles, 60 steps" in out and "same bits as one process" in out
    assert (tmp_path / "heat.png").read_bytes().startswith(b"\x89PNG")
    alone = runpy.run_path(str(STENCIL))["alone"](size, 60)
    mean = re.search(r"mean temperature: ([\d.]+)", out)
    assert mean and float(mean[1]) == pytest.approx(alone.mean(), abs=1e-9)


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
def test_refused(tmp_path: Path, arguments: tuple[str, ...], text: str) -> None:
    """The messages contain a remedy."""
    code, out = run(tmp_path, "a:3", *arguments)
    assert code != 0 and text in " ".join(out.replace("│", " ").split())
