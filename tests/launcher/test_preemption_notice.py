"""Preemption notices: services of three clouds, as local stand-ins, and a command of the user's own."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.error import HTTPError

import pytest

from gossamer.launcher.preemption_notice import (
    AwsNotices,
    AzureNotices,
    CommandNotices,
    GoogleNotices,
    NoticeSource,
    PreemptionWatch,
    notices_of,
)

Reply = tuple[int, str, dict[str, str]]  # status, body, headers
Respond = Callable[[BaseHTTPRequestHandler], Reply]


@contextmanager
def service(respond: Respond) -> Iterator[str]:
    """A metadata service on loopback; yields its address."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            status, body, headers = respond(self)
            self.send_response(status)
            for name, value in {**headers, "Content-Length": str(len(body))}.items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(body.encode())

        do_PUT = do_GET  # noqa: N815

        def log_message(self, *_: object) -> None:
            """Print nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def test_aws_announces_by_a_token_and_an_action() -> None:
    tokens, actions = ["first", "second"], ["", '{"action": "terminate", "time": "2030-01-01T08:22:00Z"}']
    valid: list[str] = []

    def respond(request: BaseHTTPRequestHandler) -> Reply:
        if request.command == "PUT":
            assert request.path == "/latest/api/token"
            assert int(request.headers["X-aws-ec2-metadata-token-ttl-seconds"]) > 0
            valid[:] = [tokens.pop(0)]
            return 200, valid[0], {}
        assert request.path == "/latest/meta-data/spot/instance-action"
        if request.headers["X-aws-ec2-metadata-token"] not in valid:
            return 401, "", {}
        action = actions.pop(0)
        return (200, action, {}) if action else (404, "", {})

    with service(respond) as base:
        source = AwsNotices(base)
        assert source.look() == ""
        valid.clear()  # the token expires
        assert source.look() == ""
        assert source.look() == "terminate at 2030-01-01T08:22:00Z"
    assert not tokens


def test_gce_announces_by_a_change_of_a_value() -> None:
    values, etags = ["FALSE", "TRUE"], []

    def respond(request: BaseHTTPRequestHandler) -> Reply:
        assert request.headers["Metadata-Flavor"] == "Google"
        path, _, query = request.path.partition("?")
        assert path == "/computeMetadata/v1/instance/preempted"
        asked = dict(each.split("=") for each in query.split("&"))
        assert asked["wait_for_change"] == "true"
        etags.append(asked["last_etag"])
        return 200, values.pop(0), {"ETag": f"tag{len(etags)}"}

    with service(respond) as base:
        source = GoogleNotices(base)
        assert [source.look(), source.look()] == ["", "preempted"]
    assert etags == ["0", "tag1"]


def test_azure_announces_events_of_this_machine_only() -> None:
    def event(kind: str, machine: str) -> dict[str, object]:
        return {"EventType": kind, "Resources": [machine], "NotBefore": "Mon, 19 Sep 2030 18:29:47 GMT"}

    answers = [[], [event("Preempt", "worker_8")], [event("Reboot", "worker_7")], [event("Preempt", "worker_7")]]

    def respond(request: BaseHTTPRequestHandler) -> Reply:
        assert request.headers["Metadata"] == "true"
        if request.path.startswith("/metadata/instance/compute/name?"):
            return 200, "worker_7", {}
        assert request.path == "/metadata/scheduledevents?api-version=2020-07-01"
        return 200, json.dumps({"DocumentIncarnation": 1, "Events": answers.pop(0)}), {}

    with service(respond) as base:
        source = AzureNotices(base)
        assert [source.look() for _ in range(3)] == ["", "", ""]
        assert source.look() == "Preempt not before Mon, 19 Sep 2030 18:29:47 GMT"


@pytest.mark.parametrize("kind", [AwsNotices, GoogleNotices, AzureNotices])
def test_a_failing_service_raises(kind: Callable[[str], NoticeSource]) -> None:
    with service(lambda request: (500, "", {})) as base, pytest.raises(HTTPError):
        kind(base).look()
    with pytest.raises(OSError, match="refused"):
        kind(base).look()


@pytest.mark.parametrize("body", ["[]", "no json", '"TRUE"', '{"Events": 3}', '{"Events": [3, {}]}', "{}"])
@pytest.mark.parametrize("kind", [AwsNotices, GoogleNotices, AzureNotices])
def test_invalid_answers_are_no_notices(kind: Callable[[str], NoticeSource], body: str) -> None:
    with service(lambda request: (200, body, {})) as base, suppress(ValueError):  # the watch reports it
        assert kind(base).look() == ""


def test_a_command_announces_by_exit_code_0(tmp_path: Path) -> None:
    source = CommandNotices(f"cat {tmp_path / 'notice'}")
    assert source.look() == ""
    (tmp_path / "notice").write_text("maintenance at noon\nmore\n")
    assert source.look() == "maintenance at noon"
    assert CommandNotices("true").look() == "exit code 0"


@pytest.mark.parametrize("command", ["awz", "./notice"])
def test_a_command_that_a_shell_cannot_start_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: str
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("notice").mkdir()  # exit code 126
    with pytest.raises(OSError, match=r"Write aws, gce, azure or a command$") as caught:
        CommandNotices(command).look()
    assert command in str(caught.value)


def test_an_empty_command_is_refused() -> None:
    with pytest.raises(ValueError, match="aws, gce, azure or a command"):
        notices_of(" ")


def test_the_option_names_a_cloud_or_a_command() -> None:
    kinds = [type(notices_of(text)) for text in ("aws", "gce", "azure", "test -e /tmp/x")]
    assert kinds == [AwsNotices, GoogleNotices, AzureNotices, CommandNotices]


# -- the watch ---------------------------------------------------------------------------------------------------------


class Script:
    """A source that answers, or fails, in this order."""

    name = "aws"

    def __init__(self, *answers: str | Exception) -> None:
        self.left = list(answers)

    def look(self) -> str:
        answer = self.left.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer


def watched(*answers: str | Exception) -> tuple[list[str], int, str]:
    """(notes, number of stops, reason) after the source has given all answers."""
    source, notes, stops = Script(*answers), [], []
    watch = PreemptionWatch(source, lambda: stops.append(1), notes.append, lambda: not source.left)
    watch.run()
    for _ in range(3):
        watch.tick()
    return notes, len(stops), watch.reason


def test_a_notice_stops_the_launcher_once_and_says_why() -> None:
    notes, stops, reason = watched("", "", "terminate at 08:22")
    assert notes == [reason]
    assert stops == 1
    assert "aws" in reason
    assert "terminate at 08:22" in reason


def test_without_a_notice_nothing_stops() -> None:
    assert watched("", "", "") == ([], 0, "")


def test_a_service_that_fails_is_reported_once_and_asked_again() -> None:
    notes, stops, _ = watched(OSError("timed out"), ValueError("no JSON"), "preempted")
    assert (len(notes), stops) == (1, 1)
    notes, stops, _ = watched(OSError("timed out"), OSError("timed out"), "")
    assert (len(notes), stops) == (1, 0)
    assert "timed out" in notes[0]


def test_the_thread_ends_with_the_block() -> None:
    source, stops = Script("", "preempted"), threading.Event()
    with PreemptionWatch(source, stops.set, lambda text: None, lambda: not source.left) as watch:
        watch._thread.join()
        watch.tick()
    assert stops.is_set()
