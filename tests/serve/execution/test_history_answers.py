"""Each tower over histories, trained and exported without options, answers as its trainer does, to 1e-6."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import history_models as histories
import numpy as np
import pytest
import torch
from history_models import close

import hotrow as hr
from hotrow.data.rebatch import slice_batch
from hotrow.serve.protocol import frames, user_join
from hotrow.serve.protocol.request import Ids, Request

pytestmark = pytest.mark.usefixtures("one_thread")


def trained(name: str, **options: Any) -> hr.Trainer:
    built = histories.model(name)
    histories.random_weights(built.tower)
    trainer = histories.trainer_of(built, **options)
    trainer.fit(histories.Log(name, 4), progress=False)
    return trainer


def without_events(batch: hr.KeyedBatch, name: str) -> hr.KeyedBatch:
    """The same examples with empty histories."""
    tower = histories.TOWERS[name]()
    columns = {column for history in tower.histories for column in history.columns}
    empty = hr.Jagged(torch.zeros(0, dtype=torch.int64), torch.zeros(batch.size + 1, dtype=torch.int64))
    ids, numbers = (
        {one: empty if one in columns else jagged for one, jagged in part.items()}
        for part in (batch.ids, batch.numbers)
    )
    return hr.KeyedBatch(ids, batch.dense, numbers=numbers)


def requests_of(batch: hr.KeyedBatch, signature: Any) -> list[Request]:
    """Each user of a batch as a request with its candidates: the user's features once."""
    assert batch.user_of is not None
    found = []
    for user in range(batch.users):
        rows = (batch.user_of == user).nonzero().flatten().tolist()

        def column(name: str, user: int = user, rows: list[int] = rows) -> Ids:
            jagged = batch.column(name)
            offsets = torch.arange(jagged.size + 1) if jagged.offsets is None else jagged.offsets
            places = [user] if name in batch.user_features else rows
            parts = [jagged.values[offsets[at] : offsets[at + 1]].numpy() for at in places]
            if name in batch.user_features and len(rows) > 1:
                return Ids(parts[0], shared=True)
            return Ids(np.concatenate(parts), np.cumsum([0, *map(len, parts)], dtype=np.int64))

        assert batch.dense is not None
        ids = tuple(column(name) for name in signature.columns)
        found.append(Request("ctr", len(rows), ids, batch.dense[rows].numpy()))
    return found


ALWAYS = ("hstu", "sim hard")  # the other towers' exports are compared in tests/serve/graph/test_history_towers.py


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in ALWAYS else pytest.mark.soak) for name in histories.TOWERS]
)
def test_answers_of_an_exported_tower_are_its_trainers(tmp_path: Path, name: str) -> None:
    torch.manual_seed(0)
    trainer = trained(name)
    tower = trainer.model.tower
    version = hr.export(trainer.model, tmp_path / "ctr")
    limits = version.manifest["signature"]["max_lengths"]
    assert {limits[one] for history in tower.histories for one in history.columns} == {histories.MOST}
    batches = [histories.batch(name, 50 + seed, users=4, rows=rows) for seed, rows in enumerate((1, 9, 40))]
    assert max(int(batches[2].column(one.name).lengths().max()) for one in tower.histories) == histories.MOST
    batches += [slice_batch(batches[2], 0, 1), without_events(batches[1], name)]
    with hr.Engine(tmp_path / "ctr", user_cache="1MiB") as cached, hr.Engine(tmp_path / "ctr") as plain:
        for engine in (cached, plain, cached):
            for batch in batches:
                expected = trainer.predict(batch)
                shared = batch.share_users(tower.user_features)
                assert close(engine.predict(batch), expected) and close(engine.predict(shared), expected)
        signature = version.signature
        asked = [one for batch in batches[:3] for one in requests_of(batch.share_users(tower.user_features), signature)]
        written = [frames.write_request(one, at, 1, signature.fingerprint, 0.0) for at, one in enumerate(asked)]
        pieces = [(one, 0, len(one), 0, request.rows) for one, request in zip(written, asked, strict=True)]
        joined = user_join.join(pieces, signature, signature.fingerprint)
        assert joined.users == len(asked)
        assert close(plain.predict(joined), trainer.predict(joined))
        alone = torch.cat([trainer.predict(user_join.join([one], signature, signature.fingerprint)) for one in pieces])
        assert close(cached.predict(joined), alone)
