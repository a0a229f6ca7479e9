"""Fixtures of the tests between hosts: two network namespaces with two links between them."""

import sys
import threading
from pathlib import Path

import pytest

from xvcomm.errors import ResourceError
from xvcomm.testing.hosts import Hosts

RANKS = Path(__file__).parent / "ranks.py"
sys.path.insert(0, str(RANKS.parent))  # for the modules beside this one, here and on the ranks


class TwoHosts(Hosts):
    """Two hosts, and ranks of `ranks.py` on them."""

    @staticmethod
    def outputs(processes):
        """What processes of `begin` have printed; all must end, and well."""
        printed = [process.communicate(timeout=120)[0] for process in processes]
        assert not any(process.returncode for process in processes), "\n---\n".join(printed)
        return printed

    def start(self, *arguments, **options):
        """Start `ranks.py` with these arguments; options as for `start_ranks`."""
        return self.start_ranks(sys.executable, RANKS, *arguments, **options)

    def run(self, *arguments, **options):
        """`start`, and wait for a good end; what the ranks have printed."""
        return self.outputs(self.start(*arguments, **options))

    def cut_and_mend(self, **options):
        """Cut a link while the ranks of `cut` send to each other, and bring it back; they must end well."""
        ranks = self.start("cut", **options)
        for rank in ranks:
            assert rank.stdout.readline() == "begun\n", rank.stdout.read()
        self.link(1, "down")
        mend = threading.Timer(1.5, self.link, (1, "up"))
        mend.start()
        outputs = [rank.communicate(timeout=100) for rank in ranks]
        mend.join()
        assert [rank.returncode for rank in ranks] == [0, 0], outputs
        assert outputs[0][0].split()[0] == outputs[1][0].split()[0]


@pytest.fixture
def two_hosts(request):
    """Two hosts, with a parameter as the arguments of `Hosts`; skipped where this user may make no network namespaces."""
    try:
        hosts = TwoHosts(**getattr(request, "param", {}))
    except ResourceError as error:
        pytest.skip(str(error))
    left = []
    try:
        yield hosts
    finally:
        left = hosts.close()
    assert not left
