"""What a request costs that compiled code posts through the provider's functions, over the fake provider, beside the same in C.

`python benchmarks/verbs.py`, and a part of benchmarks/rdma.py. The fake provider copies within memory: no network is in these
figures.
"""

from __future__ import annotations

import argparse
import ctypes
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numba import njit

from xvcomm.wire import verbs

SHIM = Path(__file__).resolve().parents[1] / "tests" / "shims" / "verbs"
LENGTHS = (1, 2, 8, 32)
ROUNDS, REQUESTS = 5, 1_000_000


@njit(nogil=True)  # type: ignore[untyped-decorator]
def drive(queue: int, completions: int, here: int, there: int, key: int, length: int, chains: int) -> int:
    """Post chains of inline WRITEs of 8 bytes and take completions until each chain has ended; 0, or what went wrong."""
    queue, completions = verbs.queue_at(queue), verbs.completions_at(completions)
    for _ in range(chains):
        for _ in range(length):
            verbs.write_inline(queue, here, there, key, 8)
        error = verbs.post(queue)
        if error != 0:
            return error
        while queue.ended != queue.posted:
            verbs.take(completions)
        if verbs.failed(queue):
            return -1
    return 0


def in_c(folder: Path) -> Any:
    """`drive` in C."""
    library = folder / "bare.so"
    source = Path(__file__).with_suffix(".c")
    subprocess.run(["gcc", "-O2", "-fPIC", "-shared", "-I", SHIM, "-o", library, source], check=True)
    found = ctypes.CDLL(str(library)).drive
    word = ctypes.c_uint64
    found.argtypes = [ctypes.c_void_p, word, word, ctypes.c_uint32, ctypes.c_int, ctypes.c_int]
    return found


def seconds(call: Callable[..., int], *arguments: int) -> float:
    """Duration of a call that must return 0."""
    begun = time.perf_counter()
    assert call(*arguments) == 0
    return time.perf_counter() - begun


@dataclass(frozen=True, slots=True)
class Row:
    """Chains of one length.

    Attributes:
        requests: of a chain. A slot takes two: the WRITE of its payload, and the SEND of its frame.
        ours, bare: nanoseconds of a request, by compiled code and in C.
    """

    requests: int
    ours: float
    bare: float

    @property
    def millions(self) -> float:
        """Million requests a second of one thread."""
        return 1e3 / self.ours


def measure(requests: int) -> list[Row]:
    """A row for each length of a chain: medians of rounds in which both take turns, each of so many requests."""
    sys.path.insert(0, str(SHIM))
    from fabric import Fabric, build

    with tempfile.TemporaryDirectory() as name, Fabric(build(Path(name)), Path(name, "shared")) as fabric:
        bare = in_c(Path(name))
        device, remote = fabric.device(), fabric.device()
        completions = device.queue()
        pair, peer = device.pair(completions, depth=64), remote.pair(remote.queue())
        pair.connect(peer.number)
        peer.connect(pair.number)
        here, there = np.ones(1, np.int64), np.zeros(1, np.int64)
        key = fabric.register(there.ctypes.data, there.nbytes)
        places = here.ctypes.data, there.ctypes.data, key
        rows = []
        for length in LENGTHS:
            chains = requests // length
            assert drive(pair.address, completions.address, *places, length, 1) == 0
            took: list[list[float]] = [[], []]
            for _ in range(ROUNDS):
                took[0].append(seconds(drive, pair.address, completions.address, *places, length, chains))
                took[1].append(seconds(bare, pair.record.pair, *places, length, chains))
            ours, c = (1e9 * float(np.median(times)) / (chains * length) for times in took)
            rows.append(Row(length, ours, c))
    return rows


def table(rows: Sequence[Row]) -> list[str]:
    """In Markdown."""
    return [
        "| requests a chain | million requests/s | ns a request | ns of a loop in C that posts the same | ns a slot |",
        "| --: | --: | --: | --: | --: |",
        *(
            f"| {row.requests} | {row.millions:.1f} | {row.ours:.0f} | {row.bare:.0f} | {2 * row.ours:.0f} |"
            for row in rows
        ),
    ]


def main() -> None:
    """Read the options and measure."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=REQUESTS, help="of each row and round")
    print("\n".join(table(measure(parser.parse_args().requests))))


if __name__ == "__main__":
    main()
