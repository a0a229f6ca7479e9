"""Builds an image and runs a command in a container of it: `build_image.py FILE CONTEXT FOLDER COMMAND...`.

buildah builds it on a base that debootstrap makes, so that no registry of images is needed. All that it makes lies in FOLDER.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

CERTIFICATES = "/etc/ssl/certs"
"""This machine's, by which its proxies, if any, are trusted."""


def main(file: str, context: str, folder: Path, *command: str) -> None:
    """Make the base, the image and a container, and run a command there as the image's user."""
    store = ("--root", str(folder / "store"), "--runroot", str(folder / "run"), "--storage-driver", "vfs")
    base, quiet = folder / "base", {"stdout": sys.stderr}

    def buildah(verb: str, *words: str) -> str:
        line = ["buildah", *store, verb, *words]
        return subprocess.run(line, check=True, stdout=subprocess.PIPE, text=True).stdout.strip()

    subprocess.run(["debootstrap", "--variant=minbase", "bookworm", str(base)], check=True, **quiet)
    empty = buildah("from", "scratch")
    buildah("add", empty, str(base), "/")
    buildah("commit", "--rm", empty, "localhost/base")
    (folder / "pip.conf").write_text("[global]\ncert = /certificates/ca-certificates.crt\n")
    mounts = (f"{CERTIFICATES}:/certificates:ro", f"{folder}/pip.conf:/etc/pip.conf:ro")
    reached = ("--isolation", "chroot", "--network", "host", *(f"--volume={mount}" for mount in mounts))
    buildah("build", *reached, "--build-arg", "BASE=localhost/base", "--file", file, "--tag", "built", context)
    container = buildah("from", "localhost/built")
    print(buildah("run", "--isolation", "chroot", container, "--", *command))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], Path(sys.argv[3]), *sys.argv[4:])
