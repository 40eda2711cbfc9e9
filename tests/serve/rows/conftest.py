"""Puts the helper modules of execution/ and online/ on the path; the fixture of row_servers.py, for all tests here."""

import sys
from pathlib import Path

from row_servers import repository, rows

for folder in ("execution", "online"):
    sys.path.insert(0, str(Path(__file__).parent.parent / folder))

__all__ = ["repository", "rows"]
