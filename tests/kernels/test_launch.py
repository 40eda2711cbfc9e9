"""A kernel is compiled again only where Triton would specialise it again."""

from __future__ import annotations

from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import triton
import triton.language as tl

from hotrow import undocumented
from hotrow.kernels import current_stream, launch
from hotrow.kernels.launch import CachedLauncher, cached_launch


@dataclass
class Param:
    name: str
    is_constexpr: bool = False
    do_not_specialize: bool = False


@dataclass
class Compiled:
    """A fake compiled kernel: records its launches as (grid, arguments), tensors as addresses."""

    launches: list[Any] = field(default_factory=list)
    function: int = 9
    packed_metadata: Any = (4, 1, 0)

    def run(self, gridX: int, gridY: int, gridZ: int, stream: int, function: int, *args: Any) -> None:  # noqa: N803
        self.launches.append(((gridX, gridY, gridZ), args[4:]))


class Kernel:
    """A fake jitted kernel (data, n, unspecialized, A, B) that records its calls."""

    def __init__(self, made: type[Any] = Compiled) -> None:
        self.kind = made
        self.params = [
            Param("data"), Param("n"), Param("unspecialized", do_not_specialize=True), Param("A", True),
            Param("B", True),
        ]  # fmt: skip
        self.calls: list[Any] = []
        self.made: list[Any] = []

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        def compile_and_launch(*args: Any, **options: Any) -> Compiled:
            self.calls.append((grid, args, options))
            self.made.append(self.kind())
            return self.made[-1]

        return compile_and_launch


@pytest.fixture(autouse=True)
def fake_streams(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Handles 70, 71, ... for the streams of devices 0, 1, ...; a test on a GPU keeps the real ones."""
    if request.node.get_closest_marker("gpu") is not None:
        return
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda device: 70 + device, raising=False)
    monkeypatch.setattr(undocumented, "_warned", set())


MEMORY = torch.zeros(64)
START = -MEMORY.data_ptr() // 4 % 4  # the first element at a multiple of 16 bytes
DATA = MEMORY[START : START + 16]
USUAL: dict[str, Any] = {"A": 8, "B": True, "num_warps": 4}


def test_the_same_call_goes_to_what_was_compiled() -> None:
    kernel = Kernel()
    again = CachedLauncher(kernel)
    again[(3,)](DATA, 20, 5, **USUAL)
    assert kernel.calls == [((3,), (DATA, 20, 5), USUAL)] and kernel.made[0].launches == []
    again[(4,)](DATA, 20, 6, **USUAL)
    again[(5,)](DATA, 21, 7, **USUAL)  # 21 specialises as 20 does
    other = MEMORY[START + 16 : START + 32]
    again[(6,)](other, 20, 7, **USUAL)  # elsewhere, and as well aligned
    assert len(kernel.calls) == 1
    grids = [grid for grid, _ in kernel.made[0].launches]
    assert grids == [(4, 1, 1), (5, 1, 1), (6, 1, 1)]
    passed = [args[1:] for _, args in kernel.made[0].launches]
    assert passed == [(20, 6, 8, True), (21, 7, 8, True), (20, 7, 8, True)]  # constexprs too, in the kernel's order
    assert [args[0] for _, args in kernel.made[0].launches] == [DATA.data_ptr()] * 2 + [other.data_ptr()]


@pytest.mark.parametrize(
    "args, options",
    [
        pytest.param((DATA.double(), 20, 5), {}, id="dtype"),
        pytest.param((MEMORY[START + 1 :], 20, 5), {}, id="alignment"),
        pytest.param((DATA, 1, 5), {}, id="one"),
        pytest.param((DATA, 32, 5), {}, id="a multiple of 16"),
        pytest.param((DATA, 1 << 31, 5), {}, id="64 bits"),
        pytest.param((DATA, 20, 1 << 31), {}, id="64 bits, unspecialized"),
        pytest.param((DATA, 20, 5), {"A": 16}, id="constexpr"),
        pytest.param((DATA, 20, 5), {"B": False}, id="flag"),
        pytest.param((DATA, 20, 5), {"num_warps": 8}, id="option"),
    ],
)
def test_what_triton_specialises_on_is_compiled_anew(args: tuple[Any, ...], options: dict[str, Any]) -> None:
    kernel = Kernel()
    again = CachedLauncher(kernel)
    again[(1,)](DATA, 20, 5, **USUAL)
    for _ in range(2):
        again[(1,)](*args, **(USUAL | options))
        again[(1,)](DATA, 20, 5, **USUAL)
    assert [call[1] for call in kernel.calls] == [(DATA, 20, 5), args]
    assert [len(made.launches) for made in kernel.made] == [2, 1]


def test_unspecialized_numbers_are_never_compiled_anew() -> None:
    kernel = Kernel()
    again = CachedLauncher(kernel)
    for number in (5, 1, 16, 17, 0, 2**31 - 1):
        again[(1,)](DATA, 20, number, **USUAL)
    assert len(kernel.calls) == 1
    assert [args[2] for _, args in kernel.made[0].launches] == [1, 16, 17, 0, 2**31 - 1]


class Launcher:
    """Triton's, as it is in 3.6."""

    def __init__(self) -> None:
        self.calls: list[Any] = []

    def __call__(self, gridX: int, gridY: int, gridZ: int, stream: int, function: int, *args: Any) -> None:  # noqa: N803
        self.calls.append((gridX, gridY, gridZ, stream, function, *args))


class NamedLauncher(Launcher):
    """As it is from 3.7 on."""

    def __call__(  # type: ignore[override]
        self, gridX: int, gridY: int, gridZ: int, stream: int, function: int, kernel_metadata: Any,  # noqa: N803
        launch_metadata: Any, launch_enter_hook: Any, launch_exit_hook: Any, *args: Any,
    ) -> None:  # fmt: skip
        hooks = (launch_metadata, launch_enter_hook, launch_exit_hook)
        self.calls.append((gridX, gridY, gridZ, stream, function, kernel_metadata, *hooks, *args))


class OtherLauncher(Launcher):
    """A launcher of an unknown version."""

    def __call__(self, grid: tuple[int, ...], stream: int, function: int, *args: Any) -> None:  # type: ignore[override]
        raise AssertionError("called with arguments that it does not take")


@pytest.mark.parametrize("launcher", [Launcher(), NamedLauncher()])
def test_the_launcher_is_called_as_triton_calls_it(launcher: Launcher) -> None:
    compiled = SimpleNamespace(run=launcher, function=9, packed_metadata=(4, 1, 0))
    run = launch._make_launch(compiled, (8, True))
    assert run is not None
    run(3, 1, [20, 5])
    assert launcher.calls == [(3, 1, 1, 71, 9, (4, 1, 0), None, None, None, 20, 5, 8, True)]


@pytest.mark.parametrize("change", ["another launcher", "no launcher", "no metadata", "another version"])
def test_a_triton_that_launches_in_another_way_is_called_as_documented(
    change: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Other(Compiled):
        def __init__(self) -> None:
            super().__init__()
            if change == "another launcher":
                self.run = OtherLauncher()  # type: ignore[method-assign, assignment]
            elif change == "no launcher":
                self.run = None  # type: ignore[method-assign, assignment]
            elif change == "no metadata":
                self.packed_metadata = None

    if change == "another version":
        monkeypatch.setattr(triton, "__version__", "3.99.0")
    kernel = Kernel(Other)
    again = CachedLauncher(kernel)
    with pytest.warns(
        UserWarning, match=r"triton 3\.\S+ has a launcher .* tested with triton<3\.\d+,>=3\.6\. "
    ) as warned:
        for programs in (3, 4, 5):
            again[(programs,)](DATA, 20, 5, **USUAL)
        again[(6,)](DATA.double(), 20, 5, **USUAL)
    assert len(warned) == 1
    assert [(grid, args[1:], options) for grid, args, options in kernel.calls] == [
        ((programs,), (20, 5), USUAL) for programs in (3, 4, 5, 6)
    ]
    assert all(call[1][0].data_ptr() == DATA.data_ptr() for call in kernel.calls[:3])
    assert all(made.launches == [] for made in kernel.made)


def test_a_triton_with_other_kernel_parameters_is_called_as_documented(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "INTERPRETED", False)
    kernel = SimpleNamespace(params=[SimpleNamespace(name="data")])
    with pytest.warns(
        UserWarning,
        match=r"triton \S+ describes a kernel's parameters otherwise \(.*is_constexpr.*\); HotRow was tested",
    ):
        assert cached_launch(kernel) is kernel


def test_a_stream_has_the_same_handle_by_what_torch_documents(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "current_stream", lambda number: SimpleNamespace(cuda_stream=70 + number))
    undocumented_handle = current_stream.current_stream_handle(1)
    monkeypatch.delattr(torch._C, "_cuda_getCurrentRawStream")
    with pytest.warns(UserWarning, match="has no torch._C._cuda_getCurrentRawStream; HotRow was tested") as warned:
        assert [current_stream.current_stream_handle(1) for _ in range(2)] == [undocumented_handle] * 2 == [71] * 2
    assert len(warned) == 1


def test_under_the_interpreter_a_kernel_is_not_wrapped(monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = Kernel()
    monkeypatch.setattr(launch, "INTERPRETED", True)
    assert cached_launch(kernel) is kernel
    monkeypatch.setattr(launch, "INTERPRETED", False)
    assert isinstance(cached_launch(kernel), CachedLauncher)


@cached_launch
@triton.jit(do_not_specialize=["unspecialized"])
def _sum_kernel(out, data, n, unspecialized, WIDTH: tl.constexpr):  # noqa: N803
    at = tl.arange(0, WIDTH)
    total = tl.sum(tl.load(data + at, mask=at < n, other=0), axis=0)
    tl.store(out, total * n + unspecialized)


@pytest.mark.gpu
def test_numbers_of_every_kind_reach_a_compiled_kernel() -> None:
    if not torch.cuda.is_available() or launch.INTERPRETED:
        pytest.skip("needs a CUDA device and TRITON_INTERPRET unset")
    data = torch.arange(1, 40, dtype=torch.int32, device="cuda")
    out = torch.zeros(1, dtype=torch.int32, device="cuda")
    for _ in range(2):
        for n in (1, 16, 17, 18, 32, 1):
            for unspecialized in (1, 16, 17):
                for some in (data, data[1:]):
                    _sum_kernel[(1,)](out, some, n, unspecialized, WIDTH=32)
                    assert out.item() == int(some[:n].sum()) * n + unspecialized
    assert len(_sum_kernel.compiled) == 6  # n is 1, a multiple of 16 or neither, and the data aligned or not
