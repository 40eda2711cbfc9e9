from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from hotrow.kernels.attention import tiles
from hotrow.kernels.attention.tiles import tile_table


def _plain(
    lengths: Sequence[int], others: Sequence[int], rows: int, other_rows: int, block: int, backwards: bool
) -> list[list[int]]:
    """The tiles [first, place, count, length, other, others] in order, by a loop over users."""
    users, begin, other_begin = [], 0, 0
    for length, other in zip(lengths, others, strict=True):
        users.append((begin, length, other_begin, other))
        begin, other_begin = begin + length, other_begin + other
    users.append((begin, rows - begin, other_begin, -1))
    users.sort(key=lambda user: sum(user[3] < bound for bound in (4096, 1024, 256)))
    made = []
    for begin, length, other_begin, other in users:
        places = range(0, length, block)
        for place in reversed(places) if backwards else places:
            made.append([begin + place, place, min(block, length - place), length, other_begin, other])
    return made


@pytest.mark.parametrize("backwards", [False, True])
@pytest.mark.parametrize("chunk", [4, 1024])
def test_every_row_is_in_one_tile_of_its_user_and_long_work_comes_first(
    chunk: int, backwards: bool, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tiles, "CHUNK", chunk)
    monkeypatch.setattr(tiles, "SEARCH", 16)
    random = torch.Generator().manual_seed(chunk)
    for users in (0, 1, 3, 11):
        lengths = torch.randint(0, 70, (users,), generator=random)
        others = torch.tensor([0, 200, 300, 1500, 5000])[torch.randint(0, 5, (users,), generator=random)]
        rows, other_rows = int(lengths.sum()) + 5, int(others.sum()) + 2
        table = tile_table(lengths.to(device), others.to(device), rows, other_rows, 32, backwards)
        wanted = _plain(lengths.tolist(), others.tolist(), rows, other_rows, 32, backwards)
        assert table[: len(wanted), :6].tolist() == wanted
        assert (table[len(wanted) :, 2] == 0).all() and (table[len(wanted) :, 5] == -1).all()


def test_the_bound_is_reached_by_users_with_one_row_more_than_a_block(device: torch.device) -> None:
    lengths = torch.full((3,), 17, device=device)
    table = tile_table(lengths, lengths, 52, 51, 16, False)
    assert (table[:, 2] > 0).all() and table[:, 2].sum() == 52


def test_no_rows_have_no_tiles(device: torch.device) -> None:
    nothing = torch.zeros(2, dtype=torch.int64, device=device)
    assert tile_table(nothing, nothing, 0, 9, 16, False).shape[0] == 0
