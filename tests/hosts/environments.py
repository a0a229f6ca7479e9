"""Python environments that differ from one host to the other."""

import subprocess
import sys
import sysconfig
from pathlib import Path


def environment(folder, shade):
    """The Python of a new environment: this one's packages, and a package `shade` of this version."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True)
    packages = Path(sysconfig.get_path("purelib", "venv", {"base": str(folder), "platbase": str(folder)}))
    # A path alone would leave out what that folder's own .pth files add: xvcomm, where it is installed to be edited.
    (packages / "base.pth").write_text(f"import site; site.addsitedir({sysconfig.get_path('purelib')!r})\n")
    (packages / "shade.py").touch()
    about = packages / f"shade-{shade}.dist-info"
    about.mkdir()
    (about / "METADATA").write_text(f"Metadata-Version: 2.1\nName: shade\nVersion: {shade}\n")
    return folder / "bin" / "python"


def pythons(folder):
    """Variables of the files in deploy/: a Python environment for each vendor, which labels its ranks as its GPUs would."""
    found = {}
    for label, shade in (("cuda", "1.0"), ("rocm", "2.0")):
        script = folder / f"{label}-python"
        script.write_text(f'#!/bin/sh\nXVCOMM_ISLAND={label} exec {environment(folder / label, shade)} "$@"\n')
        script.chmod(0o755)
        found[f"{label.upper()}_PYTHON"] = str(script)
    return found
