"""A plan whose rows another object owns: other ranks, or a remote store.

    transport.py   Transport: the exchange of requests, rows and gradients between processes; LocalTransport
    plan.py        ShardedPlan: the plan protocol over clients, an owner and a transport
    rows_ahead.py  RowsAhead: rows that are sent before their batch's turn

It may import tiers/plan.py, tiers/batch_values.py and the host tier. hotrow.nn and hotrow.parallel build the plans. The
threads that call are those of the plan protocol (tiers/plan.py).
"""
