"""The sparse part (EmbeddingCollection), its seam to a tower (Recommender), and the layers that towers are made of."""

from hotrow.nn.collection import EmbeddingCollection
from hotrow.nn.recommender import Recommender

__all__ = ["EmbeddingCollection", "Recommender"]
