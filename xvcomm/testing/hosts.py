"""Two hosts on this machine: network namespaces with links between them, each with a name and shared memory of its own."""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import secrets
import shlex
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType, TracebackType
from typing import Any

from xvcomm.errors import ResourceError

NAMES = "ab"
_ENTER = 'mount --bind "$1" /etc/hosts && mount --bind "$2" /dev/shm && hostname "$3" && shift 3 && exec "$@"'
_LAUNCHERS = (
    "XVCOMM_", "RANK", "WORLD_SIZE", "LOCAL_", "MASTER_", "OMPI_", "PMI", "SLURM_", "JAX_", "TORCHELASTIC_", "JOBSET_", "VC_",
)  # fmt: skip
"""Beginnings of the names of their variables."""
_GRACE_SECONDS = 5.0
_LINK_SECONDS = 30.0
_CARRYING = ("UP", "UNKNOWN")  # a tunnel's state is never known
_CONGESTION = "/proc/sys/net/ipv4/tcp_congestion_control"
_NEW_NETWORK, _NEW_MOUNTS, _NEW_NAME = 0x40000000, 0x20000, 0x4000000
_BIND, _RECURSIVE, _PRIVATE, _DETACH = 0x1000, 0x4000, 1 << 18, 2


@dataclass(frozen=True, slots=True)
class Place:
    """What makes a host.

    Attributes:
        namespace: of its network.
        names: its /etc/hosts.
        memory: its /dev/shm.
        name: of the host.
    """

    namespace: str
    names: Path
    memory: Path
    name: str


class Hosts:
    """Two hosts, 0 and 1, whose names are `a` and `b`, joined by pairs of virtual interfaces (veth).

    Link N joins 10.77.N.1 on host 0 and 10.77.N.2 on host 1. What runs on one host shares memory, and nothing else does.

    Args:
        links: between the hosts.
        rate: what each link carries each way, in the spelling of tc: `1gbit`, or one for each link; as much as the machine can
            if left out.
        addresses: of each interface, with `{link}` and `{side}`, which is 1 or 2; the names of the hosts mean the first one of
            link 0.
        congestion: TCP's congestion control on both hosts, of those that this machine has; its own choice if left out.

    Raises:
        ResourceError: this user may make no network namespaces, or a tool is missing.
    """

    def __init__(
        self,
        links: int = 2,
        rate: str | Sequence[str] | None = None,
        addresses: Sequence[str] = ("10.77.{link}.{side}/24",),
        congestion: str = "",
    ) -> None:
        self._tag = secrets.token_hex(3)
        self._namespaces = [f"xv{self._tag}{name}" for name in NAMES]
        self._folder = Path("/dev/shm", self._tag)
        self._begun: list[subprocess.Popen[str]] = []
        try:
            for name in NAMES:
                (self._folder / name).mkdir(parents=True)
            first = [addresses[0].format(link=0, side=side + 1).partition("/")[0] for side in range(2)]
            self._addresses = first
            names = "".join(f"{address} {name}\n" for address, name in zip(first, NAMES, strict=True))
            (self._folder / "hosts").write_text(f"127.0.0.1 localhost\n{names}")
            for namespace in self._namespaces:
                _call("ip", "netns", "add", namespace)
                _call("ip", "-n", namespace, "link", "set", "lo", "up")
                if congestion:
                    self._choose_congestion(namespace, congestion)
            rates = [rate] * links if rate is None or isinstance(rate, str) else rate
            for link in range(links):
                self._join(link, rates[link], addresses)
            self._await_links(links)
        except BaseException as error:
            self.close()
            if isinstance(error, OSError | subprocess.CalledProcessError):
                why = getattr(error, "stderr", "") or error
                raise ResourceError(
                    f"cannot make network namespaces with links between them: {str(why).strip()}; that needs Linux, root "
                    "and iproute2 (ip, tc)"
                ) from error
            raise

    @staticmethod
    def _choose_congestion(namespace: str, congestion: str) -> None:
        try:
            _call("ip", "netns", "exec", namespace, "sh", "-c", f"echo {congestion} > {_CONGESTION}")
        except subprocess.CalledProcessError as error:
            raise ResourceError(f"cannot choose {congestion} in {_CONGESTION}: {error.stderr.strip()}") from error

    def _join(self, link: int, rate: str | None, addresses: Sequence[str]) -> None:
        self.make_interfaces(link)
        for side, namespace in enumerate(self._namespaces):
            end = self.interface(side, link)
            for pattern in addresses:
                address = pattern.format(link=link, side=side + 1)
                at_once = ("nodad",) if ":" in address else ()
                self.ip(side, "addr", "add", address, "dev", end, *at_once)
            if rate is not None:
                shape = ("tbf", "rate", rate, "burst", "128kb", "latency", "20ms")
                _call("tc", "-n", namespace, "qdisc", "add", "dev", end, "root", *shape)
            self.ip(side, "link", "set", end, "up")

    def _await_links(self, links: int) -> None:
        """Wait until the kernel carries packets over all links: on a busy machine it drops them for seconds before."""
        waiting = {self.interface(side, link) for side in range(2) for link in range(links)}
        end = time.monotonic() + _LINK_SECONDS
        while True:
            for side in range(2):
                for link in json.loads(self.ip(side, "-j", "link", "show")):
                    if link["operstate"] in _CARRYING and "LOWER_UP" in link["flags"]:
                        waiting.discard(link["ifname"])
            if not waiting:
                return
            if time.monotonic() > end:
                raise OSError(f"{', '.join(sorted(waiting))} did not come up within {_LINK_SECONDS:.0f} s")
            time.sleep(0.01)

    def make_interfaces(self, link: int) -> None:
        """Make the two interfaces of a link, one on each host; a subclass may join the hosts otherwise.

        Raises:
            OSError, subprocess.CalledProcessError: they cannot be made.
        """
        ends = [self.interface(side, link) for side in range(2)]
        near, far = ((end, "netns", namespace) for end, namespace in zip(ends, self._namespaces, strict=True))
        _call("ip", "link", "add", *near, "type", "veth", "peer", "name", *far)

    def interface(self, side: int, link: int) -> str:
        """Name of a host's interface to a link."""
        return f"v{self._tag}{NAMES[side]}{link}"

    def ip(self, side: int, *words: str) -> str:
        """Call `ip` with these words on a host; its output."""
        return _call("ip", "-n", self._namespaces[side], *words)

    def link(self, link: int, state: str) -> None:
        """Cut a link, or bring it back: `down` or `up`."""
        self.ip(0, "link", "set", self.interface(0, link), state)

    def sent(self, side: int, link: int) -> int:
        """Bytes that a host has sent over a link so far, all headers included."""
        text = self.ip(side, "-s", "-j", "link", "show", self.interface(side, link))
        return int(json.loads(text)[0]["stats64"]["tx"]["bytes"])

    def namespace(self, side: int) -> str:
        """Name of a host's network namespace, for `enter`."""
        return self._namespaces[side]

    def place(self, side: int) -> Place:
        """What makes a host, for `settle`."""
        return Place(self._namespaces[side], self._folder / "hosts", self._folder / NAMES[side], NAMES[side])

    def inside(self, side: int, *command: object) -> list[str]:
        """The command line that runs a command on a host."""
        place = self.place(side)
        enter = ("unshare", "--mount", "--uts", "sh", "-ec", _ENTER, "sh", place.names, place.memory, place.name)
        return ["ip", "netns", "exec", place.namespace, *map(str, (*enter, *command))]

    def agent(self, file: Path) -> Path:
        """Make a script that mpirun on host 0 can call instead of ssh (`plm_rsh_agent`): it enters host 1."""
        enter = shlex.join(["nsenter", f"--mount=/proc/{os.getpid()}/ns/mnt", *self.inside(1, "sh", "-c")])
        file.write_text(f'#!/bin/sh\nshift\nexec {enter} "$*"\n')
        file.chmod(0o755)
        return file

    def begin(
        self, side: int, *command: object, env: Mapping[str, str] = MappingProxyType({}), stdout: Any = subprocess.PIPE
    ) -> subprocess.Popen[str]:
        """Start a command on a host, for ranks on host memory.

        Args:
            side: the host.
            command: program and arguments.
            env: further variables. It gets this process's but those of launchers, and a secret of these hosts.
            stdout: as `subprocess.Popen` takes it; standard error goes there too.
        """
        process = subprocess.Popen(
            self.inside(side, *command), env=self.variables(env), stdin=subprocess.DEVNULL, stdout=stdout,
            stderr=subprocess.STDOUT, text=True, process_group=0,
        )  # fmt: skip
        self._begun.append(process)
        return process

    def variables(self, env: Mapping[str, str] = MappingProxyType({})) -> dict[str, str]:
        """All variables of a process on a host; arguments as for `begin`."""
        base = {k: v for k, v in os.environ.items() if not k.startswith(_LAUNCHERS) or k == "XVCOMM_KERNEL_CACHE"}
        job = {"XVCOMM_DEVICE": "host", "XVCOMM_TIMEOUT": "60", "XVCOMM_SECRET": self._tag, "OMP_NUM_THREADS": "1"}
        return {**base, **job, **env}

    def start_ranks(
        self, *command: object, sides: Sequence[int] = (0, 1), env: Mapping[str, str] = MappingProxyType({})
    ) -> list[subprocess.Popen[str]]:
        """Start a rank of one job on each of these hosts, by variables alone; further arguments as for `begin`."""
        each = self.ranks(len(sides), env)
        return [self.begin(side, *command, env=rank) for side, rank in zip(sides, each, strict=True)]

    @staticmethod
    def ranks(size: int, env: Mapping[str, str] = MappingProxyType({})) -> list[dict[str, str]]:
        """The variables of each rank of a job, beside those of all processes."""
        job = {"XVCOMM_SIZE": str(size), "XVCOMM_STORE": "tcp://a:29711", **env}
        return [{**job, "XVCOMM_RANK": str(rank)} for rank in range(size)]

    def name(self, side: int, *names: str) -> None:
        """Let further names mean a host, from now on."""
        with open(self._folder / "hosts", "a") as file:
            file.write(f"{self._addresses[side]} {' '.join(names)}\n")

    def shared_memory(self) -> list[Path]:
        """The files of xvcomm's jobs that lie in the shared memory of the hosts."""
        return list(self._folder.glob("*/xvcomm-*"))

    def close(self) -> list[str]:
        """End what still runs on the hosts and remove them; what jobs have left in their shared memory. Idempotent."""
        for end in (signal.SIGTERM, signal.SIGKILL):
            running = [process for process in self._begun if process.poll() is None]
            for process in running:
                os.killpg(process.pid, end)
            for process in running:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.communicate(timeout=_GRACE_SECONDS if end == signal.SIGTERM else None)
        left = [file.name for file in self.shared_memory()]
        shutil.rmtree(self._folder, ignore_errors=True)
        for namespace in self._namespaces:
            with contextlib.suppress(OSError, subprocess.CalledProcessError):
                _call("ip", "netns", "del", namespace)
        return left

    def __enter__(self) -> Hosts:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()


def enter(namespace: str) -> None:
    """Move this thread, and what it starts from now on, into a network namespace. Its memory and its files stay as they are."""
    with open(f"/run/netns/{namespace}") as file:
        _system("setns", file.fileno(), _NEW_NETWORK)


def settle(place: Place) -> None:
    """Move this process, which has one thread, onto a host, for good: what the command line of `Hosts.inside` does."""
    enter(place.namespace)
    _system("unshare", _NEW_MOUNTS | _NEW_NAME)
    _system("mount", None, b"/", None, _RECURSIVE | _PRIVATE, None)
    _system("umount2", b"/sys", _DETACH)
    _system("mount", b"sysfs", b"/sys", b"sysfs", 0, None)  # which shows the network's interfaces
    for source, target in ((place.names, b"/etc/hosts"), (place.memory, b"/dev/shm")):
        _system("mount", bytes(source), target, None, _BIND, None)
    socket.sethostname(place.name)


def _system(call: str, *arguments: bytes | int | None) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if getattr(libc, call)(*arguments):
        error = ctypes.get_errno()
        raise OSError(error, f"{call}: {os.strerror(error)}")


def _call(*words: str) -> str:
    """Output of a program that must succeed, which signals of the terminal do not reach."""
    return subprocess.run(words, check=True, capture_output=True, text=True, process_group=0).stdout
