"""Cluster: feature work on other machines, through Ray. docs/ray.md is the guide.

`source.py` is the door, `window.py` one pass (what is under way, in order), `submit.py` a unit on its way, `worker.py`
what runs on the other side, `connect.py` how this process joins a cluster. Ray is imported when it is first used.
"""

from hotrow.data.cluster.source import OnRay, on_ray

__all__ = ["OnRay", "on_ray"]
