"""Rows on the GPU: reading them for a batch, updating them with gradients, and moving them to and from host memory.

    layout.py               a row's bytes, the cache's rows and a batch's own, how positions become outputs
    gather.py               slots to vectors, pooled or not
    runs.py                 positions grouped by row
    gradient_sums.py        each row's gradients, located and summed
    update.py               the optimizer's rule applied to the summed rows, in place
    rules.py                the update rules on a tile; the same bits as core/optim/rules.h
    counts.py               how often a row was seen, in 16 bits
    stochastic_rounding.py  fp32 to fp16 and bf16
    finite.py               whether all gradients of a batch are finite
    transfer.py             rows between slots, buffers and host memory
    serving_lookup.py       a server's lookup and its list of misses
    jagged_lookup.py        the same for any number of ids per feature
    quantize.py             int8 rows for serving

Every function enqueues on the caller's current stream. Slots are unique within a call unless it says otherwise.
"""
