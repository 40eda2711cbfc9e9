"""The release file of a model, `repository/<model>/releases.json`: aliases, canary, shadow (docs/formats/releases.md).

It lives in the repository, so all servers over that repository agree, and a restart changes nothing. `hotrow release`
writes it. Servers read it when they load the model, and with `--poll`.

A file is replaced as a whole (rename), so a reader sees the old or the new one. Writers of one model take turns. A
model without a file has the empty Release: its newest version serves.

Invariant of a Release, checked when it is created: a canary or a shadow needs the alias `stable`, because otherwise the
newest version would be the default, which is usually the canary itself.
"""

from __future__ import annotations

import fcntl
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hotrow.checksummed_json import FileFormat, OtherFormatError
from hotrow.errors import OptionError, RepositoryError
from hotrow.serve.repository.manifest import check_version
from hotrow.train.checkpoint import durable_files

FORMAT, VERSION = "hotrow-releases", 1
RELEASES_JSON = FileFormat(FORMAT, (VERSION,))
FILE = "releases.json"
STABLE, CANARY, SHADOW = "stable", "canary", "shadow"
_DRAFT, _LOCK = f".{FILE}.new", f".{FILE}.lock"
_ALIAS = re.compile(r"[a-z][a-z0-9_-]{0,63}")


@dataclass(frozen=True)
class Share:
    """A version, and its share of the requests, 0 to 1."""

    version: int
    share: float

    @staticmethod
    def parse(text: str, option: str, default: str | None = None) -> Share:
        """`VERSION:PERCENT%`, or `VERSION` alone if there is a default.

        >>> Share.parse("4:5%", "--canary")
        Share(version=4, share=0.05)
        """
        version, _, percent = text.partition(":")
        percent = percent or default or ""
        try:
            share = float(percent.removesuffix("%")) / 100
        except ValueError:
            share = -1.0
        if not percent.endswith("%") or not 0 <= share <= 1:
            raise OptionError(f"{option} {text}: give a version and its share from 0% to 100%, such as {option} 4:5%")
        return Share(check_version(version), share)


@dataclass(frozen=True)
class Release:
    """Which versions of a model take traffic, and their names.

    >>> Release({"stable": 3}, canary=Share(4, 0.05)).named()
    {'stable': '3', 'canary': '4'}
    >>> Release(canary=Share(4, 0.05))
    Traceback (most recent call last):
    hotrow.errors.OptionError: a canary needs a stable version, which answers the other requests: --alias stable=3
    """

    aliases: Mapping[str, int] = field(default_factory=dict)
    canary: Share | None = None
    shadow: Share | None = None

    def __post_init__(self) -> None:
        for name, version in self.aliases.items():
            check_alias(name)
            check_version(version)
        for role, given in ((CANARY, self.canary), (SHADOW, self.shadow)):
            if given is None:
                continue
            check_version(given.version)
            if not 0 <= given.share <= 1:
                raise OptionError(f"the {role} has the share {given.share:g}; give 0 to 1")
            if STABLE not in self.aliases:
                raise OptionError(
                    f"a {role} needs a stable version, which answers the other requests: --alias stable=3"
                )
            if given.version == self.aliases[STABLE]:
                raise OptionError(f"version {given.version} is stable and cannot be the {role} too; name another one")

    @property
    def stable(self) -> str | None:
        """The version that answers requests which name none; None: the newest."""
        version = self.aliases.get(STABLE)
        return None if version is None else str(version)

    def named(self) -> dict[str, str]:
        """All aliases with their versions. `canary` and `shadow` are aliases too."""
        found = {name: str(version) for name, version in self.aliases.items()}
        found |= {CANARY: str(self.canary.version)} if self.canary else {}
        found |= {SHADOW: str(self.shadow.version)} if self.shadow else {}
        return found

    def to_json(self) -> dict[str, Any]:
        """The file's fields."""
        return {
            "aliases": dict(self.aliases),
            **{role: {"version": g.version, "share": g.share} for role, g in self._shares() if g is not None},
        }

    @staticmethod
    def from_json(fields: Mapping[str, Any]) -> Release:
        """The release with these fields; anything malformed is an OptionError."""
        try:
            shares = {
                role: Share(check_version(fields[role]["version"]), float(fields[role]["share"]))
                for role in (CANARY, SHADOW)
                if fields.get(role) is not None
            }
            aliases = {str(name): check_version(version) for name, version in fields["aliases"].items()}
        except (KeyError, TypeError, AttributeError) as error:
            raise OptionError(f"its fields are not what HotRow writes: {error!r}") from None
        return Release(aliases, **shares)

    def _shares(self) -> tuple[tuple[str, Share | None], ...]:
        return (CANARY, self.canary), (SHADOW, self.shadow)


def check_alias(name: str) -> str:
    """An alias that `--alias` may set."""
    if not _ALIAS.fullmatch(name):
        raise OptionError(f"alias {name[:80]!r}: use a-z, 0-9, '_' and '-', beginning with a letter, at most 64")
    if name in (CANARY, SHADOW):
        raise OptionError(f"the alias {name!r} names the {name}'s version by itself; give --{name} VERSION")
    return name


def split_alias(name: str) -> tuple[str, str | None]:
    """The model and the alias in `model@alias`.

    >>> split_alias("ctr@stable"), split_alias("ctr")
    (('ctr', 'stable'), ('ctr', None))
    """
    model, at, alias = name.partition("@")
    return model, alias if at else None


def read_release(model: Path) -> Release:
    """The release of the model in this folder. A damaged file is a RepositoryError."""
    path = model / FILE
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        return Release()
    except OSError as error:
        raise RepositoryError(f"cannot read {path}: {error.strerror or error}; look at the disk") from error
    cure = f"remove it with `hotrow release {model} --clear` and set it again"
    try:
        return Release.from_json(RELEASES_JSON.load(data))
    except OtherFormatError as error:
        raise RepositoryError(
            f"{path} has format {error.format!r} version {error.version!r}; this release of HotRow reads {FORMAT!r} "
            f"version {VERSION}: {cure}"
        ) from None
    except ValueError as error:  # OptionError is one
        raise RepositoryError(f"{path} is corrupt: {error}; {cure}") from None


def change_release(model: Path, change: Callable[[Release], Release]) -> Release:
    """Replace the model's release by `change` of it, durably; returns the new one. Concurrent callers take turns."""
    with _locked(model):
        release = change(read_release(model))
        draft = model / _DRAFT
        with durable_files.disk("remove", draft), suppress(FileNotFoundError):
            draft.unlink()  # left by a crash
        durable_files.write(draft, RELEASES_JSON.dump(release.to_json()))
        durable_files.rename(draft, model / FILE)
        durable_files.sync(model)
    return release


def remove_release(model: Path) -> None:
    """Remove the file, damaged or not, so that the newest version serves again."""
    with _locked(model), durable_files.disk("remove", model / FILE):
        with suppress(FileNotFoundError):
            (model / FILE).unlink()
        durable_files.sync(model)


@contextmanager
def _locked(model: Path) -> Iterator[None]:
    """Wait for other writers. An export locks the model's folder for long, so this lock is a file of its own."""
    with durable_files.disk("open", model / _LOCK), open(model / _LOCK, "wb") as file:
        with suppress(OSError):  # a file system without locks
            fcntl.flock(file, fcntl.LOCK_EX)
        yield
