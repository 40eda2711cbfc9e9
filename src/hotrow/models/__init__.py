"""Towers: the dense part of well-known ranking models, one file each.

A tower is a plain torch module from the vectors of an embedding collection to logits: `tower(vectors: dict[str,
Tensor], dense: Tensor | None) -> Tensor`. A pooled feature comes as `[batch, width]`; an unpooled one as `[batch,
length, width]`, padded with zeros, with a bool mask `[batch, length]` under its name + "_mask". Any module with
this interface is a tower.
"""

from hotrow.models.dcn_v2 import DCNv2
from hotrow.models.deepfm import DeepFM
from hotrow.models.din import DIN
from hotrow.models.dlrm import DLRM
from hotrow.models.factory import build_tower
from hotrow.models.wide_and_deep import WideAndDeep

__all__ = ["DIN", "DLRM", "DCNv2", "DeepFM", "WideAndDeep", "build_tower"]
