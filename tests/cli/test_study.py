"""`gossamer study`: labels, commands of its runs, tables and files."""

from __future__ import annotations

import csv
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from support.command_line import output_of
from support.simulated_scripts import script as simulated_script

from gossamer.cli import study
from gossamer.cli.compare import CommandEnd
from gossamer.cli.main import gossamer
from gossamer.cli.study import study_command
from gossamer.plan.study import StudyRun

ENDS = {"Dense()": 1.0, "Silent()": 2.0, "Int8()": 1.25}


def _ended(words: Sequence[str]) -> dict[str, Any]:
    """A record whose metrics follow from the recipe and the seed, the last word."""
    recipe, seed = words[words.index("--recipe") + 1], int(words[-1])
    loss = ENDS[recipe] + 0.01 * seed
    return {
        "ended": "finished",
        "steps": 2,
        "seconds": 3.0 + seed,
        "bytes_sent_per_step": {"accounted": 1e6},
        "memory_bytes": {"peak_resident": 1},
        "metrics": {
            "loss": [[1, 1.0, 9.0], [2, 2.0, loss]],
            "accuracy": [[1, 1.0, 0.1], [2, 2.0, 0.5 + 0.01 * seed]],
        },
    }


@pytest.fixture
def commands(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[list[str]]:
    """The commands of runs, which end at once; the current folder has a script."""
    made: list[list[str]] = []

    def run_at_once(words: Sequence[str], environment: Mapping[str, str], tell: Any, started: Any) -> CommandEnd:
        made.append([*words])
        return CommandEnd(0, _ended(words), [])

    monkeypatch.setattr(study, "run_for_json", run_at_once)
    monkeypatch.chdir(tmp_path)
    Path("train.py").write_text("")
    return made


def recipes(*texts: str) -> list[str]:
    return [word for text in texts for word in ("--recipe", text)]


def studied(*arguments: str) -> str:
    code, said = output_of(study_command, "--real-time", *arguments, "train.py", "{seed}")
    assert code == 0, said
    return said


def test_every_recipe_runs_with_every_seed_and_an_interrupted_study_continues(commands: list[list[str]]) -> None:
    studied(*recipes("Dense()", "Int8()"), "--seeds", "2", "--network", "20mbit,20ms")
    wanted = ["run", "--workers", "2", "--network", "20mbit,20ms", "--recipe", "Dense()", "train.py", "0"]
    assert commands[0] == wanted
    assert [(words[6], words[-1]) for words in commands] == [
        ("Dense()", "0"),
        ("Int8()", "0"),
        ("Dense()", "1"),
        ("Int8()", "1"),
    ]
    commands.clear()
    studied(*recipes("Dense()", "Int8()"), "--seeds", "3", "--network", "20mbit,20ms")
    assert [words[-1] for words in commands] == ["2", "2"]


@pytest.mark.parametrize("network", ["{}", "{}; 10mbit at 30s", "100mbit; {} at 30s"])
def test_a_changed_network_file_is_another_study(
    network: str, commands: list[list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    def train(trainer: study.CommandTrainer, run: StudyRun, on_line: Any) -> dict[str, Any]:
        commands.append([*run.command])
        return _ended(run.command)

    monkeypatch.setattr(study.CommandTrainer, "train", train)
    file = Path("my net.toml")
    words = ["--network", network.format(file), "--step-seconds", "0.1", "--seeds", "1", *recipes("Dense()")]
    for rate in ("10mbit", "10mbit", "20mbit"):
        file.write_text(f'[[hosts]]\ncount = 2\nrate = "{rate}"\n')
        code, said = output_of(study_command, *words, "train.py", "0")
        assert code == 0, said
    assert len(commands) == 2


def test_the_table_has_means_paired_differences_and_the_retained_benefit(commands: list[list[str]]) -> None:
    said = studied(*recipes("Dense()", "small=Int8()", "Silent()"), "--seeds", "3")
    names = ("recipe", "Dense()", "small", "Silent()")
    header, dense, small, _ = (line for line in said.splitlines() if line.startswith(names))
    assert "loss at step 2" in header
    assert dense.split()[:2] == ["Dense()", "1.01"]
    assert "1.26 ± 0.0248" in small
    assert "0.250" in small  # the difference, without an interval: it is the same for every seed
    assert "75 % (75 to 75)" in small
    assert "2.0 MB" in small
    assert "paired by seed" in said


def test_files_have_the_labels_and_all_metrics(commands: list[list[str]]) -> None:
    studied(
        *recipes("Dense()", "small_net=Int8()"), "--seeds", "2", "--csv", "o.csv", "--tex", "o.tex", "--plot", "o.png"
    )
    with Path("o.csv").open() as file:
        rows = {(row["label"], row["quantity"]): row for row in csv.DictReader(file)}
    assert {name for _, name in rows} == {"loss", "accuracy", "seconds", "bytes_sent", "steps"}
    small = rows["small_net", "loss"]
    assert small["recipe"] == "Int8()"
    assert float(small["mean"]) == pytest.approx(1.255)
    assert float(small["difference"]) == pytest.approx(0.25)
    assert (float(small["seed_0"]), float(small["seed_1"])) == pytest.approx((1.25, 1.26))
    assert rows["Dense()", "loss"]["difference"] == ""
    table = Path("o.tex").read_text()
    assert r"small\_net & " in table
    assert r"\textpm{}" in table
    assert Path("o.png").read_bytes().startswith(b"\x89PNG")


def test_a_plot_has_two_panels_for_each_metric_with_a_band_for_each_recipe(
    commands: list[list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    from gossamer.observe import plot

    drawn: list[Any] = []
    make = plot.figure
    monkeypatch.setattr(plot, "figure", lambda *size: drawn.append(make(*size)) or drawn[-1])
    studied(*recipes("Dense()", "small=Int8()"), "--seeds", "2", "--plot", "o.png")
    titles = [axes.get_title(loc="left") for axes in drawn[0].axes]
    assert titles == ["loss over time", "loss over bytes", "accuracy over time", "accuracy over bytes"]
    assert all(len(axes.collections) == 2 for axes in drawn[0].axes)
    assert {text.get_text() for text in drawn[0].axes[0].texts} == {"Dense()", "small"}


def test_virtual_time_trains_by_simulation_and_keeps_its_record(
    commands: list[list[str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def simulate(
        words: Sequence[str], environment: Mapping[str, str], tell: Callable[[str], None], started: Any
    ) -> Any:
        file = tmp_path / "found.json"
        commands.append([*words])
        ended = CliRunner().invoke(gossamer, [words[0], "--json", str(file), *words[1:]])
        return CommandEnd(ended.exit_code, json.loads(file.read_text()), [])

    monkeypatch.setattr(study, "run_for_json", simulate)
    file = simulated_script(tmp_path)
    code, said = output_of(
        study_command,
        *recipes("Dense()", "TopK(density=0.1)"),
        *("--network", "100mbit,20ms", "--step-seconds", "0.1", "--steps", "3", "--seeds", "1", str(file), "9{seed}"),
    )
    assert code == 0, said
    assert commands[0][0] == "simulate"
    assert "loss at step 3" in said
    (stored,) = (tmp_path / "studies" / "train").glob("TopK*")
    record = json.loads(stored.read_text())
    assert record["study"]["seed"] == 0
    assert record["memory_bytes"]["peak_resident"] > 1e6
    assert record["compute_seconds_per_step"] == 0.1


def test_the_compute_time_of_a_step_is_measured_once_for_all_runs(
    commands: list[list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    from types import SimpleNamespace

    measured: list[Any] = []
    monkeypatch.setattr(
        study, "profile_script", lambda *given: measured.append(given) or SimpleNamespace(compute_seconds=0.25)
    )
    code, _ = output_of(study_command, *recipes("Dense()", "Int8()"), "--network", "1mbit", "train.py", "{seed}")
    assert code == 1  # the records are those of real runs
    assert all("0.25" in words for words in commands)
    output_of(study_command, *recipes("Dense()"), "--network", "1mbit", "train.py", "{seed}")
    assert len(measured) == 1


def test_failed_runs_are_named_below_the_table_of_the_others(
    commands: list[list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    def breaks(words: Sequence[str], *_: Any) -> CommandEnd:
        if "Int8()" in words:
            return CommandEnd(1, None, ["rank 1 failed: KeyError: 'labels'"])
        return CommandEnd(0, _ended(words), [])

    monkeypatch.setattr(study, "run_for_json", breaks)
    arguments = ["--real-time", *recipes("Dense()", "small=Int8()"), "--seeds", "2", "train.py", "{seed}"]
    code, said = output_of(study_command, *arguments)
    assert code == 1
    assert "Dense()  " in said
    assert "2 of 4 runs failed" in said
    assert "small, seed 1" in said
    assert "KeyError" in said


def test_a_run_that_was_stopped_early_is_not_stored(commands: list[list[str]], monkeypatch: pytest.MonkeyPatch) -> None:
    stopped = lambda words, *_: CommandEnd(0, {**_ended(words), "ended": "interrupted"}, [])  # noqa: E731
    monkeypatch.setattr(study, "run_for_json", stopped)
    code, _ = output_of(study_command, "--real-time", *recipes("Dense()"), "--seeds", "1", "train.py", "0")
    assert code == 1
    assert not Path("studies").exists()


def test_a_script_that_ignores_the_seed_is_reported(commands: list[list[str]], monkeypatch: pytest.MonkeyPatch) -> None:
    same = lambda words, *_: CommandEnd(0, _ended([*words[:-1], "0"]), [])  # noqa: E731
    monkeypatch.setattr(study, "run_for_json", same)
    assert "ignores" in studied(*recipes("Dense()"), "--seeds", "2")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([*recipes("a=Dense()", "a=Int8()"), "--network", "1mbit"], ["label", "'a'"]),
        ([*recipes("a=Dense()", "b=Dense()"), "--network", "1mbit"], ["same recipe"]),
        ([*recipes("a=Dens()"), "--network", "1mbit"], ["Dense"]),
        (recipes("Dense()"), ["--network", "--real-time"]),
        ([*recipes("Dense()"), "--real-time", "--steps", "5"], ["virtual time"]),
    ],
)
def test_unusable_options_are_refused(arguments: list[str], words: list[str], commands: list[list[str]]) -> None:
    code, said = output_of(study_command, *arguments, "train.py", "{seed}")
    assert code == 2
    assert all(word in said for word in words), said
    assert commands == []


def test_seeds_without_a_placeholder_are_refused(commands: list[list[str]]) -> None:
    code, said = output_of(study_command, "--real-time", *recipes("Dense()"), "--seeds", "2", "train.py")
    assert (code, "{seed}" in said) == (2, True)


def test_a_store_that_cannot_be_written_is_refused_before_a_run(commands: list[list[str]]) -> None:
    Path("file").write_text("")
    plan = ("--recipe", "Dense()", "--network", "1mbit", "--step-seconds", "1", "--store", "file/store")
    code, said = output_of(study_command, *plan, "train.py", "{seed}")
    assert code == 2
    assert "stored in file/store, and" in said
    assert "is not a writable folder. Write --store FOLDER" in " ".join(said.split())
    assert not commands
