"""Destinations: their text, and what each rank opens for them."""

from __future__ import annotations

import json
import sys
import urllib.request
from pathlib import Path

import pytest
from support.exporting import attached, logged, noticed, step
from support.processes import free_port

from gossamer import events
from gossamer.events import Closed
from gossamer.observe.exporters import destination
from gossamer.observe.exporters.destination import (
    Destination,
    RankPlace,
    host_and_port,
    read_destination,
    read_destinations,
)

CLOSED = Closed(steps=2, digest="d", residual_bytes=0, bucket_bytes=0)


@pytest.mark.parametrize("text", ["tensorboard:runs/tb", "prometheus:9400", "prometheus:0.0.0.0:9400",
                                  "otlp:http://localhost:4318", "jsonl:a:b,c.jsonl"])  # fmt: skip
def test_what_is_read_is_written_the_same(text: str) -> None:
    assert str(read_destination(text)) == text


@pytest.mark.parametrize("text", ["", "tensorboard", "tensorboard:", "tb:runs", "runs/x.jsonl", "Jsonl:x"])
def test_what_is_no_destination_is_answered_by_the_list(text: str) -> None:
    with pytest.raises(ValueError, match="tensorboard:DIR, wandb:PROJECT, mlflow:URI, prometheus:PORT, otlp:ENDPOINT"):
        read_destination(text)


@pytest.mark.parametrize("text", ["prometheus:x", "prometheus:0", "prometheus:70000", "prometheus:-1", "otlp:4318"])
def test_what_cannot_be_meant_is_refused_with_an_example(text: str) -> None:
    with pytest.raises(ValueError, match="such as"):
        read_destination(text)


def test_a_tool_that_is_not_there_comes_with_the_line_that_brings_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(destination, "find_spec", lambda name: None)
    for kind in ("wandb", "mlflow"):
        with pytest.raises(ValueError, match=f"{sys.executable} -m pip install {kind}"):
            read_destination(f"{kind}:x")
    assert read_destination("tensorboard:x")  # our own


def test_several_are_told_apart_by_what_begins_them() -> None:
    text = "tensorboard:a,b,jsonl:c.jsonl,otlp:http://localhost:4318"
    assert [str(each) for each in read_destinations(text)] == [
        "tensorboard:a,b", "jsonl:c.jsonl", "otlp:http://localhost:4318",
    ]  # fmt: skip
    assert read_destinations("") == ()


def test_paths_are_those_of_where_they_were_written() -> None:
    assert str(Destination("jsonl", "x/y").at(Path("/here"))) == "jsonl:/here/x/y"
    assert str(Destination("tensorboard", "/there").at(Path("/here"))) == "tensorboard:/there"
    assert str(Destination("wandb", "team/project").at(Path("/here"))) == "wandb:team/project"


def test_a_port_is_on_loopback() -> None:
    assert host_and_port("9400") == ("127.0.0.1", 9400)
    assert host_and_port("10.0.0.1:9400") == ("10.0.0.1", 9400)


def train(rank: int, *texts: str) -> list[str]:
    with noticed() as said:
        destination.begin([read_destination(text) for text in texts], RankPlace(rank, rank))
        for event in (attached(), step(1), logged(1, **{"train/loss": 0.5 + rank}), step(2), CLOSED):
            events.emit(event)
    assert not events.observed()
    return said


def test_every_rank_has_its_own_files(tmp_path: Path) -> None:
    for rank in range(2):
        assert not train(rank, f"jsonl:{tmp_path}/metrics.jsonl", f"tensorboard:{tmp_path}/tb")
    for rank, name in enumerate(("metrics.jsonl", "metrics-1.jsonl")):
        lines = [json.loads(line) for line in (tmp_path / name).read_text().splitlines()]
        assert {line["rank"] for line in lines} == {rank}
        assert [line["values"] for line in lines if "train/loss" in line["values"]] == [{"train/loss": 0.5 + rank}]
        assert [line["step"] for line in lines if "gossamer/step_seconds" in line["values"]] == [1, 2]
        assert len(list((tmp_path / "tb" / f"rank-{rank}").iterdir())) == 1


def test_tools_whose_runs_are_rows_hear_the_first_rank_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[int] = []

    class Row:
        def __init__(self, uri: str) -> None:
            opened.append(0)

        def write(self, points: object) -> None:
            pass

        def close(self) -> None:
            pass

    monkeypatch.setattr(destination, "find_spec", lambda name: name)
    monkeypatch.setattr(destination, "WandbWriter", Row)
    train(1, "wandb:x")
    assert not opened
    train(0, "wandb:x")
    assert len(opened) == 1


def test_a_port_in_use_ends_nothing(tmp_path: Path) -> None:
    port = free_port()
    taken = destination.TOOLS["prometheus"].open(str(port), RankPlace(0, 0))
    try:
        said = train(0, f"prometheus:{port}", f"jsonl:{tmp_path}/m.jsonl")
    finally:
        taken.close()
    assert f"prometheus:{port} takes no numbers of this worker now (Address already in use)" in said[0]
    assert said[1] == f"4 of 4 events of this worker never came to prometheus:{port}."
    assert (tmp_path / "m.jsonl").read_text().count("\n") == 4


def test_a_dead_endpoint_ends_nothing() -> None:
    said = train(0, f"otlp:http://127.0.0.1:{free_port()}")
    assert len(said) == 1
    assert "Connection refused" in said[0]


def test_each_worker_of_a_machine_has_a_port_of_its_own() -> None:
    port = free_port()
    page = destination.TOOLS["prometheus"].open(str(port), RankPlace(5, 1))
    try:
        page.take([step(7)])
        with urllib.request.urlopen(f"http://127.0.0.1:{port + 1}/metrics", timeout=10) as answer:
            assert 'gossamer_step{rank="5"} 7.0' in answer.read().decode()
    finally:
        page.close()


def test_the_next_session_ends_the_one_before(tmp_path: Path) -> None:
    for name in ("first", "second"):
        destination.begin([read_destination(f"jsonl:{tmp_path}/{name}")], RankPlace(0, 0))
        events.emit(step(1))
    destination.end()
    assert [(tmp_path / name).read_text().count("\n") for name in ("first", "second")] == [1, 1]
    assert not events.observed()
