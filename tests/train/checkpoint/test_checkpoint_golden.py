"""A checkpoint of version 1 that was written once and must be read for ever.

`python tests/train/checkpoint/test_checkpoint_golden.py` writes a new one, for a new version of the format.
"""

from __future__ import annotations

import hashlib
import shutil
from pathlib import Path

from runs import bits, clicks, make_trainer

import hotrow as hr
from hotrow.train.checkpoint.manifest import open_checkpoint

GOLDEN = Path(__file__).parents[2] / "golden" / "checkpoint"


def digest(trainer: hr.Trainer) -> str:
    """Of everything that a checkpoint brings back."""
    state = bits(trainer)
    state["rows"] = {name: sorted(rows.items()) for name, rows in state["rows"].items()}
    return hashlib.sha256(repr(sorted(state.items())).encode()).hexdigest()


def test_a_checkpoint_of_version_1_is_read(tmp_path: Path) -> None:
    shutil.copytree(GOLDEN, tmp_path / "golden")  # loading links files, and the repository's must not be touched
    trainer = make_trainer(torch_seed=5, precision="fp16", width=2)
    trainer.load(tmp_path / "golden")
    manifest = open_checkpoint(tmp_path / "golden").manifest
    assert (trainer.steps, manifest["version"], manifest["number"]) == (3, 1, 1)
    assert digest(trainer) == manifest["notes"]["digest"]
    trainer.fit(clicks(8, 4), steps=1, cursor=None, progress=False)


if __name__ == "__main__":
    trainer = make_trainer(precision="fp16", width=2)
    trainer.fit(clicks(24, 8), steps=3, progress=False)
    shutil.rmtree(GOLDEN, ignore_errors=True)
    trainer.save(GOLDEN, notes={"digest": digest(trainer)})
