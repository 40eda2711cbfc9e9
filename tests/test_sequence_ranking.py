"""examples/sequence_ranking.py: what it trains on, how it ranks, and that it learns the next item."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch

import hotrow as hr

ROOT = Path(__file__).parents[1]
ITEMS = 40


def load(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def example() -> ModuleType:
    return load(ROOT / "examples" / "sequence_ranking.py")


@pytest.fixture(scope="module")
def ratings(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Users who take items in the order of their numbers, from a random one on. Lines are in random order."""
    random = np.random.default_rng(0)
    starts, lengths = random.integers(0, ITEMS, 60), random.integers(3, 12, 60)
    rows = [
        (user + 1, (start + i) % ITEMS + 1, 5, 978_300_000 + 60 * i)
        for user, (start, length) in enumerate(zip(starts, lengths, strict=True))
        for i in range(length)
    ]
    path = tmp_path_factory.mktemp("log") / "ratings.dat"
    path.write_text("".join("::".join(map(str, rows[i])) + "\n" for i in random.permutation(len(rows))))
    return path


def test_files_of_every_format_give_the_same_log(example: ModuleType, ratings: Path, tmp_path: Path) -> None:
    log = example.read_log(ratings, "user,item,timestamp", 3)
    assert log.users == 60 and log.item_count == ITEMS
    headers = {
        "u.data": "",
        "log.csv": "who\twhat\tstars\twhen\n",
        "ml.inter": "user_id:token\titem_id:token\trating:float\ttimestamp:float\n",
    }
    for name, header in headers.items():
        text = header + ratings.read_text().replace("::", "\t")
        (tmp_path / name).write_text(text.replace("\t", ",") if name == "log.csv" else text)
        found = example.read_log(tmp_path / name, "who,what,when" if name == "log.csv" else "user,item,timestamp", 3)
        assert found.offsets.tolist() == log.offsets.tolist() and found.times.tolist() == log.times.tolist()
        assert found.items.tolist() == log.items.tolist()
    assert all((np.diff(log.items_of(user)) % ITEMS == 1).all() for user in range(60))  # in the order of time
    with pytest.raises(SystemExit, match="has no column 'user', only who, what"):
        example.read_log(tmp_path / "log.csv", "user,item,timestamp", 3)


def test_a_batch_has_each_next_item_and_items_that_the_user_never_took(example: ModuleType) -> None:
    lengths = [3, 9, 4, 12, 1]  # user u takes items 100 u, 100 u + 1, and so on
    items = np.concatenate([100 * user + np.arange(length) for user, length in enumerate(lengths)])
    log = example.Log(items, items * 1000, np.concatenate([[0], np.cumsum(lengths)]), 500)
    source = example.NextItems(log, users=2, negatives=3, longest=5, epochs=2, seed=1)
    batches = list(source.batches())
    assert sum(batch.size for batch, _ in batches) == source.examples == 2 * 4 * (5 + 1 + 5)
    trained = set()
    for batch, _ in batches:
        seen, visible = batch.ids["seen_item"], batch.visible["seen_item"].view(-1, 4)
        histories = [history.tolist() for history in seen.values.split(seen.lengths().tolist())]
        rows, labels = batch.ids["item"].values.view(-1, 4), batch.labels.view(-1, 4)
        assert bool((labels[:, 0] == 1).all()) and not bool(labels[:, 1:].any())
        for row, (right, *wrong) in enumerate(rows.tolist()):
            history = histories[int(batch.user_of[4 * row])]
            assert right == history[int(visible[row, 0]) - 1] + 1 and bool((visible[row] == visible[row, 0]).all())
            owner = right // 100
            assert not set(wrong) & set(log.items_of(owner).tolist())
            trained.add(right)
    # At most five events of each, and never the last two items, which are for validation and the test.
    assert trained == {*range(102, 107), 201, *range(305, 310)}
    _, cursor = batches[0]
    rest = list(source.batches(cursor))
    assert len(rest) == len(batches) - 1
    assert torch.equal(rest[0][0].ids["item"].values, batches[1][0].ids["item"].values)
    passes = [torch.cat([batch.ids["item"].values for batch, _ in part]) for part in (batches[:2], batches[2:])]
    assert not torch.equal(passes[0], passes[1])


def test_ranks_count_what_scores_as_high_and_was_not_seen(example: ModuleType, ratings: Path) -> None:
    log = example.read_log(ratings, "user,item,timestamp", 3)
    ranking = example.Ranking(log, longest=5, validation=False)
    draw = torch.Generator().manual_seed(0)
    table = torch.rand(len(ranking.users), ITEMS, generator=draw)
    lengths: list[int] = []

    def scores(items: hr.Jagged, times: hr.Jagged) -> torch.Tensor:
        lengths.extend(items.lengths().tolist())
        return table

    _, (hits, gain) = ranking.figures(scores)
    ranks = []
    for row, user in enumerate(ranking.users):
        mine = log.items_of(user)
        others = [item for item in range(ITEMS) if item not in mine]
        ranks.append(sum(float(table[row, item]) >= float(table[row, mine[-1]]) for item in others))
    assert hits == pytest.approx(np.mean([rank < 10 for rank in ranks]))
    assert gain == pytest.approx(np.mean([1 / np.log2(rank + 2) if rank < 10 else 0 for rank in ranks]))
    assert lengths == [min(5, len(log.items_of(user)) - 1) for user in ranking.users]


@pytest.mark.parametrize(
    ("program", "options"),
    [
        ("examples/sequence_ranking.py", []),
        ("examples/sequence_ranking.py", ["--model", "hstu", "--loss", "softmax", "--negatives", "5"]),
        ("benchmarks/sasrec_plain_torch.py", []),
    ],
)
def test_the_next_item_is_learned(
    program: str, options: list[str], ratings: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    common = ["--min-events", "3", "--length", "8", "--users", "20", "--dim", "16", "--lr", "0.01", "--dropout", "0"]
    steps = ["--epochs", "20", "--evaluate-every", "20"]
    monkeypatch.setattr(sys, "argv", [program, str(ratings), *common, *steps, *options])
    monkeypatch.setenv("COLUMNS", "200")
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        load(ROOT / program).main()
    finally:
        torch.set_num_threads(threads)
    text = capsys.readouterr().out
    ours = next(line for line in text.splitlines() if "ratings.dat, epoch 20" in line)
    hits = float(ours.split("│")[-3])
    assert hits > 0.6 and "0.8245" in text and "arXiv 1808.09781" in text  # by chance 0.29
