"""Puts the helper modules of this folder on the path, and those of tests/serve/ for a small model."""

import subprocess
import sys
from pathlib import Path

import pytest

for folder in (Path(__file__).parent, Path(__file__).parents[1] / "serve"):
    sys.path.insert(0, str(folder))

DEPLOY = Path(__file__).parents[2] / "deploy"


@pytest.fixture(scope="session")
def secrets(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that deploy/make-secrets.sh filled for the row servers of compose.yaml."""
    folder = tmp_path_factory.mktemp("deploy") / "secrets"
    command = ["sh", str(DEPLOY / "make-secrets.sh"), str(folder), "rows-0", "rows-1"]
    try:
        subprocess.run(["openssl", "version"], check=True, capture_output=True)
    except FileNotFoundError:
        pytest.skip("there is no openssl to make certificates with")
    subprocess.run(command, check=True, capture_output=True, timeout=60)
    return folder
