"""Towers with a user part: sharing a user changes nothing, padding changes nothing, and what every tower promises."""

from __future__ import annotations

import itertools
from functools import partial

import pytest
import torch
from torch import Tensor, nn
from user_batches import DIM, LONGEST, TOWERS, batch_of, columns, expanded, gradients, make, padded

from hotrow.errors import OptionError
from hotrow.models import SASRec
from hotrow.nn import MMoE

pytestmark = pytest.mark.usefixtures("one_thread")

SHAPES = {
    "odd lengths": ([0, 1, LONGEST, 3], [2, 0, 3, 2, 1, 2]),
    "all empty": ([0, 0], [1, 0, 1]),
    "one user": ([5], [0, 0, 0]),
    "a user without rows": ([2, 4, 1], [2, 0]),
    "no rows": ([2, 1], []),
}

KINDS = ["bst", "hstu", "sasrec", "sim hard", "sim soft", "din"]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", TOWERS)
def test_shared_users_give_the_logits_and_the_gradients_of_repeated_ones(name: str, shape: str) -> None:
    tower = make(name)
    vectors, dense = batch_of(*SHAPES[shape])
    of_user = {key: vector for key, vector in vectors.items() if vector.is_floating_point()}
    for vector in of_user.values():
        vector.requires_grad_()
    shared, apart = tower(vectors, dense), tower(expanded(tower, vectors), dense)
    assert shared.shape == (len(SHAPES[shape][1]),)
    torch.testing.assert_close(shared, apart, atol=1e-5, rtol=1e-5)
    if shared.numel():
        ours, theirs = gradients(tower, shared, vectors), gradients(tower, apart, vectors)
        assert ours.keys() == theirs.keys()
        for key, gradient in ours.items():
            torch.testing.assert_close(
                gradient, theirs[key], atol=2e-5, rtol=1e-4, msg=lambda text, key=key: key + text
            )


@pytest.mark.parametrize("garbage", [0.0, 7.0])
@pytest.mark.parametrize("name", TOWERS)
def test_padding_at_the_ends_changes_no_logit(name: str, garbage: float) -> None:
    tower = make(name)
    for shape in ("odd lengths", "all empty", "one user"):
        vectors, dense = batch_of(*SHAPES[shape])
        logits = tower(*padded(tower, vectors, dense, garbage))
        torch.testing.assert_close(logits[: len(dense)], tower(vectors, dense), atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("name", TOWERS)
def test_the_order_of_rows_and_a_missing_user_of_change_nothing(name: str) -> None:
    tower = make(name)
    vectors, dense = batch_of([3, 0, 6, 2], [0, 1, 2, 3])
    logits = tower(vectors, dense)
    del vectors["user_of"]
    assert torch.equal(tower(vectors, dense), logits)


@pytest.mark.parametrize("name", TOWERS)
def test_every_part_matters(name: str) -> None:
    """Gradients reach every weight and every input that the tower reads, and integers change the logits."""
    tower = make(name)
    vectors, dense = batch_of([LONGEST, 4, 6], [0, 1, 2, 0, 1, 2, 2, 1])
    read = {*columns(tower), *tower.widths}
    for key in read:
        if vectors[key].is_floating_point():
            vectors[key].requires_grad_()
    found = gradients(tower, tower(vectors, dense), vectors)
    for key in [*(f"weight {key}" for key, _ in tower.named_parameters()), *read]:
        if key.startswith("weight") or vectors[key].is_floating_point():
            assert key in found and found[key].isfinite().all() and found[key].ne(0).any(), key


@pytest.mark.parametrize("name", ["bst dot", "hstu", "sim hard"])
def test_times_and_categories_are_read(name: str) -> None:
    tower = make(name)
    vectors, dense = batch_of([LONGEST, 5], [0, 1, 1])
    logits = tower(vectors, dense)
    for key in ("seen_time", "now", *(("seen_category", "category") if name == "sim hard" else ())):
        other = vectors[key] * 100 if "time" in key or key == "now" else vectors[key] + 1
        assert not torch.allclose(tower(vectors | {key: other}, dense), logits), key


@pytest.mark.parametrize("name", TOWERS)
def test_an_encoding_can_be_cut_into_users_and_joined_again(name: str) -> None:
    tower = make(name).eval()
    vectors, dense = batch_of([3, 0, LONGEST], [2, 0, 1, 2])
    encoding = tower.encode_user(vectors)
    cut: dict[str, list[Tensor]] = {}
    for key, tensor in encoding.items():
        whole = f"{key}_lengths" not in encoding
        cut[key] = list(tensor.split(1) if whole else tensor.split(encoding[f"{key}_lengths"].tolist()))
    order = [2, 0, 1]
    joined = {key: torch.cat([pieces[user] for user in order]) for key, pieces in cut.items()}
    place = torch.tensor([order.index(user) for user in range(3)])
    moved = vectors | {"user_of": place[vectors["user_of"]]}
    torch.testing.assert_close(tower.score(moved, joined, dense), tower(vectors, dense), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("name", TOWERS)
def test_causal_towers_encode_an_event_by_it_and_earlier_ones_alone(name: str) -> None:
    tower = make(name).eval()
    vectors, _ = batch_of([5], [0], searches=[5])
    before = {key: vector[:3] if key in columns(tower) else vector for key, vector in vectors.items()}
    before |= {f"{key}_lengths": torch.tensor([3]) for key in columns(tower)}
    whole, short = tower.encode_user(vectors), tower.encode_user(before)
    jagged = [key for key in whole if f"{key}_lengths" in whole]
    same = all(torch.allclose(whole[key][:3], short[key], atol=1e-6) for key in jagged)
    assert same == tower.causal or name == "sasrec"  # its encoding has no events


@pytest.mark.parametrize(
    "name", ["bst relative", "hstu", "sasrec events", "sasrec hstu", "sim soft", "sim whole", "din"]
)
def test_rows_that_see_the_beginning_of_a_history_equal_users_with_that_history(name: str) -> None:
    tower = make(name)
    assert tower.causal and tower.prefixes == tuple(history.columns for history in tower.histories)
    vectors, dense = batch_of([LONGEST, 0, 4], [2, 0, 0, 1, 0, 2], searches=[3, 2, 5])
    for key in ("seen_item", "searched", "item"):
        vectors[key].requires_grad_()
    seen = {"seen_item": torch.tensor([1, LONGEST, 0, 0, 4, 3]), "searched": torch.tensor([5, 0, 3, 1, 2, 4])}
    apart = expanded(tower, vectors)
    for history in tower.histories:
        its = seen[history.name]
        for column in history.columns:
            pieces = apart[column].split(apart[f"{column}_lengths"].tolist())
            apart[column] = torch.cat([piece[:count] for piece, count in zip(pieces, its.tolist(), strict=True)])
            apart[f"{column}_lengths"] = its
    shared = vectors | {f"{column}_visible": seen[h.name] for h in tower.histories for column in h.columns}
    ours, theirs = tower(shared, dense), tower(apart, dense)
    torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-5)
    found, wanted = gradients(tower, ours, vectors), gradients(tower, theirs, vectors)
    for key, gradient in found.items():
        torch.testing.assert_close(gradient, wanted[key], atol=2e-5, rtol=1e-4, msg=lambda text, key=key: key + text)


@pytest.mark.parametrize("name", ["bst", "bst dot", "hstu", "sasrec"])
def test_checkpointing_changes_no_bit(name: str) -> None:
    vectors, dense = batch_of([LONGEST, 0, 4], [0, 2, 2, 1])
    found = []
    for checkpoint in (False, True):
        tower = make(name, checkpoint=checkpoint, dropout=0.25)
        vectors["seen_item"] = vectors["seen_item"].detach().requires_grad_()
        torch.manual_seed(5)
        logits = tower(vectors, dense)
        found.append({"logits": logits, **gradients(tower, logits, vectors)})
    for key, tensor in found[0].items():
        assert torch.equal(tensor, found[1][key]), key


@pytest.mark.parametrize(
    ("name", "checkpoint"), [*((name, False) for name in TOWERS), ("bst", True), ("hstu", True), ("sasrec", True)]
)
def test_bf16_autocast_stays_near_full_precision_and_trains(name: str, checkpoint: bool) -> None:
    tower = make(name, **({"checkpoint": True} if checkpoint else {}))
    vectors, dense = batch_of([LONGEST, 0, 4], [0, 2, 2, 1])
    full = tower(vectors, dense)
    with torch.autocast("cpu", torch.bfloat16):
        mixed = tower(vectors, dense)
    torch.testing.assert_close(mixed.float(), full, atol=0.15, rtol=0.1)
    mixed.float().square().sum().backward()
    assert all(weight.grad is None or weight.grad.dtype == torch.float32 for weight in tower.parameters())
    assert any(weight.grad is not None and weight.grad.ne(0).any() for weight in tower.parameters())


@pytest.mark.parametrize("name", TOWERS)
def test_a_head_gives_a_logit_per_task(name: str) -> None:
    tower = make(name, head=partial(MMoE, tasks=["click", "like"], experts=2, expert=(4,), tower=(3,)))
    vectors, dense = batch_of([3, 2], [0, 1, 1])
    logits = tower(vectors, dense)
    assert logits.shape == (3, 2)
    logits.sum().backward()


@pytest.mark.parametrize("name", KINDS)
def test_both_parts_export_with_free_sizes(name: str) -> None:
    tower = make(name).eval()
    vectors, dense = batch_of([4, 3, LONGEST], [0, 2, 1, 2, 0])
    dims = {key: torch.export.Dim(key) for key in ("users", "rows", "items", "searched")}
    own = {
        key: vectors[key]
        for feature in tower.user_features
        for key in (feature, f"{feature}_lengths")
        if key in vectors
    }
    events = {
        column: dims[
            "items" if column in {"seen_time", "seen_category"} | set(tower.histories[0].columns) else "searched"
        ]
        for column in columns(tower)
    }
    shapes = {key: {0: events.get(key, dims["users"])} for key in own}
    with torch.no_grad():
        user_part = torch.export.export(EncodeUser(tower), (own,), dynamic_shapes=(shapes,))
        encoding = tower.encode_user(own)
        rest = {key: vector for key, vector in vectors.items() if key not in own}
        rest = {key: rest[key] for key in read_by_score(tower)}
        per_row = {key: {0: dims["rows"]} for key in rest}
        for number in ("now", "category"):
            if number in rest:
                per_row[number] = {0: torch.export.Dim(f"{number}_values")}
        of_encoding = {
            key: {
                0: dims["searched" if key.startswith("searched") else "items"]
                if f"{key}_lengths" in encoding
                else dims["users"]
            }
            for key in encoding
        }
        candidate_part = torch.export.export(
            Score(tower), (rest, encoding, dense), dynamic_shapes=(per_row, of_encoding, {0: dims["rows"]})
        )
        names = {
            str(node.target)
            for part in (user_part, candidate_part)
            for node in part.graph.nodes
            if node.op == "call_function"
        }
        assert {target.split(".")[0] for target in names if "getitem" not in target and "built-in" not in target} <= {
            "aten",
            "hotrow",
        }
        for lengths, rows_of in (([2], [0]), ([1, 0, 5, LONGEST], [3, 3, 1, 0, 2, 2]), ([0, 1], [0, 0, 0])):
            vectors, dense = batch_of(lengths, rows_of, seed=len(lengths))
            found = user_part.module()({key: vectors[key] for key in own})
            logits = candidate_part.module()({key: vectors[key] for key in rest}, found, dense)
            torch.testing.assert_close(logits, tower(vectors, dense), atol=1e-5, rtol=1e-5)


def read_by_score(tower: nn.Module) -> list[str]:
    numbers = [name for name in (tower.time, tower.category) if name is not None]
    return ["user_of", *tower.candidate_widths, *itertools.chain(*((name, f"{name}_lengths") for name in numbers))]


class EncodeUser(nn.Module):
    def __init__(self, tower: nn.Module) -> None:
        super().__init__()
        self.tower = tower

    def forward(self, vectors: dict[str, Tensor]) -> dict[str, Tensor]:
        return self.tower.encode_user(vectors)


class Score(EncodeUser):
    def forward(self, vectors: dict[str, Tensor], encoding: dict[str, Tensor], dense: Tensor) -> Tensor:
        return self.tower.score(vectors, encoding, dense)


@pytest.mark.parametrize("name", KINDS)
def test_learns_which_candidates_the_history_holds(name: str) -> None:
    """A click is likely when the candidate's taste is that of most of the user's events."""
    torch.manual_seed(0)
    tower = TOWERS[name](**({"layers": 1} if name.startswith(("bst", "hstu", "sasrec")) else {}))
    items = nn.Embedding(12, DIM)
    nn.init.normal_(items.weight, std=0.3)
    steps = torch.optim.Adam([*tower.parameters(), *items.parameters()], lr=0.02)
    losses = []
    for step in range(60):
        vectors, dense = batch_of([LONGEST - 1] * 32, [user for user in range(32) for _ in range(4)], seed=step)
        taste = torch.randint(0, 3, (32,))
        ids = (taste.unsqueeze(1) + 3 * torch.randint(0, 4, (32, LONGEST - 1))).flatten()
        candidate = torch.randint(0, 12, (128,))
        vectors["seen_item"], vectors["searched"] = items(ids), items(ids)
        vectors["item"] = items(candidate)
        vectors["seen_category"], vectors["category"] = ids % 3, candidate % 3
        labels = (candidate % 3 == taste[vectors["user_of"]]).float()
        loss = nn.functional.binary_cross_entropy_with_logits(tower(vectors, dense), labels)
        steps.zero_grad()
        loss.backward()
        steps.step()
        losses.append(float(loss.detach()))
    assert sum(losses[-5:]) / 5 < 0.55  # 0.64 is the entropy of the labels


def test_sasrec_trains_on_every_event_of_a_history() -> None:
    torch.manual_seed(0)
    tower = SASRec({"item": DIM}, [{"features": {"seen_item": DIM}, "max_length": LONGEST}], "item", width=8)
    vectors, _ = batch_of([4, 0, LONGEST], [0, 1, 2])
    (events,) = tower.event_vectors(vectors)
    (items,) = tower.candidate_vectors(torch.randn(6, DIM))
    assert (events @ items.T).shape == (11, 6)
    newest = tower.encode_user(vectors)["seen_item_user"]
    torch.testing.assert_close(newest, torch.stack([events[3], torch.zeros(8), events[10]]))
    (candidates,) = tower.candidate_vectors(vectors["item"])
    torch.testing.assert_close(tower(vectors), (newest * candidates).sum(1))


@pytest.mark.parametrize("positions", ["learned", "relative"])
def test_sasrec_compares_a_row_with_the_newest_event_that_it_sees(positions: str) -> None:
    torch.manual_seed(0)
    history = [{"features": {"seen_item": DIM}, "max_length": LONGEST}]
    tower = SASRec({"item": DIM}, history, "item", width=8, every_event=True, positions=positions)
    vectors, _ = batch_of([4, 0, LONGEST], [2, 0, 1, 0, 2, 2])
    vectors["seen_item_visible"] = torch.tensor([LONGEST, 1, 0, 4, 3, 0])
    (events,), (candidates,) = tower.event_vectors(vectors), tower.candidate_vectors(vectors["item"])
    nothing = torch.zeros(8)
    seen = torch.stack([events[10], events[0], nothing, events[3], events[6], nothing])
    torch.testing.assert_close(tower(vectors), (seen * candidates).sum(1))
    assert (tower.prefixes is None) == (positions == "learned")  # a place counts from the newest event
    whole = {name: vector for name, vector in vectors.items() if name != "seen_item_visible"}
    plain = SASRec({"item": DIM}, history, "item", width=8, positions=positions)
    plain.load_state_dict(tower.state_dict())
    torch.testing.assert_close(tower(whole), plain(whole))


def test_sasrec_of_an_unknown_block_names_the_right_ones() -> None:
    with pytest.raises(OptionError, match="block='hsut'; did you mean 'hstu'"):
        SASRec(["item"], ["seen"], "item", 4, block="hsut")


def test_sasrec_without_a_projection_reads_what_the_tables_gave() -> None:
    torch.manual_seed(0)
    history = [{"features": {"seen_item": DIM}, "max_length": LONGEST}]
    tower = SASRec({"item": DIM}, history, "item", width=DIM, positions="none", every_event=True, project=False)
    names = [name for name, _ in tower.named_parameters() if "projection" in name]
    assert names and all("blocks" in name for name in names)  # those of queries, keys and values alone
    item = torch.randn(6, DIM)
    torch.testing.assert_close(tower.candidate_vectors(item), [item * DIM**-0.5])
    vectors, _ = batch_of([4, 0, LONGEST], [0, 1, 2])
    assert tower(vectors).shape == (3,)
    with pytest.raises(OptionError, match="events of history 'seen_item' are 4 wide, the target 4 and the encoder 8"):
        SASRec({"item": DIM}, history, "item", width=8, project=False)
