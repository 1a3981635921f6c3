"""OTLP: totals to an OpenTelemetry collector, over HTTP with the JSON encoding.

OpenTelemetry's own exporter is not used. It reads the whole response: an endpoint with an endless response filled
2.4 GB of memory in 12 seconds, with a timeout of 2. It also logs its own lines about each failure, and needs nine
packages.

source: opentelemetry/proto/metrics/v1/metrics.proto and proto3's JSON mapping: 64-bit integers and non-finite numbers
are strings.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from http.client import HTTPConnection, HTTPResponse, HTTPSConnection
from math import inf, isfinite
from typing import Any
from urllib.parse import unquote, urlsplit

from gossamer.events import Event
from gossamer.observe.exporters.totals import BOUNDS, LOGGED, STEP_DURATION, Instrument, Totals
from gossamer.version import __version__

EVERY_SECONDS = 10.0
ANSWER_SECONDS = 5.0
CUMULATIVE = 2  # AggregationTemporality
PATH = "/v1/metrics"
HEADERS = "OTEL_EXPORTER_OTLP_HEADERS"
Attributes = Mapping[str, str | int]


class OtlpExporter:
    """Posts one rank's totals every ten seconds, and at the end. attributes: of the resource; rank: of each point."""

    def __init__(
        self, url: str, rank: int, attributes: Attributes, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._url, self._rank, self._attributes, self._clock = url, rank, attributes, clock
        self._totals = Totals()
        self.unsent = 0  # events in the totals since the last successful post
        self._next = clock() + EVERY_SECONDS

    def take(self, events: Sequence[Event]) -> None:
        self._totals.take(events)
        self.unsent += len(events)
        if self._clock() >= self._next:
            self._next = self._clock() + EVERY_SECONDS
            self._post()

    def close(self) -> None:
        self._post()

    def _post(self) -> None:
        body = json.dumps(request(self._totals, self._rank, self._attributes, time.time())).encode()
        headers = {"Content-Type": "application/json", **parse_headers(os.environ.get(HEADERS, ""))}
        post(self._url, body, headers, ANSWER_SECONDS)
        self.unsent = 0


def metrics_url(endpoint: str) -> str:
    """URL of the metrics at an endpoint such as http://localhost:4318. Raises ValueError for other addresses."""
    parts = urlsplit(endpoint)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ValueError("write an HTTP address, such as http://localhost:4318")
    return endpoint if parts.path.endswith(PATH) else endpoint.rstrip("/") + PATH


def parse_headers(text: str) -> dict[str, str]:
    """Headers, such as a token, in OpenTelemetry's format: name=value,name=value, percent-encoded."""
    pairs = [pair.partition("=") for pair in text.split(",") if "=" in pair]
    return {name.strip(): unquote(value.strip()) for name, _, value in pairs}


def request(totals: Totals, rank: int, resource: Attributes, now: float) -> dict[str, Any]:
    """An ExportMetricsServiceRequest. now: unix seconds."""
    span = {"startTimeUnixNano": _nanoseconds(totals.began), "timeUnixNano": _nanoseconds(now)}
    own = _attributes({"gossamer.rank": rank})

    def value(number: float, **labels: str) -> dict[str, Any]:
        named = _attributes({f"gossamer.{label}": text for label, text in labels.items()})
        return {**span, "asDouble": double(number), "attributes": [*own, *named]}

    durations = {
        **span,
        "attributes": own,
        "count": str(sum(totals.durations)),
        "sum": double(totals.seconds),
        "bucketCounts": [str(count) for count in totals.durations],
        "explicitBounds": list(BOUNDS),
    }
    cumulative = {"aggregationTemporality": CUMULATIVE}
    metrics = [_metric(STEP_DURATION, "histogram", [durations], **cumulative)]
    for instrument, count in totals.counters.items():
        metrics.append(_metric(instrument, "sum", [value(count)], **cumulative, isMonotonic=True))
    metrics += [_metric(instrument, "gauge", [value(latest)]) for instrument, latest in totals.gauges.items()]
    if totals.logged:
        points = [value(latest, metric=metric) for metric, latest in totals.logged.items()]
        metrics.append(_metric(LOGGED, "gauge", points))
    scope = {"name": "gossamer", "version": __version__}
    scoped = {"scope": scope, "metrics": metrics}
    return {"resourceMetrics": [{"resource": {"attributes": _attributes(resource)}, "scopeMetrics": [scoped]}]}


def double(value: float) -> float | str:
    return value if isfinite(value) else {inf: "Infinity", -inf: "-Infinity"}.get(value, "NaN")


def _metric(instrument: Instrument, kind: str, points: list[dict[str, Any]], **how: Any) -> dict[str, Any]:
    about = {"name": instrument.name, "unit": instrument.unit, "description": instrument.meaning}
    return {**about, kind: {"dataPoints": points, **how}}


def _attributes(attributes: Attributes) -> list[dict[str, Any]]:
    return [{"key": key, "value": _value(value)} for key, value in attributes.items()]


def _value(value: str | int) -> dict[str, str]:
    return {"intValue": str(value)} if isinstance(value, int) else {"stringValue": value}


def _nanoseconds(seconds: float) -> str:
    return str(int(seconds * 1e9))


# -- POST --------------------------------------------------------------------------------------------------------------


def post(url: str, body: bytes, headers: Mapping[str, str], seconds: float) -> None:
    """Send `body` to `url` in bounded time, without reading the response body.

    urllib's own timeout applies to a single read. A server that sends a byte now and then, or an endless body, would
    block the thread or fill the memory. Redirects are refused: urllib would turn them into a GET without the body.

    Args:
        url: an http or https address.
        body: the request's content.
        headers: of the request.
        seconds: from the connection to the end of the answer's header, at most.

    Raises:
        OSError: the server cannot be reached, took too long, or answered with another status than 2xx.
    """
    asked = urllib.request.Request(url, body, dict(headers))
    opener = urllib.request.build_opener(_Http, _Https, _NoRedirect)
    with opener.open(asked, timeout=seconds):
        pass


@contextlib.contextmanager
def _cut_off(connection: HTTPConnection) -> Iterator[None]:
    """Shut the connection down once its timeout has passed since this call."""
    sock: socket.socket = connection.sock
    ended = threading.Event()

    def cut() -> None:
        ended.set()
        with contextlib.suppress(OSError):
            sock.shutdown(socket.SHUT_RDWR)

    timer = threading.Timer(float(connection.timeout or 0), cut)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
        if ended.is_set():
            raise TimeoutError("the server did not answer in time")


class _TimedConnection(HTTPConnection):
    def getresponse(self) -> HTTPResponse:
        with _cut_off(self):
            return super().getresponse()


class _TimedTlsConnection(HTTPSConnection):
    def getresponse(self) -> HTTPResponse:
        with _cut_off(self):
            return super().getresponse()


class _Http(urllib.request.HTTPHandler):
    def http_open(self, req: urllib.request.Request) -> HTTPResponse:
        return self.do_open(_TimedConnection, req)


class _Https(urllib.request.HTTPSHandler):
    def https_open(self, req: urllib.request.Request) -> HTTPResponse:
        return self.do_open(_TimedTlsConnection, req, context=self._context)  # type: ignore[attr-defined]


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    def redirect_request(self, *args: Any, **kwargs: Any) -> None:
        return None
