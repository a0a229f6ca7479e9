"""Runs a command on two hosts with RDMA NICs: `python tests/shims/rxe/run.py [--timeout 900] [--writable FOLDER] -- COMMAND...`

Its exit status is the worst of the two hosts'. Where this machine cannot build the hosts it says why, and ends with 0.
"""

from __future__ import annotations

import argparse
import signal
import sys
import time
from pathlib import Path

from build import BuildFailed, CannotBuild, build, cache, kept
from hosts import BROKEN, Hosts


def main() -> int:
    """Build what is missing, boot, run the command, and end the hosts."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--nics", type=int, default=2, help="of each host")
    parser.add_argument("--cpus", type=int, default=1, help="of each host; more than 1 only helps on 4 cores and more")
    parser.add_argument("--timeout", type=float, default=900, help="seconds, without those of building")
    parser.add_argument(
        "--writable", type=Path, action="append", default=[], help="folder that keeps what is written to it"
    )
    parser.add_argument("--kept", action="store_true", help="build nothing: skip where the hosts are not built")
    parser.add_argument("command", nargs="+")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    try:
        built = kept() if options.kept else build()
    except CannotBuild as reason:
        print(f"skipped: no hosts with RDMA NICs: {reason}")
        return 0
    except BuildFailed as reason:
        print(f"the hosts with RDMA NICs cannot be built: {reason}", file=sys.stderr)
        return BROKEN
    if built is None:
        print(
            f"skipped: the hosts with RDMA NICs are not built in {cache()}: `make test-rdma` does it, once, in 17 CPU minutes"
        )
        return 0
    begun = time.monotonic()
    with Hosts(built, options.command, options.nics, options.cpus, options.writable) as hosts:
        status = hosts.wait(options.timeout)
    print(f"two hosts: exit status {status} after {time.monotonic() - begun:.1f} s", file=sys.stderr)
    return status


if __name__ == "__main__":
    sys.exit(main())
