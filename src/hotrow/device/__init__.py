"""CUDA streams, copies between host and device, and traces of them. Without a GPU, nothing waits and nothing is copied.

    streams.py         streams, their order, copies to and from the device, captured steps
    device_to_host.py  HostCopy: an asynchronous copy to the host (imports no Triton)
    stream_trace.py    when work ran on each stream, for a trace

Importers: tiers.hbm, parallel, train. Any thread, each on its own stream.
"""
