"""Builds what two small hosts with Soft-RoCE need, once: a kernel of User-mode Linux, and pyverbs with rdma-core's libraries."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).resolve().parent
SOURCE = "linux-source-7.2"
PYVERBS = "59"
OPTIONS = (
    "RDMA_RXE", "INFINIBAND_USER_ACCESS", "UML_NET_VECTOR", "HOSTFS", "OVERLAY_FS", "POSIX_TIMERS", "IPV6",
)  # fmt: skip
"""Of the kernel: without any of these it is of no use, and a newer source may not know them any more."""

TOOLS = ("gcc", "make", "patch", "flex", "bison", "bc", "xz-utils", "libc6-dev", "binutils", "debian-archive-keyring")
COMPILED = ("gcc", "g++", "cmake", "ninja-build", "pkg-config", "libnl-3-dev", "libnl-route-3-dev", "libudev-dev")
PRESENT = ("iproute2", "libnl-3-200", "libnl-route-3-200")
"""Debian's packages: to build the kernel, to build the libraries, and to use them."""

PACKED = (
    "*/Documentation/*.rst", "*/Documentation/*.yaml", "*/tools/testing/*", "*/tools/perf/*", "*/drivers/gpu/*.[ch]",
    "*/drivers/net/ethernet/*.[ch]", "*/drivers/net/wireless/*.[ch]", "*/drivers/media/*.[ch]", "*/drivers/staging/*.[ch]",
    "*/drivers/scsi/*.[ch]", "*/drivers/iio/*.[ch]", "*/sound/*.[ch]", "*.dts", "*.dtsi",
)  # fmt: skip
"""Most of the kernel's source stays packed: User-mode Linux never compiles it."""


class CannotBuild(Exception):
    """This machine cannot build the hosts, as for want of packages; the message says why, and what to do."""


class BuildFailed(Exception):
    """What should build the hosts does not; the message has the end of its output."""


@dataclass(frozen=True)
class Built:
    """Where things lie.

    Attributes:
        kernel: an executable.
        python: folder with the package `pyverbs`, for PYTHONPATH.
        libraries: folder of rdma-core's libraries, for LD_LIBRARY_PATH.
        headers: folder with `infiniband/verbs.h` of the same version.
    """

    kernel: Path
    python: Path
    libraries: Path
    headers: Path


def build(folder: Path | None = None) -> Built:
    """Build what is missing in a folder; 17 CPU minutes if all is.

    Args:
        folder: RXE_CACHE if left out, else `~/.cache/xvcomm/rxe`.

    Raises:
        CannotBuild: not on this machine.
        BuildFailed: the recipe does not work any more.
    """
    if sys.platform != "linux" or os.uname().machine != "x86_64":
        raise CannotBuild(
            f"User-mode Linux runs on Linux on x86_64 only, this is {sys.platform} on {os.uname().machine}"
        )
    folder = folder or cache()
    folder.mkdir(parents=True, exist_ok=True)
    _install(PRESENT)
    kernel, libraries = _places(folder)
    if not kernel.exists():
        _build_kernel(kernel)
    if not libraries.exists():
        _build_libraries(libraries)
    return _built(kernel, libraries)


def kept() -> Built | None:
    """What is in the cache; None if anything is missing."""
    places = _places(cache())
    return _built(*places) if all(place.exists() for place in places) else None


def _places(folder: Path) -> tuple[Path, Path]:
    """Where the kernel and the libraries of this recipe and this Python lie."""
    recipe = (HERE / "kernel.config").read_bytes() + (HERE / "vector-fd.patch").read_bytes() + SOURCE.encode()
    kernel = folder / f"linux-{hashlib.sha256(recipe).hexdigest()[:12]}"
    return kernel, folder / f"pyverbs-{PYVERBS}-{sys.implementation.cache_tag}"


def _built(kernel: Path, libraries: Path) -> Built:
    return Built(kernel, libraries / "python", libraries / "lib", libraries / "include")


def cache() -> Path:
    """The folder where what is built is kept."""
    kept = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(os.environ.get("RXE_CACHE") or Path(kept, "xvcomm", "rxe")).absolute()


def _get(*command: str | Path, cwd: Path | None = None, **variables: str) -> str:
    """Run a command that gets packages; its failure is `CannotBuild`."""
    try:
        return _run(*command, cwd=cwd, **variables)
    except BuildFailed as failed:
        raise CannotBuild(f"packages cannot be had: {failed}") from failed


def _run(*command: str | Path, cwd: Path | None = None, **variables: str) -> str:
    """Run a command with low priority; its output. Its failure is `BuildFailed` with the end of what it printed."""
    line = ["nice", "-n", "19", *map(str, command)]
    done = subprocess.run(line, cwd=cwd, env=os.environ | variables, capture_output=True, text=True, check=False)
    if done.returncode:
        end = (done.stdout + done.stderr).strip().splitlines()[-20:]
        raise BuildFailed(f"`{' '.join(line[3:6])}` failed:\n" + "\n".join(end))
    return done.stdout


def _say(text: str) -> None:
    print(f"{time.strftime('%H:%M:%S')} {text}", file=sys.stderr, flush=True)


def _install(packages: Sequence[str]) -> None:
    """Install the packages that are missing, which root may do on Debian."""
    if not shutil.which("dpkg-query"):
        raise CannotBuild("the hosts are built from Debian's packages, on Debian 12 or 13 (no dpkg-query here)")
    query = ["dpkg-query", "-W", "-f", "${Package} ${Status}\n", *packages]
    listed = subprocess.run(query, capture_output=True, text=True, check=False).stdout
    there = {line.split()[0] for line in listed.splitlines() if line.endswith("install ok installed")}
    missing = [package for package in packages if package not in there]
    if not missing:
        return
    if os.getuid():
        raise CannotBuild(f"packages are missing: apt-get install --no-install-recommends {' '.join(missing)}")
    _say(f"installing {' '.join(missing)}")
    _get("apt-get", "-qq", "update")
    _get("apt-get", "-qq", "install", "-y", "--no-install-recommends", *missing, DEBIAN_FRONTEND="noninteractive")


def _jobs() -> str:
    return f"-j{min(2, os.cpu_count() or 1)}"


def _build_kernel(target: Path) -> None:
    _install(TOOLS)
    with tempfile.TemporaryDirectory(dir=target.parent, prefix="building-") as scratch:
        work = Path(scratch)
        package = _fetch_source(work)
        source, made = work / "source", work / "made"
        source.mkdir()
        made.mkdir()
        (work / "packed").write_text("\n".join(PACKED))
        unpack = (
            "dpkg-deb --fsys-tarfile {} | tar -xO --wildcards './usr/src/linux-source-*.tar.xz' | tar -xJ -C source"
        )
        _run("sh", "-c", unpack.format(package.name) + " --strip-components=1 -X packed", cwd=work)
        package.unlink()
        _run("patch", "-s", "-p1", "-d", source, "-i", HERE / "vector-fd.patch")
        _say("compiling a kernel of User-mode Linux, which takes 11 CPU minutes")
        make = ("make", "-s", "-C", source, "ARCH=um", f"O={made}", _jobs())
        _run(*make, "allnoconfig", KCONFIG_ALLCONFIG=str(HERE / "kernel.config"))
        settings = (made / ".config").read_text()
        for option in OPTIONS:
            if f"CONFIG_{option}=y" not in settings:
                raise BuildFailed(f"{package.name}: CONFIG_{option} cannot be set")
        _run(*make, "linux")
        _run("strip", "-o", work / "linux", made / "linux")
        (work / "linux").rename(target)
    _say(f"built {target}")


def _fetch_source(work: Path) -> Path:
    """Debian's package of the kernel's source, from its backports, without a change of the machine's lists of packages."""
    (work / "lists" / "partial").mkdir(parents=True)
    (work / "archives" / "partial").mkdir(parents=True)
    here = _get("apt-get", "indextargets", "--format", "$(REPO_URI)", "Created-By: Packages").splitlines()
    mirrors = [uri for uri in here if "security" not in uri and "debug" not in uri]
    if not mirrors:
        raise CannotBuild("apt has no lists of packages: apt-get update")
    key = "/usr/share/keyrings/debian-archive-keyring.gpg"
    (work / "sources").write_text(f"deb [signed-by={key}] {mirrors[0]} trixie-backports main\n")
    options = {
        "Dir::Etc::SourceList": work / "sources", "Dir::Etc::SourceParts": "/dev/null", "Dir::State::Lists": work / "lists",
        "Dir::Cache": work, "APT::Architectures": "amd64", "Acquire::Languages": "none", "APT::Sandbox::User": "root",
    }  # fmt: skip
    apt = ["apt-get", "-qq", *(part for name, value in options.items() for part in ("-o", f"{name}={value}"))]
    _get(*apt, "update")
    try:
        _get(*apt, "download", SOURCE, cwd=work)
    except CannotBuild:  # backports keep only the newest
        depends = _get("apt-cache", *apt[1:], "depends", "linux-source").split()
        newest = next(name for name in depends if name.startswith("linux-source-"))
        _say(f"{SOURCE} is gone, taking {newest}")
        _get(*apt, "download", newest, cwd=work)
    return next(work.glob("linux-source-*.deb"))


def _build_libraries(target: Path) -> None:
    """pyverbs from PyPI, whose wheel has none of the libraries that it needs, and these from its source."""
    _install(COMPILED)
    with tempfile.TemporaryDirectory(dir=target.parent, prefix="building-") as scratch:
        work = Path(scratch)
        (work / "constraint").write_text("cython<3.1\n")  # 59.0 does not compile with newer ones
        pip = (sys.executable, "-m", "pip", "-q", "--disable-pip-version-check")
        limits = {"PIP_CONSTRAINT": str(work / "constraint"), "CMAKE_BUILD_PARALLEL_LEVEL": "2"}
        _say("compiling pyverbs and rdma-core's libraries, which takes 6 CPU minutes")
        wanted = f"pyverbs=={PYVERBS}.*"
        _get(*pip, "download", "--no-deps", "--no-binary", "pyverbs", "-d", work, wanted, **limits)
        archive = next(work.glob("pyverbs-*.tar.gz"))
        _run("tar", "-xzf", archive, "-C", work)
        source = work / archive.name.removesuffix(".tar.gz") / "rdma-core"
        made = work / "made"
        _run(
            "cmake", "-S", source, "-B", made, "-G", "Ninja", "-DCMAKE_BUILD_TYPE=Release", "-DNO_MAN_PAGES=1", "-DNO_PYVERBS=1",
            f"-DCMAKE_INSTALL_PREFIX={target}", "-DCMAKE_INSTALL_LIBDIR=lib",
        )  # fmt: skip
        linked, provider = ("ibverbs", "rdmacm", "efa", "mana", "mlx4", "mlx5"), f"rxe-rdmav{PYVERBS}"
        _run("ninja", _jobs(), "-C", made, *(f"lib/lib{name}.so" for name in (*linked, provider)))
        ready = work / "ready"
        (ready / "lib" / "libibverbs").mkdir(parents=True)
        (ready / "etc" / "libibverbs.d").mkdir(parents=True)
        for library in (file for name in linked for file in (made / "lib").glob(f"lib{name}.so*")):
            shutil.copy2(library, ready / "lib", follow_symlinks=False)
        shutil.copy(made / "lib" / f"lib{provider}.so", ready / "lib" / "libibverbs")
        (ready / "etc" / "libibverbs.d" / "rxe.driver").write_text("driver rxe\n")
        shutil.copytree(made / "include", ready / "include")
        _run(*pip, "wheel", "--no-deps", "-w", work, archive, **limits)
        _run(*pip, "install", "--no-deps", "--target", ready / "python", next(work.glob("pyverbs-*.whl")))
        try:
            ready.rename(target)
        except OSError:
            if not target.is_dir():  # then another process was first
                raise
    _say(f"built {target}")


if __name__ == "__main__":
    print(build())
