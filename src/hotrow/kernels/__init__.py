"""GPU kernels in Triton: the index of rows in HBM, the rows themselves, and attention over histories. One operation a
file, with its launcher.

    launch.py          launches without Triton's per-call work: `@cached_launch`
    current_stream.py  the calling thread's CUDA stream, in one C call
    graph_capture.py   the stream and the lock under which CUDA graphs are captured
    index/             keys to slots: find, insert, evict, score
    rows/              slots to vectors, gradients to rows, and transfers between HBM and host memory
    attention/         queries over the keys of their user: jagged attention, forward and backward

Imported by tiers/hbm, device and serve/execution (and bench), and only once a tier in HBM is configured; and by
nn/jagged at its first call on a GPU. So Triton is not needed without a GPU. Launchers enqueue on the calling thread's
current stream and never wait for the device; any thread may call them, and callers order streams that touch the same
tensors. Given the same input, the result is the same bits on every run of one GPU. Under `TRITON_INTERPRET=1` the same
kernels run on CPU tensors. tests/kernels compares each with a reference in plain torch (tests/kernels/reference.py;
attention's is nn/jagged/reference.py).
"""
