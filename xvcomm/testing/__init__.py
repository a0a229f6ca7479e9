"""For authors of backends, transports and adapters: real ranks in tests, and suites that every plug-in must pass.

`pytest --pyargs xvcomm.testing` runs the suites on every registered backend that works on the machine, and with the arrays
of every framework that is installed. `adapter` has the suite for authors of adapters.
"""

from xvcomm.testing.processes import RankFailure
from xvcomm.testing.world import World

__all__ = ["RankFailure", "World"]
