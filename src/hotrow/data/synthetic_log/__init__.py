"""Synthetic log: a generated click log with a known ground truth, for demos, tests and benchmarks.

    clicks.py        SyntheticClicks, the source
    interests.py     LongInterests, a source whose clicks depend on events of long ago
    generated.py     GeneratedStream: batches, cursors and units of both
    shape.py         Shape: the features of an example, their sizes, and examples a day
    world.py         World: the ground truth that decides each click, and its Drift
    zipf.py          Zipf: how often each key appears
    counter_rng.py   random numbers by counter: example i needs no state of the examples before it

Everything is a pure function of the options and the example's number; any thread may call it.
"""
