"""Training benchmarks.

pipeline.py   overlapping stages: over SSD beside DRAM, and with and without lookahead
ranks.py      two ranks beside one
"""
