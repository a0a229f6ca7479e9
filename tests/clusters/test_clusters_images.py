"""The images of deploy/images: what all of them keep to; that of the CPU, built and run; the others built without torch."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from image_builder import PROGRAMS, ImageBuilder

ROOT = Path(__file__).parents[2]
IMAGES = ROOT / "deploy" / "images"
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


@pytest.fixture(scope="module")
def builder(tmp_path_factory):
    """A builder of images, from xvcomm's wheel and constraints.txt."""
    if missing := [program for program in PROGRAMS if shutil.which(program) is None]:
        pytest.skip(f"no {' and '.join(missing)}: apt-get install buildah debootstrap crun")
    if os.geteuid():
        pytest.skip("only root can make the base by debootstrap")
    context = tmp_path_factory.mktemp("context")
    wheel = ["-m", "build", "--wheel", "--outdir", context / "dist", ROOT]
    subprocess.run([sys.executable, *wheel], check=True, stdout=subprocess.DEVNULL)
    shutil.copy(ROOT / "constraints.txt", context)
    # In a folder of its own, whose files of others than this user pytest could not remove.
    with tempfile.TemporaryDirectory(prefix="image") as folder:
        yield ImageBuilder(Path(folder), context)


@pytest.mark.clusters
@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_cpu_image(builder):
    """Two ranks in a container of it, as the user 1000."""
    image = builder.build(IMAGES / "cpu.Dockerfile")
    printed = builder.run(image, "sh", "-c", f"id -u; echo '{HELLO}' > hello.py; xvcomm run -n 2 hello.py")
    assert sorted(printed.split("\n")[:3]) == ["1000", "[0] [2.]", "[1] [2.]"]


@pytest.mark.clusters
@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(("name", "library"), [("cuda", "libcuda"), ("rocm", "libamdhip64")])
def test_images_of_the_vendors(builder, name, library):
    """Each line of theirs, on Debian also for AMD's, with an empty torch: only the driver's library is missing."""
    (version,) = re.findall(r"^torch==(\S+)$", (ROOT / "constraints.txt").read_text(), re.M)
    builder.stand_in("torch", version)
    arguments = {"TORCH_INDEX": "https://pypi.org/simple"} if name == "rocm" else {}
    image = builder.build(IMAGES / f"{name}.Dockerfile", **arguments)
    told = "id -un; python -c 'import pyverbs.device'; XVCOMM_DEVICE=host xvcomm doctor --json"
    user, report = builder.run(image, "sh", "-ec", told).split("\n", 1)
    assert user == "xvcomm"
    (reason,) = [row["reason"] for row in json.loads(report)["backends"] if row["name"] == name]
    assert library in reason and "cannot open shared object file" in reason
