"""The cache of compiled towers: a private folder of this machine and user, never part of a repository.

An artifact is machine code, so a folder that another user may write to is an error: it must belong to the server's
user, have mode 0700, and not be a link. `<key>.pt2` is AOTInductor's package and `<key>.json` its description
with its sha256. The package is written under another name and renamed before the description is, so a description
always has a complete package. A package that does not match its description is removed, counted and built again.

The key is a hash of everything that the machine code depends on: the graph (without weights, which are inputs), the
shape, the number of threads, the versions of torch, triton and the C++ compiler, and the CPU's flags or the GPU's name
and capability. Above `max_bytes` the least recently used packages are removed.

Any number of threads and processes may use one folder. If two write the same key, the last one stays; both packages
compute the same.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import platform
import shutil
import stat
import subprocess
import time
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch

from hotrow.errors import OptionError, StorageError
from hotrow.serve.graph.tower_graph import Shape

FORMAT = 1


class ArtifactCache:
    """Packages by key in `folder`."""

    def __init__(self, folder: str | os.PathLike[str], max_bytes: int = 1 << 30) -> None:
        self.folder = Path(folder)
        self.max_bytes = max_bytes
        self.damaged = 0  # packages that did not match their description
        _make_private(self.folder)

    def path(self, key: str) -> Path:
        """The path of a key's package, which may not exist yet."""
        return self.folder / f"{key}.pt2"

    def find(self, key: str) -> Path | None:
        """The path of a complete package, or None. Counts as a use."""
        metadata = self.metadata(key)
        if metadata is None or "sha256" not in metadata:
            return None
        path = self.path(key)
        if not path.exists() or _sha256(path) != metadata["sha256"]:
            self.damaged += 1
            self._remove(key)
            return None
        with contextlib.suppress(OSError):
            os.utime(path)
        return path

    def add(self, key: str, built: Path, metadata: dict[str, Any]) -> Path:
        """Add a package that was built in this folder under another name."""
        path, digest = self.path(key), _sha256(built)
        size = built.stat().st_size
        os.replace(built, path)
        self._write(key, {**metadata, "sha256": digest, "bytes": size, "built": time.time()})
        self._trim(keep=key)
        return path

    def quarantine(self, key: str, reason: str) -> None:
        """Remove a package that computes other results, and record the reason so that it is not built again."""
        self._remove(key)
        self._write(key, {"quarantined": reason, "built": time.time()})

    def metadata(self, key: str) -> dict[str, Any] | None:
        """The description of a key; None if there is none that can be read."""
        try:
            metadata = json.loads((self.folder / f"{key}.json").read_text())
        except (OSError, ValueError):
            return None
        return metadata if isinstance(metadata, dict) else None

    def _write(self, key: str, metadata: dict[str, Any]) -> None:
        self.remember(f"{key}.json", metadata)

    def remember(self, name: str, value: Any) -> None:
        """Write a small JSON file atomically."""
        scratch = self.folder / f"{name}.{os.getpid()}.tmp"
        try:
            scratch.write_text(json.dumps(value))
            os.replace(scratch, self.folder / name)
        except OSError as error:
            raise StorageError(f"the compile cache {str(self.folder)!r} cannot be written: {error}") from None

    def recall(self, name: str) -> Any:
        """What `remember` wrote, or None."""
        try:
            return json.loads((self.folder / name).read_text())
        except (OSError, ValueError):
            return None

    def _remove(self, key: str) -> None:
        for path in (self.folder / f"{key}.json", self.path(key)):  # the description first
            path.unlink(missing_ok=True)

    def _trim(self, keep: str) -> None:
        packages = []
        for path in self.folder.glob("*.pt2"):
            with contextlib.suppress(OSError):
                found = path.stat()
                packages.append((found.st_mtime, found.st_size, path))
        total = sum(size for _, size, _ in packages)
        for _, size, path in sorted(packages):
            if total <= self.max_bytes:
                return
            if path.stem != keep:
                self._remove(path.stem)
                total -= size

    @property
    def bytes(self) -> int:
        """The size of all packages."""
        return sum(path.stat().st_size for path in self.folder.glob("*.pt2"))


def default_folder() -> Path:
    """`$HOTROW_CACHE/compiled`, or `hotrow/compiled` under the user's cache."""
    base = os.environ.get("HOTROW_CACHE")
    if base:
        return Path(base) / "compiled"
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "hotrow" / "compiled"


def key_of(digest: str, shape: Shape, device: torch.device, threads: int) -> str:
    """The cache key of a graph's machine code at a shape."""
    parts = [FORMAT, digest, str(shape), device.type, threads, *toolchain(device)]
    return hashlib.sha256("\0".join(map(str, parts)).encode()).hexdigest()[:32]


def compiler() -> str | None:
    """The path of the C++ compiler that AOTInductor will call, or None."""
    return shutil.which(os.environ.get("CXX") or "g++")


@lru_cache(maxsize=8)
def toolchain(device: torch.device) -> tuple[str, ...]:
    """The versions and hardware that machine code depends on."""
    try:
        from triton import __version__ as triton
    except ImportError:
        triton = "none"
    found = compiler()
    version = "none"
    if found:
        with contextlib.suppress(OSError, subprocess.SubprocessError):
            output = subprocess.run([found, "--version"], capture_output=True, text=True, timeout=30)
            version = output.stdout.partition("\n")[0]
    hardware = _gpu(device) if device.type == "cuda" else _cpu()
    return (torch.__version__, triton, version, platform.machine(), hardware)


def _cpu() -> str:
    """The vector extensions that torch uses and the CPU's flags: code is generated for exactly this CPU."""
    flags = ""
    with contextlib.suppress(OSError):
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        flags = next((line for line in lines if line.startswith(("flags", "Features"))), "")
    return f"{torch.backends.cpu.get_cpu_capability()} {hashlib.sha256(flags.encode()).hexdigest()[:16]}"


def _gpu(device: torch.device) -> str:
    major, minor = torch.cuda.get_device_capability(device)
    return f"{torch.cuda.get_device_name(device)} {major}.{minor} cuda {torch.version.cuda}"


def _make_private(folder: Path) -> None:
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with contextlib.suppress(FileExistsError):
            folder.mkdir(mode=0o700)
        found = folder.lstat()
    except OSError as error:
        raise StorageError(
            f"the compile cache {str(folder)!r} cannot be created: {error}; give another folder"
        ) from None
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or stat.S_IMODE(found.st_mode) & 0o077:
        raise OptionError(
            f"the compile cache {str(folder)!r} holds machine code, so it must be a folder of user "
            f"{os.getuid()} alone, but it is {stat.filemode(found.st_mode)} of user {found.st_uid}; chmod 700 it, "
            "or give another folder"
        )


def _sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        for block in iter(lambda: file.read(1 << 20), b""):
            digest.update(block)
    return digest.hexdigest()
