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

    RANKS = RANKS

    @staticmethod
    def outputs(processes):
        """What processes of `begin` have printed; all must end, and well."""
        printed = [process.communicate(timeout=120)[0] for process in processes]
        assert not any(process.returncode for process in processes), "\n---\n".join(printed)
        return printed

    def start(self, *arguments, **options):
        """Start `ranks.py` with these arguments; options as for `start_ranks`."""
        return self.start_ranks(sys.executable, RANKS, *arguments, **options)

    def start_labelled(self, action, **options):
        """Start `ranks.py`, with a host label for each rank."""
        command = f"XVCOMM_HOST=h$XVCOMM_RANK exec {sys.executable} {RANKS} {action}"
        return self.start_ranks("sh", "-c", command, **options)

    def run(self, *arguments, **options):
        """`start`, and wait for a good end; what the ranks have printed."""
        return self.outputs(self.start(*arguments, **options))

    def begun(self, *seconds, **options):
        """Ranks of `cut`, which send to each other for some seconds and have begun to."""
        return self.await_begun(self.start("cut", *seconds, **options))

    @staticmethod
    def await_begun(ranks):
        """Wait until processes have printed that they have begun; gives them."""
        for rank in ranks:
            while (line := rank.stdout.readline()) != "begun\n":
                assert line.startswith("xvcomm: compiling"), line + rank.stdout.read()
        return ranks

    def unharmed(self, ranks):
        """Wait for ranks of `begun`: they must end well, and both have counted the same messages."""
        sent, received = (text.splitlines()[-1].split()[0] for text in self.outputs(ranks))
        assert sent == received

    def cut_and_mend(self, **options):
        """Cut a link while ranks send to each other, and bring it back; they must end well."""
        ranks = self.begun(**options)
        self.link(1, "down")
        mend = threading.Timer(1.5, self.link, (1, "up"))
        mend.start()
        self.unharmed(ranks)
        mend.join()

    def mute(self, side, link):
        """Let nothing arrive any more that a host sends over a link; the other direction works."""
        address = ("02:00:00:00:00:99", "dev", self.interface(side, link), "nud", "permanent")
        self.ip(side, "neigh", "replace", f"10.77.{link}.{2 - side}", "lladdr", *address)


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
