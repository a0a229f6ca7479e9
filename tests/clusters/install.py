"""Installs what the tests on clusters need, and is not there: SLURM by apt-get, as root, and Ray in an environment of its own.

What cannot be had is named; the tests that need it are then skipped.
"""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
from pathlib import Path

from slurm_cluster import PACKAGES, missing

ROOT = Path(__file__).parents[2]
RAY = ROOT / "build" / "clusters" / "ray"
"""An environment with Ray that also has all packages of this one."""


def ray_python() -> Path:
    """The Python with Ray, whether it is there or not."""
    return RAY / "bin" / "python"


def install_slurm() -> None:
    """Install SLURM's packages; their services are not started."""
    if not missing():
        return
    if os.geteuid():
        sys.exit("SLURM is installed by root only")
    quiet = {**os.environ, "DEBIAN_FRONTEND": "noninteractive", "RUNLEVEL": "1"}
    for words in (("update",), ("install", "--yes", "--no-install-recommends", *PACKAGES)):
        subprocess.run(["apt-get", "--quiet=2", *words], env=quiet, check=True, stdout=subprocess.DEVNULL)


def install_ray() -> None:
    """Make the environment with Ray."""
    wanted = [
        line.strip() for line in (ROOT / "tests/clusters/ray.txt").read_text().splitlines() if line[:1] not in "#"
    ]
    done = RAY / "installed.txt"
    if done.exists() and done.read_text().splitlines() == wanted:
        return
    subprocess.run([sys.executable, "-m", "venv", "--clear", "--without-pip", str(RAY)], check=True)
    packages = Path(sysconfig.get_path("purelib", "venv", {"base": str(RAY), "platbase": str(RAY)}))
    (packages / "base.pth").write_text(f"import site; site.addsitedir({sysconfig.get_path('purelib')!r})\n")
    pip = (
        sys.executable,
        "-m",
        "pip",
        "--python",
        str(ray_python()),
        "install",
        "--quiet",
        "--disable-pip-version-check",
    )
    subprocess.run([*pip, *wanted], check=True)
    done.write_text("\n".join(wanted) + "\n")


if __name__ == "__main__":
    for name, install in (("SLURM", install_slurm), ("Ray", install_ray)):
        try:
            install()
        except (OSError, subprocess.CalledProcessError, SystemExit) as error:
            print(f"no {name}: {error}", file=sys.stderr)
