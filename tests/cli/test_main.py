"""Entry point: lazy commands, errors of the system, and terminals without Unicode."""

from __future__ import annotations

import errno
import io
import os
import resource
import subprocess
import sys
from pathlib import Path

import click
import pytest
from click.shell_completion import BashComplete
from click.testing import CliRunner

from gossamer.base import units
from gossamer.cli import main
from gossamer.cli.main import STAND_INS, write_plainly
from gossamer.errors import GossamerError, LoopError
from gossamer.plan.estimate.timeline import AT_ONCE, LANDS, LEAVES, TRAINS, TRAVELS


def test_notes_of_an_error_stand_under_it(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    @click.command()
    def fails() -> None:
        error = LoopError("the model that it was given is as it was")
        error.add_note("It was client 3 in round 7.")
        raise error

    monkeypatch.setattr(sys, "argv", ["gossamer", "fails"])
    monkeypatch.setitem(main.gossamer.commands, "fails", fails)
    with pytest.raises(SystemExit) as ended:
        main.main()
    assert ended.value.code == 1
    assert capsys.readouterr().err.splitlines() == [
        "Error: the model that it was given is as it was",
        "It was client 3 in round 7.",
    ]


def fail(monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    """`gossamer fails`, which raises the error."""

    @click.command()
    def fails() -> None:
        raise error

    monkeypatch.setattr(sys, "argv", ["gossamer", "fails"])
    monkeypatch.setitem(main.gossamer.commands, "fails", fails)
    main.main()


@pytest.mark.parametrize(
    ("number", "told"),
    [
        (errno.EMFILE, "this process reached its limit of 24 open files"),
        (errno.ENFILE, "this machine reached the maximum number of open files"),
        (errno.ENOSPC, "no space is left on the disk"),
        (errno.EDQUOT, "no space is left on the disk"),
    ],
)
def test_a_lack_of_files_or_space_is_a_sentence(
    number: int, told: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (24, 24))
    with pytest.raises(SystemExit) as ended:
        fail(monkeypatch, OSError(number, "as the system says", "runs/x/boot-0-0.txt"))
    assert ended.value.code == 1
    said = " ".join(capsys.readouterr().err.split())
    assert f"Error: {told}" in said
    assert "as the system says: 'runs/x/boot-0-0.txt'" in said
    assert ("ulimit -n 4096 (the hard limit of this user is 24" in said) == (number == errno.EMFILE)


def test_another_error_of_the_system_keeps_its_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(PermissionError):
        fail(monkeypatch, PermissionError(errno.EACCES, "denied"))


HELP_WITHOUT_TORCH = """
import sys
from pathlib import Path
from click.testing import CliRunner
from gossamer.cli.main import gossamer
for words in (["--version"], ["--help"], ["run", "--help"]):
    done = CliRunner().invoke(gossamer, words)
    assert done.exit_code == 0, done.output
    assert "torch" not in sys.modules, words
"""


def test_help_and_version_do_not_import_torch() -> None:
    subprocess.run([sys.executable, "-c", HELP_WITHOUT_TORCH], check=True)


PLAIN_RUN = """
import sys
from pathlib import Path
import gossamer.cli.run_training
wanted = ("algorithms.compressors", "algorithms.strategies", "base.kernels", "comm.elastic", "comm.mesh", "comm.rpc")
wanted += ("observe.watch", "train")
found = [name for name in sys.modules if name.removeprefix("gossamer.").startswith(wanted)]
assert not found, found
"""


def test_the_launcher_of_a_plain_run_imports_no_module_for_other_runs() -> None:
    """All workers wait for its imports."""
    subprocess.run([sys.executable, "-c", PLAIN_RUN], check=True)


PLAIN_WORKER = """
import sys
from pathlib import Path
import gossamer.cli.worker, gossamer.train.session.attach
wanted = ("comm.elastic", "comm.membership", "comm.rpc", "plan", "train.parameter_server")
allowed = {"comm", "comm.elastic", "comm.elastic.recognition"}
found = {name.removeprefix("gossamer.") for name in sys.modules if name.removeprefix("gossamer.").startswith(wanted)}
assert found <= allowed, sorted(found - allowed)
"""


def test_a_worker_of_a_plain_run_imports_no_module_for_elastic_runs_servers_or_networks() -> None:
    """The fork server imports what the workers of most runs need."""
    subprocess.run([sys.executable, "-c", PLAIN_WORKER], check=True)


@pytest.mark.parametrize("name", main.COMMANDS)
def test_the_line_of_a_command_is_the_first_sentence_of_its_help(name: str) -> None:
    """Update COMMANDS in gossamer/cli/main.py."""
    command = main.COMMANDS[name].load()
    assert (command.name, command.get_short_help_str(limit=500)) == (name, main.COMMANDS[name].help)


def test_commands_are_listed_and_an_unknown_one_is_refused() -> None:
    shown = CliRunner().invoke(main.gossamer, ["--help"]).output
    assert all(f"\n  {name} " in shown for name in main.COMMANDS)
    refused = CliRunner().invoke(main.gossamer, ["rnu"])
    assert refused.exit_code == 2
    assert "No such command 'rnu'" in refused.output


def test_the_shell_completes_commands_options_and_files() -> None:
    complete = BashComplete(main.gossamer, {}, "gossamer", "_GOSSAMER_COMPLETE")
    assert [item.value for item in complete.get_completions([], "re")] == ["recipes", "record", "rehearse", "resize"]
    assert [item.value for item in complete.get_completions(["run"], "--dry")] == ["--dry-run"]
    assert [item.type for item in complete.get_completions(["run"], "tra")] == ["file"]


def written(text: str, encoding: str, errors: str = "strict") -> bytes:
    stream = io.TextIOWrapper(io.BytesIO(), encoding=encoding, errors=errors)
    if errors == "strict":
        write_plainly(stream)
    stream.write(text)
    stream.flush()
    return stream.buffer.getvalue()


@pytest.mark.parametrize(
    ("text", "plain"),
    [
        ("step 3 · 2 steps/s", b"step 3 - 2 steps/s"),
        ("···▲═▼◆", b"---^=v*"),
        ("12 µs, cut…", b"12 us, cut."),
        ("\N{BRAILLE PATTERN DOTS-1} waiting", b"* waiting"),
        ("ümläut", rb"\xfcml\xe4ut"),
        ("name\udcff", b"name\xff"),
    ],
)
def test_letters_that_the_encoding_lacks_have_stand_ins(text: str, plain: bytes) -> None:
    assert written(text, "ascii") == plain
    with pytest.raises(UnicodeEncodeError):
        written(text, "ascii", errors="surrogatepass")  # as without stand-ins


def test_letters_that_the_encoding_has_stay() -> None:
    assert written("··▲ µs ümläut", "utf-8") == "··▲ µs ümläut".encode()
    assert written("· µ ▲", "latin-1") == b"\xb7 \xb5 ^"


def test_what_is_printed_has_a_stand_in_of_its_own() -> None:
    marks = TRAINS + LEAVES + TRAVELS + LANDS + AT_ONCE
    assert len({STAND_INS[mark] for mark in marks}) == len(marks)
    assert all(letter.isascii() or letter in STAND_INS for _, unit in units.SECOND_UNITS for letter in unit)


@pytest.mark.processes
def test_the_command_line_writes_ascii_where_nothing_else_is_there() -> None:
    command = [sys.executable, "-m", "gossamer", "explain", "DiLoCo(8)", "--parameters", "1000"]
    said = subprocess.run(
        command, env={**os.environ, "PYTHONIOENCODING": "ascii"}, capture_output=True, timeout=200, check=True
    ).stdout.decode("ascii")
    assert "- trains apart" in said


@pytest.mark.parametrize(
    ("words", "answer"),
    [
        (["compre", "train.py"], "No such command 'compre'. Did you mean compare?"),
        (["zzz"], "No such command 'zzz'."),
        (["train.py", "--workers", "2"], "Write: gossamer run train.py"),
    ],
)
def test_a_missing_command_is_answered_with_the_likely_one(words: list[str], answer: str) -> None:
    result = CliRunner().invoke(main.gossamer, words)
    assert (result.exit_code, answer in result.output) == (2, True), result.output


@pytest.mark.parametrize("closed", [">&-", "2>&-"])
def test_a_command_runs_without_standard_output_or_errors(closed: str) -> None:
    done = subprocess.run(
        ["/bin/sh", "-c", f'exec "$0" -m gossamer --version {closed}', sys.executable], capture_output=True, text=True
    )
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("record.json", ["record", "run"]),
        ("limits.json", ["limit", "run"]),
        ("coordinator.json", ["resize", "run", "2"]),
        ("rank-0.spans", ["trace", "-o", "trace.json", "run"]),
        ("flight-0-1.json", ["stacks", "--flight-recorder", "dump", "run"]),
    ],
)
def test_a_file_that_nests_too_deeply_is_refused(
    name: str, words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The parser of the standard library would exhaust the interpreter's stack."""
    monkeypatch.chdir(tmp_path)
    Path("run").mkdir()
    Path("run", name).write_text("[" * 100_000 + "\n")
    done = CliRunner().invoke(main.gossamer, words)
    assert done.exit_code > 0
    assert isinstance(done.exception, SystemExit | GossamerError), done.exception
    assert f"run/{name}" in f"{done.output} {done.exception}" or "operations of run" in done.output
