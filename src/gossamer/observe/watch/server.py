"""Server: serves the page on one port of this machine until it is stopped, and makes the link to it.

The application is read-only: files, numbers as JSON, and a stream of news.
"""

from __future__ import annotations

import secrets
import signal
import socket
import sqlite3
import threading
import time
from collections.abc import AsyncIterator, Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from types import FrameType
from typing import Any

import msgspec

from gossamer.base.host_port import family_of
from gossamer.comm.runtime.signal_handlers import handling
from gossamer.errors import GossamerError
from gossamer.observe.watch import tables
from gossamer.observe.watch.curves import bytes_at, metric_names, read_curve
from gossamer.observe.watch.grid import HEAT, GridCache, clamped, heat, over_time
from gossamer.observe.watch.guard import LOOPBACK, Guard
from gossamer.observe.watch.runs import WatchedRun
from gossamer.observe.watch.summary import read_differences, read_findings, read_ranks, read_vitals, summarize
from gossamer.observe.watch.tables import LogFilter, read_lines

STATIC = Path(__file__).parent / "static"
CELLS = 400  # default of a request
CURVES_AT_ONCE = 24

Query = Any  # starlette's QueryParams


class Views:
    """The page's views, each a function of a run and the query. They block, so they are called in threads."""

    def __init__(self, runs: Sequence[WatchedRun]) -> None:
        self._runs = runs
        self._grids = GridCache()

    def runs(self) -> list[dict[str, Any]]:
        """Every run with its summary and metric names, or with the reason why it has no data (yet)."""
        return [self._introduce(run) for run in self._runs]

    def curves(self, run: WatchedRun, query: Query) -> Any:
        """Curves of the metrics `name`, with their x in steps, seconds since the start, and bytes of all ranks."""
        cells = clamped(_number(query, "cells", CELLS))
        with run.reading() as db:
            curves = [read_curve(db, name, cells) for name in query.getlist("name")[:CURVES_AT_ONCE]]
        grid = self._grids.get(run, cells) if query.get("axis") == "bytes" else None
        return [
            {**vars(curve), "bytes": None if grid is None else bytes_at(grid, [at or 0.0 for at in curve.at])}
            for curve in curves
        ]

    def time(self, run: WatchedRun, query: Query) -> Any:
        return over_time(self._grids.get(run, clamped(_number(query, "cells", CELLS)), _span(query)))

    def heat(self, run: WatchedRun, query: Query) -> Any:
        field = query.get("field", "waiting")
        return heat(
            self._grids.get(run, clamped(_number(query, "cells", CELLS)), _span(query)),
            field if field in HEAT else "waiting",
        )

    def workers(self, run: WatchedRun, query: Query) -> Any:
        with run.reading() as db:
            return {
                "findings": read_findings(db),
                "vitals": read_vitals(db, read_ranks(db)),
                "differences": read_differences(db),
            }

    def network(self, run: WatchedRun, query: Query) -> Any:
        with run.reading() as db:
            return tables.read_network(db)

    def compression(self, run: WatchedRun, query: Query) -> Any:
        with run.reading() as db:
            return {"tensors": tables.read_tensors(db)}

    def failures(self, run: WatchedRun, query: Query) -> Any:
        with run.reading() as db:
            return {"failures": tables.read_failures(db), "events": tables.read_events(db)}

    def log(self, run: WatchedRun, query: Query) -> Any:
        wanted = LogFilter(
            rank=_whole(query, "rank"), level=query.get("level", "info"), text=query.get("text", "")[:200]
        )
        with run.reading() as db:
            before, after = _whole(query, "before"), _whole(query, "after")
            return read_lines(db, wanted, before=before, after=after, limit=_number(query, "limit", 200))

    def _introduce(self, run: WatchedRun) -> dict[str, Any]:
        row_ids: dict[str, Any] = {"key": run.key, "name": run.name, "folder": str(run.folder), "now": time.time()}
        try:
            with run.reading() as db:
                return row_ids | {"summary": summarize(db), "metrics": metric_names(db)}
        except (GossamerError, sqlite3.Error) as problem:
            return row_ids | {"problem": str(problem)}


def make_app(
    runs: Sequence[WatchedRun], token: str, names: Collection[str], stopping: Callable[[], bool] = lambda: False
) -> Guard:
    """Make the page of `runs`, protected by `token`. names: allowed host names. Needs starlette."""
    from starlette.applications import Starlette
    from starlette.concurrency import run_in_threadpool
    from starlette.requests import Request
    from starlette.responses import FileResponse, Response, StreamingResponse
    from starlette.routing import Mount, Route
    from starlette.staticfiles import StaticFiles

    views = Views(runs)
    by_key = {run.key: run for run in runs}
    asked: dict[str, Callable[[WatchedRun, Query], Any]] = {
        name: getattr(views, name)
        for name in ("curves", "time", "heat", "workers", "network", "compression", "failures", "log")
    }

    def answer(content: Any, status: int = 200) -> Response:
        return Response(msgspec.json.encode(content), status, media_type="application/json")

    async def page(request: Request) -> Response:
        return FileResponse(STATIC / "index.html", media_type="text/html; charset=utf-8")

    async def introduce(request: Request) -> Response:
        return answer(await run_in_threadpool(views.runs))

    async def view(request: Request) -> Response:
        run, ask = by_key.get(request.path_params["run"]), asked.get(request.path_params["view"])
        if run is None or ask is None:
            return answer({"problem": "There is no such run or view."}, 404)
        try:
            return answer(await run_in_threadpool(ask, run, request.query_params))
        except (GossamerError, sqlite3.Error) as problem:
            return answer({"problem": str(problem)}, 503)

    async def events(request: Request) -> Response:
        place = request.headers.get("last-event-id") or request.query_params.get("place", "")
        return StreamingResponse(stream(runs, place, stopping), media_type="text/event-stream")

    routes = [
        Route("/", page),
        Route("/api/runs", introduce),
        Route("/api/{run}/{view}", view),
        Route("/events", events),
        Mount("/static", StaticFiles(directory=STATIC)),
    ]
    return Guard(Starlette(routes=routes), token, names)


def _whole(query: Query, name: str) -> int | None:
    try:
        value = int(query.get(name, ""))
    except ValueError:
        return None
    return value if abs(value) < 2**62 else None


def _number(query: Query, name: str, otherwise: int) -> int:
    value = _whole(query, name)
    return otherwise if value is None else value


def _span(query: Query) -> tuple[float, float] | None:
    """begin and end in unix seconds, if both are given and in order."""
    try:
        begin, end = float(query["begin"]), float(query["end"])
    except (KeyError, ValueError):
        return None
    return (begin, end) if 0 <= begin < end < 1e12 else None


# -- news --------------------------------------------------------------------------------------------------------------
# A stream of server-sent events with the news of runs. It resumes after a broken connection.
#
# `tick` means that a run's store has changed, and has its summary and metric names; `news` has the failures and
# stragglers that were not sent yet, and the numbers of log lines and events. An event's id is the position in every run
# up to which all was sent, so the browser's Last-Event-ID is sufficient to resume.

WAKE_SECONDS = 1.0
ALIVE_SECONDS = 15.0  # between comments that keep a silent connection open
TABLES = ("log", "event", "failure", "finding")


@dataclass(frozen=True)
class NewsPlace:
    """The row ids up to which a run's news were sent, by table in the order of TABLES."""

    row_ids: tuple[int, ...] = (0, 0, 0, 0)

    def __str__(self) -> str:
        return ".".join(map(str, self.row_ids))


def read_places(text: str, count: int) -> list[NewsPlace | None]:
    """Positions from an event's id, `1.2.3.4,5.6.7.8`; None, the current end, for a run that is not in it."""
    found: list[NewsPlace | None] = [None] * count
    for number, each in enumerate(text.split(",")[:count]):
        parts = each.split(".")
        if len(parts) == len(TABLES) and all(part.isdecimal() and len(part) < 19 for part in parts):
            found[number] = NewsPlace(tuple(map(int, parts)))
    return found


class RunNews:
    """News of one run for one page. PRAGMA data_version detects commits of other connections."""

    def __init__(self, run: WatchedRun, place: NewsPlace | None) -> None:
        self.run, self.place = run, place
        self._db: sqlite3.Connection | None = None
        self._seen: int | None = None
        self._problem: str | None = None
        self._file: int | None = None  # number of the open store's file

    def look(self) -> list[tuple[str, dict[str, Any]]]:
        """(event, content) of each event since the last call."""
        try:
            return self._look()
        except (GossamerError, sqlite3.Error) as problem:
            self.close()
            repeated, self._problem = str(problem) == self._problem, str(problem)
            return [] if repeated else [("tick", {"key": self.run.key, "problem": str(problem)})]

    def close(self) -> None:
        if self._db is not None:
            self._db.close()
        self._db = self._seen = None

    def _look(self) -> list[tuple[str, dict[str, Any]]]:
        file = _file_number(self.run.store)
        if self._db is not None and file != self._file:  # the next run with these logs has a store of its own
            self.close()
            self.place = NewsPlace()
        if self._db is None:
            self._db, self._file = self.run.open(), file
        version = self._db.execute("PRAGMA data_version").fetchone()[0]
        if version == self._seen:
            return []
        self._seen, self._problem = version, None
        now = NewsPlace(
            tuple(self._db.execute(f"SELECT coalesce(max(rowid), 0) FROM {each}").fetchone()[0] for each in TABLES)
        )
        events = [("tick", {"key": self.run.key, "metrics": metric_names(self._db), **summarize(self._db)})]
        if self.place is not None and now != self.place:
            events.append(("news", {"key": self.run.key, **self._rows_between(self.place, now)}))
        self.place = now
        return events

    def _rows_between(self, row_ids: NewsPlace, now: NewsPlace) -> dict[str, Any]:
        assert self._db is not None
        content: dict[str, Any] = {}
        for table, first, last in zip(TABLES, row_ids.row_ids, now.row_ids, strict=True):
            content[table] = max(0, last - first)
        for table in ("failure", "finding"):
            asked = f"SELECT rowid AS id, * FROM {table} WHERE rowid > ? AND rowid <= ? ORDER BY rowid LIMIT 20"
            place = TABLES.index(table)
            content[f"{table}s"] = [
                dict(row) for row in self._db.execute(asked, (row_ids.row_ids[place], now.row_ids[place]))
            ]
        return content


def _file_number(path: Path) -> int | None:
    try:
        return path.stat().st_ino
    except OSError:
        return None


async def stream(
    runs: Sequence[WatchedRun], last_event: str, stopping: Callable[[], bool], wake_seconds: float = WAKE_SECONDS
) -> AsyncIterator[bytes]:
    """Server-sent events until `stopping`; the first one at once."""
    import anyio  # a dependency of starlette
    import anyio.to_thread

    places = read_places(last_event, len(runs))
    listened = [RunNews(run, place) for run, place in zip(runs, places, strict=True)]
    silent = 0.0
    try:
        yield b"retry: 2000\n\n"
        while not stopping():
            for news in listened:
                for kind, content in await anyio.to_thread.run_sync(news.look):
                    identity = ",".join(str(each.place or NewsPlace()) for each in listened)
                    yield f"id: {identity}\nevent: {kind}\ndata: ".encode() + msgspec.json.encode(content) + b"\n\n"
                    silent = 0.0
            if silent >= ALIVE_SECONDS:
                yield b": still here\n\n"
                silent = 0.0
            await anyio.sleep(wake_seconds)
            silent += wake_seconds
    finally:
        for news in listened:
            news.close()


# -- the server: listens, serves, makes the link -----------------------------------------------------------------------

NEEDS = ("starlette", "uvicorn")
STOP_SECONDS = 5.0
ANY_ADDRESS = ("0.0.0.0", "::")  # the link has the name of this machine


def check_installed() -> None:
    """Raise GossamerError, with the line to write, if the page's server lacks a package."""
    if missing := [name for name in NEEDS if find_spec(name) is None]:
        raise GossamerError(
            f"The page needs {' and '.join(missing)}, which is not installed here. "
            'Write: pip install "gossamer[watch]" (or use --terminal, which needs no package)'
        )


class PageServer:
    """Listens from construction on, so that a port in use is reported at once; serves in `serve` or a thread.

    host: an address of this machine; loopback excludes other machines. names: additional host names in links to it.
    """

    def __init__(
        self, runs: Sequence[WatchedRun], host: str = "127.0.0.1", port: int = 0, names: Collection[str] = ()
    ) -> None:
        check_installed()
        import uvicorn

        self._listening = _listen(host, port)
        self._token = secrets.token_urlsafe(24)
        self._name = socket.gethostname() if host in ANY_ADDRESS else _in_link(host)
        self.port = self._listening.getsockname()[1]
        self._stopping = threading.Event()
        allowed = {*LOOPBACK, self._name, *names}
        app: Any = make_app(runs, self._token, allowed, self._stopping.is_set)
        self._uvicorn = uvicorn.Server(
            uvicorn.Config(
                app, log_level="error", access_log=False, lifespan="off", ws="none", timeout_graceful_shutdown=2
            )
        )
        vars(self._uvicorn)["capture_signals"] = self._handling_signals

    @property
    def link(self) -> str:
        return f"http://{self._name}:{self.port}/?token={self._token}"

    def serve(self) -> None:
        """Serve until `stop`; in the main thread also until SIGINT or SIGTERM, unless the process ignores it."""
        try:
            self._uvicorn.run(sockets=[self._listening])
        finally:
            self._listening.close()

    def stop(self) -> None:
        self._stopping.set()
        self._uvicorn.should_exit = True

    @contextmanager
    def _handling_signals(self) -> Iterator[None]:
        """Replaces uvicorn's context manager, which also handles signals that the process ignores."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        received: list[int] = []

        def end(number: int, frame: FrameType | None) -> None:
            received.append(number)
            self._uvicorn.handle_exit(number, frame)

        with handling(end, signal.SIGINT, signal.SIGTERM):
            yield
        if received:
            signal.raise_signal(received[0])  # the previous handler ends the process

    @contextmanager
    def in_thread(self) -> Iterator[str]:
        """Serve in a thread during the block; yields the link."""
        thread = threading.Thread(target=self.serve, name="page server", daemon=True)
        thread.start()
        try:
            yield self.link
        finally:
            self.stop()
            thread.join(STOP_SECONDS)


def _listen(host: str, port: int) -> socket.socket:
    try:
        return socket.create_server((host, port), family=family_of(host))
    except (OSError, OverflowError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise GossamerError(
            f"the page cannot listen on {host} port {port} ({reason}). Leave out --port for a free one, or name "
            "another, and --host needs an address of this machine"
        ) from error


def _in_link(host: str) -> str:
    return f"[{host}]" if ":" in host else host
