"""Benchmarks of long histories.

groups.py       hotrow bench sequences: the groups of rows, and HOTROW_BENCH_ONLY
workload.py     lengths of users' histories, and the sizes of all groups
attention.py    jagged attention beside torch's attention
encoder.py      a training step of a Transformer over histories beside the same on padded tensors
served_tower.py exported towers over one history, and requests of one user with many candidates
user_once.py    500 candidates over one encoding of their user, beside the history repeated for each; the user cache
user_server.py  the same requests at real servers: p50 and p99, with the user cache and without
two_stage_search.py  search in 10,000 events, beside attention to all and beside a short history
accuracy.py     AUC of towers over whole histories beside DIN over the newest 50 events

A group is a module with `results()`. A new group is a file and a line in groups.py.
"""
