"""Recipes side by side at the command line."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import click
import pytest
from support.command_line import output_of, refusal

from gossamer.cli import compare
from gossamer.cli.compare import compare_command, failure_text, latex_text

TRAIN = """
import torch
from torch import nn
import gossamer

world = gossamer.init()
model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 8))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
session = gossamer.attach(model, optimizer)
draw = torch.Generator().manual_seed(world.rank)
for step in range(100_000):
    loss = model(torch.randn(16, 64, generator=draw)).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    {log}
"""


def run(*arguments: str) -> tuple[int, str]:
    return output_of(compare_command, *arguments)


def test_a_latex_table_escapes_special_characters() -> None:
    table = latex_text(["recipe", "50 %"], [["Adaptive(TopK(0.01), {a_b})", "3 µs"]])
    assert r"recipe & 50 \% \\" in table
    assert r"\{a\_b\}) & 3 \textmu{}s \\" in table
    assert r"\begin{tabular}{lr}" in table


@pytest.mark.processes
def test_two_recipes_are_trained_and_compared(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(TRAIN.format(log="session.log(loss=1 / (step + 1))"))
    files = {name: tmp_path / name for name in ("found.json", "page.html", "curves.png", "rows.csv", "table.tex")}
    code, said = run(
        *("--recipe", "Dense()", "--recipe", "TopK(density=0.1)", "--until", "loss<0.1"),
        *("--json", str(files["found.json"]), "--page", str(files["page.html"]), "--plot", str(files["curves.png"])),
        *("--csv", str(files["rows.csv"]), "--latex", str(files["table.tex"])),
        str(script),
    )
    assert code == 0, said
    found = json.loads(files["found.json"].read_text())
    dense, sparse = found["records"]
    assert dense["final"]["loss"] < 0.1
    assert 10 < dense["steps"] <= 13
    assert dense["workers_agree"]
    assert sparse["bytes_sent_per_step"]["accounted"] < dense["bytes_sent_per_step"]["accounted"]
    assert found["comparison"]["rows"][0]["seconds_to_target"] is not None
    assert "to loss<0.1" in said
    with files["rows.csv"].open() as file:
        first, second = csv.DictReader(file)
    assert (first["recipe"], second["recipe"]) == ("Dense()", "TopK(density=0.1)")
    assert float(second["bytes_per_step"]) == sparse["bytes_sent_per_step"]["accounted"]
    assert float(first["seconds_to_target"]) == found["comparison"]["rows"][0]["seconds_to_target"]
    assert first["money"] == ""
    table = files["table.tex"].read_text()
    assert table.count(r"\\") == 3
    assert "waiting" in table
    page = files["page.html"].read_text()
    assert "TopK(density=0.1)" in page
    assert "://" not in page  # no address: nothing is fetched
    assert files["curves.png"].stat().st_size > 10_000


@pytest.mark.processes
def test_a_script_that_logs_no_loss_is_told_so(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(TRAIN.format(log="pass"))
    code, said = run("--recipe", "Int8()", "--seconds", "0.5", str(script))
    assert code == 0, said
    assert "session.log(loss=loss.item())" in said


@pytest.mark.parametrize("option", ["--json", "--plot", "--page"])
def test_what_could_not_be_written_is_refused_before_anything_is_trained(
    option: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compare, "train_for_record", lambda *_: pytest.fail("it was trained"))
    (tmp_path / "train.py").write_text("")
    code, said = run("--recipe", "Dense()", option, str(tmp_path / "missing" / "file"), str(tmp_path / "train.py"))
    assert (code, "there is no directory" in said) == (2, True), said


@pytest.mark.parametrize(
    ("arguments", "ops"),
    [
        (["--recipe", "Float4()", "--recipe", "wan"], ["same recipe", "'wan'"]),
        (["--recipe", "TopJ(0.01)"], ["TopK"]),
        (["--recipe", "Dense()", "--until", "loss"], ["validation_loss<2.2"]),
        (["--recipe", "Dense()", "--workers", "1"], ["2<=x<=65536"]),
    ],
)
def test_what_cannot_be_compared(arguments: list[str], ops: list[str], tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("")
    code, said = run(*arguments, str(script))
    assert code == 2
    assert all(op in said for op in ops), said


def test_an_invalid_network_is_refused_before_the_script_is_profiled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compare, "_estimate", lambda *_: pytest.fail("the script was profiled"))
    (tmp_path / "train.py").write_text("")
    said = refusal("compare", "--recipe", "Dense()", "--network", "fast", str(tmp_path / "train.py"))
    assert "'fast' is not a rate" in said


def _record(recipe: str) -> dict[str, Any]:
    return {
        "recipe": recipe,
        "workers": 2,
        "steps": 10,
        "seconds": 1.0,
        "seconds_per_step": {"median": 0.1, "p90": 0.1},
        "compute_seconds_per_step": 0.08,
        "waiting_seconds_per_step": 0.02,
        "communication_seconds_per_step": {"encode": 0.001, "wire": 0.01, "decode": 0.001},
        "bytes_sent_per_step": {"accounted": 1e5, "interface": None},
        "metrics": {"loss": [[step, step / 10, 1 / step] for step in range(1, 11)]},
    }


def test_the_rate_that_hides_a_recipe_has_a_column(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compare, "train_for_record", lambda recipe, *_: _record(recipe))
    (tmp_path / "train.py").write_text("")
    code, said = run("--recipe", "Dense()", str(tmp_path / "train.py"))
    assert code == 0, said
    assert "rate to hide" in said
    assert "10.0 Mbit/s" in said


@pytest.mark.parametrize("emulation", ["switch", "paced"])
def test_it_says_how_the_network_was_emulated(emulation: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    how = {"network": "10mbit,20ms", "emulation": emulation}
    monkeypatch.setattr(compare, "train_for_record", lambda recipe, *_: {**_record(recipe), **how})
    (tmp_path / "train.py").write_text("")
    page = tmp_path / "page.html"
    options = ["--network", "10mbit,20ms", "--no-estimate", "--page", str(page), "--recipe", "Int8()"]
    code, said = run(*options, str(tmp_path / "train.py"))
    assert code == 0, said
    assert f"network: 10mbit,20ms (emulated: {emulation})" in said
    assert f"on 10mbit,20ms (emulated: {emulation})" in page.read_text()


def test_recipes_that_are_chosen_while_training_differ_from_the_one_they_begin_with(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compare, "train_for_record", lambda recipe, *_: _record(recipe))
    (tmp_path / "train.py").write_text("")
    script = str(tmp_path / "train.py")
    code, said = run("--recipe", "Dense()", "--recipe", "auto", "--recipe", "Auto(steps=20000)", script)
    assert code == 0, said
    code, said = run("--recipe", "auto", "--recipe", "Auto()", script)
    assert (code, "are the same recipe, Auto()" in said) == (2, True)


ENDS = {"Dense()": 1.0, "Silent()": 2.0, "Int8()": 1.25, "TopK(density=0.01)": 2.5}


def _ended(recipe: str, training: list[str], best: str = "0.03") -> dict[str, Any]:
    """A record whose loss follows from the recipe, the seed and the learning rate of the script's arguments."""
    _, seed, rate = training
    loss = ENDS[recipe] + 0.01 * int(seed) + (rate not in ("", best))
    return {**_record(recipe), "metrics": {"validation_loss": [[10, 1.0, loss]]}}


def _compared(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, *arguments: str) -> tuple[str, dict[str, Any]]:
    trained: list[str] = []

    def train(recipe: str, workers: int, network: Any, limits: Any, training: list[str], console: Any) -> Any:
        trained.append(f"{recipe} {training[1]} {training[2]}")
        return _ended(recipe, training)

    monkeypatch.setattr(compare, "train_for_record", train)
    (tmp_path / "train.py").write_text("")
    file = tmp_path / "found.json"
    code, said = run(*arguments, "--json", str(file), str(tmp_path / "train.py"), "{seed}", "{learning_rate}")
    assert code == 0, said
    return said, {**json.loads(file.read_text()), "trained": trained}


def test_the_share_of_the_benefit_of_communication_has_an_interval_over_seeds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipes = ["--recipe", "Int8()", "--recipe", "TopK(density=0.01)", "--retained", "--seeds", "3", "--rates", "0.03"]
    said, found = _compared(monkeypatch, tmp_path, *recipes)
    assert [share["value"] for share in found["retained"]] == pytest.approx([0.75, -0.5, 1.0, 0.0])
    assert [share["low"] for share in found["retained"]] == pytest.approx([0.75, -0.5, 1.0, 0.0])
    assert "75 % (75 to 75)" in said
    assert "worse than silence" in said
    assert len(found["other_seeds"][0]) == 2


def test_losses_over_seeds_have_a_mean_and_an_interval_in_the_table_and_in_the_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = tmp_path / "rows.csv"
    said, found = _compared(monkeypatch, tmp_path, "--recipe", "Int8()", "--seeds", "3", "--csv", str(rows))
    half = 4.303 * 0.01 / 3**0.5
    loss = found["comparison"]["rows"][0]["loss_at_equal_steps"]
    assert loss == {
        "value": pytest.approx(1.26),
        "points": 1,
        "low": pytest.approx(1.26 - half, abs=1e-4),
        "high": pytest.approx(1.26 + half, abs=1e-4),
    }
    assert f"1.26 ± {half:.4f}" in said
    assert "95 % interval over 3 seeds" in said
    with rows.open() as file:
        (row,) = csv.DictReader(file)
    assert float(row["loss_at_equal_steps"]) == pytest.approx(1.26)
    assert float(row["loss_at_equal_steps_high"]) == pytest.approx(1.26 + half, abs=1e-4)
    assert row["loss_at_equal_steps_points"] == "1"


def test_the_note_below_the_table_names_the_averaged_values(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compare, "train_for_record", lambda recipe, *_: _record(recipe))
    (tmp_path / "train.py").write_text("")
    code, said = run("--recipe", "Dense()", str(tmp_path / "train.py"))
    assert code == 0, said
    assert "last 20 % of each run's steps (2 values)" in said
    assert "--seeds 3" in said


def test_a_single_seed_has_a_share_and_no_interval(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said, found = _compared(monkeypatch, tmp_path, "--recipe", "Int8()", "--retained", "--rates", "0.03")
    assert "75 %" in said
    assert found["retained"][0]["low"] is None


def test_each_recipe_is_compared_at_its_own_best_learning_rate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said, found = _compared(monkeypatch, tmp_path, "--recipe", "Int8()", "--seeds", "2", "--rates", "0.1,0.01,0.03")
    assert found["trained"] == ["Int8() 0 0.01", "Int8() 0 0.03", "Int8() 0 0.1", "Int8() 1 0.03"]
    assert found["learning_rates"] == ["0.03"]
    assert "an end of --rates" not in said


def test_a_best_learning_rate_at_the_end_of_the_list_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said, _ = _compared(monkeypatch, tmp_path, "--recipe", "Int8()", "--rates", "0.03,0.1")
    assert "0.03, is an end of --rates" in said


def test_terms_of_the_script_are_known_before_the_ends_of_the_scale_are_added(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The script is read with the arguments of its first run."""
    seen: list[Any] = []
    monkeypatch.setattr(compare, "register_terms", lambda script, arguments, recipes: seen.append(arguments))
    monkeypatch.setattr(compare, "_with_ends", lambda recipes, workers: seen.append("ends") or recipes)
    _compared(monkeypatch, tmp_path, "--recipe", "Int8()", "--retained", "--rates", "0.03,0.1")
    assert seen == [["0", "0.03"], "ends"]


@pytest.mark.parametrize("option", [["--seeds", "2"], ["--rates", "0.1,0.3"]])
def test_runs_that_would_all_be_the_same_are_refused(option: list[str], tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("")
    code, said = run("--recipe", "Int8()", *option, str(tmp_path / "train.py"))
    assert (code, "would be the same" in said) == (2, True)


def test_a_failure_is_told_in_a_sentence_first() -> None:
    told = [
        "gossamer: starting",
        "gossamer: step 5",
        "",
        "rank 1 failed: KeyError: 'labels' (exit code 1)",
        "Traceback",
    ]
    lines = failure_text("Dense()", ["gossamer", "run", "--recipe", "Dense()", "a b.py"], told).splitlines()
    assert "the run with Dense()" in lines[0]
    assert lines[0].endswith("rank 1 failed: KeyError: 'labels' (exit code 1)")
    assert lines[1].endswith("gossamer run --recipe 'Dense()' 'a b.py'")
    assert lines[2:] == ["", "Traceback"]
    assert failure_text("Dense()", ["gossamer"], ["Error: no such script"]).count("no such script") == 1
    assert "it printed nothing" in failure_text("Dense()", ["gossamer"], [])


@pytest.mark.parametrize(("end", "says"), [(click.ClickException("it broke"), "it broke"), (KeyboardInterrupt(), "")])
def test_runs_before_one_that_failed_or_was_interrupted_are_shown(
    end: BaseException, says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def train(recipe: str, *_: object) -> dict[str, Any]:
        if recipe != "Dense()":
            raise end
        return _record(recipe)

    monkeypatch.setattr(compare, "train_for_record", train)
    (tmp_path / "train.py").write_text("")
    file = tmp_path / "found.json"
    arguments = ["--recipe", "Dense()", "--recipe", "Int8()", "--json", str(file), str(tmp_path / "train.py")]
    code, said = run(*arguments)
    assert (code, says in said) == (1, True)
    assert "100 ms" in said
    assert [record["recipe"] for record in json.loads(file.read_text())["records"]] == ["Dense()"]
    code, said = run(*arguments[2:])
    assert (code, says in said, "100 ms" in said) == (1, True, False)


def test_finished_seeds_of_a_recipe_are_kept_if_a_later_seed_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def train(recipe: str, workers: int, network: Any, limits: Any, training: list[str], console: Any) -> Any:
        if recipe == "Int8()" and training[1] == "2":
            raise click.ClickException("it broke")
        return _ended(recipe, training)

    monkeypatch.setattr(compare, "train_for_record", train)
    (tmp_path / "train.py").write_text("")
    file = tmp_path / "found.json"
    options = ["--recipe", "Dense()", "--recipe", "Int8()", "--seeds", "3", "--rates", "0.03", "--json", str(file)]
    code, said = run(*options, str(tmp_path / "train.py"), "{seed}", "{learning_rate}")
    assert (code, "it broke" in said) == (1, True)
    assert "Int8(): 2 of 3 seeds finished" in said
    assert "Dense(): " not in said.split("Int8(): 2 of 3")[1]
    found = json.loads(file.read_text())
    assert [len(others) for others in found["other_seeds"]] == [2, 1]
    assert found["comparison"]["rows"][1]["loss_at_equal_steps"]["value"] == pytest.approx(1.255)


def test_without_matplotlib_a_page_is_drawn_and_a_plot_refused_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gossamer.base.figures.find_spec", lambda name: None)
    trained: list[str] = []
    monkeypatch.setattr(compare, "train_for_record", lambda recipe, *_: trained.append(recipe) or _record(recipe))
    (tmp_path / "train.py").write_text("")
    page = tmp_path / "page.html"
    code, said = run("--recipe", "Dense()", "--page", str(page), str(tmp_path / "train.py"))
    assert code == 0, said
    assert page.read_text().count("<polyline") == 2 * 2
    trained.clear()
    code, said = run("--recipe", "Dense()", "--plot", str(tmp_path / "c.png"), str(tmp_path / "train.py"))
    assert (code, trained) == (1, [])
    assert 'pip install "gossamer[plot]"' in said
    assert "--page" in said


def test_a_line_that_a_script_prints_is_shown_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """Markup of the console in it, such as a closing tag, is no error."""
    real = compare.subprocess.Popen

    def prints(command: list[str], **options: Any) -> Any:
        return real(["/bin/sh", "-c", "echo '[/INST] a [/dim] line'; exit 3"], **options)

    monkeypatch.setattr(compare.subprocess, "Popen", prints)
    with pytest.raises(click.ClickException, match=r"\[/INST\] a \[/dim\] line"):
        compare.train_for_record("Dense()", 2, None, {}, ["train.py"], compare.wide_console(80))
