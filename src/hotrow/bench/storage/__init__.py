"""Storage benchmarks.

rows.py       rows in DRAM, beside FBGEMM and torch
ssd.py        rows on SSD, beside the raw device and RocksDB
tiers.py      training over SSD, beside training in DRAM
remote.py     rows read from a Redis cluster, beside redis-py
eviction.py   hit rates of eviction policies, simulated
read.py       decoding on Ray workers, beside decoding in-process
"""
