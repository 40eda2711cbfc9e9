"""Benchmarks that people can run: `hotrow bench NAME`. Each compares with a peer or a bar in the same run."""

from hotrow.bench.harness import BENCHES, Result, run

__all__ = ["BENCHES", "Result", "run"]
