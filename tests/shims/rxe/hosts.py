"""Hosts with RDMA NICs on a machine without any: kernels of User-mode Linux, ordinary processes, with Soft-RoCE.

Host H has the NICs eth0, eth1, ... with the addresses 10.77.NIC.(H+1)/24 and fd77:0:0:NIC::(H+1)/64, and on each an RDMA device,
rxe0, rxe1, ... NICs of one number are joined. A host's files are this machine's, copy-on-write; /dev/shm, /run and /dev are its
own.
"""

from __future__ import annotations

import os
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType

from build import Built

HERE = Path(__file__).resolve().parent
COUNT = 2
BOOT_SECONDS = 60.0
MEMORY = 2 << 30
"""Of a host; of this machine's memory it takes what it uses."""
MTU = 4500
"""Of the NICs: RoCE's largest packet, 4096 bytes, needs 4200."""
QUEUED = 4 << 20
PASSED = ("PATH", "HOME", "LANG", "LC_ALL", "VIRTUAL_ENV", "CI", "HYPOTHESIS_PROFILE")
"""Variables that a host's command gets from this process, beside those that begin with XVCOMM_."""
KILLED, BROKEN = 124, 125
"""Exit statuses: ended at the time limit; a host that did not boot, or crashed."""

MAPPINGS, MAPPINGS_LIMIT = 1 << 20, Path("/proc/sys/vm/max_map_count")
"""Each page of a host's process may be a mapping of its own here. At the limit, by default 65,530 and so 256 MiB, the host's
kernel tries the same write for ever."""
GUARD = f"""trap '' INT TERM HUP
while read -r line; do
  [ "$line" != done ] || {{ hosts=; break; }}
  hosts="$hosts $line"
done
for host in $hosts; do kill -s KILL -- "-$host" 2>/dev/null; done
[ -z "$2" ] || echo "$2" >{MAPPINGS_LIMIT}
rm -rf -- "$1"
"""
"""When this process has ended, also by SIGKILL, its input is at its end: it ends the hosts, restores the limit of mappings, if it
was changed, and removes the hosts' files."""
REGISTERED = 'echo $$ >&0; exec "$@" </dev/null'
"""Starts a kernel whose number the guard knows before it runs."""


class Host:
    """One kernel and what is known of it."""

    def __init__(self, index: int, folder: Path, process: subprocess.Popen[str]) -> None:
        self.index = index
        self._process = process
        self._console: list[str] = []
        self._booted = threading.Event()  # or it never will
        self._killed = False
        self.status: int | None = None
        self._reader = threading.Thread(target=self._read, name=f"console of host {index}", daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            text, mark, said = line.rstrip("\r\n").partition("\x01")
            if text and self._booted.is_set():
                print(f"host {self.index}| {text}", flush=True)
            self._console.append(line)
            if said == "boot":
                self._booted.set()
            elif said.startswith("exit "):
                self.status = int(said.removeprefix("exit "))
                return
            elif mark:
                break
        if self._killed:
            return
        self.status = BROKEN
        self._booted.set()
        print(f"host {self.index}: end of its console:\n{''.join(self._console[-15:])}", file=sys.stderr, flush=True)

    def join(self, seconds: float) -> None:
        """Wait until the command has ended, or the time has passed."""
        if self._booted.wait(min(seconds, BOOT_SECONDS)):
            self._reader.join(seconds)
        elif seconds > BOOT_SECONDS:
            print(f"host {self.index} has not booted in time: {''.join(self._console[-15:])}", file=sys.stderr)
            self.status = BROKEN

    def kill(self) -> None:
        """End the kernel and what runs on it, like a power cut."""
        self._killed = True
        try:  # it has a process for each address space, all in one session
            os.killpg(self._process.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
        self._process.wait()
        self._reader.join()
        assert self._process.stdout is not None
        self._process.stdout.close()


class Hosts:
    """Two hosts that run one command; `close` leaves nothing behind.

    The command sees HOST_INDEX, HOST_COUNT, NIC_COUNT, and HOST_ADDR_H_N and HOST_ADDR6_H_N for host H and NIC N.

    Args:
        built: what `build` has made.
        command: the words.
        nics: of each host.
        cpus: of each host.
        writable: folders of this machine that keep what the command writes; all else that it writes is lost.
    """

    def __init__(
        self, built: Built, command: Sequence[str], nics: int = 2, cpus: int = 1, writable: Sequence[Path] = ()
    ) -> None:
        self._folder = Path(tempfile.mkdtemp(prefix="rxe-"))
        before = _mappings_to_restore()
        self._guard = subprocess.Popen(
            ["sh", "-c", GUARD, "sh", self._folder, before], stdin=subprocess.PIPE, text=True, start_new_session=True
        )
        if before:
            MAPPINGS_LIMIT.write_text(str(MAPPINGS))
        self._links = [_link() for _ in range(nics)]
        self.hosts: list[Host] = []
        try:
            for index in range(COUNT):
                job = self._folder / f"host{index}"
                job.mkdir()
                self._write(job, built, index, command, writable)
                self.hosts.append(Host(index, job, self._start(job, built.kernel, index, cpus)))
        except BaseException:
            self.close()
            raise

    def _write(self, job: Path, built: Built, index: int, command: Sequence[str], writable: Sequence[Path]) -> None:
        """The files that a host begins with."""
        nics = range(len(self._links))
        places = {f"HOST_ADDR_{host}_{nic}": f"10.77.{nic}.{host + 1}" for host in range(COUNT) for nic in nics}
        places |= {f"HOST_ADDR6_{host}_{nic}": f"fd77:0:0:{nic}::{host + 1}" for host in range(COUNT) for nic in nics}
        passed = {name: value for name, value in os.environ.items() if name in PASSED or name.startswith("XVCOMM_")}
        path = [str(built.python), *filter(None, [os.environ.get("PYTHONPATH")])]
        variables = passed | places | {
            "HOST_INDEX": str(index), "HOST_COUNT": str(COUNT), "NIC_COUNT": str(len(self._links)), "HOST_FOLDER": os.getcwd(),
            "HOST_WRITABLE": " ".join(shlex.quote(str(folder.absolute())) for folder in writable),
            "PYTHONPATH": ":".join(path), "LD_LIBRARY_PATH": str(built.libraries), "RXE_HEADERS": str(built.headers),
        }  # fmt: skip
        names = [f"{places[f'HOST_ADDR_{host}_0']} host{host}" for host in range(COUNT)]
        (job / "environment").write_text("".join(f"export {k}={shlex.quote(v)}\n" for k, v in variables.items()))
        (job / "hosts").write_text("\n".join(["127.0.0.1 localhost", *names, ""]))
        (job / "command").write_text(f"exec {shlex.join(command)}\n")
        for script in ("init.sh", "main.sh"):
            shutil.copy(HERE / script, job)
        (job / "init.sh").chmod(0o755)

    def _start(self, job: Path, kernel: Path, index: int, cpus: int) -> subprocess.Popen[str]:
        descriptors = [link[index].fileno() for link in self._links]
        nics = [
            f"vec{nic}:transport=fd,fd={descriptor},mac=02:00:00:00:{nic:02x}:{index:02x},mtu={MTU},depth=64"
            for nic, descriptor in enumerate(descriptors)
        ]
        line = [
            kernel, f"mem={MEMORY >> 20}M", "root=/dev/root", "rootfstype=hostfs", "rootflags=/", "ro", f"init={job}/init.sh",
            "con=null", "con0=null,fd:1", "console=tty0", f"uml_dir={job}", "umid=uml", "panic=-1", "noreboot", "seccomp=auto",
            "dummy.numdummies=0", "quiet", "loglevel=3", *([f"ncpus={cpus}"] if cpus > 1 else []), *nics, "--", job,
        ]  # fmt: skip
        return subprocess.Popen(
            ["sh", "-c", REGISTERED, "sh", *map(str, line)], stdin=self._guard.stdin, stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT, text=True, errors="replace", pass_fds=descriptors, start_new_session=True,
            env=os.environ | {"TMPDIR": str(_memory_folder())},
        )  # fmt: skip

    def wait(self, seconds: float) -> int:
        """Wait for the command on all hosts; its worst exit status, or KILLED, or BROKEN."""
        end = time.monotonic() + seconds
        for host in self.hosts:
            host.join(max(0.0, end - time.monotonic()))
        return max(KILLED if host.status is None else host.status for host in self.hosts)

    def close(self) -> None:
        """End the hosts and remove their files."""
        for host in self.hosts:
            host.kill()
        for end in (end for link in self._links for end in link):
            end.close()
        shutil.rmtree(self._folder, ignore_errors=True)
        self._guard.communicate("done\n")

    def __enter__(self) -> Hosts:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _mappings_to_restore() -> str:
    """The limit of mappings, if it is too low here and this user may raise it; otherwise nothing."""
    before = MAPPINGS_LIMIT.read_text().strip()
    if int(before) >= MAPPINGS:
        return ""
    try:
        MAPPINGS_LIMIT.write_text(before)
    except OSError as reason:
        print(
            f"a process of a host that uses more than 256 MiB may hang: sysctl -w vm.max_map_count={MAPPINGS}: {reason}"
        )
        return ""
    return before


def _link() -> tuple[socket.socket, socket.socket]:
    """The two ends of a link: a NIC sends and receives a frame as a datagram."""
    ends = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
    for end in ends:
        for option in (socket.SO_SNDBUF, socket.SO_RCVBUF):
            end.setsockopt(socket.SOL_SOCKET, option, QUEUED)
    return ends


def _memory_folder() -> Path:
    """Where the hosts' memory lies, in files without a name: tmpfs where it has room and permits execution, as it must."""
    for folder in map(Path, ("/dev/shm", tempfile.gettempdir())):
        found = os.statvfs(folder)
        if not found.f_flag & os.ST_NOEXEC and found.f_bavail * found.f_frsize > COUNT * MEMORY:
            return folder
    raise RuntimeError(
        f"neither /dev/shm nor {tempfile.gettempdir()} has {COUNT * MEMORY >> 30} GiB free and permits execution"
    )
