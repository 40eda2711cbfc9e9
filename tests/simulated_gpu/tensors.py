"""Tensors that report a GPU as their device and are stored in host memory.

`dispatch` gets every operation of torch: from these tensors and, through a mode on each thread, from factories and from
plain tensors, which may be pinned. It runs the operation on the host tensors. It records what the operation reads and
writes, by its schema, for the current stream or the host. Views access nothing. Results are new memory of that stream.

While a stream is captured, an operation that writes to existing memory is only recorded. One that allocates its result
runs once, for the shape, and again into the same memory at every replay.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten

from simulated_gpu.device import Device
from simulated_gpu.order import HOST

aten = torch.ops.aten
_numpy = Tensor.numpy  # before it is replaced
WAITS = {  # their results' shapes or values are for the host
    aten._local_scalar_dense.default, aten.nonzero.default, aten.masked_select.default, aten.bincount.default,
    aten.equal.default, aten.repeat_interleave.Tensor, aten._unique2.default, aten.unique_dim.default,
}  # fmt: skip
FACTORIES = {"empty", "zeros", "ones", "full", "arange", "empty_strided", "rand", "randn", "empty_like", "zeros_like",
             "ones_like", "full_like", "new_empty", "new_zeros", "new_full", "new_ones", "new_empty_strided",
             "scalar_tensor", "rand_like", "randn_like", "empty_permuted", "randint", "randperm"}  # fmt: skip


class CudaTensor(Tensor):
    """A tensor on the simulated device; `inner` is its host tensor."""

    inner: Tensor

    @staticmethod
    def __new__(cls, inner: Tensor) -> CudaTensor:
        made = Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls, inner.size(), strides=inner.stride(), storage_offset=inner.storage_offset(), dtype=inner.dtype,
            device=torch.device("meta"), requires_grad=False,
        )  # fmt: skip
        made.inner = inner
        return made

    def __init__(self, inner: Tensor) -> None:
        pass

    __torch_function__ = torch._C._disabled_torch_function_impl

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return dispatch(func, args, kwargs or {})

    # torch's own code knows it as a meta tensor: a build without CUDA has no streams for one on a GPU.
    device = property(lambda self: torch.device("cuda", 0))  # type: ignore[assignment]
    is_cuda = property(lambda self: True)  # type: ignore[assignment]
    is_meta = property(lambda self: False)  # type: ignore[assignment]

    def get_device(self) -> int:
        return 0

    def data_ptr(self) -> int:
        return self.inner.data_ptr()

    def record_stream(self, stream: Any) -> None:
        block = device().order.block_of(self.inner.data_ptr()) if self.numel() else None
        if block is not None:
            block.known.add(stream.agent)

    def numpy(self, *_: Any, **__: Any) -> Any:
        raise TypeError("can't convert cuda:0 device type tensor to numpy")

    def __repr__(self) -> str:  # type: ignore[override]
        return f"cuda {self.inner!r}"


class Mode(TorchDispatchMode):
    """On each thread."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return dispatch(func, args, kwargs or {})


_device: Device | None = None


def use(new: Device | None) -> None:
    global _device
    _device = new


def device() -> Device:
    assert _device is not None
    return _device


def allocate(shape: Sequence[int], dtype: torch.dtype, kind: str, home: int) -> Tensor:
    """Tracked memory."""
    size = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
    array = np.zeros(-(-max(size, 1) // 64) * 64 + 64, dtype=np.uint8)
    array[:] = 0x5A
    skip = -array.ctypes.data % 64
    with device().order.lock:
        device().order.watch(array, kind, home)
    return torch.from_numpy(array)[skip : skip + size].view(dtype).view(tuple(shape))


def _moved(made: Tensor, kind: str, home: int) -> Tensor:
    """Copies a result into tracked memory, with its strides."""
    device().order.settle()
    if made.numel() == 0 or device().order.block_of(made.data_ptr()) is not None:
        return made
    extent = 1 + sum((n - 1) * step for n, step in zip(made.shape, made.stride(), strict=True))
    return allocate([extent], made.dtype, kind, home).as_strided(made.shape, made.stride()).copy_(made)


def words_of(tensor: Tensor) -> np.ndarray:
    """Returns its elements' addresses."""
    at = np.zeros((), dtype=np.int64)
    for size, step in zip(tensor.shape, tensor.stride(), strict=True):
        at = at[..., None] + np.arange(size if step else 1) * step
    return tensor.data_ptr() + at.reshape(-1) * tensor.element_size()


def touch(agent: int, tensor: Tensor, write: bool, work: str) -> None:
    if tensor.numel() == 0:
        return
    order, size = device().order, tensor.element_size()
    if tensor.is_contiguous():
        order.touch_range(agent, tensor.data_ptr(), tensor.numel() * size, write, work)
    elif agent != HOST or order.block_of(tensor.data_ptr()) is not None:
        order.touch(agent, words_of(tensor), size, write, work)


def _inner(value: Any) -> Any:
    return value.inner if isinstance(value, CudaTensor) else value


def _is_cuda(where: Any) -> bool:
    return where is not None and torch.device(where).type in ("cuda", "meta")


def dispatch(func: Any, args: Any, kwargs: Any) -> Any:
    """An operation of torch, on any thread."""
    with _disable_current_modes():
        flat, spec = tree_flatten((args, kwargs))
        ours = any(isinstance(value, CudaTensor) for value in flat)
        name = func._schema.name.split("::")[1]
        if func in (aten._to_copy.default, aten.copy_.default):
            return _copy(func, args, kwargs)
        to_gpu = _is_cuda(kwargs["device"]) if kwargs.get("device") is not None else ours
        if name in FACTORIES:
            return _make(func, args, kwargs, to_gpu)
        plain_args, plain_kwargs = tree_unflatten([_inner(value) for value in flat], spec)
        if not ours:
            return _on_host(func, name, plain_args, plain_kwargs)
        if func.is_view or name in ("detach", "alias", "_unsafe_view", "lift_fresh", "detach_", "_reshape_alias"):
            return tree_map(lambda t: CudaTensor(t) if isinstance(t, Tensor) else t, func(*plain_args, **plain_kwargs))
        return _on_device(func, name, args, kwargs, plain_args, plain_kwargs)


def _accesses(func: Any, args: Any, kwargs: Any) -> list[tuple[Tensor, bool]]:
    """Tensors that it reads, or writes."""
    found: list[tuple[Tensor, bool]] = []
    given = list(args) + [None] * (len(func._schema.arguments) - len(args))
    for value, says in zip(given, func._schema.arguments, strict=False):
        value = kwargs.get(says.name, value)
        write = says.alias_info is not None and says.alias_info.is_write
        for tensor in tree_flatten(value)[0]:
            if isinstance(tensor, Tensor):
                found.append((tensor, write))
    return found


def _note(agent: int, func: Any, name: str, args: Any, kwargs: Any) -> None:
    if name in ("index_put_", "index", "_index_put_impl_") and len(args[1]) == 1 and args[1][0].dtype != torch.bool:
        rows = args[0][args[1][0]] if name == "index" else args[0]
        at = _numpy(args[1][0].reshape(-1)) * args[0].stride(0) * args[0].element_size()
        line = words_of(args[0][:1]) if args[0].shape[0] else np.zeros(0, dtype=np.int64)
        if rows.numel() and at.size:
            write = name != "index"
            touch_at = (line[None, :] + at[:, None]).reshape(-1)
            device().order.touch(agent, touch_at, args[0].element_size(), write, f"aten.{name}")
        for tensor in (args[1][0], *(value for value in args[2:] if isinstance(value, Tensor))):
            touch(agent, tensor, False, f"aten.{name}")
        return
    for tensor, write in _accesses(func, args, kwargs):
        touch(agent, tensor, write, f"aten.{name}")


def _on_host(func: Any, name: str, args: Any, kwargs: Any) -> Any:
    owner = device()
    if not func.is_view and name not in ("detach", "alias", "lift_fresh", "_unsafe_view"):
        with owner.order.lock:
            owner.order.settle()
            _note(HOST, func, name, args, kwargs)
    return func(*args, **kwargs)


def _on_device(func: Any, name: str, args: Any, kwargs: Any, plain_args: Any, plain_kwargs: Any) -> Any:
    owner = device()
    given = tree_flatten((args, kwargs))[0]
    for value in given:
        if isinstance(value, Tensor) and not isinstance(value, CudaTensor) and value.dim() > 0:
            index = name in ("index", "index_put_", "_index_put_impl_")
            if not index:
                raise RuntimeError(f"{name}: expected all tensors to be on the same device, cuda:0 and cpu")
            owner.refuse_if_capturing("an index from the host")
    mask = any(isinstance(v, Tensor) and v.dtype == torch.bool for v in tree_flatten(args[1:2])[0])
    waits = func in WAITS or (name in ("index", "index_put_", "_index_put_impl_") and mask)
    if waits:
        owner.refuse_if_capturing(name)
    written = [t for t, write in _accesses(func, plain_args, plain_kwargs) if write]
    agent = owner.current().agent
    if written:

        def change(agent: int) -> Any:
            _note(agent, func, name, plain_args, plain_kwargs)
            return func(*plain_args, **plain_kwargs)

        owner.enqueue(f"aten.{name}", change)
        result: Any = [t for t, write in _accesses(func, args, kwargs) if write]
        returned = len(func._schema.returns)
        result = result[0] if returned == 1 else tuple(result[:returned]) if returned else None
    else:
        with owner.order.lock:
            made = func(*plain_args, **plain_kwargs)
            outs = tree_map(lambda t: _moved(t, owner.memory, agent) if isinstance(t, Tensor) else t, made)
        news = [t for t in tree_flatten(outs)[0] if isinstance(t, Tensor)]

        def again(agent: int) -> None:
            _note(agent, func, name, plain_args, plain_kwargs)
            for out in news:
                touch(agent, out, True, f"aten.{name}")
            if graph is not None:
                for out, new in zip(news, tree_flatten(func(*plain_args, **plain_kwargs))[0], strict=True):
                    out.copy_(new)

        graph = owner.current().graph
        owner.enqueue(f"aten.{name}", again)
        result = tree_map(lambda t: CudaTensor(t) if isinstance(t, Tensor) else t, outs)
    if waits:
        owner.synchronize(owner.current())
    return result


def _make(func: Any, args: Any, kwargs: Any, to_gpu: bool) -> Any:
    owner, options = device(), dict(kwargs)
    pinned = bool(options.pop("pin_memory", False))
    options.pop("device", None) if to_gpu else None
    made = func(*tree_map(_inner, args), **options, **({"device": "cpu"} if to_gpu else {}))
    agent = owner.current().agent if to_gpu else HOST
    if not to_gpu and not pinned:
        return made
    if pinned:
        owner.refuse_if_capturing("making pinned memory")
    with owner.order.lock:
        made = _moved(made, "pinned" if pinned else owner.memory, agent)
    name = func._schema.name.split("::")[1]
    if to_gpu:
        if "empty" not in name:
            values = made.clone()

            def fill(agent: int) -> None:
                touch(agent, made, True, f"aten.{name}")
                made.copy_(values)

            owner.enqueue(f"aten.{name}", fill)
        return CudaTensor(made)
    return made


def _copy(func: Any, args: Any, kwargs: Any) -> Any:
    """Between tensors of either kind."""
    owner, source = device(), args[0]
    if func is aten.copy_.default:
        target, source = args[0], args[1]
        waits = not (args[2] if len(args) > 2 else kwargs.get("non_blocking", False))
    else:
        to_gpu = _is_cuda(kwargs["device"]) if kwargs.get("device") is not None else isinstance(source, CudaTensor)
        waits = not kwargs.get("non_blocking", False)
        dtype = kwargs.get("dtype") or source.dtype
        like = _inner(source).to(dtype=dtype, memory_format=kwargs.get("memory_format"), copy=True)
        home = owner.current().agent if to_gpu else HOST
        if to_gpu:
            with owner.order.lock:
                target = CudaTensor(_moved(like, owner.memory, home))
        elif not isinstance(source, CudaTensor):
            return _on_host(func, "_to_copy", args, {**kwargs, "pin_memory": None})
        else:
            target, waits = like, True
    ours = isinstance(target, CudaTensor), isinstance(source, CudaTensor)
    to, off = _inner(target), _inner(source)
    if not any(ours):
        _on_host(aten.copy_.default, "copy_", (to, off), {})
        return target
    if all(ours):
        waits = False
    elif to.numel():
        host = off if ours[0] else to
        block = owner.order.block_of(host.data_ptr())
        if block is None:
            waits = True  # pageable memory is read or written before the call returns
        elif block.kind == "pinned":
            block.known.add(owner.current().agent)
    if waits:
        owner.refuse_if_capturing("a copy that is waited for")

    def copy(agent: int) -> None:
        for tensor, write, there in ((off, False, ours[1]), (to, True, ours[0])):
            if there or owner.order.block_of(tensor.data_ptr() if tensor.numel() else 0) is not None:
                touch(agent, tensor, write, "a copy")
        to.copy_(off)

    owner.enqueue("a copy", copy)
    if waits:
        owner.synchronize(owner.current())
    return target
