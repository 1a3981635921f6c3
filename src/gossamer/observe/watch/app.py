"""App: the page's server as an ASGI application: files, numbers as JSON, and a stream of news. It never writes."""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Any

import msgspec

from gossamer.errors import GossamerError
from gossamer.observe.watch import tables
from gossamer.observe.watch.curves import bytes_at, metric_names, read_curve
from gossamer.observe.watch.environments import read_differences
from gossamer.observe.watch.grid_cache import GridCache
from gossamer.observe.watch.guard import Guard
from gossamer.observe.watch.log_lines import LogFilter, read_lines
from gossamer.observe.watch.pictures import HEAT, heat, over_time
from gossamer.observe.watch.runs import WatchedRun
from gossamer.observe.watch.summary import read_findings, read_ranks, read_vitals, summarize
from gossamer.observe.watch.window import clamped

STATIC = Path(__file__).parent / "static"
CELLS = 400  # where a request does not say
CURVES_AT_ONCE = 24

Query = Any  # starlette's QueryParams


class Views:
    """What the page asks for, each as a function of a run and the query; blocking, so called in threads."""

    def __init__(self, runs: Sequence[WatchedRun]) -> None:
        self._runs = runs
        self._grids = GridCache()

    def runs(self) -> list[dict[str, Any]]:
        """Every run with its summary and metrics' names, or with the problem why there are none (yet)."""
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
        told: dict[str, Any] = {"key": run.key, "name": run.name, "folder": str(run.folder), "now": time.time()}
        try:
            with run.reading() as db:
                return told | {"summary": summarize(db), "metrics": metric_names(db)}
        except (GossamerError, sqlite3.Error) as problem:
            return told | {"problem": str(problem)}


def make_app(
    runs: Sequence[WatchedRun], token: str, names: Collection[str], stopping: Callable[[], bool] = lambda: False
) -> Guard:
    """The page of `runs` for who knows `token`. names: under which it may be asked for. Needs starlette."""
    from starlette.applications import Starlette
    from starlette.concurrency import run_in_threadpool
    from starlette.requests import Request
    from starlette.responses import FileResponse, Response, StreamingResponse
    from starlette.routing import Mount, Route
    from starlette.staticfiles import StaticFiles

    from gossamer.observe.watch.news import stream  # needs anyio, which starlette brings

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
    """begin and end, unix seconds, where both are given and in order."""
    try:
        begin, end = float(query["begin"]), float(query["end"])
    except (KeyError, ValueError):
        return None
    return (begin, end) if 0 <= begin < end < 1e12 else None
