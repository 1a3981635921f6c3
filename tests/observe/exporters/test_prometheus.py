"""The page that Prometheus scrapes: its text, read back by prometheus_client's parser, and the server around it."""

from __future__ import annotations

import math
import socket
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import pytest
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families
from support.exporting import MANY, ODD, attached, logged, step

from gossamer.observe.exporters.prometheus import PrometheusExporter, TotalsCollector
from gossamer.observe.exporters.totals import Totals

LABELS = {"rank": "1"}


def totals() -> Totals:
    found = Totals()
    found.take([attached(2), step(1), step(2, seconds=0.003), logged(2, **ODD)])
    return found


def page(found: Totals) -> str:
    registry = CollectorRegistry()
    registry.register(TotalsCollector(found, threading.Lock(), LABELS))
    return generate_latest(registry).decode()


def test_names_units_and_types_are_prometheus_own() -> None:
    """As its parser reads it, recorded line by line."""
    lines = page(totals()).splitlines()
    for line in (
        "# HELP gossamer_step_duration_seconds Time from the end of one step to the end of the next.",
        "# TYPE gossamer_step_duration_seconds histogram",
        'gossamer_step_duration_seconds_bucket{le="0.002",rank="1"} 0.0',
        'gossamer_step_duration_seconds_bucket{le="0.005",rank="1"} 1.0',
        'gossamer_step_duration_seconds_bucket{le="0.5",rank="1"} 2.0',
        'gossamer_step_duration_seconds_bucket{le="+Inf",rank="1"} 2.0',
        'gossamer_step_duration_seconds_sum{rank="1"} 0.503',
        'gossamer_step_duration_seconds_count{rank="1"} 2.0',
        "# TYPE gossamer_payload_sent_bytes_total counter",
        'gossamer_payload_sent_bytes_total{rank="1"} 8e+06',
        'gossamer_step_waiting_seconds_total{rank="1"} 0.2',
        'gossamer_steps_total{rank="1"} 2.0',
        'gossamer_workers{rank="1"} 2.0',
        'gossamer_logged{metric="train/loss",rank="1"} 0.25',
        'gossamer_logged{metric="quote\\" back\\\\slash",rank="1"} -1.5',
        'gossamer_logged{metric="new\\nline",rank="1"} 3.0',
        'gossamer_logged{metric="nan",rank="1"} NaN',
        'gossamer_logged{metric="-inf",rank="1"} -Inf',
    ):
        assert line in lines


def test_prometheus_reads_all_metrics() -> None:
    found = totals()
    found.take([logged(3, **MANY)])
    families = {family.name: family for family in text_string_to_metric_families(page(found))}
    logs = {sample.labels["metric"]: sample for sample in families["gossamer_logged"].samples}
    assert logs.keys() == {*ODD, *MANY}
    assert all(sample.labels["rank"] == "1" for sample in logs.values())
    assert math.isnan(logs["nan"].value)
    assert logs["beyond float32"].value == 1e300
    assert families["gossamer_step_duration_seconds"].type == "histogram"
    assert families["gossamer_payload_sent_bytes"].type == "counter"
    assert families["gossamer_payload_sent_bytes"].samples[0].name == "gossamer_payload_sent_bytes_total"
    assert not [name for name in families if not name.startswith("gossamer_")]


def test_a_metric_name_that_is_not_unicode_does_not_end_the_page() -> None:
    found = Totals()
    found.take([logged(1, **{"\udcff": 1.0, "loss": 2.0})])
    assert 'gossamer_logged{metric="loss",rank="1"} 2.0' in page(found)


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
        assert answer.headers["Content-Type"] == "text/plain; version=0.0.4; charset=utf-8"
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
