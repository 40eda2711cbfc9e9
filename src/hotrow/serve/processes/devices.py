"""The devices of `hotrow serve --devices`: which ones engines run on, and what the user is told about it.

    auto                a GPU for each engine if there is a usable one, else the CPU
    0,1 or cuda:0,...   these GPUs, by torch's numbers
    cpu                 no GPU. A device may be given several times: cpu,cpu are two engines

An engine process sees only its own GPU, through CUDA_VISIBLE_DEVICES with the GPU's id, and calls it cuda:0. With an
index instead, every thread of an engine (lanes, the cache's filler, the compiler) and every library would have to
choose the GPU before each call, and a forgotten one would use GPU 0. An id, unlike a number, means the same GPU under
MPS and whatever CUDA_VISIBLE_DEVICES the server itself was started with.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from hotrow.errors import OptionError
from hotrow.serve.processes.gpus import Gpu, Gpus

AUTO = "auto"
GPU_INSIDE = "cuda:0"  # an engine's name for its own GPU


@dataclass(frozen=True)
class Device:
    """The device of an engine, as the user knows it: cpu, or a GPU."""

    gpu: Gpu | None = None

    @property
    def name(self) -> str:
        """Its name in --devices, messages and metrics.

        >>> Device().name
        'cpu'
        """
        return "cpu" if self.gpu is None else f"cuda:{self.gpu.index}"

    @property
    def environment(self) -> dict[str, str]:
        """The environment of its engines, so that they see no other GPU."""
        return {"CUDA_VISIBLE_DEVICES": "" if self.gpu is None else self.gpu.uuid}


@dataclass(frozen=True)
class Placement:
    """The devices that were chosen, and with `auto` the reason if none of them is a GPU."""

    devices: tuple[Device, ...]
    why: str = ""


def parse_devices(given: str) -> tuple[str, ...]:
    """The names in a value of --devices.

    >>> parse_devices("0, cuda:1,cpu")
    ('cuda:0', 'cuda:1', 'cpu')
    """
    names = []
    for word in given.split(","):
        name = word.strip().lower()
        number = name.removeprefix("cuda:")
        if name == AUTO and given.strip().lower() == AUTO:
            return (AUTO,)
        if name != "cpu" and not (number.isascii() and number.isdigit()):
            raise OptionError(
                f"--devices {given}: {word.strip()!r} is no device; give GPUs by number (0,1 or cuda:0,cuda:1), cpu, "
                "or auto alone"
            )
        names.append("cpu" if name == "cpu" else f"cuda:{int(number)}")
    return tuple(names)


def place(given: str, hbm: str | None, find: Callable[[], Gpus]) -> Placement:
    """Choose the devices of --devices `given` and --hbm. `find` lists the usable GPUs; it is called only if needed."""
    names = parse_devices(given)
    if names == (AUTO,):
        gpus = find()
        if hbm is not None and not gpus.usable:
            raise OptionError(f"--hbm {hbm} needs a GPU, and {gpus.why}. Without --hbm rows are in DRAM")
        placement = Placement(tuple(map(Device, gpus.usable)) or (Device(),), gpus.why)
    else:
        gpus = find() if any(name != "cpu" for name in names) else Gpus()
        known = {device.name: device for device in (Device(), *map(Device, gpus.usable))}
        for name in names:
            if name not in known:
                raise OptionError(f"--devices {given}: {_no_gpu(name, gpus)}")
        if hbm is not None and "cpu" in names:
            raise OptionError(f"--hbm {hbm} with --devices {given}: an engine on the CPU has no HBM; leave one out")
        placement = Placement(tuple(known[name] for name in names))
    if hbm is not None and importlib.util.find_spec("triton") is None:
        raise OptionError(f"--hbm {hbm} needs Triton, which is not installed: pip install triton, or leave --hbm out")
    return placement


def describe(placement: Placement, engines: Sequence[Device]) -> list[str]:
    """Lines for the start of the server: which engines are on which device, and why not on a GPU.

    >>> describe(Placement((Device(), Device())), [Device(), Device()])
    ['engines 0, 1 on the CPU']
    """
    lines = []
    for device in dict.fromkeys(engines):
        numbers = [str(number) for number, other in enumerate(engines) if other == device]
        where = "the CPU" if device.gpu is None else f"{device.name} ({device.gpu.name})"
        why = f": {placement.why}" if placement.why and device.gpu is None else ""
        lines.append(f"engine{'s' * (len(numbers) > 1)} {', '.join(numbers)} on {where}{why}")
    return lines


def shared_gpus(engines: Sequence[Device]) -> list[Device]:
    """The GPUs with more than one engine, which MPS lets run at the same time."""
    engines = list(engines)
    return [device for device in dict.fromkeys(engines) if device.gpu is not None and engines.count(device) > 1]


def _no_gpu(name: str, gpus: Gpus) -> str:
    if not gpus.usable:
        return f"no GPU can be used: {gpus.why}. --devices cpu serves without one"
    there = ", ".join(f"{gpu.index} ({gpu.name})" for gpu in gpus.usable)
    return f"there is no {name}; the devices of this machine are {there} and cpu"
