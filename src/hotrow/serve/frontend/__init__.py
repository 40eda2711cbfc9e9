"""The front end: HTTP, gRPC and metrics ports over a Backend. A server runs it in processes of its own.

Files in reading order:

    ports.py               Frontend: the ports of one process, and their options
    service.py             Service: the rules that HTTP and gRPC share; `infer` is the front end's part of a request
    canary.py              which requests a canary version gets, and its fallback to the stable one
    load_shedding.py       LoadShedder: refuse requests before they are parsed when the engine is saturated
    answer_bytes.py        AnswerBytes: bounds the memory of answers with looked-up vectors
    authorization.py       decides which callers may load and unload models
    descriptions.py        server and model metadata as the protocol's documents
    http_server.py         HttpServer: a port, its connections and shared limits
    http_connection.py     HttpConnection: one client's connection: parse, handle, reply
    http_message.py        HttpRequest, Call and Reply
    http_protocol.py       HttpProtocol: paths to calls of the Service; the metrics page
    grpc_server.py         GrpcServer: the same over gRPC
    grpc_messages.py       the protocol's gRPC messages, built from a table
    engine_client.py       EngineClient: the Backend over engine processes
    engine_connection.py   EngineConnection: one engine's socket and the requests in flight
    engine_statistics.py   figures of several engines, added up

serve/processes imports it. Everything runs on one event loop, except the parsing of large bodies (service.py).
"""
