"""The page that Prometheus scrapes: its text, read back by prometheus_client's parser, and the server around it."""

from __future__ import annotations

import math
import socket
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import pytest
from support.exporting import MANY, ODD, attached, logged, step

from gossamer.observe.exporters.prometheus import CONTENT_TYPE, PrometheusExporter, exposition, number
from gossamer.observe.exporters.totals import Totals

LABELS = {"rank": "1"}


def totals() -> Totals:
    found = Totals()
    found.take([attached(2), step(1), step(2, seconds=0.003), logged(2, **ODD)])
    return found


def test_names_units_and_types_are_prometheus_own() -> None:
    """As its parser reads it, recorded line by line."""
    lines = list(exposition(totals(), LABELS))
    for line in (
        "# TYPE gossamer_step_duration_seconds histogram",
        'gossamer_step_duration_seconds_bucket{rank="1",le="0.002"} 0.0',
        'gossamer_step_duration_seconds_bucket{rank="1",le="0.005"} 1.0',
        'gossamer_step_duration_seconds_bucket{rank="1",le="0.5"} 2.0',
        'gossamer_step_duration_seconds_bucket{rank="1",le="+Inf"} 2.0',
        'gossamer_step_duration_seconds_sum{rank="1"} 0.503',
        'gossamer_step_duration_seconds_count{rank="1"} 2.0',
        "# TYPE gossamer_payload_sent_bytes_total counter",
        'gossamer_payload_sent_bytes_total{rank="1"} 8000000.0',
        'gossamer_step_waiting_seconds_total{rank="1"} 0.2',
        'gossamer_steps_total{rank="1"} 2.0',
        'gossamer_workers{rank="1"} 2.0',
        'gossamer_logged{rank="1",metric="train/loss"} 0.25',
        'gossamer_logged{rank="1",metric="quote\\" back\\\\slash"} -1.5',
        'gossamer_logged{rank="1",metric="new\\nline"} 3.0',
        'gossamer_logged{rank="1",metric="nan"} NaN',
        'gossamer_logged{rank="1",metric="-inf"} -Inf',
    ):
        assert line in lines


def test_numbers_are_written_as_go_reads_them() -> None:
    assert [number(value) for value in (math.inf, -math.inf, math.nan, 1, 1e-300)] == [
        "+Inf", "-Inf", "NaN", "1.0", "1e-300",
    ]  # fmt: skip


def parsed(text: str) -> dict[str, Any]:
    parser = pytest.importorskip("prometheus_client.parser")
    return {family.name: family for family in parser.text_string_to_metric_families(text)}


def test_prometheus_reads_it() -> None:
    found = totals()
    found.take([logged(3, **MANY)])
    families = parsed("".join(f"{line}\n" for line in exposition(found, LABELS)))
    logs = {sample.labels["metric"]: sample for sample in families["gossamer_logged"].samples}
    assert logs.keys() == {*ODD, *MANY}
    assert all(sample.labels["rank"] == "1" for sample in logs.values())
    assert math.isnan(logs["nan"].value)
    assert logs["beyond float32"].value == 1e300
    assert families["gossamer_step_duration_seconds"].type == "histogram"
    assert families["gossamer_payload_sent_bytes"].type == "counter"
    assert families["gossamer_payload_sent_bytes"].samples[0].name == "gossamer_payload_sent_bytes_total"


@pytest.fixture
def exporter() -> Iterator[PrometheusExporter]:
    made = PrometheusExporter("127.0.0.1", 0, LABELS)
    yield made
    made.close()


def fetch(exporter: PrometheusExporter, path: str) -> Any:
    return urllib.request.urlopen(f"http://127.0.0.1:{exporter.port}{path}", timeout=10)


def test_the_page_follows_training(exporter: PrometheusExporter) -> None:
    exporter.take([step(1)])
    with fetch(exporter, "/metrics") as answer:
        assert answer.headers["Content-Type"] == CONTENT_TYPE
        assert 'gossamer_step{rank="1"} 1.0\n' in answer.read().decode()
    exporter.take([step(2)])
    with fetch(exporter, "/metrics?name=all") as answer:
        assert 'gossamer_step{rank="1"} 2.0\n' in answer.read().decode()


def test_there_is_no_other_page(exporter: PrometheusExporter) -> None:
    with pytest.raises(urllib.error.HTTPError, match="404") as error:
        fetch(exporter, "/etc/passwd")
    error.value.close()


def test_a_port_in_use_is_an_error_of_the_destination(exporter: PrometheusExporter) -> None:
    with pytest.raises(OSError, match="in use"):
        PrometheusExporter("127.0.0.1", exporter.port, LABELS)


def test_a_request_that_comes_byte_by_byte_is_ended(
    exporter: PrometheusExporter, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gossamer.observe.exporters.prometheus.CLIENT_SECONDS", 0.2)
    with socket.create_connection(("127.0.0.1", exporter.port), timeout=0.01) as client, suppress(ConnectionError):
        answer = None
        while answer is None:
            client.sendall(b"x")
            with suppress(TimeoutError):
                answer = client.recv(1)
        assert answer == b""
