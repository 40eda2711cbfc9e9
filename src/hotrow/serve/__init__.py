"""The path of a request, and the map of serving.

**Front end process** (one event loop)
     1  protocol         HttpConnection → HttpProtocol._infer, or GrpcCalls.ModelInfer      frontend/
     2  load shedding    LoadShedder.should_shed before the body is kept, at_limit after    frontend/load_shedding.py
     3  parse            RequestParser.parse → Request                                      protocol/inference_json.py
     4  choose engine    EngineClient.infer: the engine with the fewest rows in flight      frontend/engine_client.py
     5  send             frames.write_request, over a Unix socket                           protocol/frames.py
   Service.infer (frontend/service.py) calls 2 to 5 in this order. During a canary it chooses the version after 3
   (frontend/canary.py).

**Engine process** (a reader thread for each connection, then a lane)
     6  scan             FrontendConnection: socket → frames                                processes/engine_socket.py
     7  admission        TensorBatch.admit: 429 if it would miss its deadline or exceed limits batching/tensorbatch.py
     8  cold rows        MissQueue.defer_cold: hold it while SSD or remote rows are loaded  batching/miss_queue.py
     9  TensorBatch      TensorBatch.enqueue; a free lane calls TensorBatch.take            batching/tensorbatch.py
    10  join             user_join.join: requests → one KeyedBatch; the core dedups keys    protocol/user_join.py
    11  rows             Engine.answer: HBM, DRAM, SSD, remote, at one publication          execution/engine.py
    12  tower            Towers.answer: pad to a bucket, run compiled; or the original      execution/towers.py
   A tower with a user part encodes each user once between 11 and 12, or finds the encoding in a cache: then 11 reads no
   row of that user (execution/user_part.py).
    13  answer           Lanes._send_answers: split, one send for each front end            batching/lanes.py
   RequestAdmission.receive (processes/request_admission.py) calls 7 to 9, Lanes._run_pieces 10 to 13. A copy for a
   shadow version runs later, on an idle lane (batching/shadow.py).

**Front end process**
    14  reply            EngineConnection → write_answer → HttpConnection, or gRPC          frontend/, protocol/

Packages, each opening with its own map:

    rows/          `hotrow rows`: row servers, which hold rows for tower servers
    processes/     `hotrow serve`: supervisor, front end and engine processes, their options
    frontend/      HTTP, gRPC and metrics ports; load shedding; connections to engines
    protocol/      the Open Inference Protocol and the frames between front end and engine, without a network
    batching/      admission, TensorBatch, cold rows, lanes, the models and versions of an engine
    execution/     Engine: rows, buckets, CUDA graphs and the tower, also without a server
    compile/       buckets and their compiler process
    updates/       applies publications to a running engine: follow a bus, cut over, freshness
    repository/    exported models on disk
    graph/         the exported tower as a graph
    load_estimate  estimates the duration of batches and the load of lanes

`hotrow.cli`, `hotrow.bench` and `hotrow.demo` import this package; nothing below it does. Imports inside go downwards
only, and import-linter checks it (pyproject.toml): rows → processes → frontend, batching → execution → compile →
updates → repository → graph → protocol → load_estimate. frontend and batching do not import each other: they are
different processes and share only protocol/.
"""
