"""The images of deploy/images: what all of them keep to, and that of the CPU built and run."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
IMAGES = ROOT / "deploy" / "images"
BUILD = Path(__file__).with_name("build_image.py")
HELLO = "import numpy, xvcomm; print(xvcomm.init().all_reduce(numpy.ones(1)))"


@pytest.mark.parametrize("name", ["cpu", "cuda", "rocm"])
def test_rules(name):
    """Bases of a fixed version, packages by constraints.txt, nothing compiled in the image, another user than root at the end."""
    text = (IMAGES / f"{name}.Dockerfile").read_text()
    (base,) = re.findall(r"^ARG BASE=(\S+)$", text, re.M)
    assert re.search(r":[\w-]*\d+\.\d+[\w.-]*$", base), base
    assert re.findall(r"^FROM (\S+)", text, re.M) == ["${BASE}", "${BASE}"]
    assert text.count("pip install") == text.count("-c /build/constraints.txt")
    assert re.findall(r"^USER (\S+)$", text, re.M) in (["1000"], ["xvcomm"])
    assert not re.search(r"\b(gcc|g\+\+|build-essential)\b", text)


def test_torch_is_built_for_the_rocm_of_the_base():
    text = (IMAGES / "rocm.Dockerfile").read_text()
    (base,) = re.findall(r"^ARG BASE=\S+:(\d+\.\d+)", text, re.M)
    (index,) = re.findall(r"^ARG TORCH_INDEX=\S+/rocm(\S+)$", text, re.M)
    assert base == index


def test_all_images_are_tested():
    assert sorted(file.name for file in IMAGES.iterdir()) == ["cpu.Dockerfile", "cuda.Dockerfile", "rocm.Dockerfile"]


@pytest.mark.clusters
@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_cpu_image(tmp_path):
    """Two ranks in a container of it, as the user 1000."""
    if missing := [program for program in ("buildah", "debootstrap") if shutil.which(program) is None]:
        pytest.skip(f"no {' and '.join(missing)}: apt-get install buildah debootstrap crun")
    context = tmp_path / "context"
    wheel = ["-m", "build", "--wheel", "--outdir", context / "dist", ROOT]
    subprocess.run([sys.executable, *wheel], check=True, stdout=subprocess.DEVNULL)
    shutil.copy(ROOT / "constraints.txt", context)
    # In a folder of its own, whose files of others than this user pytest could not remove.
    with tempfile.TemporaryDirectory(prefix="image") as folder:
        command = ("sh", "-c", f"id -u; echo '{HELLO}' > hello.py; xvcomm run -n 2 hello.py")
        line = [sys.executable, BUILD, IMAGES / "cpu.Dockerfile", context, folder, *command]
        run = subprocess.run(line, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr[-5000:]
    assert sorted(run.stdout.split("\n")[:3]) == ["1000", "[0] [2.]", "[1] [2.]"]
