"""A stand-in for an engine or a front end that starts at once and does what its options say.

It runs hotrow/serve/processes/child_runtime.py from its file, because importing hotrow takes seconds.
"""

from __future__ import annotations

import json
import os
import runpy
import sys

if __name__ == "__main__":
    options, lines = runpy.run_path(os.environ["CHILD_RUNTIME_FILE"])["read_options"]()
    print(options.get("stderr", ""), file=sys.stderr, flush=True)
    if options.get("ready"):
        print(json.dumps({"event": "ready", "options": options, "environment": dict(os.environ)}), flush=True)
    if "code" in options:
        os._exit(options["code"])
    for line in lines:
        print(json.dumps({"event": "line", "line": json.loads(line)}), flush=True)
