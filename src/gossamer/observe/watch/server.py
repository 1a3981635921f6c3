"""Server: serves the page on one port of this machine until it is stopped, and makes the link to it."""

from __future__ import annotations

import secrets
import signal
import socket
import threading
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from types import FrameType
from typing import Any

from gossamer.comm.runtime.signal_handlers import handling
from gossamer.errors import GossamerError
from gossamer.observe.watch.app import make_app
from gossamer.observe.watch.guard import LOOPBACK
from gossamer.observe.watch.runs import WatchedRun

NEEDS = ("starlette", "uvicorn")
STOP_SECONDS = 5.0


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
        self._host, self.port = host, self._listening.getsockname()[1]
        self._stopping = threading.Event()
        allowed = {*LOOPBACK, _in_link(host), *names}
        app: Any = make_app(runs, self._token, allowed, self._stopping.is_set)
        self._uvicorn = uvicorn.Server(
            uvicorn.Config(
                app, log_level="error", access_log=False, lifespan="off", ws="none", timeout_graceful_shutdown=2
            )
        )
        vars(self._uvicorn)["capture_signals"] = self._handling_signals

    @property
    def link(self) -> str:
        host = socket.gethostname() if self._host in ("0.0.0.0", "::") else _in_link(self._host)
        return f"http://{host}:{self.port}/?token={self._token}"

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
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family)
    except (OSError, OverflowError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise GossamerError(
            f"the page cannot listen on {host} port {port} ({reason}). Leave out --port for a free one, or name "
            "another, and --host needs an address of this machine"
        ) from error


def _in_link(host: str) -> str:
    return f"[{host}]" if ":" in host else host
