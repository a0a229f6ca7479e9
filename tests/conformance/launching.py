"""Starts `xvcomm run` as a process of its own."""

import os
import subprocess
import sys

RUN = [sys.executable, "-m", "xvcomm", "run"]
ENV = {k: v for k, v in os.environ.items() if not k.startswith(("XVCOMM_", "OMP_NUM_THREADS"))}

PID = "open(f'{sys.argv[1]}/pid.{rank}', 'w').write(str(os.getpid()))\n"
"""First line of a program that tells its process ID in the folder that is its argument."""
_AWAIT = """
def await_ranks(*ranks, ended=True):  # until they have told their process IDs, and have ended
    for other in ranks:
        file, pid = f'{sys.argv[1]}/pid.{other}', ''
        while not pid or (ended and lives(pid)):
            time.sleep(0.02)
            pid = open(file).read() if os.path.exists(file) else ''
    time.sleep(0.5 if ended else 0)  # the launcher looks for it

def lives(pid):
    try:
        return open(f'/proc/{pid}/stat').read().rpartition(')')[2].split()[0] != 'Z'
    except OSError:
        return False
"""
ENDED = PID + _AWAIT
"""The same, and a function by which ranks wait for others: in a fixed time a busy machine may not come so far."""


def start(*args, **options):
    usual = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "stdin": subprocess.DEVNULL, "env": ENV}
    return subprocess.Popen([*RUN, *args], text=True, **{**usual, **options})


def finish(*args, **options):
    process = start(*args, **options)
    out, err = process.communicate(timeout=200)
    return process.returncode, out, err
