"""Faults of ranks of two hosts whose rings go over RDMA: links that are cut, a rank that is killed, a host out of reach."""

from __future__ import annotations

import itertools
import os
import signal
import subprocess
import sys
import threading
import time

import job
import pytest

import xvcomm

pytestmark = pytest.mark.rdma

_ports = itertools.count(7200)


@pytest.fixture
def comm(monkeypatch):
    """A communicator of one rank on each host, whose rails are all up."""
    for name, value in job.settings(next(_ports)).items():
        monkeypatch.setenv(name, value)
    made = xvcomm.init()
    job.meet(made)
    yield made
    made.close()


def link(state, nic):
    """Cut a link of this host, or join it again."""
    subprocess.run(["ip", "link", "set", f"eth{nic}", state], check=True)


def test_a_link_is_cut_and_comes_back(comm):
    """In the middle of transfers, once on each host: nothing is lost, and its rails are made again."""
    for victim in range(2):
        job.meet(comm)
        comm.barrier()
        if comm.rank == victim:
            cutter = threading.Thread(target=lambda: (time.sleep(0.5), link("down", 1), time.sleep(3), link("up", 1)))
            cutter.start()
        until = time.monotonic() + 6
        rounds = 0
        while any(comm.all_gather_object(time.monotonic() < until)):
            job.exchange(comm, 50, 1 << 20, seed=rounds)
            rounds += 1
        if comm.rank == victim:
            cutter.join()
        job.meet(comm)


DIES = """
import os, signal, sys, time
import job, numpy, xvcomm
comm = xvcomm.init()
job.meet(comm)
for number in range(10_000):
    if comm.rank == 1 and number == 30:
        os.kill(os.getpid(), signal.SIGKILL)
    comm.all_reduce(numpy.ones(100_000))
"""

CUT_OFF = """
import subprocess, sys, time
import job, numpy, xvcomm
comm = xvcomm.init()
job.meet(comm)
begun = time.monotonic()
for number in range(100_000):
    if comm.rank == 1 and number == 30:
        for nic in range(2):
            subprocess.run(["ip", "link", "set", f"eth{nic}", "down"], check=True)
    comm.all_reduce(numpy.ones(100_000))
"""


def outcome(program, **more):
    """Exit status and errors of a program that is this host's rank."""
    env = {**os.environ, **job.settings(next(_ports), **more), "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run([sys.executable, "-c", program], env=env, capture_output=True, text=True, timeout=120)
    return done.returncode, done.stderr


def test_a_rank_is_killed(other_host):
    begun = time.monotonic()
    status, errors = outcome(DIES)
    if other_host.index == 1:
        assert status == -signal.SIGKILL, errors
    else:
        assert status == 1 and "PeerLost" in errors and "rank 1" in errors, errors
    assert time.monotonic() - begun < job.SECONDS
    other_host.swap()


def test_a_host_out_of_reach(other_host):
    """Both ranks fail, and say what each device saw."""
    try:
        status, errors = outcome(CUT_OFF, XVCOMM_PEER_TIMEOUT="3")
        assert status == 1 and "PeerLost" in errors, errors
        assert "rxe" in errors and "port 1" in errors and "10.77." in errors, errors
    finally:
        if other_host.index == 1:
            for nic in range(2):
                link("up", nic)
    other_host.swap()
