"""Streaming metrics: AUC, log loss and calibration over examples seen once, in memory that does not grow.

Each metric is a sum over examples, so metrics over different examples add up (`merge`), however the data was cut:
batches, windows (`reset`) or ranks. `state()` is JSON and lossless: a metric that was saved and loaded continues to the
same bits.

An exact AUC needs all scores sorted. Here scores are counted in 65,536 bins of a squashed logit, x / (|x| + 4). Bins
are finest where click logits are (2,000 bins a unit at -4, 200 at -20) and cover every finite logit. A positive and a
negative in one bin count as a tie, so the error is at most half the share of such pairs (`error_bound()`). Counts are
int64, so the result does not depend on the order of examples.

NumPy computes everything in float64 on the calling thread, so the order of its sums does not depend on the number of
threads. (torch's exp is 14 us faster, but splits 4096 numbers over two threads, and took 8 ms on two busy cores.)
Logits on a GPU are copied, which waits for the device; the trainer passes those of the previous step. Not thread-safe.
A batch that raises an error changes nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeGuard

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from hotrow.errors import BatchError, CheckpointError

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
State = dict[str, Any]

AUC_BINS = 1 << 16
CALIBRATION_BINS = 1 << 10


@dataclass(frozen=True)
class Scored:
    """A checked batch, with the values that several metrics need."""

    logits: Floats
    labels: Ints  # 0 or 1
    decay: Floats  # exp(-|logit|)
    squashed: Floats  # the logit, monotonely mapped into [0, 1]

    @staticmethod
    def check(logits: Tensor, labels: Tensor) -> Scored:
        """Requires: both `[batch]`; logits finite; labels 0 or 1.

        >>> Scored.check(torch.tensor([0.0]), torch.tensor([1.0])).decay
        array([1.])
        """
        if logits.dim() != 1 or logits.shape != labels.shape:
            raise BatchError(
                f"logits of shape {list(logits.shape)} for labels of {list(labels.shape)}; "
                "pass one logit and one label for each example, both [batch]"
            )
        x = logits.detach().to("cpu", torch.float64).numpy()
        finite = np.isfinite(x)
        if not finite.all():
            first = int(np.argmin(finite))
            raise BatchError(
                f"logits hold NaN or infinity ({int((~finite).sum())} of {x.size}, first {x[first]} at example {first})"
                "; no metric was changed. Lower the learning rate, or look for NaN in the dense features"
            )
        y = labels.detach().to("cpu", torch.float64).numpy()
        binary = (y == 0.0) | (y == 1.0)
        if not binary.all():
            first = int(np.argmin(binary))
            raise BatchError(f"labels hold {y[first]} at example {first}; these metrics need labels that are 0 or 1")
        size = np.abs(x)
        return Scored(x, y.astype(np.int64), np.exp(-size), 0.5 + 0.5 * x / (size + 4.0))

    def bins(self, count: int) -> Ints:
        """The bin of each example, out of `count`. Bins are monotone in the logit."""
        return np.minimum((self.squashed * count).astype(np.int64), count - 1)

    def probabilities(self) -> Floats:
        """The predicted probability of a 1, without overflow at either end."""
        return np.where(self.logits >= 0, 1.0, self.decay) / (1.0 + self.decay)


class StreamingAUC:
    """Area under the ROC curve: the chance that a positive is scored above a negative, ties counting half.

    `nan` until both classes have been seen.

    >>> auc = StreamingAUC()
    >>> auc.update(torch.tensor([2.0, 1.0, 1.0, -3.0]), torch.tensor([1.0, 1.0, 0.0, 0.0]))
    >>> auc.compute()
    0.875
    """

    def __init__(self) -> None:
        self.counts: Ints = np.zeros(2 * AUC_BINS, dtype=np.int64)  # bin 0's negatives, its positives, bin 1's ...

    def update(self, logits: Tensor, labels: Tensor) -> None:
        """Add one batch, both `[batch]`."""
        self.add(Scored.check(logits, labels))

    def add(self, batch: Scored) -> None:
        """Add a checked batch."""
        np.add.at(self.counts, 2 * batch.bins(AUC_BINS) + batch.labels, 1)

    def compute(self) -> float:
        """The AUC of all examples so far."""
        negatives, positives = self._classes()
        below = np.cumsum(negatives) - negatives
        return self._share_of_pairs(positives.astype(np.float64) * (below + 0.5 * negatives))

    def error_bound(self) -> float:
        """The largest possible difference between `compute()` and the exact AUC."""
        negatives, positives = self._classes()
        return self._share_of_pairs(positives.astype(np.float64) * (0.5 * negatives))

    def merge(self, other: StreamingAUC) -> None:
        """Add the examples of `other`."""
        self.counts += other.counts

    def reset(self) -> None:
        """Forget all examples."""
        self.counts[:] = 0

    def state(self) -> State:
        """State for `load_state`, as JSON values: the bins that are not empty."""
        negatives, positives = self._classes()
        used = np.flatnonzero(negatives + positives)
        return {
            "bins": AUC_BINS,
            "used": used.tolist(),
            "negatives": negatives[used].tolist(),
            "positives": positives[used].tolist(),
        }

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Restore `state`."""
        _check_bins("auc", state, AUC_BINS)
        used, negatives, positives = _counts("auc", state, ("used", "negatives", "positives"), None)
        if used.size and (used.max() >= AUC_BINS or (np.diff(used) <= 0).any()):
            raise _corrupt("auc", f"its bins do not rise within 0 to {AUC_BINS - 1}")
        self.reset()
        self.counts[2 * used] = negatives
        self.counts[2 * used + 1] = positives

    def _classes(self) -> tuple[Ints, Ints]:
        return self.counts[0::2], self.counts[1::2]

    def _share_of_pairs(self, pairs: Floats) -> float:
        negatives, positives = self._classes()
        total = float(negatives.sum()) * float(positives.sum())
        return float(pairs.sum()) / total if total else float("nan")


class LogLoss:
    """Mean binary cross-entropy, from logits; `nan` before the first example.

    >>> loss = LogLoss()
    >>> loss.update(torch.tensor([0.0, 800.0]), torch.tensor([1.0, 1.0]))
    >>> round(loss.compute(), 4)
    0.3466
    """

    def __init__(self) -> None:
        self.total = 0.0
        self.examples = 0

    def update(self, logits: Tensor, labels: Tensor) -> None:
        """Add one batch, both `[batch]`."""
        self.add(Scored.check(logits, labels))

    def add(self, batch: Scored) -> None:
        """Add a checked batch."""
        against = np.where(batch.labels == 1, -batch.logits, batch.logits)
        losses = np.maximum(against, 0.0) + np.log1p(batch.decay)
        self.total += float(losses.sum())
        self.examples += int(losses.size)

    def compute(self) -> float:
        """The mean over all examples so far, in nats."""
        return self.total / self.examples if self.examples else float("nan")

    def merge(self, other: LogLoss) -> None:
        """Add the examples of `other`."""
        self.total += other.total
        self.examples += other.examples

    def reset(self) -> None:
        """Forget all examples."""
        self.total, self.examples = 0.0, 0

    def state(self) -> State:
        """State for `load_state`, as JSON values."""
        return {"total": self.total, "examples": self.examples}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Restore `state`."""
        total, examples = state.get("total"), state.get("examples")
        if not _is_sum(total) or type(examples) is not int or examples < 0:
            raise _corrupt("logloss", f"its total is {total!r} and its examples are {examples!r}")
        self.total, self.examples = float(total), examples


@dataclass(frozen=True)
class Decile:
    """About a tenth of the examples, by prediction."""

    examples: int
    predicted: float
    observed: float


class Calibration:
    """The sum of predicted probabilities over the number of positives.

    1 is calibrated, 1.1 predicts 10% too much; `nan` until a positive has been seen.

    >>> calibration = Calibration()
    >>> calibration.update(torch.zeros(10), torch.tensor([1.0] * 4 + [0.0] * 6))
    >>> calibration.compute()
    1.25
    >>> calibration.deciles()
    [Decile(examples=10, predicted=0.5, observed=0.4)]
    """

    def __init__(self) -> None:
        self.examples: Ints = np.zeros(CALIBRATION_BINS, dtype=np.int64)
        self.positives: Ints = np.zeros(CALIBRATION_BINS, dtype=np.int64)
        self.predicted: Floats = np.zeros(CALIBRATION_BINS, dtype=np.float64)

    def update(self, logits: Tensor, labels: Tensor) -> None:
        """Add one batch, both `[batch]`."""
        self.add(Scored.check(logits, labels))

    def add(self, batch: Scored) -> None:
        """Add a checked batch."""
        bins = batch.bins(CALIBRATION_BINS)
        np.add.at(self.examples, bins, 1)
        np.add.at(self.positives, bins, batch.labels)
        self.predicted += np.bincount(bins, weights=batch.probabilities(), minlength=CALIBRATION_BINS)

    def compute(self) -> float:
        """Sum of predictions over sum of labels."""
        positives = int(self.positives.sum())
        return float(self.predicted.sum()) / positives if positives else float("nan")

    def ctr(self) -> float:
        """Share of positives; `nan` before the first example."""
        examples = int(self.examples.sum())
        return int(self.positives.sum()) / examples if examples else float("nan")

    def deciles(self) -> list[Decile]:
        """Mean prediction against share of positives, over tenths of the examples from the lowest prediction up.

        A bin is never split, so tenths are only nearly equal; an empty one is left out.
        """
        middle = np.cumsum(self.examples) - 0.5 * self.examples
        tenth = np.minimum(middle * 10 / max(int(self.examples.sum()), 1), 9).astype(np.int64)
        table = []
        for number in range(10):
            part = tenth == number
            examples = int(self.examples[part].sum())
            if examples:
                predicted, positives = float(self.predicted[part].sum()), int(self.positives[part].sum())
                table.append(Decile(examples, predicted / examples, positives / examples))
        return table

    def merge(self, other: Calibration) -> None:
        """Add the examples of `other`."""
        self.examples += other.examples
        self.positives += other.positives
        self.predicted += other.predicted

    def reset(self) -> None:
        """Forget all examples."""
        self.examples[:], self.positives[:], self.predicted[:] = 0, 0, 0.0

    def state(self) -> State:
        """State for `load_state`, as JSON values."""
        return {
            "bins": CALIBRATION_BINS,
            "examples": self.examples.tolist(),
            "positives": self.positives.tolist(),
            "predicted": self.predicted.tolist(),
        }

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Restore `state`."""
        _check_bins("calibration", state, CALIBRATION_BINS)
        examples, positives = _counts("calibration", state, ("examples", "positives"), CALIBRATION_BINS)
        predicted = state.get("predicted")
        if not isinstance(predicted, list) or len(predicted) != CALIBRATION_BINS or not all(map(_is_sum, predicted)):
            raise _corrupt("calibration", f"its predicted is not a list of {CALIBRATION_BINS} numbers of at least 0")
        self.examples, self.positives, self.predicted = examples, positives, np.array(predicted, dtype=np.float64)


class Metrics:
    """The trainer's metrics: AUC, log loss, calibration, click-through rate and the number of examples.

    A batch is checked and prepared once for all of them.

    >>> metrics = Metrics()
    >>> metrics.update(torch.tensor([1.0, -1.0]), torch.tensor([1.0, 0.0]))
    >>> {name: round(value, 3) for name, value in metrics.compute().items()}
    {'auc': 1.0, 'logloss': 0.313, 'calibration': 1.0, 'ctr': 0.5, 'examples': 2.0}
    """

    def __init__(self) -> None:
        self.auc = StreamingAUC()
        self.logloss = LogLoss()
        self.calibration = Calibration()

    def update(self, logits: Tensor, labels: Tensor) -> None:
        """Add one batch, both `[batch]`: 0.2 ms for 4096 examples on one core of an AMD EPYC."""
        self.add(Scored.check(logits, labels))

    def add(self, batch: Scored) -> None:
        """Add a checked batch."""
        self.auc.add(batch)
        self.logloss.add(batch)
        self.calibration.add(batch)

    def compute(self) -> dict[str, float]:
        """All metrics by name; `nan` if not defined yet (AUC needs both classes, calibration a positive)."""
        return {
            "auc": self.auc.compute(),
            "logloss": self.logloss.compute(),
            "calibration": self.calibration.compute(),
            "ctr": self.calibration.ctr(),
            "examples": float(self.logloss.examples),
        }

    def merge(self, other: Metrics) -> None:
        """Add the examples of `other`."""
        self.auc.merge(other.auc)
        self.logloss.merge(other.logloss)
        self.calibration.merge(other.calibration)

    def reset(self) -> None:
        """Forget all examples."""
        self.auc.reset()
        self.logloss.reset()
        self.calibration.reset()

    def state(self) -> State:
        """State for `load_state`, as JSON values."""
        return {
            "auc": self.auc.state(),
            "logloss": self.logloss.state(),
            "calibration": self.calibration.state(),
        }

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Restore `state`; a malformed state raises an error and changes nothing."""
        loaded = Metrics()
        for name in ("auc", "logloss", "calibration"):
            part = state.get(name)
            if not isinstance(part, Mapping):
                raise _corrupt(name, "it is missing")
            getattr(loaded, name).load_state(part)
        self.auc, self.logloss, self.calibration = loaded.auc, loaded.logloss, loaded.calibration


def _corrupt(metric: str, fact: str) -> CheckpointError:
    return CheckpointError(
        f"the saved state of {metric} does not fit: {fact}; load what state() gave, or reset() and count anew"
    )


def _is_sum(value: Any) -> TypeGuard[float]:
    return type(value) in (float, int) and 0 <= value < float("inf")


def _check_bins(metric: str, state: Mapping[str, Any], bins: int) -> None:
    if state.get("bins") != bins:
        raise _corrupt(metric, f"it has {state.get('bins')!r} bins and this version has {bins}")


def _counts(metric: str, state: Mapping[str, Any], names: tuple[str, ...], length: int | None) -> list[Ints]:
    """The named lists as arrays of one length, all whole numbers of at least 0."""
    arrays = []
    for name in names:
        values = state.get(name)
        if not isinstance(values, list) or not all(type(value) is int and 0 <= value < 1 << 63 for value in values):
            raise _corrupt(metric, f"its {name} is not a list of whole numbers of at least 0")
        length = len(values) if length is None else length
        if len(values) != length:
            raise _corrupt(metric, f"its {name} has {len(values)} entries, not {length}")
        arrays.append(np.array(values, dtype=np.int64))
    return arrays
