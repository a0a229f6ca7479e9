"""`xvcomm doctor --reach` as two hosts with Soft-RoCE run it: which of their devices form queue pairs."""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
from ipaddress import ip_address

import job
import pytest

pytestmark = pytest.mark.rdma

_ports = itertools.count(7800)


def reach(*options, **more):
    """What rank 0 prints."""
    env = {
        **os.environ,
        **job.settings(next(_ports), **more),
        "PYTHONPATH": os.pathsep.join(sys.path),
        "COLUMNS": "160",
    }
    command = [sys.executable, "-m", "xvcomm", "doctor", "--reach", *options]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def end(host, nic, variable):
    """A device of a host, by its GID of IPv4 or IPv6."""
    return {"device": f"rxe{nic}", "port": 1, "gid": str(ip_address(os.environ[f"{variable}_{host}_{nic}"])), "lid": 0}


def test_devices_form_queue_pairs(other_host):
    """Those that a link joins do, by IPv4 and IPv6. Others do not by IPv4, where a NIC reaches only the other of its network."""
    told = reach("--json")
    if other_host.index == 0:
        found = json.loads(told)["rdma"]
        nics = range(other_host.nics)
        used = [f"rxe{nic} port 1" for nic in nics]
        assert found["devices"] == {f"host{host}": {"used": used, "unused": []} for host in range(2)}
        why = {str((pair["here"], pair["there"])): pair["refusal"] for pair in found["pairs"]}
        for variable, nic in itertools.product(("HOST_ADDR", "HOST_ADDR6"), nics):
            assert why[str((end(0, nic, variable), end(1, nic, variable)))] == "", why
        apart = [pair for pair in found["pairs"] if pair["refusal"]]
        addresses = [(other_host.address(0, nic), other_host.address(1, 1 - nic)) for nic in nics]
        assert {(pair["local"], pair["remote"]) for pair in apart} >= set(addresses), apart
        assert all(pair["here"]["device"] != pair["there"]["device"] for pair in apart), apart
    other_host.swap()


def test_devices_that_one_host_does_not_use(other_host):
    """Each is named with the reason, and no queue pair is tried."""
    told = reach(XVCOMM_RDMA=str(1 - other_host.index))
    if other_host.index == 0:
        lines = told[told.index("RDMA devices that are not in use:") :].splitlines()[1:]
        assert lines == [f"host1: rxe{nic} port 1: XVCOMM_RDMA=0" for nic in range(other_host.nics)]
        assert "All hosts reach each other." in told and "Queue pairs" not in told
    other_host.swap()
