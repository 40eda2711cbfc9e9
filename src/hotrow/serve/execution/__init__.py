"""Execution: one version of a model in this process, from a batch of joined requests to logits.

In reading order:
    engine.py               hr.Engine: look up rows, run the tower, apply updates between two batches
    answer.py               Answer: what it returns for a batch
    opening.py              opens a version: its rows and its graphs
    version_rows.py         a version's rows: loaded here, in remote stores, or on row servers
    servable.py             adapts an engine for lanes, with its bus follower
    reader_writer_gate.py   batches hold it shared, an update holds it exclusively
    user_part.py            users of a batch: probe the cache, encode those that it lacks
    user_cache.py           UserCache: encodings by features, publication and weights
    encodings.py            cuts encodings into users and joins them
    scoring.py              encodes users, then runs the tower for ranges of rows
    two_part_tower.py       TwoPartTower: the user part and the candidate part, with one set of weights
    tower_weights.py        replaces the weights of all that run a tower
    towers.py               runs a tower on compiled buckets, otherwise on the original graph
    artifact_check.py       compares and times an artifact before it takes traffic
    padded_inputs.py        each lane's padded input tensors, per bucket
    cuda_graphs.py          a bucket as a captured CUDA graph
    device_lane.py          on a GPU: lookup and tower of a batch as two captured graphs
    jagged_lane.py          the same for a batch with multi-hot features or histories
    jagged_lanes.py         which buckets of those are captured, and when
    padding_check.py        finds towers whose logits change with padding
    tower_precision.py      fp32, tf32, bf16, fp16

serve/processes and users (hr.Engine) import it. It imports serve/compile, updates, repository, graph and protocol.

Threads: any number of lanes run batches at the same time; one thread applies updates; the compiler's thread puts new
artifacts in service.
"""
