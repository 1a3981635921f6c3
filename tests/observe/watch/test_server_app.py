"""The page's server: who is let in, and what it answers for runs of every kind. Needs starlette."""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from support.synthetic_store import extend
from support.watched_runs import KINDS, hostile, made

pytest.importorskip("starlette")

from gossamer.observe.telemetry import insert, open_store
from gossamer.observe.watch.guard import LOOPBACK
from gossamer.observe.watch.runs import WatchedRun
from gossamer.observe.watch.server import NewsPlace, RunNews, make_app, read_places, stream

TOKEN = "the-token"
VIEWS = ("curves", "time", "heat", "workers", "network", "compression", "failures", "log")
HOST = {"host": "127.0.0.1:8000"}
Asked = Callable[..., tuple[int, dict[str, str], bytes]]


def ask(
    runs: list[WatchedRun], path: str, query: str = f"token={TOKEN}", method: str = "GET", **headers: str
) -> tuple[int, dict[str, str], bytes]:
    """One request, without a socket: (status, headers, body)."""
    told: list[dict[str, Any]] = []
    given = [(name.encode(), value.encode()) for name, value in {**HOST, **headers}.items()]
    scope = {"type": "http", "method": method, "path": path, "raw_path": path.encode(), "query_string": query.encode()}
    scope |= {
        "asgi": {"version": "3.0", "spec_version": "2.4"},
        "headers": given,
        "http_version": "1.1",
        "scheme": "http",
        "server": ("127.0.0.1", 8000),
        "root_path": "",
    }

    async def receive() -> dict[str, Any]:
        await asyncio.Event().wait()  # the client has said all, and stays
        raise AssertionError

    async def send(message: dict[str, Any]) -> None:
        told.append(message)

    app: Callable[..., Awaitable[None]] = make_app(runs, TOKEN, LOOPBACK)
    asyncio.run(app(scope, receive, send))  # type: ignore[arg-type]
    answered = {name.decode(): value.decode() for name, value in told[0]["headers"]}
    return told[0]["status"], answered, b"".join(message.get("body", b"") for message in told[1:])


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, WatchedRun]:
    """By kind, only to be read."""
    folder = tmp_path_factory.mktemp("runs")
    found = {kind: made(folder / kind, run) for kind, run in KINDS.items()}
    return {**found, "hostile": hostile(folder / "hostile", metrics=30)}


@pytest.fixture
def run(runs: dict[str, WatchedRun]) -> WatchedRun:
    return runs["crashed"]


@pytest.mark.parametrize("path", ["/", "/api/runs", "/api/0/log", "/events", "/nowhere"])
@pytest.mark.parametrize(
    "query", ["", "token=", "token=the-toke", "token=the-token2", "token=%FF", "Token=the-token", "token=x&" * 30]
)
def test_without_the_token_nothing_is_reported(run: WatchedRun, path: str, query: str) -> None:
    assert ask([run], path, query)[0] == 403


@pytest.mark.parametrize("host", ["evil.example", "127.0.0.1.evil.example:8000", "", "[::2]:8000", "localhost:80:80"])
def test_another_host_name_is_refused(run: WatchedRun, host: str) -> None:
    assert ask([run], "/static/main.js", host=host)[0] == 403


@pytest.mark.parametrize("host", ["127.0.0.1:8000", "localhost", "LOCALHOST:99", "[::1]:8000"])
def test_this_machine_by_any_of_its_names_is_let_in(run: WatchedRun, host: str) -> None:
    assert ask([run], "/", host=host)[0] == 200


@pytest.mark.parametrize("origin", ["http://evil.example", "null", "http://127.0.0.1:9000", "file://", ""])
def test_another_origin_is_refused(run: WatchedRun, origin: str) -> None:
    assert ask([run], "/api/runs", origin=origin)[0] == 403


def test_the_pages_own_origin_is_let_in(run: WatchedRun) -> None:
    assert ask([run], "/api/runs", origin="http://127.0.0.1:8000")[0] == 200


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "OPTIONS", "PATCH"])
def test_it_only_reads(run: WatchedRun, method: str) -> None:
    assert ask([run], "/api/runs", method=method)[0] == 405


@pytest.mark.parametrize("path", ["/", "/api/runs", "/static/main.js", "/nowhere"])
def test_every_answer_forbids_foreign_scripts(run: WatchedRun, path: str) -> None:
    policy = ask([run], path)[1]["content-security-policy"]
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy
    assert "http" not in policy


def test_the_page_has_no_inline_script() -> None:
    page = (Path(__file__).parents[3] / "src/gossamer/observe/watch/static/index.html").read_text()
    scripts = page.split("<script")[1:]
    assert scripts
    assert all(" src=" in part.partition(">")[0] and part.partition(">")[2].startswith("</script>") for part in scripts)
    assert "style=" not in page


@pytest.mark.parametrize(
    "path", ["/static/../server.py", "/static/%2e%2e/server.py", "/static/..%2fserver.py", "/static//etc/passwd"]
)
def test_no_file_but_the_pages_own(run: WatchedRun, path: str) -> None:
    assert ask([run], path)[0] == 404


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("view", VIEWS)
def test_every_view_of_every_kind_of_run(runs: dict[str, WatchedRun], kind: str, view: str) -> None:
    status, _, body = ask([runs[kind]], f"/api/0/{view}", f"token={TOKEN}&name=loss&axis=bytes")
    assert (status, b"NaN" in body) == (200, False)
    assert msgspec.json.decode(body)


@pytest.mark.parametrize("view", VIEWS)
def test_every_view_of_a_hostile_run(runs: dict[str, WatchedRun], view: str) -> None:
    odd = "&cells=-5&begin=nan&end=x&rank=99999999999999999999&level=%27&before=x&limit=-1&field=__class__&name=never"
    assert ask([runs["hostile"]], f"/api/0/{view}", f"token={TOKEN}{odd}")[0] == 200


@pytest.mark.parametrize("view", VIEWS)
@pytest.mark.parametrize("content", [None, b"", b"SQLite format 3\0 and no more", b"half" * 999])
def test_a_store_that_cannot_be_read_is_a_sentence(tmp_path: Path, view: str, content: bytes | None) -> None:
    if content is not None:
        (tmp_path / "run.sqlite").write_bytes(content)
    status, _, body = ask([WatchedRun("0", tmp_path)], f"/api/0/{view}")
    assert status == 503
    assert "run.sqlite" in msgspec.json.decode(body)["problem"]


def test_a_newer_store_is_named_next_to_a_good_run(tmp_path: Path) -> None:
    good, newer = made(tmp_path / "a", KINDS["finished"]), made(tmp_path / "b", KINDS["finished"], "1")
    with sqlite3.connect(newer.folder / "run.sqlite") as db:
        db.execute("PRAGMA user_version = 99")
    db.close()
    told = msgspec.json.decode(ask([good, newer], "/api/runs")[2])
    assert told[0]["summary"]["step"] == 100
    assert "newer version" in told[1]["problem"]


def test_the_first_failure_is_on_top_with_what_it_took_along(run: WatchedRun) -> None:
    failures = msgspec.json.decode(ask([run], "/api/0/failures")[2])["failures"]
    assert (failures[0]["rank"], failures[0]["took"]) == (2, [0, 1, 3, 4, 5, 6, 7])
    assert "Traceback" in failures[0]["traceback"]


@pytest.mark.parametrize("path", ["/api/9/log", "/api/0/runs", "/api/0/__init__", "/api/0/_introduce"])
def test_a_missing_name_is_404(run: WatchedRun, path: str) -> None:
    assert ask([run], path)[0] == 404


@pytest.mark.parametrize("names", [6, 18, 24, 200])
def test_a_query_with_many_names_is_answered(run: WatchedRun, names: int) -> None:
    query = f"token={TOKEN}" + "".join(f"&name=m{number}" for number in range(names))
    status, _, body = ask([run], "/api/0/curves", query)
    assert (status, len(msgspec.json.decode(body))) == (200, min(names, 24))


def test_a_query_that_is_too_long_is_named(run: WatchedRun) -> None:
    status, _, body = ask([run], "/api/0/curves", f"token={TOKEN}&name={'x' * 2**15}")
    assert status == 414
    assert b"more than 32768 bytes" in body


LIVE = KINDS["live"]
FINDING = {"at": 1.0, "step": 5, "rank": 3, "cause": "link", "evidence": "slow"}


def add(run: WatchedRun, count: int = 1) -> None:
    db = open_store(run.folder / "run.sqlite")
    with db:
        insert(db, "finding", [FINDING] * count)
    db.close()


def test_a_rank_that_comes_first_is_told_how_things_stand_and_nothing_old(tmp_path: Path) -> None:
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


def test_a_store_that_comes_later_is_reported_once_as_missing_and_then_seen(tmp_path: Path) -> None:
    news = RunNews(WatchedRun("0", tmp_path), None)
    assert "problem" in news.look()[0][1]
    assert news.look() == []
    made(tmp_path, LIVE)
    assert news.look()[0][1]["step"] == LIVE.steps
    news.close()


@pytest.mark.parametrize(
    "text", ["", "1.2.3", "a.b.c.d", "1.2.3.\xb2", "1.2.3.-4", "1.2.3.99999999999999999999", "\0", "1.2.3.4.5"]
)
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
