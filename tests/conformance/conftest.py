"""Makes the modules of this folder importable, in this process and on the ranks."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
