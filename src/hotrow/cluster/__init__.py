"""Cluster: a training job's ranks on the nodes of a Ray cluster, `hotrow train job.toml --on ADDRESS`. docs/ray.md is
the guide.

    driver.py            starts the ranks, watches them, and starts the job anew when one dies
    resources.py         what a rank of each role takes, and whether the cluster's nodes have it
    placement.py         reserves it: one placement group with a bundle for each rank
    rank_actor.py        runs on a node: starts one rank as a process, passes on its output and signals
    default_signals.py   the program through which the rank starts
    terminal.py          all ranks' lines and rank 0's progress bar on one terminal

A rank is a process `hotrow train job.toml` in the environment that every launcher sets: training knows nothing of Ray.
The command line imports this package, and job.py its resources. Ray is imported on first use. One thread of the driver
enters; an actor has a few threads of its own.
"""

from hotrow.cluster.driver import ClusterJob, train_on_cluster

__all__ = ["ClusterJob", "train_on_cluster"]
