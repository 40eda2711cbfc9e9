"""The HBM tier: a write-back cache of hot rows in GPU memory, over rows that live in DRAM or on SSD.

Tables with one row layout and one optimizer form a table group and share one set-associative cache. A batch finds all
keys of a group in one kernel launch. Rows that the cache lacks are uploaded from DRAM, and the rows that they evict are
written back. No result depends on what is cached.

    plan.py            HbmPlan: one batch through the cache, verb by verb
    group_batch.py     one batch in one table group: slots, uploads, evictions, update
    cache.py           HbmCache: the groups of a collection, their locks, streams and budget
    table_group.py     one table group: uploads, write-backs, flush, rebalancing
    group_cache.py     GroupCache: slots, pins and row metadata of one group
    staging_queue.py   staged batches whose rows are still being uploaded
    miss_list.py       a batch's missing keys, in one captured launch
    row_transfer.py    rows between DRAM and HBM: zero-copy reads, copies, write-back
    pinned_ring.py     the pinned ring buffer that these rows pass through
    capacity_split.py  how a group's slots are divided between its tables
    batch_layout.py    a batch's features as arrays on the device
    rows_below.py      RowsBelow: the tiers below HBM where a remote store is the last
    serving_reader.py  lookups of a server's lanes, and the filler that inserts what they missed
    jagged_reader.py   the same lookups of batches with any number of ids per feature
    client.py          DeviceClient: the requester's half of a plan whose rows other processes own
    owner.py           HbmOwner: the owner's half

Importers: nn, parallel, serve.execution, train and bench. The package imports tiers.host, kernels and device.

Threads: the training thread calls fetch, gather, update. With a lookahead, one thread prefetches and one stages later
batches; each group has a write-back thread. When serving, every lane has its own thread and one filler thread writes.
"""
