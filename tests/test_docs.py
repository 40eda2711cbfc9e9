"""Paths and links in the documentation lead somewhere."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
PAGES += [ROOT / "examples/README.md", ROOT / "deploy/README.md"]
PATH = re.compile(r"`((?:core|deploy|docs|tests|benchmarks|examples|src)/[\w./-]+|[a-z_]+(?:/[a-z_]+)+\.py)`")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_files_that_a_page_names_exist(page: Path) -> None:
    named = set(PATH.findall(page.read_text(encoding="utf-8")))
    folders = (ROOT, ROOT / "src/hotrow", ROOT / "src/hotrow/serve")  # serving's paths are given below serve/
    assert not [name for name in named if not any((folder / name).exists() for folder in folders)]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_relative_links_of_a_page_exist(page: Path) -> None:
    links = re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)", page.read_text(encoding="utf-8"))
    local = [link for link in links if "://" not in link and not link.startswith("mailto:")]
    assert not [link for link in local if not (page.parent / link).exists()]
