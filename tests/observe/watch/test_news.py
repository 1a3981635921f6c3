"""News: a stream that goes on where it was cut off. Needs anyio, which starlette brings."""

from __future__ import annotations

import asyncio
from pathlib import Path

import msgspec
import pytest
from support.synthetic_store import extend
from support.watched_runs import KINDS, made

pytest.importorskip("anyio")

from gossamer.observe.telemetry import insert, open_store
from gossamer.observe.watch.news import NewsPlace, RunNews, read_places, stream
from gossamer.observe.watch.runs import WatchedRun

LIVE = KINDS["live"]
FINDING = {"at": 1.0, "step": 5, "rank": 3, "cause": "link", "evidence": "slow"}


def add(run: WatchedRun, count: int = 1) -> None:
    db = open_store(run.folder / "run.sqlite")
    with db:
        insert(db, "finding", [FINDING] * count)
    db.close()


def test_who_comes_first_is_told_how_things_stand_and_nothing_old(tmp_path: Path) -> None:
    news = RunNews(made(tmp_path, LIVE), None)
    assert [kind for kind, _ in news.look()] == ["tick"]
    assert news.look() == []
    news.close()


def test_a_step_is_a_tick(tmp_path: Path) -> None:
    news = RunNews(made(tmp_path, LIVE), None)
    news.look()
    db = open_store(tmp_path / "run.sqlite")
    extend(db, LIVE, 81, 90)
    db.close()
    assert [(kind, content["step"]) for kind, content in news.look()] == [("tick", 90)]
    news.close()


def test_a_new_connection_hears_what_the_one_before_missed_and_no_more(tmp_path: Path) -> None:
    run = made(tmp_path, LIVE)
    first = RunNews(run, None)
    first.look()
    place = str(first.place)
    first.close()
    add(run, 3)
    second = RunNews(run, read_places(place, 1)[0])
    told = dict(second.look())["news"]
    assert (told["finding"], len(told["findings"]), told["failures"]) == (3, 3, [])
    second.close()
    third = RunNews(run, read_places(str(second.place), 1)[0])
    assert [kind for kind, _ in third.look()] == ["tick"]
    third.close()


def test_a_store_that_comes_later_is_told_once_as_missing_and_then_seen(tmp_path: Path) -> None:
    news = RunNews(WatchedRun("0", tmp_path), None)
    assert "problem" in news.look()[0][1]
    assert news.look() == []
    made(tmp_path, LIVE)
    assert news.look()[0][1]["step"] == LIVE.steps
    news.close()


@pytest.mark.parametrize("text", ["", "1.2.3", "a.b.c.d", "1.2.3.-4", "1.2.3.99999999999999999999", "\0", "1.2.3.4.5"])
def test_an_id_that_is_none_is_the_end_of_what_there_is(text: str) -> None:
    assert read_places(text, 2) == [None, None]


def test_ids_are_read_back() -> None:
    place = NewsPlace((1, 2, 3, 4))
    assert read_places(f"{place},{place}", 2) == [place, place]


def test_the_stream_has_an_id_for_every_event_and_ends_when_told(tmp_path: Path) -> None:
    run = made(tmp_path, LIVE)
    parts: list[bytes] = []

    async def listen() -> None:
        async for part in stream([run], "", lambda: len(parts) > 1, wake_seconds=0.001):
            parts.append(part)  # noqa: PERF401  the stream ends by their number

    asyncio.run(listen())
    lines = parts[1].decode().split("\n")
    assert [line.partition(":")[0] for line in lines] == ["id", "event", "data", "", ""]
    assert msgspec.json.decode(lines[2].removeprefix("data: "))["key"] == "0"
