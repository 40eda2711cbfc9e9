"""On a machine without a GPU nothing but a tier in HBM needs Triton: `make demo` installs none."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

PROGRAM = """
import sys

sys.modules["triton"] = None  # importing it fails
import hotrow as hr
import hotrow.cli, hotrow.demo.run, hotrow.serve.processes.supervisor

clicks = hr.data.synthetic(examples=2000, keys=10_000, batch_size=500)
embeddings = hr.EmbeddingCollection([hr.Table(name, dim=8) for name in ("user", "item", "site")])
tower = hr.models.DLRM(embeddings.features, dense_features=4, bottom=(8,), top=(8,))
trainer = hr.Trainer(hr.Recommender(embeddings, tower))
assert trainer.fit(clicks, progress=False).examples == 2000
hr.export(trainer.model, sys.argv[1])
with hr.Engine(sys.argv[1]) as engine:
    assert engine.predict(next(iter(clicks.batches()))[0]).shape == (500,)
"""


def test_training_and_serving_need_no_triton(tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM, str(tmp_path / "ctr")], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
