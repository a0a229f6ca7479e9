"""Installs what the tests on clusters need, and is not there: SLURM and buildah by apt-get, as root, Ray, MPICH and accelerate in
environments of their own, which also have all packages of this one.

Arguments name some of it: slurm, images, ray, mpich, accelerate. What cannot be had is named; the tests that need it are then
skipped.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from slurm_cluster import PACKAGES, PROGRAMS

ROOT = Path(__file__).parents[2]
ENVIRONMENTS = ROOT / "build" / "clusters"
PYTHONS = ("ray", "mpich", "accelerate")


def python_of(name: str) -> Path:
    """The Python of an environment, whether it is there or not."""
    return ENVIRONMENTS / name / "bin" / "python"


def install_packages(programs: Sequence[str], packages: Sequence[str]) -> None:
    """Install packages of Debian if a program is missing; services are not started."""
    if all(shutil.which(program, path=f"{os.environ['PATH']}:/usr/sbin") for program in programs):
        return
    if os.geteuid():
        sys.exit(f"only root can install {' '.join(packages)}")
    quiet = {**os.environ, "DEBIAN_FRONTEND": "noninteractive", "RUNLEVEL": "1"}
    for words in (("update",), ("install", "--yes", "--no-install-recommends", *packages)):
        subprocess.run(["apt-get", "--quiet=2", *words], env=quiet, check=True, stdout=subprocess.DEVNULL)


def install_python(name: str) -> None:
    """Make an environment with the packages of `NAME.txt` and all of this one."""
    wanted = Path(__file__).with_name(f"{name}.txt").read_text()
    folder = ENVIRONMENTS / name
    done = folder / "installed.txt"
    if done.exists() and done.read_text() == wanted:
        return
    subprocess.run([sys.executable, "-m", "venv", "--clear", "--without-pip", str(folder)], check=True)
    packages = Path(sysconfig.get_path("purelib", "venv", {"base": str(folder), "platbase": str(folder)}))
    (packages / "base.pth").write_text(f"import site; site.addsitedir({sysconfig.get_path('purelib')!r})\n")
    pip = (
        sys.executable,
        "-m",
        "pip",
        "--python",
        str(python_of(name)),
        "install",
        "--quiet",
        "--disable-pip-version-check",
    )
    subprocess.run([*pip, "-r", Path(__file__).with_name(f"{name}.txt")], check=True)
    done.write_text(wanted)


if __name__ == "__main__":
    steps = {
        "slurm": partial(install_packages, PROGRAMS, PACKAGES),
        "images": partial(install_packages, ("buildah", "debootstrap"), ("buildah", "debootstrap", "crun")),
        **{name: partial(install_python, name) for name in PYTHONS},
    }
    for what in sys.argv[1:] or steps:
        try:
            steps[what]()
        except (OSError, subprocess.CalledProcessError, SystemExit) as error:
            print(f"no {what}: {error}", file=sys.stderr)
