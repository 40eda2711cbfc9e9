"""`hotrow` as a person types it, in this process: starting one takes seconds, most of them to import torch."""

from __future__ import annotations

import io
import subprocess
import sys
from contextlib import redirect_stderr, redirect_stdout

import pytest

from hotrow.cli import main


def hotrow(*args: str) -> subprocess.CompletedProcess[str]:
    """Returns its exit code and its output."""
    out, err, code = io.StringIO(), io.StringIO(), 0
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(out), redirect_stderr(err):
        patch.setattr(sys, "argv", ["hotrow", *args])
        try:
            main()
        except SystemExit as end:
            code = int(end.code or 0)
    return subprocess.CompletedProcess(args, code, out.getvalue(), err.getvalue())
