"""OTLP: the request, as OpenTelemetry's own classes read it (skipped where missing), and what is posted where."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any
from urllib.error import HTTPError

import pytest
from support.exporting import MANY, ODD, attached, logged, noticed, step
from support.processes import free_port

from gossamer.observe.exporters.destination import ExportQueue
from gossamer.observe.exporters.otlp import OtlpExporter, metrics_url, parse_headers, post, request
from gossamer.observe.exporters.totals import Totals

RESOURCE = {"service.name": "gossamer"}


def asked() -> dict[str, Any]:
    totals = Totals()
    totals.began = 1.7e9
    totals.take([attached(2), step(1), step(2, seconds=0.003), logged(2, **ODD, **MANY)])
    return json.loads(json.dumps(request(totals, 1, RESOURCE, 1.7e9 + 10), allow_nan=False))  # type: ignore[no-any-return]


def metrics(content: dict[str, Any]) -> dict[str, Any]:
    (resource,) = content["resourceMetrics"]
    (scope,) = resource["scopeMetrics"]
    return {metric["name"]: metric for metric in scope["metrics"]}


def test_the_request_is_what_opentelemetry_reads() -> None:
    """Recorded from what opentelemetry-proto 1.45.2 makes of it: see the next test."""
    found = metrics(asked())
    (durations,) = found["gossamer.step.duration"]["histogram"]["dataPoints"]
    assert found["gossamer.step.duration"]["unit"] == "s"
    assert found["gossamer.step.duration"]["histogram"]["aggregationTemporality"] == 2
    assert (durations["count"], durations["sum"]) == ("2", 0.503)
    assert len(durations["bucketCounts"]) == len(durations["explicitBounds"]) + 1
    assert durations["startTimeUnixNano"] == "1700000000000000000"
    assert durations["timeUnixNano"] == "1700000010000000000"
    assert durations["attributes"] == [{"key": "gossamer.rank", "value": {"intValue": "1"}}]
    sent = found["gossamer.payload.sent"]
    assert (sent["unit"], sent["sum"]["isMonotonic"], sent["sum"]["dataPoints"][0]["asDouble"]) == ("By", True, 8e6)
    logs = {
        point["attributes"][1]["value"]["stringValue"]: point
        for point in found["gossamer.logged"]["gauge"]["dataPoints"]
    }
    assert logs.keys() == {*ODD, *MANY}
    assert [logs[name]["asDouble"] for name in ("nan", "inf", "-inf")] == ["NaN", "Infinity", "-Infinity"]


def test_opentelemetry_reads_it() -> None:
    json_format = pytest.importorskip("google.protobuf.json_format")
    service = pytest.importorskip("opentelemetry.proto.collector.metrics.v1.metrics_service_pb2")
    message = json_format.ParseDict(asked(), service.ExportMetricsServiceRequest())
    told = json_format.MessageToDict(message)
    enum = "AGGREGATION_TEMPORALITY_CUMULATIVE"
    expected = json.loads(
        json.dumps(asked()).replace('"aggregationTemporality": 2', f'"aggregationTemporality": "{enum}"')
    )
    assert told == expected


@pytest.mark.parametrize(
    ("endpoint", "url"),
    [
        ("http://localhost:4318", "http://localhost:4318/v1/metrics"),
        ("http://localhost:4318/", "http://localhost:4318/v1/metrics"),
        ("https://there/otlp", "https://there/otlp/v1/metrics"),
        ("https://there/otlp/v1/metrics", "https://there/otlp/v1/metrics"),
    ],
)
def test_an_endpoint_is_a_base_address(endpoint: str, url: str) -> None:
    assert metrics_url(endpoint) == url


@pytest.mark.parametrize("endpoint", ["localhost:4318", "ftp://there", "http://", "file:///etc/passwd", "x"])
def test_an_invalid_http_address_is_refused(endpoint: str) -> None:
    with pytest.raises(ValueError, match="such as http"):
        metrics_url(endpoint)


def test_headers_are_opentelemetrys_variable() -> None:
    assert parse_headers("api-key=a%20b, x=1,nonsense") == {"api-key": "a b", "x": "1"}
    assert parse_headers("") == {}


class Collector(BaseHTTPRequestHandler):
    """Keeps what is posted; answers with `posted.status`."""

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        self.server.posted.append(
            (self.path, {name.title(): value for name, value in self.headers.items()}, json.loads(body))
        )  # type: ignore[attr-defined]
        self.send_response(self.server.posted.status)  # type: ignore[attr-defined]
        self.end_headers()

    def log_message(self, *args: object) -> None:
        pass


class Posted(list[Any]):
    status = 200  # of the next answers


@contextmanager
def collector(status: int = 200) -> Iterator[tuple[str, Posted]]:
    posted = Posted()
    posted.status = status
    with HTTPServer(("127.0.0.1", 0), Collector) as server:
        server.posted = posted  # type: ignore[attr-defined]
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}", posted
        server.shutdown()
        thread.join()


def test_totals_are_posted_when_due_and_at_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_HEADERS", "api-key=secret")
    with collector() as (endpoint, posted):
        exporter = OtlpExporter(metrics_url(endpoint), 0, RESOURCE, clock=lambda: now[0])
        exporter.take([step(1)])
        assert not posted
        now[0] += 10
        exporter.take([step(2)])
        exporter.take([step(3)])
        exporter.close()
    counts = [metrics(content)["gossamer.steps"]["sum"]["dataPoints"][0]["asDouble"] for _, _, content in posted]
    assert counts == [2, 3]
    path, headers, _ = posted[0]
    assert (path, headers["Content-Type"], headers["Api-Key"]) == ("/v1/metrics", "application/json", "secret")


def test_a_dead_endpoint_and_one_that_refuses_are_errors_of_the_destination() -> None:
    with pytest.raises(OSError, match="refused"):
        OtlpExporter(metrics_url(f"http://127.0.0.1:{free_port()}"), 0, RESOURCE).close()
    with collector(status=503) as (endpoint, _), pytest.raises(OSError, match="503"):
        OtlpExporter(metrics_url(endpoint), 0, RESOURCE).close()


@pytest.mark.parametrize(
    ("at_the_end", "lost"),
    [(200, []), (503, ["4 of 5 events of this worker did not reach otlp."])],
)
def test_events_of_a_refused_post_are_missing_only_if_no_later_post_has_them(at_the_end: int, lost: list[str]) -> None:
    now = [100.0]
    with collector() as (endpoint, posted), noticed() as notices:
        exporter = OtlpExporter(metrics_url(endpoint), 0, RESOURCE, clock=lambda: now[0])
        queue = ExportQueue("otlp", lambda: exporter)
        for number, status in enumerate((200, 503, 503, 503), 1):
            now[0] += 10
            posted.status = status
            queue(step(number))
            assert queue.pump() is (status == 200)
        queue(step(5))
        assert queue.pump()  # no post is due
        posted.status = at_the_end
        queue.finish()
        queue.report_dropped()
    counts = [metrics(content)["gossamer.steps"]["sum"]["dataPoints"][0]["asDouble"] for _, _, content in posted]
    assert counts == [1, 2, 3, 4, 5]
    assert notices[1:] == lost


Reply = Callable[[socket.socket, threading.Event], None]


@contextmanager
def answering(reply: Reply) -> Iterator[str]:
    """A server that reads one request and then runs `reply` until its client has gone."""
    over = threading.Event()
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            with listener.accept()[0] as client, suppress(OSError):
                client.recv(2**16)
                reply(client, over)

        thread = threading.Thread(target=serve)
        thread.start()
        try:
            yield f"http://127.0.0.1:{listener.getsockname()[1]}/v1/metrics"
        finally:
            over.set()
            thread.join()


def endless(client: socket.socket, over: threading.Event) -> None:
    client.sendall(b"HTTP/1.1 200 OK\r\n\r\n")
    while not over.is_set():
        client.sendall(b"x" * 2**20)


def byte_by_byte(client: socket.socket, over: threading.Event) -> None:
    client.sendall(b"HTTP/1.1 200 OK\r\n")
    while not over.wait(0.01):
        client.sendall(b"x")


def elsewhere(client: socket.socket, over: threading.Event) -> None:
    client.sendall(b"HTTP/1.1 302 Found\r\nLocation: http://127.0.0.1:9/\r\n\r\n")
    while not over.is_set():
        client.sendall(b"x" * 2**20)


def test_an_answer_without_an_end_is_not_read() -> None:
    with answering(endless) as url:
        post(url, b"{}", {}, 30.0)


def test_a_header_that_comes_byte_by_byte_ends_with_a_timeout() -> None:
    with answering(byte_by_byte) as url, pytest.raises(OSError, match="did not answer in time"):
        post(url, b"{}", {}, 0.2)


def test_a_redirect_is_refused_and_its_content_not_read() -> None:
    with answering(elsewhere) as url:
        with pytest.raises(HTTPError, match="302") as caught:
            post(url, b"{}", {}, 30.0)
        caught.value.close()
