"""Round record: the same form for every federation, as JSON and back, and without names where nobody may know them."""

from __future__ import annotations

import json
from dataclasses import replace
from math import inf, isnan, nan

import pytest

from gossamer.federated.messages import Report
from gossamer.federated.round_record import RoundRecord, mean_metrics, record_of
from gossamer.federated.server.rounds import Committed

REPORTS = {
    2: Report(samples=1, steps=1, metrics={"loss": 4.0}),
    0: Report(samples=3, steps=1, metrics={"loss": 0.0, "other": 1.0}),
}
COMMITTED = Committed(3, 7.5, REPORTS, refused={1: "client 1 was refused"}, epsilon=0.5)


def test_it_is_read_as_it_was_written() -> None:
    record = RoundRecord.of(
        COMMITTED,
        seconds=1.5,
        virtual_seconds=7.5,
        up_bytes=30,
        down_bytes=70,
        up_bytes_by_client={0: 10, 2: 20},
        metrics={"accuracy": 1.0},
    )
    assert (record.clients, record.counted, record.samples) == ((0, 2), 2, 4)
    assert (record.refused_count, record.refused, record.epsilon) == (1, {1: "client 1 was refused"}, 0.5)
    assert record.all_metrics == {"loss": 1.0, "other": 1.0, "accuracy": 1.0}
    assert RoundRecord.read(json.loads(json.dumps(record.as_json()))) == record
    total = record_of([record, record], ended="finished")
    assert (total["rounds"], total["seconds"], total["up_bytes"], total["ended"]) == (2, 3.0, 60, "finished")
    assert total["history"] == [record.as_json()] * 2


def test_who_took_part_may_be_left_out_and_how_many_stays() -> None:
    record = RoundRecord.of(COMMITTED, names_clients=False, seconds=1.0, up_bytes=0, down_bytes=0)
    assert (record.counted, record.refused_count, record.epsilon) == (2, 1, 0.5)
    assert (record.clients, record.refused) == ((), {})
    assert "client" not in json.dumps(record.as_json()["refused"])


def test_numbers_that_are_not_finite_are_kept_as_json() -> None:
    metrics = {"loss": nan, "most": inf, "least": -inf, "some": 1.5}
    committed = replace(COMMITTED, epsilon=inf)
    record = RoundRecord.of(committed, seconds=1.0, up_bytes=0, down_bytes=0, metrics=metrics)
    text = json.dumps(record.as_json(), allow_nan=False)
    assert json.loads(text)["metrics"] == {"loss": "nan", "most": "inf", "least": "-inf", "some": 1.5}
    again = RoundRecord.read(json.loads(text))
    assert isnan(again.metrics["loss"])
    assert (again.metrics["most"], again.metrics["least"], again.metrics["some"]) == (inf, -inf, 1.5)
    assert again.epsilon == inf


def test_metrics_are_weighted_by_samples() -> None:
    assert mean_metrics(REPORTS) == {"loss": 1.0, "other": 1.0}
    assert mean_metrics({0: Report(samples=0, steps=1, metrics={"loss": 1.0})}) == {}


def test_mean_of_the_largest_metrics_is_finite() -> None:
    reports = {
        0: Report(samples=10**9, steps=1, metrics={"loss": 1e300}),
        1: Report(samples=10**9, steps=1, metrics={"loss": 5e299}),
        2: Report(samples=10**9, steps=1, metrics={"loss": -1e300}),
    }
    assert mean_metrics(reports)["loss"] == pytest.approx(5e299 / 3, rel=1e-15)
    assert mean_metrics({0: reports[0]}) == {"loss": 1e300}
