"""The protocol: encodes and decodes the messages of clients, front ends and engines, without a network.

Files in reading order:

    request.py         Request, Answer, Signature, RefusedError: the values that flow through the server
    limits.py          Limits: how much one client and all clients may use
    backend.py         Backend: the interface between a front end and the models
    inference_json.py  RequestParser: bodies of the Open Inference Protocol to Requests; write_answer
    predictions.py     the outputs of a tower, and the link from logits to predictions by task
    tensors.py         a tensor's declaration and its elements, from bytes or JSON
    histories.py       checks lengths of histories and aligned columns
    input_layout.py    Layout: converts input tensors to the columns of a signature
    raw_columns.py     RawColumns: converts raw columns by the model's feature spec
    embedding_outputs.py  EmbeddingOutputs: the looked-up vectors that a request may ask for
    lookup_plan.py     LookupPlan: the ids of a request that wants only such vectors
    frames.py          requests and answers as flat bytes between front end and engine (docs/formats/frames.md)
    user_join.py       joins requests for a tower with a user part; the entry of all joins
    lookup_frames.py   the same for requests that want vectors
    metrics.py         every metric, and Prometheus' text format

All packages of serve may import it. Except for the caches of RequestParser and the counters of metrics, which belong to
a front end's event loop, its functions are pure and any thread may call them.
"""
