"""Benchmarks that need a GPU, behind `hotrow bench`. Kernels alone can also run under Triton's interpreter.

    device_clock.py    times on the device with CUDA events; the bandwidth of its memory and of PCIe
    kernels.py         each kernel by itself, against the time to move its bytes
    hbm.py             rows in HBM: training steps beside FBGEMM TBE
    hbm_find.py        the index beside HierarchicalKV; hit rates beside a fully associative cache
    hkv_operations.py  find with rows and insert-and-evict, for that comparison alone
    attention_gpu.py   jagged attention beside FlexAttention and padded SDPA
    pipeline_gpu.py    training with a lookahead, rows partly in HBM
    serve_gpu.py       an engine on a GPU

Each module's `results()` yields rows and progress messages; bench/ imports them by name, nothing else does.
"""
