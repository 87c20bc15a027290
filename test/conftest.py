"""Common set-up: the tests' own helpers are importable as ``support``."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
