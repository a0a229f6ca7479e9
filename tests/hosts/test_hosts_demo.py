"""The demo of two hosts: its result, and that nothing is left of it."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

DEMO = Path(__file__).parents[2] / "examples" / "hosts_demo.py"
SMALL = ("--layers", "1", "--dim", "16", "--heads", "2", "--kv-heads", "2", "--hidden", "24", "--context", "16")
ALONE = 'trap : INT; mount -t tmpfs none /run; mount -t tmpfs none /dev/shm; "$@"; code=$?; ls /run/netns /dev/shm; exit $code'
"""Runs a command with folders of its own for namespaces and shared memory, and lists what it has left there."""
NOTHING = "/dev/shm:\n\n/run/netns:\n"


@pytest.fixture
def demo(two_hosts, tmp_path):
    """The demo, started in a group of its own; skipped where `two_hosts` is."""

    def start(*arguments):
        command = (sys.executable, DEMO, "--out", tmp_path, *arguments, *SMALL)
        env = {k: v for k, v in os.environ.items() if not k.startswith("XVCOMM_") or k == "XVCOMM_KERNEL_CACHE"}
        return subprocess.Popen(
            ["unshare", "--mount", "sh", "-c", ALONE, "sh", *map(str, command)], env=env, text=True,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, process_group=0,
        )  # fmt: skip

    return start


def test_demo(demo, tmp_path):
    """It trains to the losses of one process, and draws what the links carried."""
    process = demo("--steps", "30")
    text, _ = process.communicate(timeout=120)
    assert process.returncode == 0, text
    assert "same loss as one process" in text and "MB/s before" in text and text.endswith(NOTHING), text
    assert (tmp_path / "links.png").read_bytes().startswith(b"\x89PNG")


def test_demo_interrupted(demo, tmp_path):
    """Ctrl-C while it trains: no host, process or shared memory is left."""
    process = demo("--steps", "1000000")
    until = time.monotonic() + 60
    while not (tmp_path / "log.jsonl").exists() and process.poll() is None and time.monotonic() < until:
        time.sleep(0.05)
    os.killpg(process.pid, signal.SIGINT)
    text, _ = process.communicate(timeout=60)
    assert process.returncode == 128 + signal.SIGINT and text.endswith(NOTHING), text
