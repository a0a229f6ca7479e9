"""Starts `xvcomm run` as a process of its own."""

import os
import subprocess
import sys

RUN = [sys.executable, "-m", "xvcomm", "run"]
ENV = {k: v for k, v in os.environ.items() if not k.startswith("XVCOMM_")}


def start(*args, **options):
    usual = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "stdin": subprocess.DEVNULL, "env": ENV}
    return subprocess.Popen([*RUN, *args], text=True, **{**usual, **options})


def finish(*args, **options):
    process = start(*args, **options)
    out, err = process.communicate(timeout=200)
    return process.returncode, out, err
