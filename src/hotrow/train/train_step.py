"""One step of a trainer: rows and dense weights change together, or nothing does.

Rows are updated first, because their gradients are checked for NaN before any row changes; then the dense weights. On a
GPU the loss is checked together with the rows' gradients: reading it in the middle of a batch would leave the device
without work. With fp16, a step in which any gradient overflowed is skipped for rows and dense weights alike, and the
loss scale is lowered.

Called by the training thread.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from hotrow.batch import KeyedBatch
from hotrow.data import Cursor
from hotrow.errors import BatchError, GradientError
from hotrow.task import Task
from hotrow.train.task_loss import task_labels

if TYPE_CHECKING:
    from hotrow.train.trainer import Trainer


ForwardResult = tuple[Tensor, Tensor, int]  # logits, loss, the step's examples
PendingBatch = tuple[ForwardResult, KeyedBatch, Cursor]  # a batch whose gradients are not applied yet; the cursor after


def labels_of(batch: KeyedBatch, tasks: Sequence[Task] = ()) -> Tensor:
    """The labels as floats, with tasks `[rows, tasks]` and checked; a batch without labels is an error."""
    if batch.labels is None:
        raise BatchError("the batch has no labels; give the feature spec label=, or use predict()")
    labels = batch.labels.float()
    return task_labels(tasks, labels) if tasks else labels


def checks_loss_in_step(trainer: Trainer) -> bool:
    """Whether the step, not the forward pass, finds a loss that is not finite."""
    embeddings = trainer.model.embeddings
    on_gpu = embeddings.hbm_cache is not None and embeddings.device.type == "cuda"
    return on_gpu and trainer.team is None and not trainer.scaler.is_enabled()


def loss_error(trainer: Trainer, value: Tensor) -> GradientError:
    """The error for a loss that is not finite."""
    return GradientError(
        f"the loss is {value.item()} at step {trainer.steps + 1}; nothing was changed by this batch. "
        "Lower the learning rate, clip gradients (clip_norm=, clip_dense_norm=), or look for bad dense features"
    )


def make_step(trainer: Trainer, losses: Sequence[Tensor]) -> None:
    """Apply the pending gradients; `losses` are those of their batches."""
    if trainer.team is not None:
        trainer.team.reduce_dense()
    if trainer.scaler.is_enabled():
        _scaled_step(trainer) if trainer.has_tower else _scaled_step_of_rows(trainer)
        return
    _clip(trainer)
    losses = losses if checks_loss_in_step(trainer) else []
    try:
        trainer.model.embeddings.step(also=[value.float().view(1, 1) for value in losses])
    except GradientError as error:
        trainer.forget()
        bad = [value for value in losses if not bool(torch.isfinite(value))]
        raise (loss_error(trainer, bad[0]) if bad else error) from None
    if trainer.dense_optimizer is not None:
        trainer.dense_optimizer.step()
        trainer.dense_optimizer.zero_grad()


def drop_gradients(trainer: Trainer) -> None:
    """Drop the pending gradients of rows and dense weights."""
    trainer.model.embeddings.discard()
    if trainer.dense_optimizer is not None:
        trainer.dense_optimizer.zero_grad()


def _scaled_step(trainer: Trainer) -> None:
    scale = trainer.scaler.get_scale()
    if trainer.dense_optimizer is not None:
        trainer.scaler.unscale_(trainer.dense_optimizer)
    team = trainer.team
    try:
        if not all(bool(torch.isfinite(p.grad).all()) for p in trainer.parameters if p.grad is not None):
            if team is None or not team.ranks.roles.are_apart:  # all ranks see the same sums
                raise GradientError("a dense gradient overflowed")
            team.ranks.not_finite = True  # row ranks see none: the exchange of gradients tells them
        else:
            _clip(trainer)
        trainer.model.embeddings.step(grad_scale=1.0 / scale)
    except GradientError:
        if trainer.team is not None:
            trainer.team.ranks.failing = False
        drop_gradients(trainer)
        trainer.scaler.update(scale * trainer.scaler.get_backoff_factor())
        return
    if trainer.dense_optimizer is not None:
        trainer.scaler.step(trainer.dense_optimizer)
        trainer.dense_optimizer.zero_grad()
    trainer.scaler.update()


def _scaled_step_of_rows(trainer: Trainer) -> None:
    """The same step on a row rank, which hears the scale, and that a gradient overflowed, from the tower ranks."""
    try:
        trainer.model.embeddings.step()
    except GradientError:
        assert trainer.team is not None
        trainer.team.ranks.failing = False
        trainer.model.embeddings.discard()


def _clip(trainer: Trainer) -> None:
    if trainer.clip_dense_norm is not None:
        nn.utils.clip_grad_norm_(trainer.parameters, trainer.clip_dense_norm)
