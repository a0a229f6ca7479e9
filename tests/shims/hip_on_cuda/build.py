"""ROCm's libraries implemented by CUDA's, so that hip-python and its users run on an NVIDIA GPU.

    python tests/shims/hip_on_cuda/build.py FOLDER

fills FOLDER and prints the variables of `environment`: with them, `rocm.bindings` loads a `libamdhip64.so` that forwards
to the CUDA runtime, a `libhiprtc.so` that forwards to NVRTC, and NCCL as `librccl.so`, whose symbols and constants are the
same. Needs CUDA's headers, a C compiler, hip-python, and NVIDIA's NCCL and NVRTC. Builds also without a GPU.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))
from declarations import STRUCTS, header  # noqa: E402

COMPILE = ("cc", "-std=gnu11", "-O2", "-Wall", "-Wextra", "-Werror", "-fvisibility=hidden", "-fPIC", "-shared")


class CannotBuild(RuntimeError):
    """Something that the build needs is missing; the message says what."""


def build(folder: Path) -> Path:
    """Build the libraries in `folder/lib` and the torch hook in `folder/python`; returns `folder`, for ROCM_PATH.

    Raises:
        CannotBuild: a package, a header or a compiler is missing.
    """
    folder = folder.resolve()
    lib, include = folder / "lib", folder / "include"
    for each in (lib, include):
        each.mkdir(parents=True, exist_ok=True)
    toolkit, nccl, nvrtc = cuda_toolkit(), nvidia_library("libnccl.so.2"), nvidia_library("libnvrtc.so.13")
    runtime = next(toolkit.glob("lib*/libcudart_static.a"), None)
    if runtime is None:
        raise CannotBuild(f"{toolkit} has no libcudart_static.a")
    for module, structs in (("hip", STRUCTS), ("hiprtc", ())):
        source = HERE / ("amdhip64.c" if module == "hip" else "hiprtc.c")
        (include / f"{module}.h").write_text(header(module, source.read_text(), structs))
    headers = ("-Wmissing-prototypes", f"-I{include}", f"-I{toolkit / 'include'}")
    static = (str(runtime), "-Wl,--exclude-libs,ALL", "-ldl", "-lrt", "-lpthread")
    _compile(HERE / "amdhip64.c", lib / "libamdhip64.so", *headers, *static)
    # NVRTC looks for its builtins by name; they are found if they are loaded already.
    builtins = map(str, nvrtc.parent.glob("libnvrtc-builtins.so.13*"))
    compilers = ("-Wl,--no-as-needed", str(nvrtc), *builtins, f"-Wl,-rpath,{nvrtc.parent}")
    _compile(HERE / "hiprtc.c", lib / "libhiprtc.so", *headers, *static, *compilers)
    _compile(HERE / "dlpack.c", lib / "libdlpack_as_rocm.so")
    rccl = lib / "librccl.so"
    rccl.unlink(missing_ok=True)
    rccl.symlink_to(nccl)
    _register_hook(folder / "python")
    return folder


def environment(folder: Path) -> dict[str, str]:
    """Variables that processes need in order to use a build."""
    hook = str(folder.resolve() / "python")
    path = os.environ.get("PYTHONPATH")
    return {"ROCM_PATH": str(folder.resolve()), "PYTHONPATH": f"{hook}{os.pathsep}{path}" if path else hook}


def cuda_toolkit() -> Path:
    """The folder with CUDA's headers.

    Raises:
        CannotBuild: there is none.
    """
    nvcc = shutil.which("nvcc")
    places = [os.environ.get("CUDA_HOME"), "/usr/local/cuda", Path(nvcc).resolve().parent.parent if nvcc else None]
    for place in places:
        if place and (Path(place) / "include" / "crt" / "host_defines.h").exists():
            return Path(place)
    raise CannotBuild("no CUDA toolkit: set CUDA_HOME")


def nvidia_library(name: str) -> Path:
    """A library from NVIDIA's Python packages, otherwise from the CUDA toolkit or the system's library folders.

    Raises:
        CannotBuild: it was not found.
    """
    for folder in _library_folders():
        if (folder / name).exists():
            return (folder / name).resolve()
    raise CannotBuild(f"no {name}: install NVIDIA's package of it")


def _library_folders() -> Iterator[Path]:
    spec = find_spec("nvidia")
    for place in (spec.submodule_search_locations or ()) if spec else ():
        yield from sorted(Path(place).glob("*/lib"))
    for place in (cuda_toolkit(), Path("/usr"), Path("/usr/local")):
        yield from (place / "lib64", place / "lib", place / "lib" / "x86_64-linux-gnu")


def _compile(source: Path, target: Path, *arguments: str) -> None:
    done = subprocess.run([*COMPILE, str(source), "-o", str(target), *arguments], capture_output=True, text=True)
    if done.returncode:
        raise CannotBuild(f"{source.name}: {done.stderr.strip()}")


def _register_hook(folder: Path) -> None:
    """Install `torch_as_rocm` as a package whose entry point torch calls."""
    info = folder / "hip_on_cuda-0.dist-info"
    info.mkdir(parents=True, exist_ok=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: hip-on-cuda\nVersion: 0\n")
    (info / "entry_points.txt").write_text("[torch.backends]\nhip_on_cuda = torch_as_rocm:install\n")
    shutil.copy(HERE / "torch_as_rocm.py", folder)


if __name__ == "__main__":
    for variable, value in environment(build(Path(sys.argv[1]))).items():
        print(f"export {variable}={value}")
