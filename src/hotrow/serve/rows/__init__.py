"""Row servers: `hotrow rows` serves the rows of exported models to tower servers.

    row_server_options.py  the options, all of them checked before anything starts
    row_server_process.py  the process: sockets, versions on demand, metrics, shutdown
    served_rows.py         ServedRows: one version's rows of some shards, which follow a bus
    shards.py              reads and filters the rows of some shards
    local_clients.py       clients on this machine, which read through shared memory
    status_page.py         /metrics, /live and /ready

The lookups themselves are answered by the core (core/rowserver/), without Python. Tower servers use
hotrow.tiers.rows. docs/decisions/0012-row-servers.md has the design. Imported by the command line and the supervisor.

Threads: the core's threads answer; each version has a follower; one thread for each client that connects locally.
"""
