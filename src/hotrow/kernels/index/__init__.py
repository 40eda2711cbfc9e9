"""The GPU index: which slot of HBM holds a key's row. Sets of eight ways, two choices of set for each key.

    key_hash.py          a key's hash, and the two sets that it picks
    sets.py              SetIndex: the tensors of keys, pins and scores
    find.py              keys to slots; pins the found ones for a batch
    dedup.py             the absent keys of a batch, and unique (table, key) pairs
    insert.py            slots for new keys and the rows they evict; writing and erasing keys
    miss_report.py       the report of missing keys for the host; index entries of fetched rows
    touch.py             scores: lru and lfu
    launch_arguments.py  arguments that a captured graph reads from the device

Every function enqueues on the current stream of its caller and returns. Streams that share an index are ordered by
tiers/hbm. Results are functions of the index and the input: no atomics decide anything.
"""
