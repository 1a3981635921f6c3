"""The study of strategies: its workers are sessions, its bytes are those of the ops, its sentences follow from it."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from benchmarks import local, local_picture
from benchmarks.local import STUDY, main, options
from benchmarks.local_picture import plot
from benchmarks.local_report import SILENT, Study, page_part, sentences, study
from benchmarks.losses import Losses
from benchmarks.markdown_tables import loss, rows
from benchmarks.tasks import TASKS, Task
from benchmarks.virtual_workers import APART, Run, train
from support.linear_regression import samples
from support.paths import ROOT
from torch import nn
from torch.nn.functional import mse_loss

from gossamer import events
from gossamer.algorithms.recipes.recipe import resolve

pytestmark = pytest.mark.nightly

DENSE = "Dense()"


PLAIN = replace(
    TASKS["bytelm"],
    batch=4,
    build=lambda: nn.Linear(12, 24, bias=False).double(),
    optimizer=torch.optim.SGD,
    loss=lambda model, x, y: mse_loss(model(x), y),
    samples=samples,
)
EXAM = samples()[2]


def run(recipe: str, steps: int = 12, learning_rate: float = 0.5, task: Task = PLAIN) -> Run:
    return train(task, EXAM, recipe, learning_rate, 0, steps, 4)


# -- training --------------------------------------------------------------------------------------------------------


def test_lock_step_is_one_worker_with_all_samples() -> None:
    torch.manual_seed(0)
    model, batches = PLAIN.build(), PLAIN.batches(4, 0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    for _ in range(12):
        optimizer.zero_grad()
        PLAIN.loss(model, *(torch.cat(parts) for parts in zip(*next(batches), strict=True))).backward()
        optimizer.step()
    assert run(DENSE)["held_out"] == pytest.approx(PLAIN.loss(model, *EXAM).item(), rel=1e-9)


@pytest.mark.parametrize("recipe", [DENSE, "LocalSGD(period=4) + Int8()"])
def test_a_training_that_is_left_early_has_the_first_points_of_the_whole_curve(recipe: str) -> None:
    paced = replace(PLAIN, pace=lambda made: 1 - made)  # a schedule over all steps
    whole, begun = (train(paced, EXAM, recipe, 0.5, 0, 40, 4, until) for until in (0, 12))
    assert begun["curve"] == whole["curve"][:3]
    assert (begun["steps"], len(whole["curve"])) == (40, 10)


def test_averages_in_every_step_are_lock_step() -> None:
    assert run("LocalSGD(period=1)")["held_out"] == pytest.approx(run(DENSE)["held_out"], rel=1e-9)
    assert run("LocalSGD(period=4)")["held_out"] != pytest.approx(run(DENSE)["held_out"], rel=1e-4)


def test_a_worker_that_never_communicates_is_alone() -> None:
    apart, mixed = run(APART), run("DiLoCo(period=4, mix=1.0)")
    assert apart["alone"] == mixed["alone"], "mix=1 keeps a worker's own parameters, bit for bit"
    assert apart["bytes_sent"] == 0 < mixed["bytes_sent"]
    assert apart["held_out"] != apart["alone"], "the mean over all four"


def test_what_is_merged_is_looked_at() -> None:
    curve = [loss for _, _, loss in run("LocalSGD(period=4)", steps=10)["curve"]]
    assert curve[0] == curve[1] == curve[2] != curve[3], "nothing is agreed upon before the fourth step"
    assert curve[3] == curve[6] != curve[7] == curve[9]


@pytest.mark.parametrize(
    ("recipe", "trials"),
    [(DENSE, 1), ("Int8()", 1), ("DiLoCo(period=4) + TopK(density=0.1)", 0), ("DelayedAveraging(delay=3)", 0)],
)
def test_bytes_are_those_of_the_steps(recipe: str, trials: int) -> None:
    """All that landed, what a session says before its first step and once it has tried how many buckets travel at once,
    and of sync rounds under way after its last."""
    told: list[float] = []
    unsubscribe = events.subscribe(
        lambda event: told.append(event.bytes_sent) if hasattr(event, "waiting_seconds") else None
    )
    found = run(recipe, steps=12)
    unsubscribe()
    apart = 3 * 16 * (1 + trials)
    under_way = 3 if recipe.startswith("Delayed") else 0
    landed = 12 - under_way
    assert found["bytes_sent"] - apart == pytest.approx(sum(told) / 4 * 12 / landed)


def test_bytes_are_counted_again_in_another_way() -> None:
    assert run("LocalSGD(period=4)")["bytes_sent"] == 3 * 16 + 3 * (2 * 3 / 4 * 8 * 288 + 3 * (24 + 38))


def test_a_training_that_diverges_has_no_loss() -> None:
    found = run("DiLoCo(period=4)", steps=40, learning_rate=1e60)
    assert found["held_out"] is None


def test_what_else_fails_is_no_divergence() -> None:
    def breaks(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        raise ArithmeticError("on purpose")

    with pytest.raises(ArithmeticError, match="on purpose"):
        run("DiLoCo(period=4)", task=replace(PLAIN, loss=breaks))


@pytest.mark.parametrize("recipe", dict.fromkeys(recipe for recipe, _ in STUDY))
def test_recipes_can_be_written(recipe: str) -> None:
    if recipe != APART:
        resolve(recipe, 4)


# -- what follows from the numbers -----------------------------------------------------------------------------------


def of(recipe: str, losses: list[float | None], bytes_sent: float, learning_rate: float = 1e-3) -> list[Run]:
    return [
        {
            "recipe": recipe,
            "resolved": recipe,
            "learning_rate": learning_rate,
            "seed": seed,
            "steps": 10,
            "workers": 4,
            "seconds": 1.0,
            "bytes_sent": bytes_sent,
            "curve": [(5, bytes_sent / 2, 2.0), (10, bytes_sent, loss)],
            "held_out": loss,
            "alone": loss,
        }
        for seed, loss in enumerate(losses)
    ]


def made_up(local_loss: float | None = 1.51) -> Study:
    dense = of(DENSE, [1.48, 1.52, 1.50], 1e9)
    rare = of("DiLoCo(period=20)", [local_loss, 1.51, 1.51], 1e6)
    wild = of("LocalSGD(period=4)", [1.58, 1.62, 1.60], 1e5)
    return study([*dense, *of(APART, [1.78, 1.82, 1.80], 0.0), *rare, *wild])


def test_a_gap_is_counted_in_spreads() -> None:
    found = made_up()
    assert found.losses(DENSE).spread == pytest.approx(0.02)
    assert found.gap(found.losses("LocalSGD(period=4)")) == pytest.approx(5.0)
    assert Losses((1.0, 1.2)).lead(Losses((2.0, 2.02))) == pytest.approx(0.91 / 0.02**0.5)


def test_retained_benefit_is_the_share_of_the_gap_between_silence_and_lock_step() -> None:
    shares = [found.value for found in map(made_up().retained, ("DiLoCo(period=20)", "LocalSGD(period=4)")) if found]
    assert shares == pytest.approx([0.29 / 0.3, 0.2 / 0.3])
    page = page_part(made_up(), [])
    assert "| `LocalSGD(period=4)` | 1.600 ± 0.020 | 67 % (67 to 67) | +5.0 |" in page, "seeds are paired"
    harmful = study([*(run for runs in made_up().runs.values() for run in runs), *of("OneBit()", [1.9, 1.9, 1.9], 1.0)])
    assert "-33 % (" in page_part(harmful, [])
    assert ", worse than silence |" in page_part(harmful, [])


def test_retained_benefit_compares_within_one_learning_rate() -> None:
    slow = [run for runs in made_up().runs.values() for run in runs]
    fast = [*of(DENSE, [1.3, 1.3], 1e9, 3e-3), *of("DiLoCo(period=20)", [1.4, 1.4], 1e6, 3e-3)]
    name = "DiLoCo(period=20), lr 0.003"
    assert study([*slow, *fast]).retained(name) is None, "silence has no run at this learning rate"
    share = study([*slow, *fast, *of(APART, [1.5, 1.5], 0.0, 3e-3)]).retained(name)
    assert share is not None
    assert share.value == pytest.approx(0.5)


def test_baselines_have_no_retained_benefit_nor_has_a_task_without_a_price_of_silence() -> None:
    assert made_up().retained(DENSE) is None
    assert made_up().retained(APART) is None
    flat = study([*of(DENSE, [1.5, 1.5], 1e9), *of(APART, [1.5, 1.5], 0.0), *of("Int8()", [1.4, 1.4], 1e8)])
    assert flat.retained("Int8()") is None


def test_committed_page_retains_what_its_losses_say() -> None:
    page = (ROOT / "docs" / "benchmarks" / "local.md").read_text(encoding="utf-8")
    lines = {line["recipe"]: line for line in rows(page) if "retained" in line and "gap" in line}
    shown = {name: line["retained"] for name, line in lines.items() if line["retained"]}
    assert len(shown) > 10
    for name, cell in shown.items():
        _, mark, rate = name.partition(", lr ")
        silent, dense, mine = (
            loss(lines[each]["held-out loss"]).mean for each in (f"{SILENT}{mark}{rate}", f"{DENSE}{mark}{rate}", name)
        )
        assert float(cell.split(" ")[0]) == pytest.approx(100 * (silent - mine) / (silent - dense), abs=1)
        assert cell.endswith("worse than silence") == (mine > silent)


def test_the_least_that_is_enough() -> None:
    assert made_up().enough(DENSE) == "DiLoCo(period=20)"
    assert made_up(local_loss=1.7).enough(DENSE) == DENSE, "it is 3.7 spreads away now"
    assert made_up(local_loss=None).enough(DENSE) == DENSE


def test_lock_step_at_another_learning_rate_is_another_yardstick() -> None:
    runs = [run for runs in made_up().runs.values() for run in runs]
    found = study([*runs, *of(DENSE, [1.3, 1.32], 1e9, 3e-3), *of("DiLoCo(period=20)", [1.31, 1.31], 1e6, 3e-3)])
    assert found.of(DENSE) == [DENSE, "Dense(), lr 0.003"]
    assert found.enough("Dense(), lr 0.003") == "DiLoCo(period=20), lr 0.003"
    assert "| `DiLoCo(period=20), lr 0.003` | 1.310 ± 0.000 |  | -9.5 | 2 |" in page_part(found, [])
    assert (
        "at least 10 standard deviations, the larger of the two: `DiLoCo(period=20)`, `LocalSGD(period=4)`."
        in page_part(found, [])
    )
    silent = study([*runs, *of("LocalSGD(period=4)", [1.5, 1.5], 1e5, 3e-3), *of(APART, [1.45, 1.46], 0.0, 3e-3)])
    assert "Not better than both by more than 3 standard deviations: `LocalSGD(period=4), lr 0.003`." in page_part(
        silent, []
    )


def test_sentences() -> None:
    better, least = sentences(made_up())
    assert "at least 10 standard deviations" in better
    assert "`DiLoCo(period=20)`, `LocalSGD(period=4)`" in better
    assert "**1,000 times fewer**" in least
    worse = [*made_up(local_loss=None).runs.values()]
    assert "Not better than both by more than 3 standard deviations: `DiLoCo(period=20)`." in list(
        sentences(study([run for runs in worse for run in runs]))
    )


def test_a_table_tells_who_diverged() -> None:
    page = page_part(made_up(local_loss=None), [])
    assert "| `DiLoCo(period=20)` | diverged (1 of 3) | diverged |  | 3 | 1.0 MB | 1,000 |" in page
    assert "| `Dense()` | 1.500 ± 0.020 |  |  | 3 | 1.0 GB | 1 |" in page
    assert "| no communication, mean of four workers | 1.800 ± 0.020 |  | +15.0 | 3 | 0 B |  |" in page


def test_a_picture_holds_what_the_table_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    drawn: list[Any] = []
    monkeypatch.setattr(local_picture, "draw", lambda panels, names, path, **_: drawn.extend([panels, names]))
    plot(page_part(made_up(), []), tmp_path / "found.png")
    (panel,), names = drawn
    assert names == ["DiLoCo(period=20)", "LocalSGD(period=4)"]
    assert (panel.dense.loss, panel.dense.spread, panel.lines) == (1.5, 0.02, {"Silent()": 1.8})
    assert panel.dots["DiLoCo(period=20)"].note == "1.0 MB"


def test_a_picture_is_drawn_again_from_the_page(tmp_path: Path) -> None:
    page = tmp_path / "local.md"
    page.write_text((ROOT / "docs" / "benchmarks" / "local.md").read_text(encoding="utf-8"), encoding="utf-8")
    main(options().parse_args(["--redraw", str(page)]))
    assert page.with_suffix(".png").read_bytes().startswith(b"\x89PNG")


def test_nothing_is_trained_twice(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(local, "TASK", replace(PLAIN, optimizer=torch.optim.AdamW))
    monkeypatch.setattr(local, "exam", lambda: EXAM)
    page = tmp_path / "page.md"
    page.write_text("# A\n<!-- written by a program: local -->\n<!-- end: local -->\n")
    asked = ["--results", str(tmp_path / "found.jsonl"), "--processes", "1", "--steps", "8", "--page", str(page)]
    asked += ["--seeds", "0", "1", "--recipes", "DiLoCo(period=4)"]
    main(options().parse_args(asked))
    first = capsys.readouterr()
    assert "6 of 6: DiLoCo(period=4), seed 1" in first.err
    assert len([json.loads(line) for line in (tmp_path / "found.jsonl").read_text().splitlines()]) == 6
    main(options().parse_args(asked))
    second = capsys.readouterr()
    assert (second.err, second.out) == ("", first.out)
    assert f"![{local.PICTURED}](page.png)" in page.read_text()
    assert (tmp_path / "page.png").exists()


def test_a_report_needs_what_others_are_held_against(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="has no runs of"):
        main(options().parse_args(["--report", "--results", str(tmp_path / "none.jsonl")]))
