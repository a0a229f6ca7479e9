"""What a server of ranks imports first, and does once for all that it forks: import path and installed plug-ins."""

from __future__ import annotations

import os
import sys

from xvcomm.testing.servers import PATH

if PATH in os.environ:
    sys.path[:] = os.environ.pop(PATH).split(os.pathsep)

from xvcomm.engine.session import plugins

for group in (plugins.BACKENDS, plugins.TRANSPORTS, plugins.CARDS):
    plugins.installed(group)
