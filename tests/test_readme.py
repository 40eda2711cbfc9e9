"""README code runs."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
BLOCKS = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.S)


@pytest.mark.parametrize("block", range(len(BLOCKS)))
def test_readme_block_runs(block: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    exec(compile(BLOCKS[block], "README.md", "exec"), {})


def test_job_file_of_the_docs_has_only_options_that_exist() -> None:
    from hotrow.config import check_options
    from hotrow.job import SECTIONS, tomllib

    text = re.search(r"```toml\n(.*?)```", (ROOT / "docs" / "jobs.md").read_text(), re.S)
    assert text is not None
    values = tomllib.loads(text[1])
    check_options("docs/jobs.md", values, list(SECTIONS))
    for section, known in SECTIONS.items():
        if known is not None:
            check_options(section, values[section], known)
            assert set(known) - {"hbm", "ssd"} <= set(values[section]), section
