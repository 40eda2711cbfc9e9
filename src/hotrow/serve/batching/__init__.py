"""Batching: joins concurrent requests into batches and runs them on lanes, in the engine process.

In reading order:
    tensorbatch.py   queues, admission control, and when a batch is released
    miss_queue.py    holds requests with cold rows while the rows are loaded
    versions.py      the engine's models: loading a version while another serves, putting it in service
    shadow.py        copies of answered requests for a shadow version, run by idle lanes
    lookups.py       the part of a lane for requests that want looked-up vectors
    lanes.py         a lane's part of the path of a request: batch → version → logits → answers

Only serve/processes imports it. It imports serve/protocol, serve/updates/freshness.py, serve/repository/releases.py and
serve/load_estimate.py, and calls serve/execution only through the Servable protocol.

Threads: connection readers admit and queue requests, miss workers load rows, lanes run batches, command threads load
and unload versions. One lock guards the queues; versions are read without one.
"""
