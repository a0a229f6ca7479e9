"""One rank of `xvcomm certify`."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import msgspec

import xvcomm
from xvcomm.cli import told_in_one_line
from xvcomm.cli.certify.options import Options
from xvcomm.cli.certify.runner import certify_job
from xvcomm.config import Config
from xvcomm.rendezvous.environment import discover


def certify_rank(options: Options) -> int:
    """Join the job and certify it; the exit code."""
    if options.labels:
        label = options.labels[discover(os.environ, Config.from_env()).rank]
        if label:
            os.environ["XVCOMM_ISLAND"] = label
    with xvcomm.init() as comm:
        code, report = certify_job(comm, options)
    if not options.verdict:
        return code
    if report is not None:
        Path(options.verdict).write_text(str(code))
    return 0


if __name__ == "__main__":
    with told_in_one_line():
        sys.exit(certify_rank(msgspec.json.decode(sys.argv[1], type=Options)))
