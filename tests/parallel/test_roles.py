"""Rows on row ranks, towers on tower ranks: the same bits as without them, whatever the number of row ranks."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from crew import Crew, working_in
from test_rank_training import Tower, WithSequences
from work import Rows, rows_of

import hotrow as hr
from hotrow.job import build_job
from hotrow.parallel.job_token import TOKEN_VARIABLE
from hotrow.parallel.ownership import Roles
from hotrow.parallel.shared_memory import SWITCH

BATCH, EXAMPLES, STEPS = 16, 16 * 12, 12
Crews = Callable[..., Crew | None]  # of so many towers and row ranks; None is this process
OVER_SOCKETS = {TOKEN_VARIABLE: "a token of the tests", SWITCH: "0"}  # as on several machines


def make(ranks: hr.Ranks | None, folder: Path | None, dram: str | None, number: int = 0, **options: Any) -> hr.Trainer:
    """Admission, expiry, a replicated table, sequences; a tower with dropout and batch norm."""
    tables = [
        hr.Table("user", dim=4, admission=hr.Admission(after=2, sketch="64KiB")),
        hr.Table(
            "item", dim=4, features={"item": "sum", "recent": "mean", "history": "none"}, expiry=hr.Expiry(steps=5)
        ),
    ]
    memory = None
    if dram is not None and folder is not None:
        memory = hr.Memory(dram=dram, ssd=folder / f"ssd-{number}")
    embeddings = hr.EmbeddingCollection(tables, optimizer=hr.optim.Adam(lr=0.01), memory=memory, seed=3, ranks=ranks)
    torch.manual_seed(1)
    tower = Tower(noisy=True)
    optimizer = torch.optim.Adam(tower.parameters(), lr=0.01)
    return hr.Trainer(
        hr.Recommender(embeddings, tower),
        optimizer,
        checkpoints=None if folder is None else folder / "saved",
        **options,
    )


def train(
    ranks: hr.Ranks | None,
    folder: Path,
    dram: str | None,
    lookahead: int,
    runs: tuple[int | None, ...],
    fp16: bool = False,
) -> dict[str, Any]:
    """Runs on every rank: a fit for each of `runs` (None: to the end), each by a new trainer that resumes the last."""
    towers = 1 if ranks is None else len(ranks.roles.requesters)
    for number, steps in enumerate(runs):
        trainer = make(ranks, folder, dram, number, lookahead=lookahead, precision="fp16" if fp16 else "fp32")
        if fp16:
            trainer.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**24)  # the first steps overflow
        source = WithSequences(EXAMPLES * towers, BATCH, keys=600)
        report = trainer.fit(source, steps=steps, epochs=2, resume=True, progress=False)
        if number + 1 < len(runs):
            trainer.save()
    tested = trainer.evaluate(WithSequences(100, BATCH), progress=False)
    path = trainer.save().path
    has_tower = trainer.has_tower
    return {
        "rows": rows_of(trainer.model.embeddings),
        "tower": {name: v.numpy().tobytes() for name, v in trainer.model.tower.state_dict().items()}
        if has_tower
        else None,
        "losses": report.losses,
        "metrics": report.metrics,
        "tested": tested,
        "examples": (report.examples, report.steps),
        "ahead": rows_sent(ranks, trainer),
        "roles": (has_tower, True if ranks is None else ranks.owns_rows),
        "path": path,
    }


def rows_sent(ranks: hr.Ranks | None, trainer: hr.Trainer) -> tuple[int, int]:
    """Floats of rows that this rank sent before their batch's turn and on it, in the last fit."""
    stream = None if ranks is None else trainer.model.embeddings._over_ranks.stream
    return (0, 0) if stream is None else (stream.floats_ahead, stream.floats_on_turn)


def joined(results: list[dict[str, Any]]) -> dict[str, Any]:
    """One result of all ranks': every row once, what towers agree upon, and no row where none belongs."""
    rows: Rows = {}
    for result in results:
        assert result["roles"][1] or not any(result["rows"].values())
        for table, owned in result["rows"].items():
            known = rows.setdefault(table, {})
            assert not known.keys() & owned.keys()
            known |= owned
    towers = [result for result in results if result["roles"][0]]
    for name in ("tower", "losses", "metrics", "tested", "examples"):
        assert all(result[name] == towers[0][name] for result in towers), name
    return {
        **{name: towers[0][name] for name in ("tower", "losses", "metrics", "tested", "examples")},
        "rows": rows,
        "ahead": tuple(map(sum, zip(*(result["ahead"] for result in results), strict=True))),
    }


@pytest.fixture(scope="module")
def crew_of() -> Iterator[Crews]:
    made: dict[tuple[int, int, bool], Crew] = {}

    def crew(towers: int, rows: int, sockets: bool = False) -> Crew | None:
        if (towers, rows) == (1, 0):
            return None
        if (towers, rows, sockets) not in made:
            made[towers, rows, sockets] = Crew(towers + rows, rows=rows, env=OVER_SOCKETS if sockets else None)
        return made[towers, rows, sockets]

    yield crew
    for one in made.values():
        one.close()


def run(crew: Crew | None, *arguments: Any) -> dict[str, Any]:
    torch.use_deterministic_algorithms(True)
    try:
        return joined([train(None, *arguments)] if crew is None else crew.run(train, *arguments))
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.fixture(scope="module")
def references(crew_of: Crews, tmp_path_factory: pytest.TempPathFactory) -> dict[int, dict[str, Any]]:
    """The run of one process, and of two ranks that both own rows and have a tower."""
    folder = tmp_path_factory.mktemp("reference")
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return {towers: run(crew_of(towers, 0), folder / str(towers), None, 0, (None,)) for towers in (1, 2)}
    finally:
        torch.set_num_threads(threads)


CASES = [  # towers, row ranks, DRAM over SSD, lookahead, steps of each run
    (1, 1, None, 2, (None,)),
    (1, 2, "6MiB", 2, (None,)),
    (1, 3, "6MiB", 0, (7, None)),
    (2, 1, "6MiB", 2, (5, None)),
    (2, 2, None, 0, (None,)),
    (2, 3, "6MiB", 2, (7, None)),
]


@pytest.mark.parametrize(("towers", "rows", "dram", "lookahead", "runs"), CASES)
def test_row_ranks_change_no_bit(
    crew_of: Crews,
    references: dict[int, dict[str, Any]],
    tmp_path: Path,
    towers: int,
    rows: int,
    dram: str | None,
    lookahead: int,
    runs: tuple[int | None, ...],
) -> None:
    result, expected = run(crew_of(towers, rows), tmp_path, dram, lookahead, runs), references[towers]
    assert result["rows"] == expected["rows"] and result["tower"] == expected["tower"]
    assert result["losses"] == expected["losses"][len(expected["losses"]) - len(result["losses"]) :]
    assert result["tested"] == expected["tested"] and result["metrics"] == expected["metrics"]
    ahead, on_turn = result["ahead"]
    assert (ahead > 1000 and on_turn > 1000) if lookahead else (ahead, on_turn) == (0, 0)


@pytest.mark.soak
@pytest.mark.parametrize(
    ("towers", "rows", "dram", "lookahead", "runs"),
    list(itertools.product((1, 2), (1, 2, 3), (None, "6MiB"), (0, 2), ((None,), (7, None)))),
)
def test_row_ranks_change_no_bit_in_any_combination(
    crew_of: Crews,
    references: dict[int, dict[str, Any]],
    tmp_path: Path,
    towers: int,
    rows: int,
    dram: str | None,
    lookahead: int,
    runs: tuple[int | None, ...],
) -> None:
    test_row_ranks_change_no_bit(crew_of, references, tmp_path, towers, rows, dram, lookahead, runs)


@pytest.mark.parametrize(("rows", "runs"), [(0, (None,)), (2, (5, None))])
def test_connections_with_a_job_token_change_no_bit(
    crew_of: Crews, references: dict[int, dict[str, Any]], tmp_path: Path, rows: int, runs: tuple[int | None, ...]
) -> None:
    crew, expected = crew_of(2, rows, sockets=True), references[2]
    assert crew is not None and crew.run(uses_gloo) == [False] * crew.world
    result = run(crew, tmp_path, "6MiB" if rows else None, 2, runs)
    assert result["rows"] == expected["rows"] and result["tower"] == expected["tower"]
    assert result["tested"] == expected["tested"] and result["metrics"] == expected["metrics"]


def uses_gloo(ranks: hr.Ranks) -> bool:
    return torch.distributed.is_initialized() or any(channel.group is not None for channel in ranks._channels.values())


def test_a_checkpoint_goes_from_one_division_to_another(
    crew_of: Crews, references: dict[int, dict[str, Any]], tmp_path: Path
) -> None:
    """Two ranks in both roles, then two towers with three row ranks, then with one, then both roles again."""
    for number, (rows, steps) in enumerate(((0, 4), (3, 9), (1, 15), (0, None))):
        last = run(crew_of(2, rows), tmp_path, "6MiB" if number == 1 else None, 2, (steps,))
    assert last["rows"] == references[2]["rows"] and last["tower"] == references[2]["tower"]


def test_fp16_towers_skip_the_same_steps(crew_of: Crews, tmp_path: Path) -> None:
    """The first steps overflow. Row ranks see neither the loss scale nor a dense gradient."""
    one, other = (run(crew_of(2, rows), tmp_path / str(rows), None, 1, (None,), True) for rows in (0, 2))
    assert {**one, "ahead": None} == {**other, "ahead": None} and one["examples"][1] < 2 * STEPS


def poisoned(ranks: hr.Ranks) -> tuple[str, Rows]:
    """The second batch, which the second tower trains on, has a loss of NaN."""
    trainer = make(ranks, None, None)
    trainer.fit(WithSequences(EXAMPLES, BATCH), steps=3, progress=False)
    before = rows_of(trainer.model.embeddings)
    with pytest.raises(hr.GradientError) as caught:
        trainer.fit(WithSequences(EXAMPLES, BATCH, poison=1), progress=False)
    after = rows_of(trainer.model.embeddings)
    assert all(after[table].get(key) == row for table, rows in before.items() for key, row in rows.items())
    return str(caught.value), before


def test_a_bad_loss_on_a_tower_changes_no_row(crew_of: Crews) -> None:
    crew = crew_of(2, 2)
    assert crew is not None
    assert {words.split("; no row")[0] for words, _ in crew.run(poisoned)} == {
        "the loss or a gradient is NaN or infinite on rank 1"
    }


def with_hbm(ranks: hr.Ranks) -> None:
    hr.EmbeddingCollection([hr.Table("user", dim=4)], memory=hr.Memory(hbm="1MiB"), ranks=ranks)


def other_tables(ranks: hr.Ranks) -> None:
    names = ["user", "item"] if ranks.has_tower else ["user"]
    embeddings = hr.EmbeddingCollection([hr.Table(name, dim=4) for name in names], ranks=ranks)
    hr.Trainer(hr.Recommender(embeddings, torch.nn.Linear(4 * len(names), 1)))


def test_errors_are_on_every_rank_and_name_the_cure(crew_of: Crews) -> None:
    crew = crew_of(2, 1)
    assert crew is not None
    assert all("hbm='1MiB' with row ranks" in str(error) for error in crew.errors(with_hbm))
    errors = [str(error) for error in crew.errors(other_tables)]
    assert all("rank 2 differs from rank 0 in the trainer, tables" in words and "item" in words for words in errors)


def without_data(ranks: hr.Ranks, folder: Path) -> None:
    with working_in(folder / "without" if ranks.rank == 1 else folder):
        build_job({"data": {"source": "criteo-tsv", "path": "clicks.tsv"}, "cluster": {"towers": 2, "rows": 1}})


def test_a_tower_rank_without_its_data_is_an_error_on_every_rank(crew_of: Crews, tmp_path: Path) -> None:
    (tmp_path / "clicks.tsv").write_text("\t".join(["1", *["5"] * 13, *["68fd1e64"] * 26]) + "\n")
    crew = crew_of(2, 1)
    assert crew is not None
    for rank, error in enumerate(crew.errors(without_data, tmp_path)):
        assert isinstance(error, hr.HotRowError) and "clicks.tsv" in str(error), error
        assert rank == 1 or "opening the data failed on rank 1" in str(error)


@pytest.mark.parametrize(
    ("given", "error"),
    [
        ({"towers": 0, "rows": 1}, "towers=0: give a whole number of ranks, 1 or more"),
        ({"towers": 1, "rows": 0}, "rows=0: give a whole number of ranks, 1 or more"),
        ({"towers": 1, "rows": 1025}, "rows=1025: rows are divided into 1024 shards"),
        ({"towers": True, "rows": 1}, "towers=True: give a whole number"),
        ({"towers": 2}, "rows=None: give a whole number"),
        ({"towers": 2, "rows": 1}, "2 towers and 1 row"),
    ],
)
def test_a_wrong_cluster_section_is_an_error(given: dict[str, Any], error: str) -> None:
    with pytest.raises(hr.OptionError, match=error):
        build_job({"cluster": given})


def test_roles_of_ranks() -> None:
    roles = Roles.apart(5, rows=2)
    assert roles.are_apart and not Roles.apart(5, rows=0).are_apart
    assert [roles.shards(rank) for rank in range(5)] == [(0, 0)] * 3 + [(0, 512), (512, 1024)]
    assert sorted(set(roles.owner_of.tolist())) == [3, 4] and roles.parts == [(0, 512), (512, 1024)]
    for rows in (5, 6, -1):
        with pytest.raises(hr.OptionError, match="leave at least 1 tower rank"):
            Roles.apart(5, rows)
    with pytest.raises(hr.OptionError, match="use 1 to 1024 ranks"):
        Roles.apart(2000, 1500)
    with pytest.raises(hr.OptionError, match="0 or more"):
        hr.join_ranks(rows=-1)
