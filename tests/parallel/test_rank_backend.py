"""What carries rows between ranks. CUDA is faked here: no group of NCCL is ever made."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from crew import Crew

import hotrow as hr
from hotrow import undocumented
from hotrow.parallel import backend
from hotrow.parallel.meeting import meeting_of_group, store_of_group
from hotrow.parallel.ranks import Ranks

IN_DRAM = {"rows": "cpu", "nccl": False, "gpu": None}


def on_gpu(name: str, nccl: bool = True) -> dict[str, Any]:
    return {"rows": "cuda", "nccl": nccl, "gpu": name}


@contextmanager
def cuda(gpus: int, uuid: str = "GPU-{}", nccl: bool = True) -> Iterator[None]:
    """As if torch saw so many GPUs."""
    named = {"get_device_properties": lambda device: SimpleNamespace(uuid=uuid.format(device.index))}
    faked = {"is_available": lambda: gpus > 0, "device_count": lambda: gpus, "current_device": lambda: 0, **named}
    with ExitStack() as stack:
        for name, value in faked.items():
            stack.enter_context(patch.object(torch.cuda, name, value))
        stack.enter_context(patch.object(dist, "is_nccl_available", lambda: nccl))
        yield


def test_nccl_is_for_rows_on_gpus_of_which_each_rank_has_its_own() -> None:
    assert backend.choose_backend(None, [on_gpu("a"), on_gpu("b")]) == "nccl"
    assert backend.choose_backend("nccl", [on_gpu("a"), on_gpu("b")]) == "nccl"
    assert backend.choose_backend("gloo", [on_gpu("a"), on_gpu("b")]) == "gloo"
    assert backend.choose_backend(None, [on_gpu("a"), on_gpu("a")]) == "gloo"
    assert backend.choose_backend(None, [on_gpu("a"), on_gpu("b", nccl=False)]) == "gloo"
    assert backend.choose_backend(None, [IN_DRAM, IN_DRAM]) == "gloo"


@pytest.mark.parametrize(
    ("offers", "words"),
    [
        ([IN_DRAM, IN_DRAM], r"rows and tower are in DRAM; give hbm= .* or leave backend= out"),
        ([on_gpu("a"), on_gpu("b"), on_gpu("b")], r"ranks 1 and 2 share one GPU, .* start as many ranks .* as it has"),
        ([on_gpu("a"), on_gpu("b", nccl=False)], r"sees no GPU on rank 1; leave backend= out"),
    ],
)
def test_nccl_that_was_asked_for_and_cannot_work_is_an_error_with_the_cure(offers: list[Any], words: str) -> None:
    with pytest.raises(hr.OptionError, match=words):
        backend.choose_backend("nccl", offers)


def test_rows_in_different_places_are_an_error() -> None:
    with pytest.raises(hr.OptionError, match=r"rank 1 has its rows on 'cpu' and rank 0 on 'cuda'; .* the same hbm="):
        backend.choose_backend(None, [on_gpu("a"), IN_DRAM])


def test_a_backend_that_does_not_exist_is_refused() -> None:
    with pytest.raises(hr.OptionError, match="backend='mpi': Choose one of: nccl, gloo"):
        hr.join_ranks("mpi")


def test_a_rank_takes_the_gpu_of_its_number_on_its_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    with cuda(gpus=4):
        for local, index in ((0, 0), (3, 3), (5, 1)):
            monkeypatch.setenv("LOCAL_RANK", str(local))
            assert backend.own_device() == torch.device("cuda", index)
        monkeypatch.delenv("LOCAL_RANK")
        assert backend.own_device() == torch.device("cuda", 0)  # the current one


def carried(ranks: hr.Ranks, gpus: int, uuid: str, in_hbm: bool) -> tuple[str, list[str]]:
    """What is chosen where torch sees so many GPUs, and the groups that are made for it: here all of Gloo."""
    made, new_group = [], dist.new_group

    def recorded(members: list[int], backend: str, **options: Any) -> Any:
        made.append(backend)
        return new_group(members, backend="gloo", **options)

    seen = cuda(gpus, uuid.replace("RANK", str(ranks.rank)))
    with (
        seen,
        patch.object(dist, "new_group", recorded),
        patch.object(ranks, "requested_backend", None),
        patch.dict(os.environ),
    ):
        try:
            for _ in range(2):  # two collections
                ranks.carry(backend.own_device() if in_hbm else torch.device("cpu"))
            assert all(ranks.channel(name).carries is None for name in ("route", "patient", "saves"))
            return ranks.backend, made
        finally:
            ranks.rows.carries = ranks.dense.carries = None
            if ranks._watch is not None:
                ranks._watch.close()


@pytest.mark.parametrize(
    ("gpus", "uuid", "in_hbm", "chosen"),
    [
        (2, "GPU-{}", True, "nccl"),
        (1, "GPU-{}", True, "gloo"),  # --ranks 2 on one GPU
        (1, "GPU-RANK", True, "nccl"),  # a launcher lets each rank see one
        (2, "GPU-{}", False, "gloo"),  # without hbm= nothing is on a GPU
    ],
)
def test_ranks_agree_on_what_carries_rows(
    crews: dict[int, Crew], gpus: int, uuid: str, in_hbm: bool, chosen: str
) -> None:
    groups = ["nccl", "nccl"] if chosen == "nccl" else []
    assert crews[2].run(carried, gpus, uuid, in_hbm) == [(chosen, groups)] * 2


def joins(ranks: hr.Ranks, asked: list[str | None], gpus: int) -> None:
    with cuda(gpus):
        Ranks(meeting_of_group(30.0, None), asked[ranks.rank], 30.0, "fp32")


def test_ranks_that_ask_for_different_backends_are_refused_on_every_rank(crews: dict[int, Crew]) -> None:
    for error in crews[2].errors(joins, [None, "gloo"], 0):
        assert isinstance(error, hr.OptionError)
        assert "rank 1 differs from rank 0 in the options of ranks, backend: 'gloo' against None" in str(error)


def test_nccl_without_a_gpu_is_refused_on_every_rank(crews: dict[int, Crew]) -> None:
    for error in crews[2].errors(joins, ["nccl", "nccl"], 0):
        assert isinstance(error, hr.OptionError)
        assert "torch has no NCCL or sees no GPU on rank 0, 1; leave backend= out" in str(error)


def meets_anew(ranks: hr.Ranks, without: bool) -> tuple[int, int]:
    """What this rank reads of the other in the store of their group, and the warnings on the way."""
    with (
        patch.object(undocumented, "_warned", set()),
        warnings.catch_warnings(record=True) as told,
        ExitStack() as stack,
    ):
        warnings.simplefilter("always")
        if without:
            stack.enter_context(patch.object(dist.distributed_c10d, "_get_default_store"))
            del dist.distributed_c10d._get_default_store
        store = store_of_group(30.0)
        store.set(f"met/{without}/{ranks.rank}", str(ranks.rank))
        other = int(store.get(f"met/{without}/{1 - ranks.rank}"))
        ranks.patient.gather_json({})  # rank 0 has the store until both have read
        return other, len([one for one in told if "Rank 0 opens a store" in str(one.message)])


@pytest.mark.parametrize("without", [False, True])
def test_ranks_of_a_group_that_is_there_meet_at_a_store(crews: dict[int, Crew], without: bool) -> None:
    assert crews[2].run(meets_anew, without) == [(1, without), (0, without)]


def in_dram(ranks: hr.Ranks) -> None:
    with patch.object(ranks, "requested_backend", "nccl"):
        hr.EmbeddingCollection([hr.Table("user", dim=4)], ranks=ranks)


def test_nccl_for_rows_in_dram_is_refused_on_every_rank(crews: dict[int, Crew]) -> None:
    for error in crews[2].errors(in_dram):
        assert isinstance(error, hr.OptionError)
        assert "rows and tower are in DRAM" in str(error)
