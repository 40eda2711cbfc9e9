"""`hotrow demo`: trains on a drifting click log, serves the model, publishes its updates, and writes a report.

Files, in reading order:
    run.py     the demo from start to end: measure, learn, serve, follow, look back
    stream.py  the click log as a live stream, with the clock as event time
    server.py  `hotrow serve` and the load generator as child processes
    load.py    the load generator: a program that imports only the standard library
    page.py    the report: one HTML file with inline SVG plots

Imported by the command line only. Training runs on the caller's thread; the server and the load are processes.
"""
