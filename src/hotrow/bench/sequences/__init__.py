"""Benchmarks of long histories.

groups.py       hotrow bench sequences: the groups of rows, and HOTROW_BENCH_ONLY
workload.py     lengths of users' histories, and the sizes of all groups
attention.py    jagged attention beside torch's attention
encoder.py      a training step of a Transformer over histories beside the same on padded tensors
accuracy.py     AUC of towers over whole histories beside DIN over the newest 50 events

A group is a module with `results()`. A new group is a file and a line in groups.py.
"""
