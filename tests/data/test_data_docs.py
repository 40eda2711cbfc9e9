"""The examples in docs/data.md run, and its error message is the real one."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import hotrow.data
import hotrow.features
from hotrow.errors import DataError

GUIDE = Path(__file__).parents[2] / "docs" / "data.md"


def test_the_guide_runs_from_top_to_bottom(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    blocks = re.findall(r"^```python\n(.*?)^```$", GUIDE.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    assert len(blocks) >= 8
    names: dict[str, object] = {"__name__": "guide"}
    for block in blocks:
        exec(compile(block, str(GUIDE), "exec"), names)


def test_the_guide_quotes_the_real_message(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("own.csv").write_text("1;ann;31\n0;bob;\nyes;cem;40\n")
    layout = hotrow.data.TextLayout({"click": "number", "user": "string", "age": "integer"}, ";", header=False)
    spec = hotrow.features.FeatureSpec([hotrow.features.Key("user")], label="click")
    with pytest.raises(DataError) as caught:
        list(hotrow.data.text("own.csv", layout, features=spec).batches())
    quoted = re.search(r"`(own\.csv, line 3.*?)`", GUIDE.read_text(encoding="utf-8"))
    assert quoted is not None and str(caught.value).startswith(quoted.group(1))
