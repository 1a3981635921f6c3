"""Checks that several commands share."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import click
import pytest
from support.command_line import output_of, refusal

from gossamer.base.figures import figure
from gossamer.cli import options, recipe_options, run
from gossamer.cli.main import gossamer
from gossamer.comm.mesh.collective_selector import REQUESTABLE


def test_a_package_that_workers_need_is_missed_before_they_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("train.py").write_text("")
    monkeypatch.setattr(options, "find_spec", lambda name: None if name == "msgspec" else name)
    said = refusal("run", "--servers", "1", "train.py")
    assert f"Write: {sys.executable} -m pip install msgspec\n" in said
    assert "Traceback" not in said
    assert not Path("runs").exists()


def test_the_recipe_of_an_advice_is_what_workers_are_told(tmp_path: Path) -> None:
    (tmp_path / "advice.json").write_text('{"advice_version": 1, "recipe": "Int8()"}')
    assert recipe_options.readable_recipe(f"@{tmp_path}/advice.json") == "Int8()"
    with pytest.raises(click.BadParameter, match="does not exist"):
        recipe_options.readable_recipe("@nowhere.json")


@pytest.mark.parametrize(
    ("option", "text", "reason"),
    [
        ("--log-to", "runs/tb", "such as"),
        ("--log-to", "tb:runs", "such as"),
        ("--log-to", "tensorboard:", "such as"),
        ("--log-to", "prometheus:http", "such as"),
        ("--congestion", "nonesuch", "unavailable congestion control 'nonesuch'"),
        ("--grace-seconds", "nan", "nan is not a finite number"),
        ("--json", "", "the name of the file is empty. Write --json FILE"),
        ("--plot", "", "the name of the file is empty. Write --plot FILE"),
        ("--json", "a" * 300, "write a shorter one"),
        ("--tls", "a" * 300, "cert.pem, key.pem, ca.pem missing in"),
        ("--preemption-notice", " ", "Write aws, gce, azure or a command"),
    ],
)
def test_an_invalid_value_is_refused_before_workers_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, option: str, text: str, reason: str
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("train.py").write_text("")
    said = " ".join(refusal("run", option, text, "train.py").split())
    assert f"Invalid value for '{option}'" in said
    assert reason in said
    assert not Path("runs").exists()


def options_of(command: click.Command, path: str = "gossamer") -> Iterator[tuple[str, click.Option]]:
    """Every option of a command and of its commands, with the command's name."""
    for each in command.params:
        if isinstance(each, click.Option):
            yield f"{path} {each.opts[-1]}", each
    if isinstance(command, click.Group):
        for name in command.list_commands(context := click.Context(command)):
            subcommand = command.get_command(context, name)
            assert subcommand is not None
            yield from options_of(subcommand, f"{path} {name}")


def test_no_option_takes_numbers_that_are_not_finite() -> None:
    numbers = {name: each for name, each in options_of(gossamer) if isinstance(each.type, click.types.FloatParamType)}
    assert {"gossamer run --grace-seconds", "gossamer compare --price-per-hour"} <= numbers.keys()
    for each in numbers.values():
        for text in ("nan", "inf", "1e19"):
            with pytest.raises(click.BadParameter):
                each.type.convert(text, each, None)


def test_a_number_of_workers_has_the_limit_of_a_range() -> None:
    assert options.WorkerCount().convert("65536", None, None) == 65536
    with pytest.raises(click.BadParameter, match="1<=x<=65536"):
        options.WorkerCount().convert("65537", None, None)


@pytest.mark.parametrize("command", ["advise", "compare", "doctor", "rehearse", "study"])
def test_commands_that_start_workers_have_the_limit_of_a_run(command: str) -> None:
    option = dict(options_of(gossamer))[f"gossamer {command} --workers"]
    with pytest.raises(click.BadParameter, match="<=x<=65536"):
        option.type.convert("65537", option, None)


@pytest.mark.parametrize("command", ["explain", "simulate"])
def test_an_estimate_has_at_most_100000_workers(command: str) -> None:
    option = dict(options_of(gossamer))[f"gossamer {command} --workers"]
    assert option.type.convert("100000", option, None) == 100_000
    with pytest.raises(click.BadParameter, match="1<=x<=100000"):
        option.type.convert("100001", option, None)


def test_a_group_of_options_is_one_value_in_the_order_of_the_help() -> None:
    def pair(first: str | None, second: str) -> str:
        return f"{first} and {second}"

    @click.command()
    @options.option_group("both", pair, click.option("--first"), click.option("--other", "second", default="b"))
    @click.option("--third")
    def command(both: str, third: str | None) -> None:
        click.echo(f"{both}, {third}")

    assert [each.name for each in command.params] == ["first", "second", "third"]
    assert output_of(command, "--third", "c", "--first", "a") == (0, "a and b, c\n")


def test_the_help_names_every_collective() -> None:
    assert ", ".join(REQUESTABLE) == run.WAYS


@pytest.mark.parametrize(
    "arguments",
    [
        ("run", "--plot"),
        ("compare", "--recipe", "Int8()", "--plot"),
        ("study", "--recipe", "Int8()", "--plot"),
        ("simulate", "--recipe", "Int8()", "--picture"),
        ("record", "--plot"),
    ],
)
@pytest.mark.parametrize("name", ["curves", "curves.xyz", "curves.html"])
def test_a_picture_of_an_unknown_format_is_refused_before_workers_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: tuple[str, ...], name: str
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("train.py").write_text("")
    said = " ".join(refusal(*arguments, name, "train.py").split())
    assert f"Write: {arguments[-1]} curves.png" in said
    assert not Path("runs").exists()


def test_each_format_of_pictures_can_be_drawn(tmp_path: Path) -> None:
    for ending in options.PICTURES:
        figure(1, 1).savefig(tmp_path / f"picture{ending}")


@pytest.mark.parametrize(
    "arguments",
    [
        ("advise", "--network", "20mbit"),
        ("compare", "--recipe", "Int8()"),
        ("explain", "Int8()"),
        ("federate", "--recipe", "FedAvg()"),
        ("simulate", "--recipe", "Int8()"),
        ("study", "--recipe", "Int8()"),
    ],
)
def test_a_misspelled_script_is_guessed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: tuple[str, ...]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("train.py").write_text("")
    assert "Did you mean train.py?" in " ".join(refusal(*arguments, "trian.py").split())
