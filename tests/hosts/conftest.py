"""Fixtures of the tests between hosts: two network namespaces with two links between them."""

import subprocess
import sys
import threading
from pathlib import Path
from types import MappingProxyType

import pytest

from xvcomm.errors import ResourceError
from xvcomm.testing.hosts import Hosts

# For the modules there, here and on the ranks.
sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[1] / "shims" / "links"))

from forked import Forked

RANKS = Path(__file__).parent / "ranks.py"


class TwoHosts(Hosts):
    """Two hosts, and ranks of `ranks.py` on them."""

    @staticmethod
    def outputs(processes):
        """What processes of `begin` have printed; all must end, and well."""
        printed = [process.communicate(timeout=120)[0] for process in processes]
        assert not any(process.returncode for process in processes), "\n---\n".join(printed)
        return printed

    def start(self, *arguments, sides=(0, 1), env=MappingProxyType({})):
        """Start `ranks.py` with these arguments; options as for `start_ranks`."""
        each = self.ranks(len(sides), env)
        return [self.fork(side, *arguments, env=rank) for side, rank in zip(sides, each, strict=True)]

    def start_labelled(self, action, *, sides, env):
        """Start `ranks.py`, with a host label for each rank."""
        each = self.ranks(len(sides), env)
        return [
            self.fork(side, action, env={**variables, "XVCOMM_HOST": f"h{rank}"})
            for rank, (side, variables) in enumerate(zip(sides, each, strict=True))
        ]

    def start_command(self, *arguments, sides=(0, 1), env=MappingProxyType({})):
        """As `start`, but the ranks call `xvcomm` with these arguments."""
        each = self.ranks(len(sides), env)
        command = Path(sys.executable).with_name("xvcomm")
        return [self.fork(side, *arguments, env=rank, program=command) for side, rank in zip(sides, each, strict=True)]

    def fork(self, side, *arguments, env=MappingProxyType({}), program=RANKS):
        """Start `ranks.py`, or another program in Python, on a host; further arguments as for `begin`."""
        self._begun.append(Forked(self.place(side), program, *arguments, env=self.variables(env)))
        return self._begun[-1]

    def run(self, *arguments, **options):
        """`start`, and wait for a good end; what the ranks have printed."""
        return self.outputs(self.start(*arguments, **options))

    def begun(self, *end, **options):
        """Ranks of `cut`, which send to each other for some seconds, or until there is a file, and have begun to."""
        return self.await_begun(self.start("cut", *end, **options))

    @staticmethod
    def await_begun(ranks):
        """Wait until processes have printed that they have begun; gives them."""
        for rank in ranks:
            while (line := rank.stdout.readline()) != "begun\n":
                assert line.startswith("xvcomm: compiling"), line + rank.stdout.read()
        return ranks

    def unharmed(self, ranks):
        """Wait for ranks of `begun`: they must end well, and both have counted the same messages."""
        said = ([line for line in text.splitlines() if not line.startswith("xvcomm: ")] for text in self.outputs(ranks))
        sent, received = (lines[-1].split()[0] for lines in said)  # a notice may come after the rank's own words
        assert sent == received

    def cut_and_mend(self, **options):
        """Cut a link while ranks send to each other, and bring it back; they must end well."""
        ranks = self.begun(**options)
        self.link(1, "down")
        mend = threading.Timer(1.5, self.link, (1, "up"))
        mend.start()
        self.unharmed(ranks)
        mend.join()

    def refused(self, side):
        """The connections between ranks over which this host has more than the other one's sockets take."""
        command = ("ip", "netns", "exec", self.namespace(side), "ss", "-tnoH", "state", "established")
        text = subprocess.run(command, check=True, capture_output=True, text=True).stdout
        return [line for line in text.splitlines() if "timer:(persist" in line and ":29711" not in line]  # of the store

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
