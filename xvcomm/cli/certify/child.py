"""A process of a job that a section has started: `python -m xvcomm.cli.certify.child faults result.json`."""

from __future__ import annotations

import importlib
import json
import os
import sys
import threading
from pathlib import Path
from typing import Any

MODULES = {"faults": "fault_trials", "training": "training_trials"}
"""What such a job can do: a module beside this one with a function `run(tell)`."""


class Log:
    """Writes what was found so far into a file, whole each time: the process may end at any moment."""

    def __init__(self, file: Path) -> None:
        self._file, self._found = file, list[dict[str, Any]]()

    def __call__(self, **found: Any) -> None:
        """Add one entry."""
        self._found.append(found)
        beside = self._file.with_suffix(".new")
        beside.write_text(json.dumps(self._found))
        beside.rename(self._file)


def main() -> None:
    """Run the job's part."""
    what, file = sys.argv[1:]
    threading.Thread(target=_end_with_the_parent, daemon=True).start()
    importlib.import_module(f"xvcomm.cli.certify.{MODULES[what]}").run(Log(Path(file)))


def _end_with_the_parent() -> None:
    """End this process when the one that started it has ended, whose end of the pipe closes then."""
    os.read(0, 1)
    os._exit(3)


if __name__ == "__main__":
    main()
