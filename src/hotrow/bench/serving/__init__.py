"""Serving benchmarks: `hotrow bench serve` and `hotrow bench online`.

serve.py           the results of `hotrow bench serve`
serve_model.py     the benchmark's model and its requests
serve_process.py   a server under test as a process
load_client.py     the load generator, a process that imports the standard library only
serve_peers.py     the same model behind LitServe and Ray Serve
serve_litserve.py  the LitServe peer's API class
online.py          the results of `hotrow bench online`
freshness.py       seconds from an event to an answer, on each bus
"""
