"""Jagged attention on the GPU: queries over the keys of their user, forward and backward, without padding.

    tiles.py            rows of all users cut into tiles, on the device; the longest work first
    problem.py          the checked inputs and tile sizes of one call, as arguments of the kernels
    scores.py           what the kernels share: rows of a tile, which keys a query sees, biases, buckets
    forward.py          outputs and the log-sums of exponentials
    query_gradients.py  gradients of queries and of their own keys, one program for a tile of queries
    key_gradients.py    gradients of keys and values, one program for a tile of keys
    bias_gradients.py   gradients of the two bias tables, as partial sums of a fixed number of programs
    backward.py         the three together

nn/jagged calls `forward` and `backward` for tensors on a GPU; nn/jagged/reference.py says what they compute. No scores
are stored and no atomics are used. Grids follow from shapes alone, so that a call never waits for the device and can be
captured in a CUDA graph.
"""
