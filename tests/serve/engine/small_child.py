"""A child of the supervisor that starts at once: it does what its options say, as an engine or a front end would.

It has the child's side of hotrow.serve.processes.child from its file, because importing hotrow takes seconds.
"""

from __future__ import annotations

import json
import os
import runpy
import sys

if __name__ == "__main__":
    options, lines = runpy.run_path(os.environ["PROCESSES_FILE"])["read_options"]()
    print(options.get("words", ""), file=sys.stderr, flush=True)
    if options.get("ready"):
        print(json.dumps({"event": "ready", "options": options, "environment": dict(os.environ)}), flush=True)
    if "code" in options:
        os._exit(options["code"])
    for line in lines:
        print(json.dumps({"event": "heard", "line": json.loads(line)}), flush=True)
