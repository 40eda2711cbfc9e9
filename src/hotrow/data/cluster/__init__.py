"""Cluster: decoding and feature work on other machines, through Ray. docs/ray.md is the guide.

    source.py        OnRay, the source that `on_ray` returns
    window.py        one pass: the bounded, ordered window of units in flight
    submit.py        sends units to workers, as Ray tasks or to one actor
    worker.py        runs in the worker: decodes one unit
    wire_format.py   a decoded unit as JSON and arrays
    connect.py       joins this process to a Ray cluster

Ray is imported on first use. The trainer's thread iterates a pass; each pass has one more thread, which keeps its
window full.
"""

from hotrow.data.cluster.source import OnRay, on_ray

__all__ = ["OnRay", "on_ray"]
