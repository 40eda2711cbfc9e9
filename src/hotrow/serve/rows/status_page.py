"""The HTTP port of a row server: /metrics for Prometheus, /live and /ready for probes. It serves nothing else."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from hotrow.errors import OptionError

Sample = tuple[str, dict[str, str], float]

HELP = {
    "hotrow_rows_lookups_total": "lookups answered",
    "hotrow_rows_keys_total": "keys looked up",
    "hotrow_rows_restored_total": "keys read at an earlier publication than the one in service",
    "hotrow_rows_publication": "the publication in service",
    "hotrow_rows_oldest_publication": "the oldest publication that can still be read",
    "hotrow_rows_history_bytes": "memory of old values of rows that changed recently",
    "hotrow_rows_rows": "rows of the served shards",
    "hotrow_rows_connections": "connections that may read",
    "hotrow_rows_accepted_total": "connections accepted",
    "hotrow_rows_refused_total": "connections refused: too many, a wrong token, or another model",
    "hotrow_rows_malformed_total": "frames that break the protocol",
    "hotrow_rows_stalled_total": "connections closed because their peer read no answer",
    "hotrow_rows_cold_total": "lookups that had to read from SSD",
    "hotrow_rows_errors_total": "lookups answered with an error",
    "hotrow_rows_bytes_in_total": "bytes received over TCP",
    "hotrow_rows_bytes_out_total": "bytes sent over TCP",
    "hotrow_rows_following": "1 while the rows follow their bus",
}


def format_metrics(samples: list[Sample]) -> str:
    """Samples in Prometheus's text format.

    >>> print(format_metrics([("hotrow_rows_publication", {"model": "ctr"}, 7)]), end="")
    # HELP hotrow_rows_publication the publication in service
    # TYPE hotrow_rows_publication gauge
    hotrow_rows_publication{model="ctr"} 7
    """
    lines: list[str] = []
    for name in dict.fromkeys(sample[0] for sample in samples):
        lines.append(f"# HELP {name} {HELP[name]}")
        lines.append(f"# TYPE {name} {'counter' if name.endswith('_total') else 'gauge'}")
        for _, labels, value in (sample for sample in samples if sample[0] == name):
            text = ",".join(f'{label}="{content}"' for label, content in labels.items())
            lines.append(f"{name}{{{text}}} {value:g}" if text else f"{name} {value:g}")
    return "".join(f"{line}\n" for line in lines)


class StatusPage:
    """Listens on `host` and `port`. `ready` returns why the server is not ready, or an empty text."""

    def __init__(self, host: str, port: int, samples: Callable[[], list[Sample]], ready: Callable[[], str]) -> None:
        class Handler(BaseHTTPRequestHandler):
            timeout = 10

            def do_GET(self) -> None:
                if self.path == "/metrics":
                    self._answer(200, format_metrics(samples()), "text/plain; version=0.0.4")
                elif self.path in ("/live", "/v2/health/live"):
                    self._answer(200, "live\n")
                elif self.path in ("/ready", "/v2/health/ready"):
                    why = ready()
                    self._answer(503 if why else 200, f"{why or 'ready'}\n")
                else:
                    self._answer(404, "there are /metrics, /live and /ready\n")

            def _answer(self, status: int, text: str, kind: str = "text/plain") -> None:
                body = text.encode()
                self.send_response(status)
                self.send_header("Content-Type", kind)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *given: Any) -> None:
                """Log nothing for each request."""

        class Server(ThreadingHTTPServer):
            address_family = socket.AF_INET6 if ":" in host else socket.AF_INET
            daemon_threads = True

        try:
            self._server = Server((host, port), Handler)
        except OSError as error:
            raise OptionError(
                f"--metrics {port}: cannot listen on {host} ({error.strerror}); stop what does, or give another port"
            ) from None
        self.port = int(self._server.server_address[1])
        threading.Thread(target=self._server.serve_forever, name="hotrow-rows-status", daemon=True).start()

    def close(self) -> None:
        """Stop listening."""
        self._server.shutdown()
        self._server.server_close()
