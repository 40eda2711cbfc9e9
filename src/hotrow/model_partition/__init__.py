"""Partition: cut a plain torch model into an EmbeddingCollection and a tower.

    partition.py    partition: the whole way, and PartitionedRecommender, which makes batches of the model's inputs
    cut.py          finds the lookups in an exported graph, and what cannot be cut
    nested.py       nested arguments of a model
    key_part.py     the graph from the model's inputs to the keys of its lookups
    tower_part.py   the rest as a tower, with its weights

Imported by users through `hr.partition`. Nothing in hotrow imports it. One thread.
"""

from hotrow.model_partition.partition import PartitionedRecommender, partition

__all__ = ["PartitionedRecommender", "partition"]
