"""Images built by buildah on a base that debootstrap makes, so that no registry of images is needed."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from pathlib import Path

PROGRAMS = ("buildah", "debootstrap")
BASE = "localhost/base"
_CERTIFICATES = "/etc/ssl/certs"
"""This machine's, by which its proxies, if any, are trusted."""
_PIP = "[global]\ncert = /certificates/ca-certificates.crt\nfind-links = /wheels\n"


class ImageBuilder:
    """A store of images with Debian 12 as base, which is made at once.

    Args:
        folder: for all that is made; the user is another one in parts of it.
        context: the folder from which images copy.
    """

    def __init__(self, folder: Path, context: Path) -> None:
        self._folder, self._context = folder, context
        (folder / "wheels").mkdir()
        (folder / "pip.conf").write_text(_PIP)
        root = folder / "base"
        subprocess.run(["debootstrap", "--variant=minbase", "bookworm", root], check=True, stdout=sys.stderr)
        empty = self._buildah("from", "scratch")
        self._buildah("add", empty, root, "/")
        self._buildah("commit", "--rm", empty, BASE)

    def stand_in(self, name: str, version: str) -> None:
        """Let pip take an empty package in place of one, by a local version, which is higher."""
        own = f"{version}+empty"
        facts = f"{name}-{own}.dist-info"
        with zipfile.ZipFile(self._folder / "wheels" / f"{name}-{own}-py3-none-any.whl", "w") as wheel:
            wheel.writestr(f"{facts}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: {own}\n")
            wheel.writestr(f"{facts}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
            wheel.writestr(f"{facts}/RECORD", "")

    def build(self, file: Path, **arguments: str) -> str:
        """Build an image of a Dockerfile with these arguments beside BASE; its name."""
        mounts = {_CERTIFICATES: "/certificates", "wheels": "/wheels", "pip.conf": "/etc/pip.conf"}
        volumes = [f"--volume={self._folder / here}:{there}:ro" for here, there in mounts.items()]
        given = [f"--build-arg={name}={value}" for name, value in {"BASE": BASE, **arguments}.items()]
        reached = ("--isolation", "chroot", "--network", "host", *volumes, *given)
        self._buildah("build", *reached, "--file", file, "--tag", file.stem, self._context)
        return f"localhost/{file.stem}"

    def run(self, image: str, *command: str) -> str:
        """What a command prints in a new container of an image, as the image's user."""
        container = self._buildah("from", image)
        return self._buildah("run", "--isolation", "chroot", container, "--", *command)

    def _buildah(self, verb: str, *words: object) -> str:
        store = ("--root", self._folder / "store", "--runroot", self._folder / "run", "--storage-driver", "vfs")
        done = subprocess.run(["buildah", *store, verb, *words], capture_output=True, text=True)
        assert done.returncode == 0, f"{done.stdout[-5000:]}\n{done.stderr[-5000:]}"
        return done.stdout.strip()
