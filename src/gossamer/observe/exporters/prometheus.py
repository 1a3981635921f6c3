"""Prometheus: totals as a page of text that it scrapes, http://127.0.0.1:PORT/metrics.

source: Prometheus's text exposition format 0.0.4, and its rules for names: base units, _total for counters.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler
from itertools import accumulate
from socket import SHUT_RDWR
from socketserver import ThreadingTCPServer

from gossamer.events import Event
from gossamer.observe.exporters.totals import BOUNDS, LOGGED, STEP_DURATION, Instrument, Totals

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
SUFFIXES = {"s": "_seconds", "By": "_bytes"}
CLIENT_SECONDS = 10.0  # for one that sends nothing


class PrometheusExporter:
    """Serves one rank's totals. Raises OSError where the port is taken."""

    def __init__(self, host: str, port: int, labels: Mapping[str, str]) -> None:
        self._totals, self._lock, self._labels = Totals(), threading.Lock(), labels
        self._server = MetricsServer((host, port), self.text)
        threading.Thread(target=self._server.serve_forever, name="gossamer-prometheus", daemon=True).start()

    @property
    def port(self) -> int:
        return int(self._server.server_address[1])

    def take(self, events: Sequence[Event]) -> None:
        with self._lock:
            self._totals.take(events)

    def text(self) -> str:
        with self._lock:
            return "".join(f"{line}\n" for line in exposition(self._totals, self._labels))

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


class MetricsServer(ThreadingTCPServer):
    """Not http.server's: that asks a name server for the host's name, which may take a minute."""

    allow_reuse_address = True
    daemon_threads = True
    block_on_close = False

    def __init__(self, address: tuple[str, int], page: Callable[[], str]) -> None:
        self.page = page
        super().__init__(address, MetricsRequest)

    def handle_error(self, request: object, client_address: object) -> None:
        """A client that goes away is no error of this worker's."""


class MetricsRequest(BaseHTTPRequestHandler):
    """GET /metrics, of the server's page."""

    timeout = CLIENT_SECONDS
    server: MetricsServer

    def handle(self) -> None:
        """One request, which is over within CLIENT_SECONDS, also where it comes byte by byte."""
        timer = threading.Timer(CLIENT_SECONDS, self._cut_off)
        timer.daemon = True
        timer.start()
        try:
            super().handle()
        finally:
            timer.cancel()

    def _cut_off(self) -> None:
        with suppress(OSError):
            self.connection.shutdown(SHUT_RDWR)

    def do_GET(self) -> None:  # http.server's name
        found = self.path.partition("?")[0] == "/metrics"
        body = self.server.page().encode(errors="replace") if found else b"See /metrics\n"
        self.send_response(HTTPStatus.OK if found else HTTPStatus.NOT_FOUND)
        self.send_header("Content-Type", CONTENT_TYPE)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002  # http.server's name
        """Scrapes are not what a worker's log is for."""


def exposition(totals: Totals, labels: Mapping[str, str]) -> Iterator[str]:
    """The lines of the page."""
    duration = prometheus_name(STEP_DURATION)
    yield from _head(duration, "histogram", STEP_DURATION)
    for bound, steps in zip((*BOUNDS, float("inf")), accumulate(totals.durations), strict=True):
        yield _sample(f"{duration}_bucket", {**labels, "le": number(bound)}, steps)
    yield _sample(f"{duration}_sum", labels, totals.seconds)
    yield _sample(f"{duration}_count", labels, sum(totals.durations))
    for instrument, value in totals.counters.items():
        name = f"{prometheus_name(instrument)}_total"
        yield from _head(name, "counter", instrument)
        yield _sample(name, labels, value)
    for instrument, value in totals.gauges.items():
        yield from _head(prometheus_name(instrument), "gauge", instrument)
        yield _sample(prometheus_name(instrument), labels, value)
    if totals.logged:
        yield from _head(prometheus_name(LOGGED), "gauge", LOGGED)
    for metric, value in totals.logged.items():
        yield _sample(prometheus_name(LOGGED), {**labels, "metric": metric}, value)


def prometheus_name(instrument: Instrument) -> str:
    """gossamer.step.duration in s: gossamer_step_duration_seconds."""
    return instrument.name.replace(".", "_") + SUFFIXES.get(instrument.unit, "")


def number(value: float) -> str:
    """repr(float) without the differences between Python and Go."""
    return {"inf": "+Inf", "-inf": "-Inf", "nan": "NaN"}.get(text := repr(float(value)), text)


def escaped(text: str) -> str:
    return text.replace("\\", r"\\").replace("\n", r"\n").replace('"', r"\"")


def _head(name: str, kind: str, instrument: Instrument) -> Iterator[str]:
    yield f"# HELP {name} {instrument.meaning}."
    yield f"# TYPE {name} {kind}"


def _sample(name: str, labels: Mapping[str, str], value: float) -> str:
    told = ",".join(f'{label}="{escaped(text)}"' for label, text in labels.items())
    return f"{name}{{{told}}} {number(value)}"
