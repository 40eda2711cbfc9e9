"""Rows on row servers: a tower server reads its rows from other processes, over TCP or shared memory.

    handshake.py    the hello and the welcome of a connection, with proofs of the token; both sides use it
    cluster_file.py which row servers there are: a list of addresses, a cluster.toml, DNS names, a set in Redis
    topology.py     which server has which shards
    row_servers.py  RowServers: connects to the servers, watches them, reads rows through the core's client
    client.py       RowServerClient: the requester's half of a plan; chooses what servers pool
    tables.py       RowServerTables: a collection's tables over row servers; the owner's half of its plans

docs/decisions/0012-row-servers.md has the design, docs/formats/rows-protocol.md the frames. The servers' side is
hotrow.serve.rows. Imported by nn and serve.

Threads: one for each server connects and pings; any number of lanes look up.
"""
