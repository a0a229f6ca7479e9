"""For authors of backends, transports and adapters: ranks in real processes, and conformance suites for plug-ins.

`pytest --pyargs xvcomm.testing` runs the suites on every registered backend that works on the machine, and with the arrays of
every installed framework. `adapter` contains the suite for authors of adapters, and `hosts` two hosts on one machine.
"""

from xvcomm.testing.processes import RankFailure
from xvcomm.testing.world import World

__all__ = ["RankFailure", "World"]
