"""Compiles the libraries of this folder into a ROCM_PATH for hip-python."""

from __future__ import annotations

import hashlib
import os
import shutil
import stat
import subprocess
import tempfile
from pathlib import Path

SOURCES = Path(__file__).resolve().parent
LIBRARIES = {
    "libamdhip64.so": ("device.c", "memory.c", "stream.c", "graph.c", "module.c"),
    "libhiprtc.so": ("hiprtc.c",),
    "librccl.so": ("rccl.c", "transfer.c", "combine.c"),
    "librocprofiler-sdk-roctx.so": ("roctx.c",),
}
HEADERS = ("prelude.h", "entry.h")
FLAGS = (
    "-std=gnu11", "-O2", "-g", "-Wall", "-Wextra", "-fwrapv", "-fno-strict-aliasing", "-fvisibility=hidden", "-fPIC",
    "-shared", "-pthread",
)  # fmt: skip


class NoCompiler(Exception):
    """There is no gcc or g++ on this machine."""


def build(folder: Path | None = None) -> Path:
    """The ROCM_PATH for this version of the sources; compiles it on first use, in a few seconds.

    Several processes may build at the same time: each uses its own folder, and one rename succeeds.

    Args:
        folder: where versions are kept; by default a per-user folder in the folder for temporary files.

    Raises:
        NoCompiler: no compiler; says how to install one.
        RuntimeError: a file does not compile; contains the compiler's output.
    """
    gcc, gxx = (shutil.which(os.environ.get(name) or other) for name, other in (("CC", "gcc"), ("CXX", "g++")))
    if not gcc or not gxx:
        raise NoCompiler("gcc and g++ compile HIP for host memory: apt-get install g++, or set CC and CXX")
    folder = folder or _folder_of_the_user()
    folder.mkdir(parents=True, exist_ok=True)
    files = sorted({*SOURCES.glob("*.c"), *SOURCES.glob("*.h"), Path(__file__)})
    text = b"\0".join([gcc.encode(), gxx.encode(), bytes(folder), *(file.read_bytes() for file in files)])
    target = folder / hashlib.sha256(text).hexdigest()[:16]
    if target.is_dir():
        return target
    with tempfile.TemporaryDirectory(dir=folder, prefix="building-") as scratch:
        made = Path(scratch, "rocm")
        (made / "include").mkdir(parents=True)
        (made / "lib").mkdir()
        for header in HEADERS:
            shutil.copy(SOURCES / header, made / "include")
        for name, sources in LIBRARIES.items():
            _compile(gcc, gxx, name, sources, made, target)
        try:
            made.rename(target)
        except OSError:
            if not target.is_dir():  # then another process was first
                raise
    return target


def _folder_of_the_user() -> Path:
    """A folder that no other user can write to, because code is loaded from it."""
    folder = Path(tempfile.gettempdir(), f"xvcomm-hip-on-host-{os.getuid()}")
    folder.mkdir(mode=0o700, exist_ok=True)
    found = folder.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o022:
        raise PermissionError(f"{folder} is not this user's own folder: remove it")
    return folder


def _compile(gcc: str, gxx: str, name: str, sources: tuple[str, ...], made: Path, target: Path) -> None:
    hip = ["-L", str(made / "lib"), "-lamdhip64", "-Wl,-rpath,$ORIGIN"] if name == "librccl.so" else []
    done = subprocess.run(
        [
            gcc, *FLAGS, f'-DHEADERS="{target / "include"}"', f'-DCOMPILER="{gxx}"',
            *(str(SOURCES / source) for source in sources),
            "-o", str(made / "lib" / name), f"-Wl,-soname,{name}", *hip, "-ldl", "-lm",
        ],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    if done.returncode:
        raise RuntimeError(f"{name} does not compile:\n{done.stderr}")
