"""Prometheus: a rank's totals at http://127.0.0.1:PORT/metrics, served by prometheus_client (the extra
`prometheus`).

source: Prometheus's rules for names: base units, _total for counters.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import accumulate
from socket import SHUT_RDWR
from socketserver import ThreadingTCPServer

from prometheus_client import CollectorRegistry
from prometheus_client.exposition import MetricsHandler
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from gossamer.events import Event
from gossamer.observe.exporters.totals import BOUNDS, LOGGED, STEP_DURATION, Instrument, Totals

SUFFIXES = {"s": "_seconds", "By": "_bytes"}
CLIENT_SECONDS = 10.0  # for a whole request


class PrometheusExporter:
    """Serves one rank's totals. Raises OSError if the port is in use."""

    def __init__(self, host: str, port: int, labels: Mapping[str, str]) -> None:
        self._totals, self._lock = Totals(), threading.Lock()
        registry = CollectorRegistry()
        registry.register(TotalsCollector(self._totals, self._lock, labels))
        self._server = ScrapeServer((host, port), ScrapeRequest.factory(registry))
        threading.Thread(target=self._server.serve_forever, name="gossamer-prometheus", daemon=True).start()

    @property
    def port(self) -> int:
        return int(self._server.server_address[1])

    def take(self, events: Sequence[Event]) -> None:
        with self._lock:
            self._totals.take(events)

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


class TotalsCollector(Collector):
    """Totals as the metrics of prometheus_client. labels: of every sample."""

    def __init__(self, totals: Totals, lock: threading.Lock, labels: Mapping[str, str]) -> None:
        self._totals, self._lock, self._labels = totals, lock, labels

    def describe(self) -> Iterator[Metric]:
        """No metrics: otherwise registration would compare their names with those of other collectors."""
        return iter(())

    def collect(self) -> Iterator[Metric]:
        with self._lock:
            found = list(self._metrics())
        yield from found

    def _metrics(self) -> Iterator[Metric]:
        totals, names, values = self._totals, tuple(self._labels), tuple(self._labels.values())
        durations = HistogramMetricFamily(*_about(STEP_DURATION), labels=names)
        bounds = [*map(str, BOUNDS), "+Inf"]
        steps = [*map(float, accumulate(totals.durations))]
        durations.add_metric(values, [*zip(bounds, steps, strict=True)], totals.seconds)
        yield durations
        for instrument, total in totals.counters.items():
            counter = CounterMetricFamily(*_about(instrument), labels=names)
            counter.add_metric(values, total)
            yield counter
        for instrument, latest in totals.gauges.items():
            gauge = GaugeMetricFamily(*_about(instrument), labels=names)
            gauge.add_metric(values, latest)
            yield gauge
        if totals.logged:
            gauge = GaugeMetricFamily(*_about(LOGGED), labels=(*names, "metric"))
            for metric, latest in totals.logged.items():
                gauge.add_metric((*values, metric.encode(errors="replace").decode()), latest)
            yield gauge


def _about(instrument: Instrument) -> tuple[str, str]:
    """The name and the help text: gossamer.step.duration in s is gossamer_step_duration_seconds."""
    return instrument.name.replace(".", "_") + SUFFIXES.get(instrument.unit, ""), f"{instrument.meaning}."


class ScrapeServer(ThreadingTCPServer):
    """Replaces prometheus_client's server, which looks up the host name, for up to a minute, and in which a request
    that arrives byte by byte blocks a thread forever."""

    allow_reuse_address = True
    daemon_threads = True
    block_on_close = False

    def handle_error(self, request: object, client_address: object) -> None:
        """Ignore clients that disconnect."""


class ScrapeRequest(MetricsHandler):
    """GET /metrics, within CLIENT_SECONDS."""

    timeout = CLIENT_SECONDS

    def handle(self) -> None:
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

    def do_GET(self) -> None:  # noqa: N802  # http.server's name
        if self.path.partition("?")[0] == "/metrics":
            super().do_GET()
        else:
            self.send_error(404, "See /metrics")
