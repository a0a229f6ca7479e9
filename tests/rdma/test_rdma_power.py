"""A whole host dies at once, as by a power cut: over TCP and over RDMA the other host's ranks lose its rank in time.

`make test-rdma`, which builds the hosts, runs it outside of those that run the other tests.
"""

import shlex
import subprocess
import sys
import time

import pytest

TIMEOUT, SECONDS = 6, 120
SETTINGS = {
    "XVCOMM_SIZE": "3", "XVCOMM_STORE": "tcp://10.77.0.1:7300", "XVCOMM_SECRET": "of the test", "XVCOMM_DEVICE": "host",
    "XVCOMM_PEER_TIMEOUT": str(TIMEOUT), "XVCOMM_TIMEOUT": str(SECONDS),
}  # fmt: skip

RANK = """
import os, time
import numpy, xvcomm

def ready(comm):
    peers = {rail.rank for rail in comm.rails()}
    over_rdma = {rail.rank for rail in comm.rails() if rail.scheme == "rdma"}
    return comm.all_gather_object(peers == over_rdma or os.environ["XVCOMM_RDMA"] == "0")

with xvcomm.init() as comm:
    x = numpy.zeros(1000)
    comm.all_reduce(x)
    while not all(ready(comm)):
        time.sleep(0.1)
    print("begun", flush=True)
    try:
        while True:
            begun = time.monotonic()
            comm.all_reduce(x)
    except xvcomm.PeerLost as error:
        print(f"{time.monotonic() - begun:.1f} {error.peer} {error}", flush=True)
"""


def command(ranks, folder):
    """Starts each host's ranks, which print into files of their numbers."""
    each = f"XVCOMM_RANK=$rank {shlex.join([sys.executable, '-c', RANK])} > {folder}/$rank 2>&1 &"
    return f"set -- {shlex.join(ranks)}; shift $HOST_INDEX; for rank in $1; do {each} done; wait"


@pytest.mark.slow
@pytest.mark.parametrize("rdma", [pytest.param("0", id="tcp"), pytest.param("1", id="rdma")])
@pytest.mark.parametrize(("victim", "ranks"), [(0, ("0", "1 2")), (1, ("0 1", "2"))], ids=["store", "other"])
def test_a_host_dies(start, tmp_path, monkeypatch, rdma, victim, ranks):
    """Whether it served the store or not; the error has the states of the rails that carried, or the other rank has told."""
    for name, value in {**SETTINGS, "XVCOMM_RDMA": rdma}.items():
        monkeypatch.setenv(name, value)
    subprocess.run([sys.executable, "-c", "import xvcomm.wire.network, xvcomm.backends.rdma.plain"], check=True)
    files = [tmp_path / str(rank) for rank in range(3)]
    with start("sh", "-c", command(ranks, tmp_path), writable=[tmp_path]) as hosts:
        until = time.monotonic() + SECONDS
        while not all(file.exists() and "begun\n" in file.read_text() for file in files):
            assert time.monotonic() < until, [file.read_text() for file in files if file.exists()]
            time.sleep(0.1)
        hosts.hosts[victim].kill()
        survivor = hosts.hosts[1 - victim]
        survivor.join(SECONDS)
        assert survivor.status == 0
    lost = ranks[victim]
    for rank in ranks[1 - victim].split():
        text = files[int(rank)].read_text()
        seconds, peer, words = text.splitlines()[-1].split(maxsplit=2)
        assert peer == lost and f"rank {lost} on host{victim} was lost; " in words, text
        assert f"({('tcp', 'rdma')[int(rdma)]}) lost" in words or "did not answer" in words, text
        assert float(seconds) < TIMEOUT + 4, text
