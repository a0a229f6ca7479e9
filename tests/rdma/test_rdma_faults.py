"""Faults of ranks of two hosts whose rings go over RDMA: links that are cut, a rank that is killed, a host out of reach."""

from __future__ import annotations

import itertools
import os
import re
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


PROGRAM = """
import os, signal, subprocess, time
import job, numpy, xvcomm
comm = xvcomm.init()
job.meet(comm)
try:
    for number in range(100_000):
        begun = time.monotonic()
        if comm.rank == 1 and number == 30:
            FAULT
        comm.all_reduce(numpy.ones(100_000))
except xvcomm.PeerLost as error:
    print(f"{time.monotonic() - begun:.1f} {error.peer} {error}")
"""
DIES = "os.kill(os.getpid(), signal.SIGKILL)"
CUT_OFF = "[subprocess.run(['ip', 'link', 'set', f'eth{nic}', 'down'], check=True) for nic in range(2)]"


def outcome(fault, **more):
    """Exit status of a program that is this host's rank, what it prints of its PeerLost, and its errors."""
    env = {**os.environ, **job.settings(next(_ports), **more), "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", PROGRAM.replace("FAULT", fault)]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=120)
    return done.returncode, done.stdout, done.stderr


def test_a_rank_is_killed(other_host):
    """The other one learns it from the end of the process, long before a host counts as silent."""
    status, told, errors = outcome(DIES, XVCOMM_PEER_TIMEOUT="100")
    if other_host.index == 1:
        assert status == -signal.SIGKILL, errors
    else:
        seconds, peer, words = told.split(maxsplit=2)
        assert status == 0 and peer == "1" and "rank 1" in words, told + errors
        assert float(seconds) < 60, told
    other_host.swap()


def test_a_host_out_of_reach(other_host):
    """Both ranks fail, and the error itself says how the last queue pair failed, and between which ends."""
    me = other_host.index
    try:
        status, told, errors = outcome(CUT_OFF, XVCOMM_PEER_TIMEOUT="3")
        if me == 1:
            time.sleep(10)  # host 0 cannot tell through the cut links that it has failed too
        ends = "|".join(f"{other_host.address(me, nic)} to {other_host.address(1 - me, nic)}" for nic in range(2))
        assert status == 0, told + errors
        assert re.search(rf"; RDMA: rxe[01] port 1, GID ({ends}): (PORT_ERR|GID_CHANGE|RETRY_EXC_ERR): .", told), (
            told + errors
        )
    finally:
        if other_host.index == 1:
            for nic in range(2):
                link("up", nic)
    other_host.swap()
