"""Loading an artifact and calling it without holding Python's lock.

torch's own loader keeps the interpreter lock for the whole run (measured on torch 2.13: a second thread got 262
turns during 300 runs, against 9,238 with what is below), so two lanes on a CPU would take turns. An AOTInductor
library has a plain C interface (torch/csrc/inductor/aoti_runtime/interface.h), and ctypes drops the lock around a
foreign call. So on a CPU we open the library ourselves: handles of the inputs are made in one call of torch's, the
run steals them, and the outputs' handles are stolen back. `lanes` runs may go on at once; each has its own model
inside the library.

An artifact that calls ops for which torch has no C function needs torch's proxy executor, and so torch's loader. So
does CUDA, where a run only launches: there every thread has a loader of its own, without locks, as CUDA graphs want
it.
"""

from __future__ import annotations

import ctypes
import os
import tempfile
import threading
import zipfile
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import Tensor

from hotrow.errors import HotRowError

Runner = Callable[[Sequence[Tensor]], Tensor]  # weights, then inputs
PieceRunner = Callable[[Sequence[Tensor]], Sequence[Tensor]]  # what a piece reads; what it gives
WHOLE = "model"  # the name, in its package, of an artifact of a whole tower


class ArtifactError(HotRowError, RuntimeError):
    """An artifact that cannot be loaded or run; the original graph answers instead."""


def load(path: Path, device: torch.device, lanes: int) -> Runner:
    """A function of weights and inputs that any thread may call."""
    run = load_piece(path, WHOLE, device, lanes)
    return lambda tensors: run(tensors)[0]


def load_piece(path: Path, piece: str, device: torch.device, lanes: int) -> PieceRunner:
    """One artifact of a package, as a function that any thread may call."""
    try:
        if device.type != "cpu" or _needs_proxy(path, piece):
            return _PackageRunner(path, piece, device)
        return _LibraryRunner(path, piece, lanes)
    except (OSError, RuntimeError, zipfile.BadZipFile, AttributeError) as error:
        raise ArtifactError(f"the artifact {path.name} cannot be loaded: {error}") from None


def _files(package: zipfile.ZipFile, piece: str, ending: str) -> list[str]:
    return [name for name in package.namelist() if f"/{piece}/" in name and name.endswith(ending)]


def _needs_proxy(path: Path, piece: str) -> bool:
    with zipfile.ZipFile(path) as package:
        notes = _files(package, piece, ".json")
    return any(not name.endswith(("_metadata.json", "_flags.json")) for name in notes)


class _LibraryRunner:
    def __init__(self, path: Path, piece: str, lanes: int) -> None:
        self._library = _open(path, piece)
        self._run = self._library.AOTInductorModelContainerRun
        pointer, size = ctypes.c_void_p, ctypes.c_size_t
        self._run.argtypes = [pointer, pointer, size, pointer, size, pointer, pointer]
        self._container = ctypes.c_void_p()
        create = self._library.AOTInductorModelContainerCreateWithDevice
        if create(ctypes.byref(self._container), size(max(1, lanes)), b"cpu", None):
            raise ArtifactError(f"the artifact {path.name} cannot be set up")
        count = ctypes.c_size_t()
        if self._library.AOTInductorModelContainerGetNumOutputs(self._container, ctypes.byref(count)):
            raise ArtifactError(f"the artifact {path.name} does not say how many tensors it gives")
        self._outputs = count.value

    def __call__(self, tensors: Sequence[Tensor]) -> Sequence[Tensor]:
        handles = [_pointer(capsule, None) for capsule in _make_handles(list(tensors))]
        out = (ctypes.c_void_p * self._outputs)()
        taken = (ctypes.c_void_p * len(handles))(*handles)
        if self._run(self._container, taken, len(handles), out, self._outputs, None, None):
            raise ArtifactError("an artifact's run failed; the library wrote why to stderr")
        return [_take_handle(_capsule(handle, None, None)) for handle in out]

    def __del__(self) -> None:
        if getattr(self, "_container", None):
            self._library.AOTInductorModelContainerDelete(self._container)


def _open(path: Path, piece: str) -> ctypes.CDLL:
    """The library out of its package; its file is gone again once it is open."""
    with zipfile.ZipFile(path) as package, tempfile.TemporaryDirectory(prefix="hotrow-") as scratch:
        name = next(iter(_files(package, piece, ".so")), None)
        if name is None:
            raise ArtifactError(f"the artifact {path.name} holds no library of {piece!r}")
        library = Path(scratch) / "tower.so"
        library.write_bytes(package.read(name))
        return ctypes.CDLL(os.fspath(library), mode=os.RTLD_NOW | os.RTLD_LOCAL)


class _PackageRunner:
    def __init__(self, path: Path, piece: str, device: torch.device) -> None:
        self._path, self._piece, self._device = path, piece, device
        self._alone = device.type == "cuda"
        self._lane = threading.local()
        self._shared = None if self._alone else self._load()

    def __call__(self, tensors: Sequence[Tensor]) -> Sequence[Tensor]:
        loader = self._shared
        if loader is None:
            loader = getattr(self._lane, "loader", None)
            if loader is None:
                loader = self._lane.loader = self._load()
        given: list[Tensor] = loader.boxed_run(list(tensors))
        return given

    def _load(self):  # type: ignore[no-untyped-def]  # torch has no type for it
        from torch._inductor.package.package import load_package

        index = -1 if self._device.index is None else self._device.index
        return load_package(
            os.fspath(self._path), self._piece, run_single_threaded=self._alone, device_index=index
        ).loader


_make_handles = torch._C._aoti.unsafe_alloc_void_ptrs_from_tensors
_take_handle = torch._C._aoti.alloc_tensor_by_stealing_from_void_ptr
_pointer = ctypes.pythonapi.PyCapsule_GetPointer
_pointer.argtypes, _pointer.restype = [ctypes.py_object, ctypes.c_char_p], ctypes.c_void_p
_capsule = ctypes.pythonapi.PyCapsule_New
_capsule.argtypes, _capsule.restype = [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p], ctypes.py_object
