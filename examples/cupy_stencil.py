"""Heat diffusion on a plate that is distributed over the ranks of several islands: a five-point stencil with halo exchange.

    xvcomm run -n 4 --islands cuda:2,rocm:2 -- examples/cupy_stencil.py --check
    mpirun -n 4 python examples/cupy_stencil.py --array cupy

Each rank holds one tile of the plate with a halo of one cell. A step sends the tile's edges to the neighbours, computes the
inner cells meanwhile, and then the cells that need the halo. A rank with a GPU uses CuPy, other ranks numpy; one job may mix
both. `--check` also computes the plate in one process: every cell must have the same bits.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from time import perf_counter
from typing import Annotated, Any

import numpy as np
import typer

import xvcomm
from xvcomm.comm.communicator import Communicator
from xvcomm.config import Config
from xvcomm.errors import XvcommError
from xvcomm.types.topology import Topology

SPREAD = 0.2
SIDES = {"up": (-1, 0), "down": (1, 0), "left": (0, -1), "right": (0, 1)}
OPPOSITE = {"up": "down", "down": "up", "left": "right", "right": "left"}
EDGES = {
    "up": np.s_[1, 1:-1], "down": np.s_[-2, 1:-1], "left": np.s_[1:-1, 1], "right": np.s_[1:-1, -2],
}  # fmt: skip
HALOS = {
    "up": np.s_[0, 1:-1], "down": np.s_[-1, 1:-1], "left": np.s_[1:-1, 0], "right": np.s_[1:-1, -1],
}  # fmt: skip
"""`EDGES`: cells of a tile that a neighbour needs. `HALOS`: cells that the neighbour sends, in the tile's one-cell border."""


class Arrays(StrEnum):
    """Array library of a rank."""

    auto = "auto"
    numpy = "numpy"
    cupy = "cupy"


@dataclass(frozen=True, slots=True)
class Tiling:
    """How a plate of `size` x `size` cells is cut into `down` x `across` tiles, one per rank, in row-major order."""

    size: int
    down: int
    across: int

    @classmethod
    def of(cls, size: int, ranks: int) -> Tiling:
        """Choose tiles that are as close to square as possible."""
        down = max(n for n in range(1, math.isqrt(ranks) + 1) if ranks % n == 0)
        return cls(size, down, ranks // down)

    def spans(self, rank: int) -> tuple[tuple[int, int], tuple[int, int]]:
        """(first row, last row + 1) and (first column, last column + 1) of a rank's tile."""
        row, column = divmod(rank, self.across)
        return self._span(row, self.down), self._span(column, self.across)

    def _span(self, place: int, parts: int) -> tuple[int, int]:
        return place * self.size // parts, (place + 1) * self.size // parts

    def cells(self, rank: int) -> int:
        """Number of cells of a rank's tile."""
        (top, bottom), (left, right) = self.spans(rank)
        return (bottom - top) * (right - left)

    def neighbours(self, rank: int) -> Iterator[tuple[str, int]]:
        """The neighbouring rank by side; sides at the rim of the plate are left out."""
        row, column = divmod(rank, self.across)
        for side, (by_row, by_column) in SIDES.items():
            if 0 <= row + by_row < self.down and 0 <= column + by_column < self.across:
                yield side, (row + by_row) * self.across + column + by_column


def begin(size: int) -> np.ndarray[Any, Any]:
    """Initial plate including its constant rim: hot at the top, cold elsewhere, and a hot disc in the interior."""
    plate = np.zeros((size + 2, size + 2))
    plate[0] = np.sin(np.linspace(0, np.pi, size + 2))
    rows, columns = np.ogrid[: size + 2, : size + 2]
    plate[(rows - 0.55 * size) ** 2 + (columns - 0.45 * size) ** 2 < (0.15 * size) ** 2] = 1
    return plate


def relax(old: Any, new: Any, rows: slice, columns: slice) -> None:
    """Compute one step for some cells of a tile; rows and columns count from its first cell.

    Every operation is rounded separately and in a fixed order, so that all array libraries and tilings give the same bits.
    """
    height, width = old.shape[0] - 2, old.shape[1] - 2
    (top, bottom, _), (left, right, _) = rows.indices(height), columns.indices(width)
    here = np.s_[top + 1 : bottom + 1, left + 1 : right + 1]
    around = old[top:bottom, left + 1 : right + 1] + old[top + 2 : bottom + 2, left + 1 : right + 1]
    around += old[top + 1 : bottom + 1, left:right]
    around += old[top + 1 : bottom + 1, left + 2 : right + 2]
    around -= 4 * old[here]
    around *= SPREAD
    new[here] = old[here] + around


class Tile:
    """One rank's part of the plate.

    Args:
        library: numpy or CuPy.
    """

    def __init__(self, comm: Communicator, library: Any, tiling: Tiling) -> None:
        self._comm, self._library = comm, library
        self._neighbours = dict(tiling.neighbours(comm.rank))
        (top, bottom), (left, right) = tiling.spans(comm.rank)
        self._old = library.asarray(begin(tiling.size)[top : bottom + 2, left : right + 2].copy())
        self._new = self._old.copy()
        self._halos = {side: library.empty_like(self._old[HALOS[side]]).reshape(-1) for side in self._neighbours}

    def step(self) -> None:
        """Exchange halos while computing the inner cells, then compute the cells at the edges."""
        library, works = self._library, []
        edges = {side: library.ascontiguousarray(self._old[EDGES[side]]) for side in self._neighbours}
        with self._comm.group():
            for tag, side in enumerate(SIDES):
                if side in self._neighbours:
                    works.append(self._comm.isend(edges[side], self._neighbours[side], tag))
                if OPPOSITE[side] in self._neighbours:
                    source = OPPOSITE[side]
                    works.append(self._comm.irecv(self._halos[source], self._neighbours[source], tag))
        relax(self._old, self._new, slice(1, -1), slice(1, -1))
        for work in works:
            work.wait()
        for side, halo in self._halos.items():
            self._old[HALOS[side]] = halo
        every, first, last, inner = slice(None), slice(0, 1), slice(-1, None), slice(1, -1)
        for rows, columns in ((first, every), (last, every), (inner, first), (inner, last)):
            relax(self._old, self._new, rows, columns)
        self._old, self._new = self._new, self._old

    def change(self) -> float:
        """Largest change of any cell of the plate in the last step."""
        most = abs(self._old[1:-1, 1:-1] - self._new[1:-1, 1:-1]).max().reshape(1)
        return float(self._comm.all_reduce(most, "max")[0])

    def gather(self, tiling: Tiling) -> np.ndarray[Any, Any] | None:
        """The whole plate on rank 0; None on other ranks."""
        mine = self._library.ascontiguousarray(self._old[1:-1, 1:-1]).reshape(-1)
        counts = [tiling.cells(rank) for rank in range(self._comm.size)]
        room = self._library.empty(sum(counts)) if self._comm.rank == 0 else None
        found = self._comm.gather(mine, out=room, counts=counts)
        if found is None:
            return None
        parts = np.split(found if self._library is np else found.get(), np.cumsum(counts)[:-1])
        plate = np.empty((tiling.size, tiling.size))
        for rank, part in enumerate(parts):
            (top, bottom), (left, right) = tiling.spans(rank)
            plate[top:bottom, left:right] = part.reshape(bottom - top, right - left)
        return plate


def alone(size: int, steps: int) -> np.ndarray[Any, Any]:
    """The plate after `steps` steps, computed in this process with numpy."""
    old = begin(size)
    new = old.copy()
    for _ in range(steps):
        relax(old, new, slice(None), slice(None))
        old, new = new, old
    return old[1:-1, 1:-1]


def picture(path: Path, plate: np.ndarray[Any, Any], tiling: Tiling, topology: Topology, title: str) -> str:
    """Write the plate and its tiles as a PNG file; returns the path, or the reason why there is none."""
    if find_spec("matplotlib") is None:
        return "none; pip install 'xvcomm[plot]' for one"
    from matplotlib.figure import Figure
    from matplotlib.patches import Rectangle

    figure = Figure(figsize=(7, 6), layout="constrained")
    axes = figure.subplots()
    image = axes.imshow(plate, cmap="inferno", vmin=0, vmax=1)
    for rank in range(topology.size):
        (top, bottom), (left, right) = tiling.spans(rank)
        color = f"C{topology.island_of(rank).index}"
        axes.add_patch(
            Rectangle((left, top), right - left - 1, bottom - top - 1, fill=False, edgecolor=color, linewidth=2)
        )
        axes.text(left + 4, bottom - 6, f"rank {rank}, {topology.island_of(rank).label}", color="white", fontsize=9)
    axes.set(title=title, xticks=[], yticks=[])
    figure.colorbar(image, label="temperature", shrink=0.8)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
    return str(path)


def lead(tiling: Tiling, topology: Topology, plate: np.ndarray[Any, Any], steps: int, check: bool, out: Path) -> bool:
    """Rank 0 only: print the results and compare them with one process; returns whether the check passed."""
    islands = ", ".join(f"{island.label} x {island.size}" for island in topology.islands)
    rehearsal = " (rehearsal)" if Config.from_env().island is not None else ""
    typer.echo(f"mean temperature: {plate.mean():.9f}")
    typer.echo(f"picture: {picture(out, plate, tiling, topology, f'{steps} steps on {islands}{rehearsal}')}")
    if not check:
        return True
    differing = int((plate.view(np.uint64) != alone(tiling.size, steps).copy().view(np.uint64)).sum())
    typer.echo(
        "same bits as one process" if not differing else f"{differing} of {plate.size} cells differ from one process"
    )
    return not differing


def main(
    size: Annotated[int, typer.Option(help="Cells of the plate in each direction.", min=4)] = 256,
    steps: Annotated[int, typer.Option(help="Steps of time.", min=1)] = 400,
    arrays: Annotated[Arrays, typer.Option("--array", help="Left out: CuPy's on a GPU, else numpy's.")] = Arrays.auto,
    check: Annotated[bool, typer.Option("--check", help="Compute it in one process too; fail if bits differ.")] = False,
    out: Annotated[Path, typer.Option(help="Where to put the picture.")] = Path("runs/stencil.png"),
) -> None:
    """Simulate heat diffusion on a plate that is distributed over any mix of islands."""
    try:
        with xvcomm.init(device="host" if arrays is Arrays.numpy else None) as comm:
            on_gpu = comm.device != "host"
            library = import_module("cupy" if on_gpu else "numpy")
            if arrays is Arrays.cupy and not on_gpu:
                raise typer.BadParameter(f"rank {comm.rank} is on host memory; use --array numpy, or a rank with a GPU")
            if on_gpu:
                library.cuda.Device(comm.device_index).use()
            tiling = Tiling.of(size, comm.size)
            if min(tiling.size // tiling.down, tiling.size // tiling.across) < 2:
                raise typer.BadParameter(
                    f"a plate of {size} x {size} has less than 2 cells for each of {comm.size} ranks"
                )
            tile, begun = Tile(comm, library, tiling), perf_counter()
            for _ in range(steps):
                tile.step()
            change = tile.change()
            spent = perf_counter() - begun
            plate = tile.gather(tiling)
            if plate is None:
                return
            typer.echo(f"{tiling.down} x {tiling.across} tiles, {steps} steps, {1e3 * spent / steps:.3f} ms each")
            typer.echo(f"last change: {change:.3e}")
            passed = lead(tiling, comm.topology, plate, steps, check, out)
    except XvcommError as error:
        typer.echo(f"error: {error}", err=True)
        raise typer.Exit(1) from None
    if not passed:
        raise typer.Exit(1)


if __name__ == "__main__":
    typer.run(main)
