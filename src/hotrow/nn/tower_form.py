"""TowerForm: in which form a tower reads its histories, and which features its user part reads.

A tower says so by attributes, all optional:

    jagged          True: a history is `name` [events, dim] and `name_lengths` [entries]; False: padded, with a mask
    user_features   the names that `encode_user` reads; the tower then has two parts, a user part and a candidate part
    aligned         tuples of names that are columns of one history: equal lengths in every example
    prefixes        the columns of each history, as tuples, of a tower in which the encoding of an event depends
                    on it and on earlier events alone. Examples whose histories are beginnings of one history then share
                    its encoding: `<name>_visible` says how much each sees

An export also reads `numbers`, the names of features without rows, and `max_lengths`, the most events of a history by
feature (serve/repository/history_layout.py).

docs/decisions/0013-histories.md has the forms of the tensors.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

from hotrow.batch import KeyedBatch
from hotrow.errors import BatchError, OptionError


@dataclass(frozen=True)
class TowerForm:
    """The form of a tower's inputs."""

    jagged: bool = False
    user_features: tuple[str, ...] = ()
    aligned: tuple[tuple[str, ...], ...] = ()
    prefixes: tuple[tuple[str, ...], ...] | None = None

    @staticmethod
    def of(tower: nn.Module) -> TowerForm:
        """The form that a tower's attributes declare.

        >>> TowerForm.of(nn.Linear(2, 2))
        TowerForm(jagged=False, user_features=(), aligned=(), prefixes=None)
        """
        user_features = tuple(getattr(tower, "user_features", ()))
        aligned = tuple(tuple(group) for group in getattr(tower, "aligned", ()))
        jagged = bool(getattr(tower, "jagged", False))
        if user_features and not jagged:
            raise OptionError(
                f"the tower {type(tower).__name__} has user_features={user_features!r} and jagged=False; a user part "
                "reads jagged histories: set jagged = True"
            )
        for method in ("encode_user", "score") if user_features else ():
            if not callable(getattr(tower, method, None)):
                raise OptionError(
                    f"the tower {type(tower).__name__} has user_features={user_features!r} but no {method}(); write "
                    "it, or derive from hr.models.UserTower"
                )
        prefixes = getattr(tower, "prefixes", None) if user_features else None
        groups = None if prefixes is None else tuple(tuple(group) for group in prefixes)
        return TowerForm(jagged, user_features, aligned, groups)

    def arrange(self, batch: KeyedBatch) -> KeyedBatch:
        """The batch as the tower reads it: examples of one user share it, and aligned histories are of equal lengths.

        Raises BatchError for the first example where they are not.
        """
        for group in self.aligned:
            self._check_aligned(batch, group)
        if self.user_features and batch.user_of is not None:
            self._check_users(batch)
        return batch.share_users(self.user_features, self.prefixes) if self.user_features else batch

    def _check_users(self, batch: KeyedBatch) -> None:
        wanted = {name for name in self.user_features if name in batch.ids or name in batch.numbers}
        # A number of the user's events that the tower does not read is no harm: a source may serve several towers.
        unread = {
            name for name in batch.user_features if name in batch.numbers and batch.numbers[name].offsets is not None
        }
        if wanted != set(batch.user_features) - (unread - wanted):
            given = ", ".join(sorted(batch.user_features)) or "none"
            raise BatchError(
                f"the batch's users have the features {given}, but the tower's user part reads "
                f"{', '.join(sorted(wanted))}; give it the batch without users, or with "
                "batch.share_users(tower.user_features)"
            )

    def _check_aligned(self, batch: KeyedBatch, group: tuple[str, ...]) -> None:
        present = [name for name in group if name in batch.ids or name in batch.numbers]
        lengths = [batch.column(name).lengths() for name in present]
        for name, found in zip(present[1:], lengths[1:], strict=True):
            if found.numel() != lengths[0].numel():
                raise BatchError(f"{present[0]!r} has {lengths[0].numel()} entries and {name!r} {found.numel()}")
            if not torch.equal(found, lengths[0]):
                at = int((found != lengths[0]).nonzero()[0])
                raise BatchError(
                    f"{present[0]!r} and {name!r} are columns of one history, but entry {at} has {int(lengths[0][at])} "
                    f"and {int(found[at])} events; give both one length"
                )
