"""`gossamer federate serve` and `join`: real processes on loopback, killed and started again; refusals in time."""

from __future__ import annotations

import json
import os
import signal
import stat
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path

import click
import pytest
import torch
from click.testing import CliRunner
from support.certificates import certificates
from support.deployed_federations import Command, commands, join, port, program, server

from gossamer.cli.federate_server import (
    INTERRUPTED,
    _interrupting,
    _stopping,
    enroll_command,
    join_command,
    read_bind,
    read_server,
    serve_command,
)
from gossamer.comm.environment.run_token import read_token
from gossamer.federated.client.functions import load_script
from gossamer.federated.secure_aggregation.identities import IdentityRoster

Start = Callable[..., Command]
NOTHING = click.Context(serve_command), click.Option(["--bind"])


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    with commands(tmp_path) as begin:
        yield begin


def serving(folder: Path, number: int, recipe: str = "FedAvg(fraction=1.0)", **options: object) -> list[object]:
    chosen = {"clients": 3, "rounds": 4, "token-file": folder / "token", "journal": folder / "journal", **options}
    flags = [word for key, value in chosen.items() for word in (f"--{key}", value)]
    return ["serve", program(folder), "--recipe", recipe, "--bind", f"127.0.0.1:{number}", *flags]


def joining(folder: Path, at: int, number: int, **options: object) -> list[object]:
    chosen = {"token-file": folder / "token", "number": number, "state": folder / f"device-{number}", **options}
    flags = [word for key, value in chosen.items() for word in (f"--{key}", value)]
    return ["join", folder / "program.py", "--server", f"127.0.0.1:{at}", *flags]


@pytest.mark.parametrize("block", [lambda: _stopping(lambda: pytest.fail("stopped")), _interrupting])
def test_servers_and_devices_ignore_signals_that_they_were_started_to_ignore(
    block: Callable[[], AbstractContextManager[None]],
) -> None:
    before = {number: signal.signal(number, signal.SIG_IGN) for number in (signal.SIGINT, signal.SIGHUP)}
    try:
        with block():
            for number in before:
                os.kill(os.getpid(), number)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def is_serving(text: str) -> bool:
    return "devices join by" in text


@pytest.mark.processes
def test_a_federation_of_processes_ends_encrypted_and_hears_signals(tmp_path: Path, start: Start) -> None:
    number, tls, record = port(), certificates(tmp_path / "tls"), tmp_path / "record.json"
    arguments = serving(tmp_path, number, tls=tls, json=record)
    server = start(*arguments)
    server.until(is_serving)
    assert stat.S_IMODE((tmp_path / "token").stat().st_mode) == 0o600
    devices = [start(*joining(tmp_path, number, each, tls=tls)) for each in range(2)]
    devices[1].until(lambda text: "joined as client 1" in text)
    began = time.monotonic()
    devices[1].process.send_signal(signal.SIGTERM)
    assert devices[1].wait() == INTERRUPTED
    assert time.monotonic() - began < 25.0  # it would be waited for half a minute and more
    assert "start the same command again" in devices[1].text
    server.process.send_signal(signal.SIGINT)
    assert server.wait() == INTERRUPTED
    assert f"it continues from {tmp_path / 'journal'}" in server.text
    again = start(*arguments)
    devices[1:] = [start(*joining(tmp_path, number, each, tls=tls)) for each in (1, 2)]
    assert [each.wait() for each in devices] == [0, 0, 0]
    assert again.wait() == 0
    found = json.loads(record.read_text())
    assert found["ended"] == "finished"
    assert [entry["metrics"]["bias"] for entry in found["history"]] == [1.0, 2.0, 3.0, 4.0]
    assert "round 4/4" in again.text
    assert "bias 4" in again.text
    token = (tmp_path / "token").read_bytes().hex()
    assert all(token not in each.text for each in [server, again, *devices])


@pytest.mark.processes
def test_a_server_and_a_device_that_are_killed_continue_and_nothing_counts_twice(tmp_path: Path, start: Start) -> None:
    number, record, rounds = port(), tmp_path / "record.json", 40
    arguments = serving(tmp_path, number, rounds=rounds, clients=2, json=record)
    server = start(*arguments)
    server.until(is_serving)
    script, token = load_script(tmp_path / "program.py"), read_token(tmp_path / "token")
    stays = join(("127.0.0.1", number), 0, script=script, token=token)
    killed = start(*joining(tmp_path, number, 1))
    server.until(lambda text: "round 5/" in text)
    server.process.kill()
    killed.process.kill()
    server.wait()
    again = start(*arguments)
    returns = start(*joining(tmp_path, number, 1))
    stays.ended()
    assert (returns.wait(), again.wait()) == (0, 0)
    assert "continuing from version" in again.text
    last = json.loads(record.read_text())["history"][-1]
    assert last["version"] == rounds
    assert last["metrics"] == {"bias": rounds, "least": rounds}  # each device adds one, each round's mean is one


def test_wrong_tokens_and_models_are_refused_in_time(tmp_path: Path) -> None:
    (tmp_path / "token").write_bytes(bytes(32))
    (tmp_path / "token").chmod(0o600)
    (tmp_path / "other").write_bytes(bytes(33))
    (tmp_path / "other").chmod(0o600)
    served = server(script=load_script(program(tmp_path)), token=read_token(tmp_path / "token"))
    served.start()
    larger = program(tmp_path, size=5, name="larger.py")
    refusals = {"another token": {"token-file": tmp_path / "other"}, "build the same model everywhere": {}}
    for reason, options in refusals.items():
        words = [*map(str, joining(tmp_path, served.address[1], 0, **options))][1:]
        words[0] = words[0] if options else str(larger)
        began = time.monotonic()
        said = CliRunner().invoke(join_command, words)
        assert reason in str(said.exception)
        assert time.monotonic() - began < 25.0  # it would be waited for half a minute and more
    served.stop()
    served.close()


def test_addresses_are_read() -> None:
    assert read_bind(*NOTHING, "127.0.0.1") == ("127.0.0.1", 29600)
    assert read_bind(*NOTHING, "0.0.0.0:80") == ("0.0.0.0", 80)
    assert read_bind(*NOTHING, "::1") == ("::1", 29600)
    assert read_server(*NOTHING, "[::1]:80") == ("::1", 80)
    for text in ("somewhere", "somewhere:port", ":80", "a:99999"):
        with pytest.raises(click.BadParameter, match="Write ADDRESS:PORT"):
            read_server(*NOTHING, text)


def test_a_token_that_others_may_read_is_refused(tmp_path: Path) -> None:
    token = tmp_path / "token"
    token.write_bytes(bytes(32))
    token.chmod(0o644)
    arguments = [*map(str, serving(tmp_path, 0))][1:]
    said = CliRunner().invoke(serve_command, arguments)
    assert said.exit_code == 2
    assert "chmod 600" in said.output


def token_of(folder: Path) -> bytes:
    (folder / "token").write_bytes(bytes(32))
    (folder / "token").chmod(0o600)
    return read_token(folder / "token")


def test_it_ends_where_it_was_told_to_and_the_model_is_saved(tmp_path: Path) -> None:
    number, model, script = port(), tmp_path / "model.pt", load_script(program(tmp_path))
    device = join(("127.0.0.1", number), 0, script=script, token=token_of(tmp_path))
    chosen = {"clients": 1, "rounds": 10**6, "until": "bias>=2", "config": "rate=0.5", "save": model}
    said = CliRunner().invoke(serve_command, [*map(str, serving(tmp_path, number, **chosen))][1:])
    assert said.exit_code == 0, said.output
    assert device.ended() >= 2
    assert "of 1000000: bias>=2 is reached" in said.output
    assert f"model.load_state_dict(torch.load('{model}', weights_only=True))" in said.output
    assert torch.load(model, weights_only=True)["bias"].item() >= 2


def test_what_no_federation_can_be_is_reported_without_a_traceback(tmp_path: Path) -> None:
    token_of(tmp_path)
    said = CliRunner().invoke(serve_command, [*map(str, serving(tmp_path, port(), fewest=4))][1:])
    assert said.exit_code == 1
    assert "fewest must be 1 to the cohort's 3, got 4" in said.output
    said = CliRunner().invoke(serve_command, [*map(str, serving(tmp_path, port(), selection="within-deadline"))][1:])
    assert said.exit_code == 1
    assert "add --round-seconds 600" in said.output


def test_late_devices_and_who_is_drawn_are_options(tmp_path: Path) -> None:
    number, script, record = port(), load_script(program(tmp_path)), tmp_path / "record.json"
    devices = [join(("127.0.0.1", number), each, script=script, token=token_of(tmp_path)) for each in range(2)]
    chosen = {"clients": 2, "rounds": 4, "selection": "least-trained", "late": "count", "json": record}
    said = CliRunner().invoke(
        serve_command, [*map(str, serving(tmp_path, number, "FedAvg(fraction=0.5)", **chosen))][1:]
    )
    assert said.exit_code == 0, said.output
    assert sum(each.ended() for each in devices) == 4
    assert len(json.loads(record.read_text())["history"]) == 4


def test_a_device_is_enrolled_by_its_line(tmp_path: Path) -> None:
    pytest.importorskip("cryptography")
    words = ["--number", "3", "--identity", str(tmp_path / "identity")]
    first, again = (CliRunner().invoke(enroll_command, words).stdout for _ in range(2))
    assert first == again
    assert stat.S_IMODE((tmp_path / "identity").stat().st_mode) == 0o600
    (tmp_path / "roster").write_text(first)
    assert [*IdentityRoster.read(tmp_path / "roster").keys] == [3]
