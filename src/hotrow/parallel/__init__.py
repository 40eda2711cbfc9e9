"""Rows over ranks: who owns a key, how keys, rows and gradients travel, and what happens when a rank fails."""

from hotrow.parallel.ranks import Ranks, join_ranks

__all__ = ["Ranks", "join_ranks"]
