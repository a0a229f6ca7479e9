"""Fixtures of the tests on clusters; what needs one is marked, and skipped but in `make test-clusters`."""

import os
import shutil
import sys
import tempfile
from pathlib import Path

import pytest

FOLDER = Path(__file__).parent
sys.path[:0] = [str(FOLDER), str(FOLDER.parent / "hosts")]  # for the modules beside this one, and there

import slurm_cluster  # noqa: E402

from xvcomm.errors import ResourceError  # noqa: E402
from xvcomm.testing.hosts import Hosts  # noqa: E402

WANTED = os.environ.get("WITH_CLUSTERS") == "1"


def pytest_collection_modifyitems(items):
    """Skip the tests that need a cluster where none was asked for."""
    for item in items:
        if item.get_closest_marker("clusters") and not WANTED:
            item.add_marker(pytest.mark.skip(reason="part of make test-clusters"))


@pytest.fixture(scope="module")
def cluster():
    """A SLURM cluster of two nodes."""
    if missing := slurm_cluster.missing():
        pytest.skip(f"no {', '.join(missing)}: apt-get install {' '.join(slurm_cluster.PACKAGES)}")
    folder = Path(tempfile.mkdtemp(prefix="slurm", dir="/tmp"))
    try:
        hosts = Hosts(links=1)
    except ResourceError as error:
        shutil.rmtree(folder)
        pytest.skip(str(error))
    left = []
    try:
        slurm = slurm_cluster.Slurm(folder, hosts)
        try:
            yield slurm
        finally:
            slurm.close()
    finally:
        left = hosts.close()
        shutil.rmtree(folder)
    assert not left


@pytest.fixture
def nodes():
    """Two hosts, on which pods are started; skipped where this user may make no network namespaces."""
    try:
        hosts = Hosts(links=1)
    except ResourceError as error:
        pytest.skip(str(error))
    left = []
    try:
        yield hosts
    finally:
        left = hosts.close()
    assert not left
