"""Lists the GPUs that CUDA sees, as a line of JSON. The supervisor runs this file as a short process (gpus.py).

It asks the driver's library, because only that numbers the GPUs as torch does: by CUDA_VISIBLE_DEVICES and
CUDA_DEVICE_ORDER. cuInit creates no CUDA context, so no GPU memory is taken. It runs in a process of its own because a
broken driver may block or crash in cuInit. The file imports only the standard library: importing torch takes seconds.

    {"driver": 12080, "gpus": [{"name": "NVIDIA H200", "uuid": "GPU-5d7e...", "bytes": 150754820096}]}
    {"library": "libcuda.so.1: cannot open shared object file: No such file or directory"}
    {"code": 100, "error": "no CUDA-capable device is detected"}
"""

from __future__ import annotations

import ctypes
import json
import uuid
from typing import Any

LIBRARY = "libcuda.so.1"


class _FailedError(Exception):
    """A call of the driver failed: its code and the driver's text."""


def list_gpus() -> dict[str, Any]:
    """One of the documents above."""
    try:
        library = ctypes.CDLL(LIBRARY)
    except OSError as error:
        return {"library": str(error)}
    try:
        _call(library, "cuInit", 0)
        driver, count = ctypes.c_int(), ctypes.c_int()
        _call(library, "cuDriverGetVersion", ctypes.byref(driver))
        _call(library, "cuDeviceGetCount", ctypes.byref(count))
        return {"driver": driver.value, "gpus": [_describe(library, index) for index in range(count.value)]}
    except _FailedError as error:
        code, text = error.args
        return {"code": code, "error": text}


def _describe(library: ctypes.CDLL, index: int) -> dict[str, Any]:
    device, size = ctypes.c_int(), ctypes.c_size_t()
    name, identity = ctypes.create_string_buffer(256), (ctypes.c_ubyte * 16)()
    _call(library, "cuDeviceGet", ctypes.byref(device), index)
    _call(library, "cuDeviceGetName", name, len(name), device)
    # Of a part of a GPU (MIG), only the second version gives the part's id.
    get_uuid = "cuDeviceGetUuid_v2" if hasattr(library, "cuDeviceGetUuid_v2") else "cuDeviceGetUuid"
    _call(library, get_uuid, ctypes.byref(identity), device)
    _call(library, "cuDeviceTotalMem_v2", ctypes.byref(size), device)
    text = name.value.decode(errors="replace")
    prefix = "MIG" if " MIG " in text else "GPU"
    return {"name": text, "uuid": f"{prefix}-{uuid.UUID(bytes=bytes(identity))}", "bytes": size.value}


def _call(library: ctypes.CDLL, function: str, *arguments: Any) -> None:
    code = getattr(library, function)(*arguments)
    if code:
        text = ctypes.c_char_p()
        library.cuGetErrorString(code, ctypes.byref(text))
        raise _FailedError(code, (text.value or b"unknown error").decode(errors="replace"))


if __name__ == "__main__":
    print(json.dumps(list_gpus()))
