"""Predictions: the outputs of a model's tower, and the link from logits to predictions by the kinds of its tasks.

A model without named tasks, or with binary ones alone, has the outputs `probabilities` and `logits`. A model with a
regression or a count has `predictions` and `logits`: the column of each task is a probability, a value or a rate. There
a name that says "probabilities" would be wrong.

Pure functions over arrays; any thread may call them.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from hotrow.serve.protocol.request import Array, Signature

LOGITS = "logits"
_MAX_EXP, _ONE = np.float32(88), np.float32(1)  # exp(88) is finite in float32, exp(89) is not


def tower_outputs(signature: Signature) -> tuple[str, str]:
    """The names of the outputs of a model's tower.

    >>> tower_outputs(Signature(("user",), frozenset(), 0))
    ('probabilities', 'logits')
    """
    return ("probabilities" if all(kind == "binary" for kind in signature.kinds) else "predictions", LOGITS)


def predictions(logits: Array, kinds: Sequence[str] = ()) -> Array:
    """Probabilities, values or rates of logits `[rows]` or `[rows, tasks]`, by the kind of each task.

    >>> predictions(np.zeros((1, 3), np.float32), ["binary", "regression", "count"]).tolist()
    [[0.5, 0.0, 1.0]]
    """
    if all(kind == "binary" for kind in kinds):
        return sigmoid(logits)
    found = np.array(logits, dtype=np.float32).reshape(len(logits), len(kinds))
    for place, kind in enumerate(kinds):
        if kind == "binary":
            found[:, place] = sigmoid(found[:, place])
        elif kind == "count":
            with np.errstate(over="ignore"):
                np.exp(found[:, place], out=found[:, place])
    return found.reshape(logits.shape)


def sigmoid(logits: Array) -> Array:
    """Probabilities, without overflow and with small ones exact to rounding."""
    found = np.negative(logits)
    np.minimum(found, _MAX_EXP, out=found)
    np.exp(found, out=found)
    found += _ONE
    return np.reciprocal(found, out=found)
