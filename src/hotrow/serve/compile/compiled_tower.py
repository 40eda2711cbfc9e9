"""Loads an artifact and runs it without holding Python's interpreter lock.

torch's own loader holds the interpreter lock during the whole run (torch 2.13: a second thread ran 262 times during 300
runs, against 9,238 with the loader here), so lanes on a CPU could not run in parallel. An AOTInductor library has a C
interface (torch/csrc/inductor/aoti_runtime/interface.h), and ctypes releases the lock around a foreign call. So on a
CPU the library is loaded here: one call of torch creates handles for the inputs, the run takes ownership of them, and
the handles of the outputs are converted to tensors. Up to `lanes` runs may execute at once; each uses its own model
instance inside the library.

Torch's loader is still used for artifacts with ops that have no C function in torch, because these need its proxy
executor, and on CUDA, where a run only launches kernels. There every thread has its own loader without locks, as CUDA
graph capture requires.

torch documents neither the C interface nor the handles. They are used only with tested torch versions. With another
version torch's loader runs the artifact; if that has changed too, the original graph answers.
"""

from __future__ import annotations

import ctypes
import os
import tempfile
import threading
import zipfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hotrow.errors import HotRowError
from hotrow.undocumented import ChangedError, describe, is_tested, look_up, warn_once

Runner = Callable[[Sequence[Tensor]], Sequence[Tensor]]  # from weights, then inputs, to a graph's outputs
PieceRunner = Callable[[Sequence[Tensor]], Sequence[Tensor]]  # from a piece's inputs to its outputs
Handles = tuple[
    Callable[[list[Tensor]], list[Any]], Callable[[Any], Tensor]
]  # from tensors to handles, and from a handle to its tensor
WHOLE = "model"  # the name of a whole tower's artifact in its package
SLOWER = "Compiled towers are run by torch's own loader: the same results, but the lanes of a CPU take turns"


class ArtifactError(HotRowError, RuntimeError):
    """An artifact that cannot be loaded or run; the original graph answers instead."""


def load(path: Path, device: torch.device, lanes: int) -> Runner:
    """A function of weights and inputs that any thread may call."""
    return load_piece(path, WHOLE, device, lanes)


def load_piece(path: Path, piece: str, device: torch.device, lanes: int) -> PieceRunner:
    """One artifact of a package, as a function that any thread may call."""
    try:
        handles = _find_handles() if device.type == "cpu" and not _needs_proxy(path, piece) else None
        if handles is not None:
            try:
                return _LibraryRunner(path, piece, lanes, handles)
            except AttributeError as error:
                warn_once(f"{describe('torch', f'compiles libraries of another interface ({error})')}. {SLOWER}")
        return _PackageRunner(path, piece, device)
    except ChangedError:
        raise  # compiling it again would not help
    except (OSError, RuntimeError, zipfile.BadZipFile, AttributeError) as error:
        raise ArtifactError(f"the artifact {path.name} cannot be loaded: {error}") from None


def _find_handles() -> Handles | None:
    """The functions from tensors to handles and back; None if this torch may have changed them."""
    try:
        if not is_tested("torch"):
            raise ChangedError(describe("torch", "may have another C interface of AOTInductor"))
        return (
            look_up("torch._C._aoti:unsafe_alloc_void_ptrs_from_tensors"),
            look_up("torch._C._aoti:alloc_tensor_by_stealing_from_void_ptr"),
        )
    except ChangedError as error:
        warn_once(f"{error}. {SLOWER}")
        return None


def _files(package: zipfile.ZipFile, piece: str, ending: str) -> list[str]:
    return [name for name in package.namelist() if f"/{piece}/" in name and name.endswith(ending)]


def _needs_proxy(path: Path, piece: str) -> bool:
    with zipfile.ZipFile(path) as package:
        notes = _files(package, piece, ".json")
    return any(not name.endswith(("_metadata.json", "_flags.json")) for name in notes)


class _LibraryRunner:
    def __init__(self, path: Path, piece: str, lanes: int, handles: Handles) -> None:
        self._make_handles, self._take_handle = handles
        self._library = _open(path, piece)
        self._run = self._library.AOTInductorModelContainerRun
        self._delete = self._library.AOTInductorModelContainerDelete
        count_outputs = self._library.AOTInductorModelContainerGetNumOutputs
        pointer, size = ctypes.c_void_p, ctypes.c_size_t
        self._run.argtypes = [pointer, pointer, size, pointer, size, pointer, pointer]
        self._container = ctypes.c_void_p()
        create = self._library.AOTInductorModelContainerCreateWithDevice
        if create(ctypes.byref(self._container), size(max(1, lanes)), b"cpu", None):
            raise ArtifactError(f"the artifact {path.name} cannot be set up")
        count = ctypes.c_size_t()
        if count_outputs(self._container, ctypes.byref(count)):
            raise ArtifactError(f"the artifact {path.name} does not say how many tensors it returns")
        self._outputs = count.value

    def __call__(self, tensors: Sequence[Tensor]) -> Sequence[Tensor]:
        handles = [_pointer(capsule, None) for capsule in self._make_handles(list(tensors))]
        out = (ctypes.c_void_p * self._outputs)()
        taken = (ctypes.c_void_p * len(handles))(*handles)
        if self._run(self._container, taken, len(handles), out, self._outputs, None, None):
            raise ArtifactError("an artifact's run failed; the library wrote why to stderr")
        return [self._take_handle(_capsule(handle, None, None)) for handle in out]

    def __del__(self) -> None:
        if getattr(self, "_container", None):
            self._delete(self._container)


def _open(path: Path, piece: str) -> ctypes.CDLL:
    """Load the library from its package. The extracted file is deleted as soon as it is loaded."""
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
        self._per_thread = device.type == "cuda"
        self._lane = threading.local()
        self._shared = None if self._per_thread else self._load()

    def __call__(self, tensors: Sequence[Tensor]) -> Sequence[Tensor]:
        run = self._shared
        if run is None:
            run = getattr(self._lane, "run", None)
            if run is None:
                run = self._lane.run = self._load()
        return run(list(tensors))

    def _load(self) -> Callable[[list[Tensor]], list[Tensor]]:
        # The model itself cannot be called: it expects nested inputs, and these graphs have flat ones.
        load_package = look_up("torch._inductor.package:load_package")
        index = -1 if self._device.index is None else self._device.index
        model = load_package(
            os.fspath(self._path), self._piece, run_single_threaded=self._per_thread, device_index=index
        )
        run: Callable[[list[Tensor]], list[Tensor]] | None = getattr(getattr(model, "loader", None), "boxed_run", None)
        if run is None:
            raise ChangedError(describe("torch", "loads artifacts that have no loader.boxed_run"))
        return run


_pointer = ctypes.pythonapi.PyCapsule_GetPointer
_pointer.argtypes, _pointer.restype = [ctypes.py_object, ctypes.c_char_p], ctypes.c_void_p
_capsule = ctypes.pythonapi.PyCapsule_New
_capsule.argtypes, _capsule.restype = [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p], ctypes.py_object
