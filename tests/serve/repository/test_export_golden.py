"""A repository of version 1 that was written once and must be read for ever.

`python tests/serve/repository/test_export_golden.py` writes a new one, for a new version of the format.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import torch
from small_models import make_batch, trained

import hotrow as hr
from hotrow.serve.repository.manifest import Repository

GOLDEN = Path(__file__).parents[2] / "golden" / "export"
VALUES = ("fp32", "fp16", "int8")  # versions 1, 2 and 3


def test_an_export_of_version_1_is_read(tmp_path: Path) -> None:
    shutil.copytree(GOLDEN, tmp_path / "golden")  # a copy: the repository's files must not be touched
    expected = json.loads((GOLDEN / "answers.json").read_text())
    assert Repository(tmp_path / "golden").versions("ctr") == [3, 2, 1]
    for number, values in enumerate(VALUES, start=1):
        version = Repository(tmp_path / "golden").open("ctr", number)
        version.verify(whole=True)
        assert [table["values"] for table in version.manifest["tables"]] == [values] * 3
        with hr.Engine(tmp_path / "golden" / "ctr", version=number) as engine:
            answers = engine.predict(make_batch(6, seed=1))
        torch.testing.assert_close(answers, torch.tensor(expected[values]), rtol=0, atol=1e-6)


if __name__ == "__main__":
    shutil.rmtree(GOLDEN, ignore_errors=True)
    model = trained("din", steps=1).model
    answers = {}
    for values in VALUES:
        version = hr.export(model, GOLDEN / "ctr", values=values)
        answers[values] = hr.Engine(GOLDEN / "ctr").predict(make_batch(6, seed=1)).tolist()
    (GOLDEN / "answers.json").write_text(json.dumps(answers, indent=1))
