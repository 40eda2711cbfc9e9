"""One step of a trainer: rows and dense weights change together, or nothing does.

Rows first, because they are checked for NaN before anything changes; then the dense part. On a GPU the loss is checked
with them: to ask the device for it in the middle of a batch leaves it without work. With fp16, a step in which any
gradient overflowed is skipped, rows and dense weights alike, and the scale goes down.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from hotrow.errors import GradientError

if TYPE_CHECKING:
    from hotrow.train.trainer import Trainer


def checks_with_rows(trainer: Trainer) -> bool:
    """Whether it shows only in the step that a loss is not finite."""
    embeddings = trainer.model.embeddings
    on_gpu = embeddings.hbm_cache is not None and embeddings.device.type == "cuda"
    return on_gpu and trainer.team is None and not trainer.scaler.is_enabled()


def bad_loss(trainer: Trainer, value: Tensor) -> GradientError:
    """What to raise for a loss that is not finite."""
    return GradientError(
        f"the loss is {value.item()} at step {trainer.steps + 1}; nothing was changed by this batch. "
        "Lower the learning rate, clip gradients (clip_norm=, clip_dense_norm=), or look for bad dense features"
    )


def make_step(trainer: Trainer, losses: Sequence[Tensor]) -> None:
    """Make the step for which gradients wait, of batches with these losses."""
    if trainer.team is not None:
        trainer.team.reduce_dense()
    if trainer.scaler.is_enabled():
        _scaled_step(trainer)
        return
    _clip(trainer)
    losses = losses if checks_with_rows(trainer) else []
    try:
        trainer.model.embeddings.step(also=[value.float().view(1, 1) for value in losses])
    except GradientError as error:
        trainer.forget()
        bad = [value for value in losses if not bool(torch.isfinite(value))]
        raise (bad_loss(trainer, bad[0]) if bad else error) from None
    if trainer.dense_optimizer is not None:
        trainer.dense_optimizer.step()
        trainer.dense_optimizer.zero_grad()


def drop_gradients(trainer: Trainer) -> None:
    """Of rows and dense weights."""
    trainer.model.embeddings.discard()
    if trainer.dense_optimizer is not None:
        trainer.dense_optimizer.zero_grad()


def _scaled_step(trainer: Trainer) -> None:
    scale = trainer.scaler.get_scale()
    if trainer.dense_optimizer is not None:
        trainer.scaler.unscale_(trainer.dense_optimizer)
    try:
        if not all(bool(torch.isfinite(p.grad).all()) for p in trainer.parameters if p.grad is not None):
            raise GradientError("a dense gradient overflowed")
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


def _clip(trainer: Trainer) -> None:
    if trainer.clip_dense_norm is not None:
        nn.utils.clip_grad_norm_(trainer.parameters, trainer.clip_dense_norm)
