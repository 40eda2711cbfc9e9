"""The DRAM and SSD tiers. The C++ core holds the rows; these files check arguments and call it.

    store.py         HostStore: one table's rows
    stored_table.py  StoredTable: the interface of a table that tiers use
    plan.py          HostPlan: one batch over several tables
    client.py        HostClient: the requester's half of a plan whose rows other processes own
    owner.py         HostOwner: the owner's half
    row_staging.py   finds, loads and pins rows that a GPU loads and writes back
    core_errors.py   the core's exceptions as HotRow's

Imported by the other tiers, table, nn, parallel, train, publish, serve and inspect. Any number of threads may read one
store beside one that writes; plan.py (hotrow.tiers.plan) names the threads of a batch.
"""
