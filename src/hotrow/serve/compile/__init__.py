"""Compilation: a tower compiled for padded shapes (buckets) in a process of its own, while the original graph serves.

In reading order:
    buckets.py            which shapes to compile, and how a batch is split over the compiled ones
    compiler.py           the manager: a queue of shapes and one thread that obtains an artifact for each
    compiler_process.py   the process that compiles, at low priority
    graph_partition.py    compiled pieces and eager ops, for a tower that the compiler refuses as a whole
    artifacts.py          the private cache of compiled artifacts
    compiled_tower.py     loads an artifact and runs it without the interpreter lock

serve/execution imports it. It imports serve/graph.

Threads: lanes count shapes and request buckets; the manager's thread does the rest.
"""
