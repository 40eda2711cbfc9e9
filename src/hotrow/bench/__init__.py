"""Benchmarks for users: `hotrow bench NAME`. Each compares with a peer or a target (called "bar") in the same run.

    harness.py   the list of benchmarks, Result, timing, output
    storage/     rows in DRAM, on SSD and in Redis; tiers; eviction policies; reading on Ray
    training/    the pipeline, and two ranks against one
    serving/     the server under load, and online learning
    sequences/   long histories: attention, encoders
    transports/  ways from a client of rows to a row server
    gpu/         the HBM tier, its kernels, and serving on a GPU
    servers/     Redis servers and a Kafka mock, started for a benchmark or a test

A benchmark is a module with `results()`, a generator of Results and of status lines. Imported by the command line, by
tests and by benchmarks/; it may import everything. benchmarks/README.md says what limits each figure.
"""

from hotrow.bench.harness import BENCHES, Result, run

__all__ = ["BENCHES", "Result", "run"]
