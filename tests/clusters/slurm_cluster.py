"""A SLURM cluster of Debian's packages on this machine: its two nodes are the hosts of `xvcomm.testing.hosts`."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType

from xvcomm.testing.hosts import Hosts

PACKAGES = ("slurmctld", "slurmd", "slurm-client", "munge")
PROGRAMS = ("munged", "slurmctld", "slurmd", "srun", "sbatch", "scontrol")
_PATH = f"{os.environ['PATH']}:/usr/sbin"
_SECONDS = 60.0
_GPUS = 8
_CONFIGURATION = """
ClusterName=xvcomm
SlurmctldHost=a
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
# A job that was requeued waits for cred_expire; two minutes if left out.
AuthInfo=socket={folder}/munge.socket,cred_expire=6
CredType=cred/munge
MpiDefault=none
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SwitchType=switch/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SchedulerType=sched/backfill
SchedulerParameters=sched_interval=1,sched_min_interval=0,bf_interval=1
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
ReturnToService=2
KillWait=5
GresTypes=gpu
SlurmdParameters=config_overrides
SlurmctldPidFile={folder}/slurmctld.pid
SlurmctldLogFile={folder}/slurmctld.log
StateSaveLocation={folder}
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmdLogFile={folder}/slurmd-%n.log
SlurmdSpoolDir={folder}/spool-%n
NodeName=a,b CPUs=64 Boards=1 SocketsPerBoard=1 CoresPerSocket=64 ThreadsPerCore=1 RealMemory=1000 Gres=gpu:{gpus}
PartitionName=all Nodes=a,b Default=YES State=UP
PartitionName=cuda Nodes={cuda} State=UP
PartitionName=rocm Nodes={rocm} State=UP
"""


def missing() -> list[str]:
    """The programs of SLURM that this machine has not got."""
    return [program for program in PROGRAMS if shutil.which(program, path=_PATH) is None]


class Slurm:
    """A controller on node a, and slurmd on the nodes a and b, each of which has eight GPUs by name.

    Args:
        folder: for its files; short, since a path of a socket has at most 107 bytes.
        hosts: the nodes.
    """

    def __init__(self, folder: Path, hosts: Hosts) -> None:
        self.folder, self.hosts = folder, hosts
        self._daemons: list[subprocess.Popen[bytes]] = []
        self._conf = folder / "slurm.conf"
        self._conf.write_text(_CONFIGURATION.format(folder=folder, gpus=_GPUS, cuda="b", rocm="a"), encoding="ascii")
        # Finding out by itself fails where the namespaces hide the groups of this machine's processes.
        (folder / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\n")
        for number in range(_GPUS):
            (folder / f"gpu{number}").touch()
        (folder / "gres.conf").write_text(f"Name=gpu File={folder}/gpu[0-{_GPUS - 1}]\n")
        key = folder / "munge.key"
        key.write_bytes(os.urandom(128))
        key.chmod(0o400)
        files = {name: folder / f"munge.{name}" for name in ("socket", "pid", "log", "seed")}
        options = [
            word
            for name, file in files.items()
            for word in (f"--{name}-file" if name != "socket" else "--socket", file)
        ]
        try:
            self._start(0, "munged", "--foreground", "--force", "--key-file", key, *options)
            self._await("munged", files["socket"].exists)
            self._start(0, "slurmctld", "-D")
            for side in range(2):
                self._start(side, "slurmd", "-D")
            self._await("the nodes", lambda: self.call("sinfo", "-h", "-p", "all", "-o", "%D%t") == "2idle")
        except BaseException:
            self.close()
            raise

    def _environment(self) -> dict[str, str]:
        return {**os.environ, "PATH": _PATH, "SLURM_CONF": str(self._conf)}

    def _start(self, side: int, *command: object) -> None:
        with open(self.folder / "daemons.log", "ab") as log:
            line, outputs = self.hosts.inside(side, *command), {"stdout": log, "stderr": log}
            daemon = subprocess.Popen(
                line, env=self._environment(), stdin=subprocess.DEVNULL, process_group=0, **outputs
            )
        self._daemons.append(daemon)

    def _await(self, what: str, reached: Callable[[], bool], seconds: float = _SECONDS) -> None:
        end = time.monotonic() + seconds
        while not reached():
            assert time.monotonic() < end, f"{what}: not within {seconds:.0f} s\n{self.logs()}"
            time.sleep(0.2)

    def logs(self) -> str:
        """The last lines of what the daemons have written."""
        return "".join(file.read_text(errors="replace")[-3000:] for file in self.folder.glob("*.log"))

    def call(self, *command: object, env: Mapping[str, str] = MappingProxyType({})) -> str:
        """What a command on node a prints that must succeed, with further variables."""
        place = self.hosts.begin(0, *command, env={"PATH": _PATH, "SLURM_CONF": str(self._conf), **env})
        text: str = place.communicate(timeout=300)[0]
        assert place.returncode == 0, f"{text}\n{self.logs()}"
        return text.strip()

    def submit(self, *arguments: object, env: Mapping[str, str] = MappingProxyType({})) -> int:
        """Call `sbatch` with these arguments; the number of the job."""
        return int(self.call("sbatch", "--parsable", *arguments, env=env).split(";")[0])

    def job(self, number: int) -> dict[str, str]:
        """What `scontrol show job` says of a job, of its first group if it has several."""
        text = self.call("scontrol", "--oneliner", "show", "job", number).splitlines()[0]
        return dict(re.findall(r"(\w+)=(\S*)", text))

    def wait(self, number: int, state: str = "COMPLETED", seconds: float = 240.0) -> dict[str, str]:
        """Wait for a state of a job; what SLURM says of it then. Another state that is an end fails."""
        end = time.monotonic() + seconds
        while (job := self.job(number))["JobState"] != state:
            ended = job["JobState"] in ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL")
            if ended or time.monotonic() > end:
                output = Path(job["StdOut"]).read_text(errors="replace") if Path(job["StdOut"]).exists() else ""
                raise AssertionError(f"job {number} is {job['JobState']}, expected {state}\n{output}\n{self.logs()}")
            time.sleep(0.2)
        return job

    def step(self, *arguments: object, env: Mapping[str, str] = MappingProxyType({})) -> str:
        """Call `srun` with these arguments on node a; what the tasks print."""
        return self.call("srun", *arguments, env=env)

    def left(self) -> list[str]:
        """What lies in the shared memory of the nodes."""
        return [file.name for file in self.hosts.shared_memory()]

    def close(self) -> None:
        """End the daemons, and what still runs of jobs."""
        for daemon in reversed(self._daemons[1:]):
            daemon.terminate()
        for daemon in self._daemons[1:]:
            daemon.wait(30)
        for daemon in self._daemons[:1]:  # which the others need until they have ended
            daemon.terminate()
            daemon.wait(30)


def tasks(number: int) -> dict[int, int]:
    """Process ids of the tasks that run now of a job's steps, by their ranks."""
    found = {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            text = (folder / "environ").read_bytes().decode(errors="replace")
        except OSError:
            continue
        env = dict(line.partition("=")[::2] for line in text.split("\0"))
        if (
            env.get("SLURM_JOB_ID") == str(number)
            and env.get("SLURM_TASK_PID") == folder.name
            and env.get("SLURM_STEP_ID")
        ):
            found[int(env["SLURM_PROCID"])] = int(folder.name)
    return found
