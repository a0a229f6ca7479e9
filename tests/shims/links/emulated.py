"""Two hosts whose links lose and delay packets, are slow, or are dead in one direction, as a test wants; see `forward.py`."""

import json
import socket
import subprocess
import sys
from pathlib import Path

from xvcomm.testing.hosts import Hosts

_FORWARD = Path(__file__).with_name("forward.py")


class EmulatedHosts(Hosts):
    """Two hosts, joined by links that can be changed at any time; Linux' netem, which does the same, is missing in many kernels.

    Args:
        links: between the hosts.
        seed: of the losses.
        mtu: most bytes of a packet.
        congestion: see `Hosts`.

    Raises:
        ResourceError: as of `Hosts`; or there is no /dev/net/tun.
    """

    def __init__(self, links=2, seed=0, mtu=1500, congestion=""):
        self._seed, self._mtu = seed, mtu
        self._forwarders = []
        super().__init__(links, congestion=congestion)

    def make_interfaces(self, link):
        ends = [word for side in range(2) for word in (self.namespace(side), self.interface(side, link))]
        process = subprocess.Popen(
            [sys.executable, "-S", _FORWARD, *ends, self.control(link), f"{self._seed} {link}"],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, process_group=0,
        )  # fmt: skip
        self._forwarders.append(process)
        if process.stdout.readline() != "ready\n":
            raise OSError(process.stderr.read().splitlines()[-1])
        for side in range(2):
            self.ip(side, "link", "set", self.interface(side, link), "mtu", str(self._mtu))

    def control(self, link):
        """Path of the socket by which `change` below, in any process, reaches a link."""
        return self._folder / f"link{link}"

    def change(self, link, *sides, **properties):
        """Change a link, for what these hosts send, or for both directions if none is named; see `change`."""
        change(self.control(link), *sides, **properties)

    def close(self):
        for process in self._forwarders:
            with process:  # which closes its standard input, and waits
                pass
        return super().close()


def change(control, *sides, **properties):
    """Change a link by its control socket.

    Args:
        control: path.
        sides: hosts of whose packets the properties are; both if left out.
        properties: `loss` (share of the packets), `delay` (seconds), `rate` (bytes a second, 0: unlimited).
    """
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender:
        for side in sides or (0, 1):
            sender.sendto(json.dumps({"side": side, **properties}).encode(), str(control))
