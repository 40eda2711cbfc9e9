"""Several processes train one model. By default each rank owns some shards' rows, reads some of the batches and has the
whole tower; with `rows=R` the last R ranks own all rows, and the others have batches and towers.

    ranks.py              Ranks: meeting, channels, agreement; join_ranks
    ownership.py          which rank owns a key
    rank_plans.py         the plans of a collection over ranks
    rank_transport.py     the exchange of keys, rows and gradients
    rank_batches.py       which batches a rank reads
    dense_all_reduce.py   the tower's gradients
    exchange.py           Channel: all-to-all and all-gather over one carrier
    backend.py            NCCL or Gloo
    shared_memory.py      ranks of one machine
    health.py             heartbeats, failure reports, the name of the rank that failed
    watchdog.py           the end of a process whose device waits for ever
    launch.py             `hotrow train --ranks N`

It may import tiers, table and data; nn, train, publish and the command line import it. The training thread, the route
thread, backward's hooks and a background save enter it, each on a channel of its own (ranks.py).
"""

from hotrow.parallel.ranks import Ranks, join_ranks

__all__ = ["Ranks", "join_ranks"]
