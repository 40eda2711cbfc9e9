"""HotRow: recommendation models whose embedding tables are larger than GPU memory, and larger than RAM.

    import hotrow as hr

    embeddings = hr.EmbeddingCollection(
        tables=[
            hr.Table("user", dim=32, features=["user_id"]),
            hr.Table("item", dim=32, features=["item_id", "recent_items"]),
        ],
        optimizer=hr.optim.Adam(lr=1e-3),
        memory=hr.Memory(dram="4GiB"),
    )
    model = hr.Recommender(embeddings, tower=hr.models.DLRM(embeddings.features, dense_features=13))
    hr.Trainer(model).fit(hr.data.parquet("clicks/*.parquet", features=spec))

Everything public is listed below; the rest may change.
"""

from hotrow import data, features, models, nn, optim
from hotrow._core import set_threads, threads
from hotrow.batch import Jagged, KeyedBatch
from hotrow.config import Initial, Memory
from hotrow.errors import (
    BatchError,
    BusError,
    CheckpointError,
    ClusterError,
    DataError,
    GradientError,
    HotRowError,
    MemoryBudgetError,
    OptionError,
    PublishError,
    RankError,
    RepositoryError,
    StorageError,
)
from hotrow.features import FeatureSpec
from hotrow.interop import from_keyed_jagged, from_torch, to_keyed_jagged
from hotrow.model_partition import partition
from hotrow.nn import EmbeddingCollection, Recommender
from hotrow.parallel import Ranks, join_ranks
from hotrow.publish.publisher import Publish
from hotrow.publish.subscriber import Subscriber
from hotrow.serve.execution.engine import Engine
from hotrow.serve.repository.export import export
from hotrow.table import Admission, Expiry, Table
from hotrow.task import Task
from hotrow.train.report import Report, SaveReport
from hotrow.train.trainer import Trainer

__version__ = "0.2.0"

__all__ = [
    "Admission",
    "BatchError",
    "BusError",
    "CheckpointError",
    "ClusterError",
    "DataError",
    "EmbeddingCollection",
    "Engine",
    "Expiry",
    "FeatureSpec",
    "GradientError",
    "HotRowError",
    "Initial",
    "Jagged",
    "KeyedBatch",
    "Memory",
    "MemoryBudgetError",
    "OptionError",
    "Publish",
    "PublishError",
    "RankError",
    "Ranks",
    "Recommender",
    "Report",
    "RepositoryError",
    "SaveReport",
    "StorageError",
    "Subscriber",
    "Table",
    "Task",
    "Trainer",
    "__version__",
    "data",
    "export",
    "features",
    "from_keyed_jagged",
    "from_torch",
    "join_ranks",
    "models",
    "nn",
    "optim",
    "partition",
    "set_threads",
    "threads",
    "to_keyed_jagged",
]
