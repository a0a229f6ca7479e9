"""Processes that run a program on a host, forked from a server that has imported xvcomm: a start costs little.

To tests they are what `subprocess.Popen` makes: standard output is a pipe, and standard error goes there too.
"""

import os
import runpy
import signal
import subprocess
import sys
from multiprocessing import Pipe
from pathlib import Path

from xvcomm.testing.hosts import settle
from xvcomm.testing.processes import prepare
from xvcomm.testing.servers import forked_with
from xvcomm.testing.world import PRELOAD


class Forked:
    """Runs a program, with arguments, at a `Place`. What it prints must fit into a pipe where nothing reads it meanwhile.

    Attributes:
        pid: of the process, and of its process group.
        stdout: what it has printed.
    """

    def __init__(self, place, program, *arguments, env):
        ours, theirs = Pipe(duplex=False)
        work = (theirs, place, env, str(program), list(map(str, arguments)))
        self._process = forked_with(tuple(PRELOAD))(target=_main, args=work, daemon=True)
        self._process.start()
        theirs.close()
        ours.recv_bytes()  # it has its process group
        self.stdout = open(os.dup(ours.fileno()))  # noqa: SIM115
        ours.close()
        self.pid = self._process.pid

    @property
    def returncode(self):
        return self._process.exitcode

    def poll(self):
        return self.returncode

    def wait(self, timeout=None):
        self._process.join(timeout)
        if self.returncode is None:
            raise subprocess.TimeoutExpired(f"process {self.pid}", timeout)
        return self.returncode

    def communicate(self, timeout=None):
        self.wait(timeout)
        with self.stdout:
            return self.stdout.read(), None

    def send_signal(self, number):
        if self.returncode is None:
            os.kill(self.pid, number)

    def kill(self):
        self.send_signal(signal.SIGKILL)


def _main(pipe, place, variables, program, arguments):
    os.setpgid(0, 0)
    pipe.send_bytes(b"")
    for stream in (1, 2):
        os.dup2(pipe.fileno(), stream)
    pipe.close()
    settle(place)
    os.environ.clear()
    prepare(variables, [str(Path(program).parent), *sys.path])
    sys.argv = [program, *arguments]
    runpy.run_path(program, run_name="__main__")
