"""The release file and `hotrow release`: what they accept, keep and show."""

from __future__ import annotations

import json
import threading
from pathlib import Path

import pytest
from typer.testing import CliRunner

from hotrow.cli import app
from hotrow.errors import OptionError, RepositoryError
from hotrow.serve.repository.releases import FILE, RELEASES_JSON, Release, Share, change_release, read_release


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A model's folder with versions 3, 4 and 5."""
    for version in ("3", "4", "5"):
        (tmp_path / "repository" / "ctr" / version).mkdir(parents=True)
    return tmp_path / "repository" / "ctr"


def command(*arguments: object) -> str:
    """The output of `hotrow release`, in one line for each of its lines."""
    ran = CliRunner().invoke(app, ["release", *map(str, arguments)], catch_exceptions=False)
    assert ran.exit_code == 0, ran.output
    return ran.output


def test_release_that_was_written_is_read_back(model: Path) -> None:
    release = Release({"stable": 3, "candidate": 5}, Share(4, 0.05), Share(5, 1.0))
    change_release(model, lambda old: release)
    assert read_release(model) == release
    assert release.named() == {"stable": "3", "candidate": "5", "canary": "4", "shadow": "5"}
    assert sorted(path.name for path in model.iterdir() if path.is_file()) == [".releases.json.lock", FILE]


def test_model_without_a_file_has_the_empty_release(model: Path) -> None:
    assert read_release(model) == Release() and read_release(model).stable is None


@pytest.mark.parametrize("damage", ["{", "[]", '{"format": "hotrow-releases", "version": 1, "checksum": "x"}'])
def test_damaged_file_is_named_with_its_cure(model: Path, damage: str) -> None:
    (model / FILE).write_text(damage)
    with pytest.raises(RepositoryError, match=r"releases\.json .*--clear"):
        read_release(model)
    command(model, "--clear")
    assert read_release(model) == Release()


def test_changed_share_is_found_by_the_checksum(model: Path) -> None:
    change_release(model, lambda old: Release({"stable": 3}, Share(4, 0.05)))
    (model / FILE).write_text((model / FILE).read_text().replace("0.05", "0.5"))
    with pytest.raises(RepositoryError, match="checksum"):
        read_release(model)


def test_concurrent_changes_are_all_kept(model: Path) -> None:
    def add(name: str) -> None:
        change_release(model, lambda old: Release({**old.aliases, name: 3}))

    threads = [threading.Thread(target=add, args=(f"a{number}",)) for number in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert len(read_release(model).aliases) == 16


def test_draft_of_a_killed_writer_is_overwritten(model: Path) -> None:
    (model / f".{FILE}.new").write_text("half")
    change_release(model, lambda old: Release({"stable": 4}))
    assert read_release(model).stable == "4"


def test_command_sets_shows_promotes_and_clears(model: Path) -> None:
    assert "version 5, the newest" in command(model)
    shown = command(model, "--alias", "stable=3", "--canary", "4:5%", "--shadow", "5")
    assert "95% of the requests" in shown and "5% of them" in shown and "copy of 100%" in shown
    assert read_release(model) == Release({"stable": 3}, Share(4, 0.05), Share(5, 1.0))
    command(model, "--canary", "4:20%", "--alias", "candidate=5")  # what is not named stays
    assert read_release(model) == Release({"stable": 3, "candidate": 5}, Share(4, 0.2), Share(5, 1.0))
    command(model, "--alias", "stable=4")  # the canary is stable now, so it ends
    assert read_release(model) == Release({"stable": 4, "candidate": 5}, None, Share(5, 1.0))
    command(model, "--shadow", "none", "--alias", "candidate=none")
    assert read_release(model) == Release({"stable": 4})
    command(model, "--clear")
    assert not (model / FILE).exists()


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        (["--canary", "4:5%"], "needs a stable version"),
        (["--alias", "stable=3", "--canary", "4"], "such as --canary 4:5%"),
        (["--alias", "stable=3", "--canary", "4:0.05"], "such as --canary 4:5%"),
        (["--alias", "stable=3", "--canary", "4:101%"], "from 0% to 100%"),
        (["--alias", "stable=3", "--canary", "4:nan%"], "from 0% to 100%"),
        (["--alias", "stable=3", "--canary", "3:5%"], "version 3 is stable and cannot be the canary too"),
        (["--alias", "stable=9"], "the model has no version 9; it has 3, 4, 5"),
        (["--alias", "stable"], "give NAME=VERSION"),
        (["--alias", "canary=4"], "give --canary VERSION"),
        (["--alias", "Stable=3"], "use a-z"),
        (["--alias", "stable=3", "--shadow", "x"], "version 'x'"),
        (["--clear", "--shadow", "5"], "give it alone"),
    ],
)
def test_wrong_option_is_refused_with_its_cure_and_changes_nothing(
    model: Path, arguments: list[str], error: str
) -> None:
    with pytest.raises(OptionError, match=error):
        command(model, *arguments)
    assert read_release(model) == Release()


def test_stable_cannot_be_removed_under_a_canary(model: Path) -> None:
    command(model, "--alias", "stable=3", "--canary", "4:5%")
    with pytest.raises(OptionError, match="needs a stable version"):
        command(model, "--alias", "stable=none")
    command(model, "--alias", "stable=none", "--canary", "none")


def test_folder_that_is_no_model_and_bus_with_versions_are_refused(model: Path) -> None:
    with pytest.raises(OptionError, match="is no model's folder"):
        command(model.parent / "ctrr")
    with pytest.raises(OptionError, match="is a bus, which has no versions"):
        command("dir:/no/such/bus", "--canary", "4:5%")


def test_file_in_the_documentation_is_read() -> None:
    page = Path(__file__).parents[3] / "docs" / "formats" / "releases.md"
    fields = RELEASES_JSON.load(page.read_text().partition("```json\n")[2].partition("```")[0].encode())
    assert Release.from_json(fields) == Release({"stable": 3, "candidate": 5}, Share(4, 0.05), Share(5, 1.0))


def test_file_has_the_documented_fields(model: Path) -> None:
    command(model, "--alias", "stable=3", "--canary", "4:5%", "--shadow", "5:20%")
    found = json.loads((model / FILE).read_text())
    assert found.pop("checksum")
    assert found == {
        "format": "hotrow-releases",
        "version": 1,
        "aliases": {"stable": 3},
        "canary": {"version": 4, "share": 0.05},
        "shadow": {"version": 5, "share": 0.2},
    }
