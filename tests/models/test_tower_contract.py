"""What every tower promises: gradients, learning, export, compile, autocast, odd batches."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from hotrow.models import DIN, DLRM, DCNv2, DeepFM, WideAndDeep
from hotrow.train.metrics import StreamingAUC

pytestmark = pytest.mark.usefixtures("one_thread")

DIM, DENSE, LENGTH = 5, 3, 4
NAMES = ["user", "item", "shop"]

TOWERS: dict[str, Callable[[], nn.Module]] = {
    "wide_and_deep": lambda: WideAndDeep(NAMES, DIM, dense_features=DENSE, deep=(16, 8)),
    "deepfm": lambda: DeepFM(NAMES, DIM, dense_features=DENSE, deep=(16, 8)),
    "dlrm": lambda: DLRM(NAMES, DIM, dense_features=DENSE, bottom=(8,), top=(16, 8)),
    "dcn_v2": lambda: DCNv2(NAMES, DIM, dense_features=DENSE, layers=2, deep=(16, 8)),
    "dcn_v2 mixture": lambda: DCNv2(NAMES, DIM, dense_features=DENSE, layers=2, rank=4, experts=2, deep=(16, 8)),
    "din": lambda: DIN(NAMES, "history", "item", DIM, dense_features=DENSE, attention=(8,), top=(16, 8)),
}


@pytest.fixture(params=TOWERS)
def tower(request: pytest.FixtureRequest) -> nn.Module:
    torch.manual_seed(0)
    return TOWERS[request.param]()


def batch_of(size: int, seed: int = 1) -> tuple[dict[str, Tensor], Tensor]:
    """What a collection with one unpooled feature gives."""
    random = torch.Generator().manual_seed(seed)
    vectors = {name: torch.randn(size, DIM, generator=random) for name in NAMES}
    mask = torch.rand(size, LENGTH, generator=random) < 0.7
    vectors["history"] = torch.randn(size, LENGTH, DIM, generator=random) * mask.unsqueeze(2)
    vectors["history_mask"] = mask
    return vectors, torch.randn(size, DENSE, generator=random)


def read_by(tower: nn.Module, vectors: dict[str, Tensor]) -> dict[str, Tensor]:
    return vectors if isinstance(tower, DIN) else {name: vectors[name] for name in NAMES}


def test_gradients_reach_every_input_and_every_weight(tower: nn.Module) -> None:
    vectors, dense = batch_of(32)
    inputs = [dense, *(vector for vector in read_by(tower, vectors).values() if vector.is_floating_point())]
    for tensor in inputs:
        tensor.requires_grad_()
    tower(vectors, dense).square().sum().backward()
    for tensor in (*inputs, *tower.parameters()):
        assert tensor.grad is not None and tensor.grad.isfinite().all() and tensor.grad.ne(0).any()


@pytest.mark.parametrize("size", [0, 1])
def test_batches_of_none_and_of_one_train(tower: nn.Module, size: int) -> None:
    logits = tower(*batch_of(size))
    assert logits.shape == (size,)
    logits.sum().backward()
    assert all(weight.grad is not None and weight.grad.isfinite().all() for weight in tower.parameters())


def test_an_example_scores_the_same_alone_and_in_a_batch(tower: nn.Module) -> None:
    vectors, dense = batch_of(6)
    together = tower(vectors, dense)
    for example in range(6):
        alone = {name: vector[example : example + 1] for name, vector in vectors.items()}
        torch.testing.assert_close(tower(alone, dense[example : example + 1])[0], together[example])


def test_order_of_the_dict_does_not_matter_and_runs_repeat_exactly(tower: nn.Module) -> None:
    vectors, dense = batch_of(9)
    backwards = dict(reversed(vectors.items()))
    assert torch.equal(tower(vectors, dense), tower(backwards, dense))


def test_exported_tower_gives_the_same_numbers_for_any_batch(tower: nn.Module) -> None:
    vectors, dense = batch_of(6)
    size = torch.export.Dim("size")
    vectors = read_by(tower, vectors)
    shapes = ({name: {0: size} for name in vectors}, {0: size})
    exported = torch.export.export(tower.eval(), (vectors, dense), dynamic_shapes=shapes).module()
    for other in (1, 2, 17):
        vectors, dense = batch_of(other)
        vectors = read_by(tower, vectors)
        torch.testing.assert_close(exported(vectors, dense), tower(vectors, dense))


def test_din_exports_with_a_dynamic_length_too() -> None:
    tower = TOWERS["din"]().eval()
    size, length = torch.export.Dim("size"), torch.export.Dim("length")
    vectors, dense = batch_of(6)
    shapes = {name: {0: size} for name in NAMES} | {name: {0: size, 1: length} for name in ("history", "history_mask")}
    exported = torch.export.export(tower, (vectors, dense), dynamic_shapes=(shapes, {0: size})).module()
    vectors["history"], vectors["history_mask"] = vectors["history"][:, :2], vectors["history_mask"][:, :2]
    torch.testing.assert_close(exported(vectors, dense), tower(vectors, dense))


def test_compiles_to_one_graph_with_the_same_gradients(tower: nn.Module) -> None:
    vectors, dense = batch_of(6)
    compiled = torch.compile(tower, backend="aot_eager", fullgraph=True)
    (ours,) = torch.autograd.grad(compiled(vectors, dense.requires_grad_()).sum(), dense)
    (plain,) = torch.autograd.grad(tower(vectors, dense).sum(), dense)
    torch.testing.assert_close(ours, plain)


def test_bf16_autocast_stays_near_full_precision_and_trains(tower: nn.Module) -> None:
    vectors, dense = batch_of(32)
    full = tower(vectors, dense)
    with torch.autocast("cpu", torch.bfloat16):
        mixed = tower(vectors, dense)
    torch.testing.assert_close(mixed.float(), full, atol=0.1, rtol=0.1)
    mixed.float().square().sum().backward()
    assert all(weight.grad is not None and weight.grad.dtype == torch.float32 for weight in tower.parameters())


def test_learns_what_only_user_and_item_together_tell(tower: nn.Module) -> None:
    """A click is likely when user and item are of one taste, or (for DIN) when the history holds the item's taste."""
    torch.manual_seed(0)
    keys = 12
    tables = nn.ModuleDict({name: nn.Embedding(keys, DIM) for name in NAMES})
    for weight in tables.parameters():
        nn.init.normal_(weight, std=0.3)
    steps = torch.optim.Adam([*tower.parameters(), *tables.parameters()], lr=0.02)

    def draw(size: int) -> tuple[dict[str, Tensor], Tensor, Tensor]:
        ids = {name: torch.randint(keys, (size,)) for name in NAMES}
        history = torch.randint(keys, (size, LENGTH))
        vectors = {name: tables[name](ids[name]) for name in NAMES}
        vectors["history"] = tables["item"](history)
        vectors["history_mask"] = torch.ones(size, LENGTH, dtype=torch.bool)
        together = ids["user"] % 2 == ids["item"] % 2
        if isinstance(tower, DIN):
            together = (history % 3 == ids["item"].unsqueeze(1) % 3).sum(1) >= 2
        return vectors, torch.randn(size, DENSE), together.float()

    for _ in range(120):
        vectors, dense, labels = draw(256)
        loss: Tensor = nn.functional.binary_cross_entropy_with_logits(tower(vectors, dense), labels)
        steps.zero_grad()
        torch.autograd.backward(loss)
        steps.step()
    auc = StreamingAUC()
    with torch.no_grad():
        vectors, dense, labels = draw(1024)
        auc.update(tower(vectors, dense), labels)
    assert auc.compute() > 0.9
