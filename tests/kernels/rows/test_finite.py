from __future__ import annotations

import pytest
import torch

from hotrow.errors import GradientError
from hotrow.kernels.rows.finite import check_finite

BAD = [float("nan"), float("inf"), float("-inf")]


def _flag(device: torch.device) -> torch.Tensor:
    return torch.zeros(1, dtype=torch.int32, device=device)


@pytest.mark.parametrize("shapes", [[(1, 1)], [(3, 5)], [(700, 17), (0, 17), (1, 17), (64, 17)], [(1024, 8)] * 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_one_bad_number_anywhere_is_found(
    shapes: list[tuple[int, int]], dtype: torch.dtype, device: torch.device
) -> None:
    matrices = [torch.randn(shape, device=device).to(dtype) for shape in shapes]
    flag = _flag(device)
    check_finite(matrices, flag)
    assert flag.item() == 0
    for i, matrix in enumerate(m for m in matrices if m.numel()):
        for place in {0, matrix.numel() // 2, matrix.numel() - 1}:
            flag = _flag(device)
            kept = matrix.view(-1)[place].item()
            matrix.view(-1)[place] = BAD[(i + place) % 3]
            check_finite(matrices, flag)
            matrix.view(-1)[place] = kept
            assert flag.item() != 0, (i, place)


def test_slices_are_read_without_their_gaps(device: torch.device) -> None:
    wide = torch.full((50, 40), float("nan"), device=device)
    slices = [wide[:, 4:16], wide[:, 17:29]]
    for part in slices:
        part.zero_()
    flag = _flag(device)
    check_finite(slices, flag)
    assert flag.item() == 0
    slices[1][49, 11] = float("inf")
    check_finite(slices, flag)
    assert flag.item() != 0


def test_the_flag_stays(device: torch.device) -> None:
    flag = _flag(device) + 1
    check_finite([torch.zeros(3, 3, device=device)], flag)
    check_finite([], flag)
    check_finite([torch.zeros(0, 3, device=device)], flag)
    assert flag.item() == 1


def test_the_largest_number_is_finite(device: torch.device) -> None:
    flag = _flag(device)
    check_finite([torch.full((2, 2), torch.finfo(torch.float32).max, device=device)], flag)
    assert flag.item() == 0


def test_mixed_types_are_refused(device: torch.device) -> None:
    with pytest.raises(GradientError, match="one type"):
        check_finite([torch.zeros(2, 2, device=device), torch.zeros(2, 2, device=device).half()], _flag(device))


def test_expanded_gradients(device: torch.device) -> None:
    flag = _flag(device)
    check_finite([torch.ones(1, 1, device=device).expand(5, 3), torch.zeros(3, 5, device=device).t()], flag)
    assert flag.item() == 0
    check_finite([torch.full((1, 1), float("nan"), device=device).expand(5, 3)], flag)
    assert flag.item() != 0
