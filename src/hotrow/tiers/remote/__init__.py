"""The remote tier: rows in Redis or RocksDB, with a cache in DRAM. A server reads them; the trainer publishes them.

    store.py             RemoteStore: the protocol of a store; `open_remote`, `write_publication`, `fill`
    redis_store.py       RedisStore: rows in Redis or Redis Cluster
    redis_batch.py       one batched read from Redis
    redis_nodes.py       which nodes own which slots, and which are up
    redis_connection.py  connections and pipelined requests
    redis_options.py     options and URLs
    redis_scripts.py     the Lua scripts that write rows
    row_server_store.py  RowServerStore: row servers below a cache (tiers/rows/)
    rocksdb_store.py     RocksStore: rows in RocksDB on a local disk
    export_store.py      ExportStore: the rows of an exported version, read from its own files
    fallback_store.py    FallbackStore: several stores, read in order
    ssd_limit.py         bounds the SSD folder of a cache over a store
    read_only.py         the refusal of stores that are only read to be written
    row_encoding.py      a row's values as bytes
    cached_rows.py       CachedTable: a table's cache in DRAM over a store
    tables.py            RemoteTables: all tables of a collection over one store
    owner.py             RemoteOwner: the owner's half of a plan
    below_hbm.py         RemoteBelow: all this below a cache in HBM

Imported by table, nn, serve and bench. Any number of threads may read a store beside one that writes.
"""
