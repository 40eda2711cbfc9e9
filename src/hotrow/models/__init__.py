"""Towers: the dense part of well-known ranking models, one file each.

A tower is a plain torch module from the vectors of an embedding collection to logits: `tower(vectors: dict[str,
Tensor], dense: Tensor | None) -> Tensor`. A pooled feature comes as `[batch, width]`; an unpooled one as `[batch,
length, width]`, padded with zeros, with a bool mask `[batch, length]` under its name + "_mask". Any module with
this interface is a tower.

Towers over histories derive from UserTower: they have a user part and a candidate part, and read histories in jagged
form, `[events, width]` with the lengths under name + "_lengths" (docs/histories.md).

    dlrm.py dcn_v2.py deepfm.py wide_and_deep.py din.py   towers over pooled features, and DIN over a padded history
    user_tower.py       UserTower: the two parts; HistoryReader: how a tower reads one history
    history.py          History: the columns of a history
    prefix_ranker.py    BST, HSTU
    sasrec.py           SASRec
    sim.py              SIM
    jagged_din.py       JaggedDIN
    ranking_top.py tower_top.py   from the vectors of a row to logits
    inputs.py part_vectors.py     checks of what a tower reads
    factory.py          build_tower: a tower from a job file's options
"""

from hotrow.models.dcn_v2 import DCNv2
from hotrow.models.deepfm import DeepFM
from hotrow.models.din import DIN
from hotrow.models.dlrm import DLRM
from hotrow.models.factory import build_tower
from hotrow.models.history import History
from hotrow.models.jagged_din import JaggedDIN
from hotrow.models.prefix_ranker import BST, HSTU
from hotrow.models.sasrec import SASRec
from hotrow.models.sim import SIM
from hotrow.models.user_tower import HistoryReader, UserTower
from hotrow.models.wide_and_deep import WideAndDeep

__all__ = [
    "BST",
    "DIN",
    "DLRM",
    "HSTU",
    "SIM",
    "DCNv2",
    "DeepFM",
    "History",
    "HistoryReader",
    "JaggedDIN",
    "SASRec",
    "UserTower",
    "WideAndDeep",
    "build_tower",
]
