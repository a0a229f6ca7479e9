"""Makes the modules of this folder importable, in this process and on the ranks; and writes programs for ranks."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture
def script(tmp_path):
    """Writes the program of a rank, whose number it has as `rank`, and returns the path."""

    def write(text):
        path = tmp_path / "rank.py"
        path.write_text("import os, signal, sys, time\nrank = int(os.environ['RANK'])\n" + text)
        return str(path)

    return write
