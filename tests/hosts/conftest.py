"""Fixtures of the tests between hosts: two network namespaces with two links between them."""

import contextlib
import os
import secrets
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))  # for the modules beside this one, here and on the ranks


def ip(*words):
    """Run `ip`, which must succeed."""
    subprocess.run(["ip", *words], check=True, capture_output=True, text=True)


ENTER = 'mount --bind "$1" /etc/hosts && mount --bind "$2" /dev/shm && hostname "$3" && shift 3 && exec "$@"'
"""Gives a process shared memory, a table of hosts and a host name of its own, and executes the rest."""

LAUNCHERS = ("XVCOMM_", "RANK", "WORLD_SIZE", "LOCAL_", "MASTER_", "OMPI_", "PMI", "SLURM_", "JAX_", "TORCHELASTIC_")
"""Beginnings of the names of their variables."""


class TwoHosts:
    """Two network namespaces, joined by two pairs of virtual interfaces."""

    def __init__(self):
        self.tag = secrets.token_hex(3)
        self.begun = []
        self.names = [f"xv{self.tag}{side}" for side in "ab"]
        for name in self.names:
            ip("netns", "add", name)
            ip("-n", name, "link", "set", "lo", "up")
        self.folder = Path("/dev/shm", self.tag)
        for name in "ab":
            (self.folder / name).mkdir(parents=True)
        (self.folder / "hosts").write_text("127.0.0.1 localhost\n10.77.0.1 a\n10.77.0.2 b\n")
        for link in range(2):
            near, far = (f"v{self.tag}{side}{link}" for side in "ab")
            ip("link", "add", near, "netns", self.names[0], "type", "veth", "peer", "name", far, "netns", self.names[1])
            for number, (name, device) in enumerate(zip(self.names, (near, far), strict=True)):
                ip("-n", name, "addr", "add", f"10.77.{link}.{number + 1}/24", "dev", device)
                ip("-n", name, "link", "set", device, "up")

    def link(self, link, state):
        """Cut a link, or bring it back: `down` or `up`."""
        ip("-n", self.names[0], "link", "set", f"v{self.tag}a{link}", state)

    def inside(self, side, *command):
        """The command line that runs a command on host `side`, 0 or 1, with its own shared memory and its name, `a` or `b`.

        What runs on one host shares memory, and nothing else does.
        """
        places = (self.folder / "hosts", self.folder / "ab"[side], "ab"[side])
        enter = ("unshare", "--mount", "--uts", "sh", "-ec", ENTER, "sh", *places)
        return ["ip", "netns", "exec", self.names[side], *map(str, (*enter, *command))]

    def begin(self, side, *command, env=None):
        """Start a command on a host, as in `inside`, without variables of launchers."""
        base = {k: v for k, v in os.environ.items() if not k.startswith(LAUNCHERS) or k == "XVCOMM_KERNEL_CACHE"}
        job = {"XVCOMM_DEVICE": "host", "XVCOMM_TIMEOUT": "60", "XVCOMM_SECRET": self.tag, "OMP_NUM_THREADS": "1"}
        process = subprocess.Popen(
            self.inside(side, *command), env={**base, **job, **(env or {})}, stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, process_group=0,
        )  # fmt: skip
        self.begun.append(process)
        return process

    @staticmethod
    def outputs(processes):
        """What processes of `begin` have printed; all must end, and well."""
        printed = [process.communicate(timeout=120)[0] for process in processes]
        assert not any(process.returncode for process in processes), "\n---\n".join(printed)
        return printed

    def start(self, *arguments, env=None):
        """Start `ranks.py` with these arguments on both hosts, one rank each."""
        base = {k: v for k, v in os.environ.items() if not k.startswith("XVCOMM_")}
        job = {
            "XVCOMM_SIZE": "2", "XVCOMM_STORE": "tcp://10.77.0.1:29711", "XVCOMM_SECRET": self.tag, "XVCOMM_DEVICE": "host",
            "XVCOMM_TIMEOUT": "60", "XVCOMM_LOCAL_RANK": "0", "XVCOMM_LOCAL_SIZE": "1", **(env or {}),
        }  # fmt: skip
        if "XVCOMM_KERNEL_CACHE" in os.environ:
            job["XVCOMM_KERNEL_CACHE"] = os.environ["XVCOMM_KERNEL_CACHE"]
        script = str(Path(__file__).parent / "ranks.py")
        return [
            subprocess.Popen(
                ["ip", "netns", "exec", name, sys.executable, script, *map(str, arguments)],
                env={**base, **job, "XVCOMM_RANK": str(rank), "XVCOMM_HOST": "ab"[rank]},
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
            )
            for rank, name in enumerate(self.names)
        ]  # fmt: skip

    def run(self, *arguments, env=None):
        """`start`, and wait for a good end; what the ranks have printed."""
        ranks = self.start(*arguments, env=env)
        outputs = [rank.communicate(timeout=120) for rank in ranks]
        assert [rank.returncode for rank in ranks] == [0, 0], outputs
        return [out for out, _ in outputs]

    def close(self):
        """Remove the hosts, where no shared memory may be left."""
        for process in self.begun:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.communicate()
        left = list(self.folder.glob("*/xvcomm-*"))
        shutil.rmtree(self.folder)
        for name in self.names:
            with contextlib.suppress(subprocess.CalledProcessError):
                ip("netns", "del", name)
        assert not left


@pytest.fixture
def two_hosts():
    """Two hosts; skipped where this user may make no network namespaces."""
    try:
        hosts = TwoHosts()
    except (subprocess.CalledProcessError, FileNotFoundError) as error:
        pytest.skip(f"no network namespaces here, which need root and iproute2: {getattr(error, 'stderr', error)}")
    try:
        yield hosts
    finally:
        hosts.close()
