"""Guard: accepts requests with the link's token from this page only, and restricts browsers to the page's own files.

The token in the link authorizes a reader. The Host header must be a known name of this server, which prevents DNS
rebinding, and an Origin header, if present, must be the page itself.
"""

from __future__ import annotations

import secrets
from collections.abc import Collection
from typing import Any
from urllib.parse import parse_qs

POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; base-uri 'none'; "
    "form-action 'none'; frame-ancestors 'none'"
)
HEADERS = (
    (b"content-security-policy", POLICY.encode()),
    (b"x-content-type-options", b"nosniff"),
    (b"referrer-policy", b"no-referrer"),
    (b"cross-origin-resource-policy", b"same-origin"),
    (b"cross-origin-opener-policy", b"same-origin"),
    (b"cache-control", b"no-store"),
)
MOST_QUERY_BYTES = 2**15  # for 24 names of metrics, which may be long
LOOPBACK = ("127.0.0.1", "localhost", "[::1]")
OPEN_TO_ALL = "/static/"  # the page's own files, without data of runs


class Guard:
    """ASGI middleware for the page's server: allows reading only, and answers 403 to unauthorized requests.

    token: a secret of 24 random bytes; names: allowed host names, without port.
    """

    def __init__(self, app: Any, token: str, names: Collection[str]) -> None:
        self._app, self._token = app, token.encode()
        self._names = frozenset(name.lower() for name in names)

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            return

        async def sealed(message: Any) -> None:
            if message["type"] == "http.response.start":
                message = {**message, "headers": [*message.get("headers", ()), *HEADERS]}
            await send(message)

        status, reason = self._refusal(scope)
        if status:
            plain = [(b"content-type", b"text/plain; charset=utf-8")]
            await sealed({"type": "http.response.start", "status": status, "headers": plain})
            await sealed({"type": "http.response.body", "body": reason.encode()})
        else:
            await self._app(scope, receive, sealed)

    def _refusal(self, scope: Any) -> tuple[int, str]:
        headers = {name.lower(): value.decode("latin-1") for name, value in scope["headers"]}
        host, origin = headers.get(b"host", ""), headers.get(b"origin")
        if scope["method"] not in ("GET", "HEAD"):
            return 405, "This page is read-only."
        if _without_port(host).lower() not in self._names:
            return (
                403,
                "Unknown host name. Use the link that this server printed, or add --allow-host NAME.",
            )
        if origin is not None and origin.lower() not in (f"http://{host}".lower(), f"https://{host}".lower()):
            return 403, "Requests from other pages are refused."
        if len(scope["query_string"]) > MOST_QUERY_BYTES:
            return 414, f"The query has more than {MOST_QUERY_BYTES} bytes. Request fewer metrics at once."
        if not scope["path"].startswith(OPEN_TO_ALL) and not self._knows(scope["query_string"]):
            return 403, "The link is incomplete: its token is missing or wrong. Copy the whole printed link."
        return 0, ""

    def _knows(self, query: bytes) -> bool:
        given = parse_qs(query.decode("latin-1")).get("token", [""])[0]
        return secrets.compare_digest(given.encode(), self._token)


def _without_port(host: str) -> str:
    name, colon, port = host.rpartition(":")
    return name if colon and port.isdecimal() and not name.endswith(":") else host
