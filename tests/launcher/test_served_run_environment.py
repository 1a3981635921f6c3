"""What launched processes are told: each its own place, and the run's secret nowhere but in its file."""

from __future__ import annotations

import stat
from typing import Any

import pytest
from support.served_launches import Run

from gossamer.comm.environment.run_token import TOKEN_BYTES, check_token_file, make_token_file
from gossamer.errors import ConnectError
from gossamer.launcher import served_run
from gossamer.launcher.failure import Outcome

pytestmark = pytest.mark.processes
SHOW = 'print(*sys.argv, *(f"{name}={value}" for name, value in os.environ.items()), sep="\\n", flush=True)\n'


def check_nobody_has_the_secret(run: Run) -> None:
    assert run(SHOW + "ask(0)", server=SHOW, workers=2) == Outcome()
    path = run.private / "token"
    token = path.read_bytes()
    assert (stat.S_IMODE(path.stat().st_mode), len(token)) == (0o600, TOKEN_BYTES)
    elsewhere = b"".join(file.read_bytes() for file in run.directory.rglob("*") if file.is_file() and file != path)
    assert b"GOSSAMER_TOKEN_FILE=%s\n" % bytes(path) in elsewhere
    assert not any(form in elsewhere for form in (token, token.hex().encode(), repr(token).encode()))


def test_the_secret_is_in_its_file_and_nowhere_else(run: Run) -> None:
    check_nobody_has_the_secret(run)


def test_the_check_of_secrets_notices_one_in_the_environment(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def tells(*arguments: Any) -> dict[str, str]:
        return dict(surroundings(*arguments)) | {"TOLD": (run.private / "token").read_bytes().hex()}

    surroundings = served_run._shared_environment
    monkeypatch.setattr(served_run, "_shared_environment", tells)
    with pytest.raises(AssertionError):
        check_nobody_has_the_secret(run)


def test_every_process_knows_its_place_and_not_an_outer_launchers(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "5")
    monkeypatch.setenv("GOSSAMER_REJOIN", "1")
    assert run(SHOW + "ask(0)", server=SHOW, workers=2, recipe="Dense()") == Outcome()
    worker = [line for rank, line in run.lines if rank == 1]
    server = [note.removeprefix("server 0: ") for note in run.notes]
    for lines in (worker, server):
        found = dict(line.split("=", 1) for line in lines if "=" in line)
        assert (found["WORLD_SIZE"], found["LOCAL_WORLD_SIZE"], found["MASTER_ADDR"]) == ("2", "2", "127.0.0.1")
        assert (found["TORCHELASTIC_USE_AGENT_STORE"], found["GOSSAMER_RECIPE"]) == ("True", "Dense()")
        assert found["GOSSAMER_SERVERS"].startswith("127.0.0.1:")
        assert int(found["MASTER_PORT"]) > 0
        assert len(found["GOSSAMER_RUN"]) == 16
        assert "GOSSAMER_REJOIN" not in found
    assert {"RANK=1", "LOCAL_RANK=1"} <= set(worker)
    assert {"GOSSAMER_SERVER=0", f"GOSSAMER_JOURNAL={run.private / 'journal-0'}"} <= set(server)
    assert not any(line.startswith(("RANK=", "LOCAL_RANK=")) for line in server)


def test_a_secret_of_ones_own_is_checked_and_used(run: Run) -> None:
    mine = make_token_file(run.directory)
    run(f"assert os.environ['GOSSAMER_TOKEN_FILE'] == {str(mine)!r}", token_file=mine)
    assert not (run.private / "token").exists()
    with pytest.raises(ConnectError, match="No such file"):
        check_token_file(run.directory / "none")
    mine.chmod(0o640)
    with pytest.raises(ConnectError, match=f"chmod 600 {mine}"):
        check_token_file(mine)
    mine.chmod(0o600)
    mine.write_bytes(b"short")
    with pytest.raises(ConnectError, match="at least 32 bytes"):
        check_token_file(mine)
    with pytest.raises(ConnectError, match="at least 32 bytes"):
        check_token_file(run.directory)
