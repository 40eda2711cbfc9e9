"""EmbeddingCollection (the sparse part), Recommender (which joins it with a tower), and the layers of towers.

    collection.py   EmbeddingCollection: keys in, vectors out
    recommender.py  Recommender: a collection and a tower
    tower_form.py   TowerForm: in which form a tower reads histories, and its user part
    mlp.py          MLP
    interaction.py  DotInteraction, FactorizationMachine
    cross.py        CrossLayer
    attention.py    LocalActivation
    jagged/         attention over histories without padding
    histories/      Transformer and HSTU blocks, target attention and search over such histories
    multitask.py    SharedBottom, MMoE, PLE: heads of several tasks
    sizes.py        checks of the sizes that a layer is built with

Imported by models, train, publish and serve. The training thread runs a model; pipelines call `route`, `prefetch` and
`stage` of later batches from threads of their own.
"""

from hotrow.nn.collection import EmbeddingCollection
from hotrow.nn.multitask import PLE, MMoE, SharedBottom
from hotrow.nn.recommender import Recommender

__all__ = ["PLE", "EmbeddingCollection", "MMoE", "Recommender", "SharedBottom"]
