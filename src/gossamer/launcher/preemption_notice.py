"""Preemption notices: a cloud announces that it takes this machine away, and the launcher stops as on Ctrl-C.

Workers of a launcher that joined an elastic run leave it, and the run continues. In other runs all workers stop after
the same step, so that the script can save. Nothing is requested without `--preemption-notice`.
"""

from __future__ import annotations

import json
import subprocess
import threading
from collections.abc import Callable, Mapping
from http.client import HTTPException
from typing import Any, Protocol
from urllib.error import HTTPError
from urllib.request import ProxyHandler, Request, build_opener

METADATA = "http://169.254.169.254"  # AWS and Azure: a link-local address of the virtual machine's host
GOOGLE_METADATA = "http://metadata.google.internal"
POLL_SECONDS = 2.0  # notices come 30 s (Google, Azure) or 120 s (AWS) before the end
ANSWER_SECONDS = 10.0  # within which a service must answer
WAIT_SECONDS = 5  # for which Google's service waits for a change
TOKEN_SECONDS = 21_600  # life of a token of AWS's service, its maximum
MOST_BYTES = 2**20  # of an answer
UNAVAILABLE = "no preemption notices: {source} does not answer ({reason}); training continues without them"
NOT_STARTED = (126, 127)  # exit codes of a shell that cannot execute the command, or does not find it
LEAVES = "{source} announced a preemption of this machine: {reason}"


class NoticeSource(Protocol):
    """A service that announces preemptions."""

    name: str

    def look(self) -> str:
        """Return the notice as text, or "" without one. Raises OSError or ValueError if there is no valid answer."""


def _answer(url: str, headers: Mapping[str, str], method: str = "GET") -> tuple[str, Mapping[str, str]]:
    """Request a metadata service directly, without proxies. Raises HTTPError, OSError."""
    request = Request(url, headers=dict(headers), method=method)
    with build_opener(ProxyHandler({})).open(request, timeout=ANSWER_SECONDS) as answer:
        return answer.read(MOST_BYTES).decode(), answer.headers


class AwsNotices:
    """EC2 spot interruption notices, by IMDSv2: a session token, then `spot/instance-action`, which is 404 without
    one.
    """

    name = "aws"

    def __init__(self, base: str = METADATA) -> None:
        self._base, self._token = base, ""

    def look(self) -> str:
        if not self._token:
            headers = {"X-aws-ec2-metadata-token-ttl-seconds": str(TOKEN_SECONDS)}
            self._token, _ = _answer(f"{self._base}/latest/api/token", headers, "PUT")
        try:
            headers = {"X-aws-ec2-metadata-token": self._token}
            text, _ = _answer(f"{self._base}/latest/meta-data/spot/instance-action", headers)
        except HTTPError as refused:
            if refused.code == 401:  # the token has expired
                self._token = ""
            elif refused.code != 404:
                raise
            return ""
        found = _object(text)
        return f"{found['action']} at {found['time']}" if {"action", "time"} <= found.keys() else ""


class GoogleNotices:
    """Compute Engine's `instance/preempted`; each request after the first waits for a change."""

    name = "gce"

    def __init__(self, base: str = GOOGLE_METADATA) -> None:
        self._base, self._etag = base, "0"

    def look(self) -> str:
        query = f"wait_for_change=true&timeout_sec={WAIT_SECONDS}&last_etag={self._etag}"
        url = f"{self._base}/computeMetadata/v1/instance/preempted?{query}"
        text, headers = _answer(url, {"Metadata-Flavor": "Google"})
        self._etag = headers.get("ETag", "0")
        return "preempted" if text.strip().upper() == "TRUE" else ""


class AzureNotices:
    """Azure's scheduled events of the type Preempt or Terminate; the service also lists events of other machines."""

    name = "azure"

    def __init__(self, base: str = METADATA) -> None:
        self._base, self._machine = base, ""

    def look(self) -> str:
        if not self._machine:
            self._machine = self._answer("instance/compute/name?api-version=2021-02-01&format=text").strip()
        events = _object(self._answer("scheduledevents?api-version=2020-07-01")).get("Events")
        for event in events if isinstance(events, list) else ():
            match event:
                case {"EventType": "Preempt" | "Terminate" as kind, "Resources": list(names)} if self._machine in names:
                    return f"{kind} not before {event.get('NotBefore') or 'now'}"
        return ""

    def _answer(self, path: str) -> str:
        return _answer(f"{self._base}/metadata/{path}", {"Metadata": "true"})[0]


class CommandNotices:
    """A shell command that ends with exit code 0 once this machine is about to be taken away. Its first line of output
    is the notice. `look` raises OSError if the shell cannot start the command.
    """

    def __init__(self, command: str) -> None:
        self.name, self._command = command, command

    def look(self) -> str:
        ended = subprocess.run(
            self._command, shell=True, stdin=subprocess.DEVNULL, capture_output=True, timeout=60, check=False
        )
        if ended.returncode in NOT_STARTED:
            problem = ended.stderr.decode(errors="replace").strip().splitlines() or [f"exit code {ended.returncode}"]
            raise OSError(f"{problem[-1]}. Write {', '.join(SOURCES)} or a command")
        lines = ended.stdout.decode(errors="replace").strip().splitlines() or ["exit code 0"]
        return lines[0] if ended.returncode == 0 else ""


def _object(text: str) -> dict[str, Any]:
    found = json.loads(text)
    if not isinstance(found, dict):
        raise ValueError(f"expected a JSON object, got {text[:80]!r}")
    return found


SOURCES: dict[str, Callable[[], NoticeSource]] = {"aws": AwsNotices, "gce": GoogleNotices, "azure": AzureNotices}


def notices_of(text: str) -> NoticeSource:
    """Return the source for the text of `--preemption-notice`: aws, gce, azure, or a command. Raises ValueError for an
    empty text, which a shell executes with exit code 0.
    """
    if not text.strip():
        raise ValueError(
            f"an empty text names no source of preemption notices. Write {', '.join(SOURCES)} or a command"
        )
    return SOURCES[text]() if text in SOURCES else CommandNotices(text)


class PreemptionWatch:
    """Asks a source in a thread, until it announces a preemption or the block ends.

    Args:
        source: announces preemptions.
        stop: called once, by the thread that calls `tick`, after a preemption was announced.
        note: shows a message to the user.
        pause: waits between two requests; returns whether the block has ended. Replaced in tests.
    """

    def __init__(
        self,
        source: NoticeSource,
        stop: Callable[[], object],
        note: Callable[[str], None],
        pause: Callable[[], bool] | None = None,
    ) -> None:
        self._source, self._stop, self._note = source, stop, note
        self._over = threading.Event()
        self._pause = pause or (lambda: self._over.wait(POLL_SECONDS))
        self._thread = threading.Thread(target=self.run, name="gossamer-preemption", daemon=True)
        self._failure, self._warned, self._found, self.reason = "", False, "", ""

    def __enter__(self) -> PreemptionWatch:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()  # the thread may wait for an answer, and ends with the process

    def run(self) -> None:
        """Ask until there is a notice. A service that fails is asked again."""
        while not self._found:
            try:
                self._found = self._source.look()
            except (OSError, ValueError, HTTPException, subprocess.SubprocessError) as failure:
                self._failure = str(failure)
            if self._pause():
                return

    def tick(self) -> None:
        """Report what the thread has found; call it regularly."""
        if self._found and not self.reason:
            self.reason = LEAVES.format(source=self._source.name, reason=self._found)
            self._note(self.reason)
            self._stop()
        elif self._failure and not self._found and not self._warned:
            self._warned = True
            self._note(UNAVAILABLE.format(source=self._source.name, reason=self._failure))
