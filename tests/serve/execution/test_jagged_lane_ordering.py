"""Captured buckets of histories on a simulated GPU (tests/simulated_gpu): the answers of the CPU, captures beside
traffic, and all accesses to memory ordered.

The tower is a plain module: torch.export does not run over simulated tensors. test_jagged_lanes.py has exported ones,
on a real GPU. Each test runs in a forked process, because the core loads the driver once per process.
"""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import forked
import pytest
import torch
from serve.execution.jagged_models import DENSE, DIM, KEYS, MOST, TOWERS, make_batch
from serve.two_part_towers import INPUTS
from torch import Tensor

import hotrow as hr
from hotrow.serve.graph.tower_inputs import TowerInputs

if os.environ.get("TRITON_INTERPRET") != "1" or torch.cuda.is_available():
    pytest.skip("there is a GPU, or kernels are not interpreted", allow_module_level=True)


class SimulatedTower:
    """A module whose weights and constants are on the simulated GPU."""

    def __init__(self, module: torch.nn.Module, inputs: TowerInputs, device: torch.device) -> None:
        self.module, self.inputs = module, inputs
        self.weights = {name: value.detach().to(device) for name, value in module.state_dict().items()}

    def run(self, vectors: Any, dense: Tensor | None) -> Tensor:
        with torch.device(next(iter(self.weights.values())).device):
            logits: Tensor = torch.func.functional_call(self.module, self.weights, (dict(vectors), dense))
        return logits


def collection(form: str, device: str | None) -> hr.EmbeddingCollection:
    more = {"tags": "mean"} if form != "two_parts" else {"user": "sum", "action": "none"}
    features = {"item": {"item": "sum", "seen": "none"}, "other": more}
    tables = [hr.Table(name, dim=DIM, features=of_table, values="fp32") for name, of_table in features.items()]
    memory = hr.Memory(hbm="16KiB") if device else None
    embeddings = hr.EmbeddingCollection(tables, seed=2, memory=memory, device=device)
    generator = torch.Generator().manual_seed(3)
    for rows in embeddings.tables:
        rows.assign(torch.arange(KEYS), torch.randn(KEYS, DIM, generator=generator))
    return embeddings.eval()


def tower(form: str) -> tuple[torch.nn.Module, TowerInputs]:
    torch.manual_seed(0)
    if form == "two_parts":
        return TOWERS[form]().eval(), INPUTS
    jagged = form == "jagged"
    inputs = TowerInputs(
        {"item": DIM, "seen": DIM, "tags": DIM}, frozenset({"seen"}), DENSE, ("when",) if jagged else (), jagged,
        aligned=(("seen", "when"),) if jagged else (), max_lengths={"seen": MOST},
    )  # fmt: skip
    return TOWERS[form]().eval(), inputs


def serve(form: str, folder: Path) -> dict[str, Any]:
    """Batches on two lanes, before, while and after their buckets are captured."""
    from simulated_gpu import simulate_gpu

    module, inputs = tower(form)
    batches = [make_batch(form, 2 + n % 6, n, longest=(0, 3, MOST)[n % 3]) for n in range(4)]
    plain = collection(form, None)
    plain.form = hr.Recommender(plain, module).embeddings.form
    with torch.inference_mode():
        expected = [module(plain(batch), batch.dense) for batch in batches]
    right, captured, done = [], 0, 0
    with simulate_gpu(folder) as device:
        from hotrow.serve.execution.device_lane import DeviceLanes

        embeddings = collection(form, "cuda")
        embeddings.form = plain.form
        lanes = DeviceLanes(embeddings, SimulatedTower(module, inputs, embeddings.device), DENSE, (4, 8), "fp32", 2)  # type: ignore[arg-type]

        def answer(number: int) -> bool | None:
            run = lanes.plan(batches[number])
            if run is None:
                return None
            logits, _, _ = run("wait", None)
            return bool(torch.allclose(logits, expected[number], rtol=1e-5, atol=1e-6))

        first = [answer(number) for number in range(len(batches))]
        assert lanes.jagged.wait(100)
        with ThreadPoolExecutor(2) as threads:
            right = [*threads.map(answer, range(len(batches))), *threads.map(answer, range(len(batches)))]
        captured, done = len(lanes.jagged.captured), device.done.get("_lookup_ids_kernel", 0)
        error, refused = lanes.reader.filler.error, dict(lanes.jagged.refused)
        inserted = lanes.reader.filler.rows_inserted
        lanes.close()
        device.synchronize_all()
        device.order.settle()
    return {
        "first": first[:1],
        "right": right,
        "captured": captured,
        "lookups": done,
        "inserted": inserted,
        "error": repr(error),
        "refused": {str(key): value for key, value in refused.items()},
        "refusal": lanes.jagged.refusal,
        "races": [race for race in device.order.races.values() if not _is_score(race)],
        "errors": list(map(repr, device.errors)),
    }


def _is_score(race: str) -> bool:
    """Whether two lanes raise the score of a row at the same time: both write what follows from the old one."""
    return race.count("_lookup_ids_kernel on ") == 2 and "kernels/index/sets.py" in race


def _report(queue: Any, *arguments: Any) -> None:
    import interpreter_speedup

    interpreter_speedup.install()
    try:
        queue.put(serve(*arguments))
    except BaseException:
        import traceback

        queue.put({"failed": traceback.format_exc()})


def in_a_process(*arguments: Any) -> dict[str, Any]:
    queue = forked.Queue()
    process = forked.Process(target=_report, args=(queue, *arguments), daemon=True)
    process.start()
    found: dict[str, Any] = queue.get(timeout=120)
    process.join(10)
    assert "failed" not in found, found["failed"]
    return found


@pytest.mark.parametrize("form", ["padded", "jagged", "two_parts"])
def test_buckets_are_captured_beside_traffic_and_answer_as_the_cpu(form: str, tmp_path: Path) -> None:
    found = in_a_process(form, tmp_path)
    assert found["first"] == [None]  # the first batch does not wait for a capture
    assert found["right"] == [True] * 8, found
    assert found["captured"] and found["lookups"] and found["inserted"]
    assert not found["refused"] and not found["refusal"]
    assert found["error"] == "None" and not found["races"] and not found["errors"]
