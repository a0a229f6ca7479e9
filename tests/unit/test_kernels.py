"""Launching GPU kernels: argument packing and the image cache; the source compiles for AMD."""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest

from xvcomm.backends.gpu import kernels as _kernels
from xvcomm.backends.gpu.kernels import Kernels, Transfer
from xvcomm.backends.gpu.vendor import Addresses, Runtime, VendorError
from xvcomm.errors import BackendUnavailable
from xvcomm.jit.cache import KernelCache
from xvcomm.memory.ring import Message, RingLayout
from xvcomm.types.dtype import BY_NAME, UINT8, DType, ReduceOp
from xvcomm.types.opcode import OpCode


class CountingRuntime:
    """Replaces a compiler in tests of the cache: its images are numbers, which it loads and launches."""

    kind = "counting"
    source = ""

    def __init__(self) -> None:
        self.compiled: list[str] = []
        self.launched: list[tuple[Any, ...]] = []
        self.fails = False

    def architecture(self, index: int) -> str:
        return f"arch_{index}"

    def addresses(self) -> Addresses:
        return Addresses(0, 0, 0, 0, 0)

    def compile(self, source: str, names: Sequence[str], architecture: str) -> tuple[bytes, dict[str, str]]:
        if self.fails:
            raise VendorError("compile", 6, "COMPILATION", "first line\n" + "line\n" * 100)
        self.compiled.append(architecture)
        return b"%d" % len(self.compiled), {name: f"lowered {name}" for name in names}

    def load(self, image: bytes) -> int:
        return int(image)

    def function(self, module: int, name: str) -> int:
        assert name.startswith("lowered xv::")
        return 1000 + 10 * module + [*_kernels.NAMES].index(name.removeprefix("lowered "))

    def launch(self, function: int, blocks: int, threads: int, params: int, stream: int) -> None:
        pointer = ctypes.c_void_p.from_address(params).value
        assert pointer is not None
        self.launched.append((function, blocks, threads, ctypes.string_at(pointer, 2000), stream))


def counting(folder: Path, index: int = 0) -> tuple[CountingRuntime, Kernels]:
    runtime = CountingRuntime()
    return runtime, Kernels(cast(Runtime, runtime), index, KernelCache(folder))


def message(nbytes: int, dtype: DType = UINT8) -> Message:
    return Message(OpCode.SEND, dtype.code, nbytes, 0)


def scale(kernels: Kernels, dtype: str = "float32") -> None:
    kernels.scale(64, 64, 1000, BY_NAME[dtype], 2.0, 0, 7)


def test_the_kernels_are_compiled_once_and_kept_on_disk(tmp_path: Path) -> None:
    """Another process finds them; another architecture or source does not."""
    folder = tmp_path / "deep" / "cache"
    runtime, kernels = counting(folder)
    scale(kernels)
    assert runtime.compiled == ["arch_0"]
    again, later = counting(folder)
    scale(later)
    assert again.compiled == [] and again.launched == runtime.launched
    other, _ = counting(folder, index=1)
    again.source = "// another\n"
    Kernels(cast(Runtime, again), 0, KernelCache(folder))
    assert other.compiled == ["arch_1"] and again.compiled == ["arch_0"]
    assert not list(folder.glob(".*")), "files that were being written are gone"


@pytest.mark.parametrize("damage", [b"", b"short", None])
def test_damaged_files_are_compiled_anew(tmp_path: Path, damage: bytes | None) -> None:
    """An empty file, a cut one, one with a flipped bit; afterwards the file is whole."""
    counting(tmp_path)
    (file,) = tmp_path.iterdir()
    whole = file.read_bytes()
    file.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]) if damage is None else damage)
    runtime, _ = counting(tmp_path)
    assert runtime.compiled == ["arch_0"] and file.read_bytes() == whole


def test_a_folder_that_cannot_be_written_costs_only_time(tmp_path: Path) -> None:
    """A file stands where the folder should be."""
    (tmp_path / "file").write_text("")
    runtime, kernels = counting(tmp_path / "file" / "cache")
    scale(kernels)
    assert len(runtime.launched) == 1


def test_a_failed_compilation_says_what_to_do(tmp_path: Path) -> None:
    """The log's first lines and a remedy; nothing is kept."""
    runtime = CountingRuntime()
    runtime.fails = True
    with pytest.raises(BackendUnavailable, match=r"(?s)arch_0.*first line.*update the counting toolkit") as error:
        Kernels(cast(Runtime, runtime), 0, KernelCache(tmp_path))
    assert len(str(error.value).splitlines()) < 20
    runtime.fails = False
    scale(Kernels(cast(Runtime, runtime), 0, KernelCache(tmp_path)))
    assert runtime.compiled == ["arch_0"]


def test_a_launch_shares_its_blocks(tmp_path: Path) -> None:
    """A lane a block while there are enough; rows follow each other, and each says how it reduces."""
    runtime, kernels = counting(tmp_path)
    layout = RingLayout(16, 8, 65536)
    geometry = (layout.lanes, layout.slots, layout.slot_bytes, layout.ledger, layout.data, layout.least_chunk)
    big, small = message(64 << 20), message(100, BY_NAME["bfloat16"])
    put = Transfer(1 << 40, 0, 256, geometry, True, 4096, big, 3)
    get = Transfer(2 << 40, 3 << 40, 512, geometry, False, 8192, small, 3, ReduceOp.SUM, remote_first=True)
    kernels.move([put], 5)
    kernels.move([put, get], 5)
    kernels.move([put] * 30, 5)
    assert [launch[1] for launch in runtime.launched] == [16, 17, 60]
    rows = np.frombuffer(runtime.launched[1][3], _kernels.ROW, 2)
    where = [row[["ring", "slots_at", "state", "data", "nbytes"]].tolist() for row in rows]
    assert where == [(1 << 40, (1 << 40) + layout.data, 256, 4096, 64 << 20), (2 << 40, 3 << 40, 512, 8192, 100)]
    assert rows[["block", "blocks"]].tolist() == [(0, 16), (16, 1)]
    assert rows[["producer", "reduction", "remote_first"]].tolist() == [(1, 0, 0), (0, 4 * 16 + 1, 1)]
    assert runtime.launched[1][0] == 1010 and runtime.launched[1][4] == 5


@pytest.mark.parametrize(
    ("architecture", "wave", "linked"),
    [("gfx90a", 64, True), pytest.param("gfx1100", 32, False, marks=pytest.mark.slow)],
)
def test_the_source_compiles_for_amd(tmp_path: Path, architecture: str, wave: int, linked: bool) -> None:
    """Movers, reductions and scaling, for waves of both widths, where hipcc is installed."""
    hipcc = shutil.which("hipcc")
    if hipcc is None:
        pytest.skip("hipcc is not installed: apt-get install --no-install-recommends hipcc")
    file, out = tmp_path / "kernels.hip", tmp_path / "kernels.out"
    file.write_text(_kernels.source())
    # Debian 12's device library is older than gfx1100, so that its code is made and not linked.
    ways = ["-c"] if linked else ["-S", "-nogpulib"]
    done = subprocess.run(
        [hipcc, "-x", "hip", "-std=c++17", "-O3", f"--offload-arch={architecture}", "--cuda-device-only", "-include",
         "hip/hip_runtime.h", *ways, file, "-o", out],
        env=os.environ | {"HIP_PLATFORM": "amd"}, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    # What the loader reads of each kernel: MessagePack in objects, YAML in assembly.
    each = b".wavefront_size" + bytes([wave]) if linked else b".wavefront_size: %d" % wave
    assert out.read_bytes().count(each) >= len(_kernels.NAMES)
