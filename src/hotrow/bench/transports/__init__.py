"""Transports for batched row lookups: `hotrow bench transports`. docs/decisions/0011-row-transport.md has its table.

    row_transports.py  the results of `hotrow bench transports`
    sides.py           one server process and one client process: what a turn measures
    transport.py       Transport and Connection, which every transport implements; the rows that a server has
    flight.py          Arrow Flight: DoExchange, DoGet, DoPut
    grpc_calls.py      gRPC: unary calls and streams, threaded and asyncio servers
    gloo.py            torch.distributed send and recv over Gloo
    zeromq.py          ZeroMQ, if pyzmq is installed
    plain_sockets.py   a blocking loop over one TCP connection, in Python
    in_process.py      no transport: the store called where the client is, the limit of all

To add a transport: a module with a frozen dataclass that implements Transport, and its name in row_transports.MODULES.
"""
