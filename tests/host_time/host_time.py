"""The host's work in a training step on a GPU, measured on a machine that has none (README.md).

A CUDA build of torch runs over a runtime that computes nothing (runtime.cpp): every call is made, kernels leave zeros,
and streams are busy for fixed times. First W-gpu with all rows in HBM, on a device that takes no time, so that all of a
step's time is the host's. Then W-dlrm (bench/gpu/pipeline_gpu.py) on a device that takes 5.6 ms a step, alone and
beside two threads that take Python's lock for 0.2 ms now and then: for the time beyond the device's, the device has no
work. Nothing of it says how fast a GPU is.

    python tests/host_time/host_time.py            # needs a CUDA build of torch, CUDA's headers, a C++ compiler
    CUDA_HOME=/usr/local/cuda python ...                # where the headers are
"""

from __future__ import annotations

import ctypes
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
READY = "HOTROW_NULL_CUDA"  # environment variable of the measuring process: the folder of the libraries
CALL = {"NULL_CALL": "2500"}
DEVICE = {"NULL_KERNEL": "20000", "NULL_PRODUCT": "170000", "NULL_GRAPH": "120000", "NULL_COPY": "5000"}
VERSIONED = ("libcudart.so.13", "libcublas.so.13", "libcublasLt.so.13")
WRITTEN = {  # functions whose results torch reads; all others just return 0
    "cublasCreate_v2": "int cublasCreate_v2(void** out) { *out = (void*)16; return 0; }",
    "cublasLtCreate": "int cublasLtCreate(void** out) { *out = (void*)16; return 0; }",
    "cublasLtMatmulAlgoGetHeuristic": "int cublasLtMatmulAlgoGetHeuristic(void*, void*, void*, void*, void*, void*, "
    "void*, int, void*, int* found) { *found = 1; return 0; }",
    "cublasGetMathMode": "int cublasGetMathMode(void*, int* mode) { *mode = 0; return 0; }",
    "cublasGetPointerMode_v2": "int cublasGetPointerMode_v2(void*, int* mode) { *mode = 0; return 0; }",
    "cublasGetVersion_v2": "int cublasGetVersion_v2(void*, int* version) { *version = 130000; return 0; }",
    "cublasLtGetVersion": "unsigned long cublasLtGetVersion() { return 130000; }",
}


# --- the libraries --------------------------------------------------------------------------------------------------


def build(folder: Path) -> list[Path]:
    """Compile runtime.cpp and driver.cpp, with a function for every other symbol that torch's libraries import."""
    wanted = _wanted()
    libraries = [_compile(folder, "libcuda.so.1", [HERE / "driver.cpp"])]
    for name in VERSIONED:
        sources = [HERE / "runtime.cpp"] if "cudart" in name else []
        rest = folder / f"{name}.cpp"
        rest.write_text(_stubs(wanted[name] - _defined(sources)))
        version = folder / f"{name}.map"
        version.write_text(f"{name} {{ global: *; }};\n")
        libraries.insert(0, _compile(folder, name, [*sources, rest], version))
    return libraries


def _wanted() -> dict[str, set[str]]:
    import torch

    found: dict[str, set[str]] = {name: set() for name in VERSIONED}
    for library in (Path(torch.__file__).parent / "lib").glob("*.so"):
        symbols = subprocess.run(["nm", "-D", "--undefined-only", library], capture_output=True, text=True).stdout
        for word in symbols.split():
            symbol, _, version = word.partition("@")
            if version in found:
                found[version].add(symbol)
    if not found[VERSIONED[0]]:
        raise SystemExit(
            "this torch is not a build for CUDA 13: pip install torch==2.11.0, in an environment of its own"
        )
    return found


def _defined(sources: list[Path]) -> set[str]:
    """Names of the functions that the sources define."""
    text = "".join(source.read_text() for source in sources)
    return {word.split("(")[0].lstrip("*") for word in text.split() if "(" in word and "cuda" in word}


def _stubs(symbols: set[str]) -> str:
    lines = []
    for symbol in sorted(symbols):
        product = "emm" in symbol.lower() or symbol == "cublasLtMatmul"
        default = f"int {symbol}() {{ {'null_product(); ' if product else ''}return 0; }}"
        lines.append(WRITTEN.get(symbol, default))
    return 'extern "C" {\nvoid null_product();\n' + "\n".join(lines) + "\n}\n"


def _compile(folder: Path, name: str, sources: list[Path], version: Path | None = None) -> Path:
    include = Path(os.environ.get("CUDA_HOME", "/usr/local/cuda")) / "include"
    command = [os.environ.get("CXX", "c++"), "-O2", "-std=c++20", "-shared", "-fPIC", "-w", f"-I{include}", *sources]
    command += ["-o", folder / name, f"-Wl,-soname,{name}"]
    command += [] if version is None else [f"-Wl,--version-script={version}"]
    subprocess.run(command, check=True)
    return folder / name


# --- measurements -------------------------------------------------------------------------------------------------


class Counts:
    """Calls of the runtime since this was made."""

    def __init__(self) -> None:
        self.library = ctypes.CDLL(str(Path(os.environ[READY]) / VERSIONED[0]))
        self.before = self._now()

    def _now(self) -> list[int]:
        numbers = (ctypes.c_long * 6)()
        self.library.null_counts(numbers)
        return list(numbers)

    def of(self, steps: int) -> str:
        launches, graphs, copies, waits, _, busy = (
            (now - then) / steps for now, then in zip(self._now(), self.before, strict=True)
        )
        counted = f"{launches:.0f} launches, {graphs:.0f} graphs, {copies:.0f} copies, {waits:.0f} waits a step"
        return f"{counted}; device busy {busy / 1e6:.2f} ms"


def w_gpu(rows: int = 20_000) -> None:
    """Steps of W-gpu with all rows in HBM."""
    from hotrow.bench.gpu import hbm

    for name in hbm.OPTIMIZERS:
        embeddings = hbm.collection(name, 2 * hbm.TABLES * rows, rows)
        steps = hbm.Steps(embeddings, hbm.Ids(rows, hbm.IDS, embeddings.device))
        steps.warm(60)
        batches = [steps.source.batch() for _ in range(20)] * 20
        counts = Counts()
        forward, whole = zip(*(_milliseconds(steps, batch) for batch in batches), strict=True)
        print(
            f"W-gpu {name}: {statistics.median(forward):.3f} ms of the host until its rows are gathered, "
            f"{statistics.median(whole):.3f} in all; {counts.of(len(batches))}"
        )


def _milliseconds(steps: Any, batch: Any) -> tuple[float, float]:
    """The host's time from the start of a step to its gathered rows, and to its end."""
    start = time.perf_counter()
    lookup = steps.embeddings.route(batch).fetch()
    lookup.gather()
    middle = time.perf_counter()
    lookup.accept(list(steps.gradients))
    steps.embeddings._waiting.append(lookup)
    steps.embeddings.step()
    return (middle - start) * 1e3, (time.perf_counter() - start) * 1e3


def w_dlrm(rows: int = 20_000, batches: int = 200) -> None:
    """Steps of W-dlrm with all rows in HBM."""
    import torch

    from hotrow import optim
    from hotrow.bench.gpu import hbm
    from hotrow.bench.gpu.pipeline_gpu import BATCH, DENSE, DIM, TABLES, batch_of
    from hotrow.bench.training.pipeline import Drawn
    from hotrow.config import Memory
    from hotrow.models import DLRM
    from hotrow.nn import EmbeddingCollection, Recommender
    from hotrow.table import Table
    from hotrow.train.trainer import Trainer

    tables = [Table(f"t{t}", dim=DIM, features=[f"f{t}"]) for t in range(TABLES)]
    embeddings = EmbeddingCollection(tables, optim.RowWiseAdagrad(lr=0.01), Memory(hbm="2GiB"), seed=1)
    for table in embeddings.tables:
        table.create(torch.arange(rows))
    tower = DLRM(embeddings.features, dense_features=DENSE, bottom=(512, 256), top=(1024, 1024, 512, 256))
    model = Recommender(embeddings, tower)
    trainer = Trainer(model, torch.optim.Adam(model.tower.parameters(), fused=True))
    draw = hbm.Ids(rows, BATCH, embeddings.device)
    source = Drawn([batch_of(draw) for _ in range(8)] * (batches // 8))
    trainer.fit(source, progress=False)
    for beside in ("alone", "beside two threads"):
        if beside != "alone":
            for _ in range(2):
                threading.Thread(target=_hold_the_lock, daemon=True).start()
        took, counts = [], Counts()
        for _ in range(5):
            start = time.perf_counter()
            trainer.fit(source, progress=False)
            took.append((time.perf_counter() - start) / batches * 1e3)
        print(f"W-dlrm {beside}: {statistics.median(took):.2f} ms a step; {counts.of(5 * batches)}")


def _hold_the_lock() -> None:
    while True:
        time.sleep(0.0004)
        for _ in range(6):
            sum(range(2500))


def main() -> None:
    """Build the libraries, and measure in processes that load them."""
    if READY in os.environ:
        {"w_gpu": w_gpu, "w_dlrm": w_dlrm}[sys.argv[1]]()
        return
    with tempfile.TemporaryDirectory() as folder:
        libraries = " ".join(str(library) for library in build(Path(folder)))
        (Path(folder) / "libcuda.so").symlink_to("libcuda.so.1")
        for job, times in (("w_gpu", CALL), ("w_dlrm", {**CALL, **DEVICE})):
            env = {**times, **os.environ, READY: folder, "LD_PRELOAD": libraries, "TRITON_LIBCUDA_PATH": folder}
            subprocess.run([sys.executable, __file__, job], env=env, check=True)


if __name__ == "__main__":
    main()
