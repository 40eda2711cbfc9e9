"""Puts the helper modules of this folder on the path, and those of execution/ for test_fresh_engine.py."""

import sys
from pathlib import Path

for folder in (Path(__file__).parent, Path(__file__).parent.parent / "execution"):
    sys.path.insert(0, str(folder))
