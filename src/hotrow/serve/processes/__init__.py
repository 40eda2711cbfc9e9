"""`hotrow serve` as processes: a supervisor, engines (models, rows, lanes) and front ends (ports).

Files in reading order:

    serve_options.py      ServeOptions: the command's options, checked before a process starts
    model_addresses.py    options that give an address for a model; hotrow rows uses it too
    supervisor.py         Supervisor: starts, restarts and ends the processes; holds the ports
    child.py              Child: the supervisor's handle of one process
    child_runtime.py      the child's side: options from stdin, events on stdout
    status_line.py        the terminal's status line
    devices.py            --devices: the device of each engine
    gpus.py               the usable GPUs, or why there are none
    gpu_probe.py          asks the driver, in a short process
    mps.py                NVIDIA's MPS, for several engines on one GPU
    frontend_process.py   a front end as a process
    engine_options.py     EngineOptions
    engine_process.py     EngineProcess: start, stop, clock and commands of one engine
    engine_socket.py      FrontendConnection: an engine's side of a front end's socket
    request_admission.py  RequestAdmission: the engine's first part of the path of a request
    engine_status.py      EngineStatus: models and figures as documents
    restore.py            Restore: makes a restarted engine serve the same versions

`hotrow.cli`, `hotrow.demo` and serve/rows import it; nothing else in serve does. The supervisor runs on its main
thread, with two reader threads for each child. engine_process.py lists the threads of an engine.
"""
