"""A served model of several tasks answers a probability, a value or a rate by the kind of each; others as before."""

from __future__ import annotations

import json
import urllib.request
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from lookup_server import LookupServer
from small_models import DENSE, collection, make_batch

import hotrow as hr
from hotrow.client import Client
from hotrow.errors import OptionError
from hotrow.serve.protocol.predictions import predictions, tower_outputs
from hotrow.serve.protocol.request import Signature

KINDS = ("binary", "regression", "count")
TASKS = [hr.Task("click"), hr.Task("dwell", "regression"), hr.Task("orders", "count")]


def trained(tasks: list[hr.Task], head: Any = "shared_bottom") -> hr.Trainer:
    embeddings = collection()
    torch.manual_seed(0)
    tower = hr.models.build_tower(
        "dlrm",
        features=embeddings.features,
        dense_features=DENSE,
        tasks=tasks,
        head=head,
        bottom=[8],
        top=[8],
    )
    trainer = hr.Trainer(hr.Recommender(embeddings, tower), tasks=tasks)
    trainer.fit(Batches(len(tasks)), progress=False)
    return trainer


class Batches:
    """Batches whose labels fit every kind, one in four missing."""

    examples = 256

    def __init__(self, tasks: int) -> None:
        self.tasks = tasks

    def batches(self, cursor: Any = None) -> Any:
        for number in range(4):
            batch = make_batch(64, number)
            labels = batch.labels.unsqueeze(1).repeat(1, self.tasks)
            labels[number::4, -1] = float("nan")
            yield hr.KeyedBatch({n: batch.ids[n] for n in ("user", "item", "tags")}, batch.dense, labels), number

    def describe(self) -> str:
        return "drawn batches"


def inputs_of(batch: hr.KeyedBatch) -> dict[str, np.ndarray]:
    tags = batch.ids["tags"]
    tensors = {name: batch.ids[name].values.numpy() for name in ("user", "item", "tags")}
    return {**tensors, "tags.offsets": tags.offsets.numpy(), "dense": batch.dense.numpy()}  # type: ignore[union-attr]


def batch_of(rows: int) -> hr.KeyedBatch:
    batch = make_batch(rows, 9)
    return hr.KeyedBatch({name: batch.ids[name] for name in ("user", "item", "tags")}, batch.dense)


def test_a_server_answers_what_the_trainer_predicts(tmp_path: Path) -> None:
    trainer, batch = trained(TASKS, {"kind": "mmoe", "experts": 2, "expert": [6], "tower": []}), batch_of(7)
    with LookupServer(tmp_path, model=trainer.model, tasks=TASKS) as server:
        expected = trainer.predict(batch)
        torch.testing.assert_close(server.direct.predict(batch), expected, rtol=1e-6, atol=1e-6)
        for protocol in ("http", "grpc"):
            with Client(f"{protocol}://{server.address(protocol)}") as client:
                answer = client.predict("ctr", inputs_of(batch))
            assert list(answer.arrays) == ["predictions", "logits"]
            torch.testing.assert_close(torch.tensor(answer["predictions"]), expected, rtol=1e-5, atol=1e-6)
        document = {"inputs": [{"name": "user", "shape": [1], "datatype": "INT64", "data": [1]}]}
        status, error, _ = server.post({**document, "outputs": [{"name": "probabilities"}]})
        assert status == 400 and "no output 'probabilities'" in error["error"] and "predictions" in error["error"]
        with urllib.request.urlopen(server.url("/v2/models/ctr"), timeout=30) as reply:
            outputs = {output["name"]: output for output in json.loads(reply.read())["outputs"]}
        named = [{"name": task.name, "kind": task.kind} for task in TASKS]
        assert outputs["predictions"]["parameters"]["tasks"] == named
        assert outputs["predictions"]["shape"] == [-1, 3]


def test_binary_tasks_and_models_without_tasks_keep_their_outputs(tmp_path: Path) -> None:
    tasks = [hr.Task("click"), hr.Task("like")]
    trainer = trained(tasks, {"kind": "ple", "shared_experts": 1, "task_experts": 1, "expert": [4], "tower": []})
    named = hr.export(trainer.model, tmp_path / "ctr", tasks=tasks)
    plain = hr.export(trainer.model, tmp_path / "ctr")
    assert "named_tasks" not in plain.manifest["signature"]
    assert named.signature.named_tasks == (("click", "binary"), ("like", "binary"))
    assert named.signature.fingerprint == plain.signature.fingerprint
    assert tower_outputs(named.signature) == tower_outputs(plain.signature) == ("probabilities", "logits")
    batch = batch_of(5)
    with hr.Engine(tmp_path / "ctr", version=1) as one, hr.Engine(tmp_path / "ctr", version=2) as other:
        assert torch.equal(one.predict(batch), other.predict(batch))


@pytest.mark.parametrize("rows", [0, 1, 5])
def test_links_are_those_of_torch(rows: int) -> None:
    logits = torch.randn(rows, 3) * 10
    found = predictions(logits.numpy().copy(), KINDS)
    expected = torch.stack([torch.sigmoid(logits[:, 0]), logits[:, 1], torch.exp(logits[:, 2])], 1)
    torch.testing.assert_close(torch.tensor(found), expected)
    alone = predictions(logits[:, 2].numpy().copy(), ["count"])  # a tower of one task may give [rows]
    torch.testing.assert_close(torch.tensor(alone), torch.exp(logits[:, 2]))
    assert predictions(np.full((1, 1), 500.0, np.float32), ["count"]).tolist() == [[float("inf")]]


def test_an_export_of_other_tasks_is_refused(tmp_path: Path) -> None:
    trainer = trained(TASKS)
    with pytest.raises(OptionError, match="tasks= has 2 tasks but the tower gives 3 logits"):
        hr.export(trainer.model, tmp_path / "ctr", tasks=TASKS[:2])
    assert not (tmp_path / "ctr" / "1").exists()


def test_one_named_task_is_described() -> None:
    signature = Signature(("user",), frozenset(), 0, 1, (("dwell", "regression"),))
    assert tower_outputs(signature) == ("predictions", "logits")
