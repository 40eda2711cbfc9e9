"""`hotrow release`: which versions of a model take traffic. It also lets a held publisher of a bus go on."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from hotrow.cli.terminal import warn_of_passwords
from hotrow.errors import OptionError

if TYPE_CHECKING:
    from hotrow.serve.repository.releases import Release

RELEASE_HELP = """Choose which versions of a model take traffic: aliases, canary, shadow. Without options, show them.

Servers over the repository follow within their --poll, or when they are told to load the model. Options change what
they name and leave the rest. Requests that name no version go to the alias `stable`; without it, to the newest version.

Examples:

    hotrow release repository/ctr                                        # show the state

    hotrow release repository/ctr --alias stable=3 --canary 4:5%         # 5% of the requests go to version 4

    hotrow release repository/ctr --shadow 5                             # version 5 runs beside, and never answers

    hotrow release repository/ctr --alias stable=4                       # promote the canary, which ends it

    hotrow release repository/ctr --canary none                          # end it without promoting

    hotrow release repository/ctr --clear                                # the newest version serves again

    hotrow release dir:/data/publications      # a bus: let a publisher that `hotrow rollback` holds go on
"""

_NONE = "none"


def release(
    target: Annotated[str, typer.Argument(metavar="REPOSITORY/MODEL", help="a model's folder, or a bus")],
    alias: Annotated[
        list[str] | None, typer.Option(help="NAME=VERSION, such as stable=3; NAME=none removes it; several are allowed")
    ] = None,
    canary: Annotated[str | None, typer.Option(help="VERSION:SHARE, such as 4:5%; none ends it")] = None,
    shadow: Annotated[str | None, typer.Option(help="VERSION[:SHARE], such as 5 or 5:20%; none ends it")] = None,
    clear: Annotated[bool, typer.Option("--clear", help="remove aliases, canary and shadow")] = False,
) -> None:
    """Choose which versions of a model take traffic."""
    from hotrow.publish.bus import SCHEMES

    given = bool(alias or canary is not None or shadow is not None)
    if target.partition(":")[0] in SCHEMES and not Path(target).is_dir():
        if given or clear:
            raise OptionError(
                f"{target.partition(':')[0]}:... is a bus, which has no versions; give a model's folder such as "
                "repository/ctr"
            )
        return _release_publisher(target)
    if clear and given:
        raise OptionError("--clear removes everything; give it alone")
    _release_model(Path(target), alias or [], canary, shadow, clear, given)


def _release_publisher(bus: str) -> None:
    from hotrow.publish.rollback import release as run

    warn_of_passwords(bus)
    Console().print("released" if run(bus) else "it was not held", highlight=False)


def _release_model(
    model: Path, alias: list[str], canary: str | None, shadow: str | None, clear: bool, given: bool
) -> None:
    from hotrow.serve.repository.manifest import list_versions
    from hotrow.serve.repository.releases import change_release, read_release, remove_release

    model = model.resolve()  # `.` has the model's name too
    versions = list_versions(model)
    if not versions:
        raise OptionError(f"{model} is no model's folder, because it has no version; give one such as repository/ctr")
    if clear:
        remove_release(model)
    elif given:
        change_release(model, lambda old: _changed(old, alias, canary, shadow, versions))
    _show(model.name, read_release(model), versions)


def _changed(old: Release, alias: list[str], canary: str | None, shadow: str | None, versions: list[int]) -> Release:
    """The release after these options. Versions must be in the repository."""
    from hotrow.serve.repository.manifest import check_version
    from hotrow.serve.repository.releases import CANARY, SHADOW, STABLE, Release, Share, check_alias

    aliases, shares = dict(old.aliases), {CANARY: old.canary, SHADOW: old.shadow}
    for one in alias:
        name, _, version = one.partition("=")
        if not version:
            raise OptionError(f"--alias {one}: give NAME=VERSION, such as --alias stable=3")
        aliases.pop(check_alias(name), None)
        if version != _NONE:
            aliases[name] = check_version(version)
    for role, text, default in ((CANARY, canary, None), (SHADOW, shadow, "100%")):
        if text is not None:
            shares[role] = None if text == _NONE else Share.parse(text, f"--{role}", default)
        elif (kept := shares[role]) is not None and kept.version == aliases.get(STABLE):
            shares[role] = None  # it was promoted
    changed = Release(aliases, shares[CANARY], shares[SHADOW])
    for name, version in changed.named().items():
        if int(version) not in versions:
            raise OptionError(
                f"{name}={version}: the model has no version {version}; it has {', '.join(map(str, sorted(versions)))}"
            )
    return changed


def _show(name: str, release: Release, versions: list[int]) -> None:
    from hotrow.serve.repository.releases import CANARY, SHADOW, STABLE

    lines = [f"[bold]{name}[/]: versions {', '.join(map(str, sorted(versions)))}"]
    canary = release.canary.share if release.canary else 0.0
    rest = f"{_percent(1 - canary)} of the requests that name no version"
    if release.stable is None:
        lines.append(f"  version {max(versions)}, the newest, answers requests that name no version")
    notes = {
        STABLE: rest,
        CANARY: f"{_percent(canary)} of them",
        SHADOW: "" if release.shadow is None else f"runs a copy of {_percent(release.shadow.share)} without answering",
    }
    named = release.named()
    width = max([len(alias) for alias in named], default=0)
    order = sorted(named, key=lambda alias: (alias != STABLE, alias != CANARY, alias != SHADOW, alias))
    lines += [f"  {alias:<{width}}  {named[alias]:>3}  {notes.get(alias, '')}".rstrip() for alias in order]
    Console().print("\n".join(lines), highlight=False, soft_wrap=True)


def _percent(share: float) -> str:
    return f"{share * 100:.6g}%"
