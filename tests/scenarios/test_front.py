"""The study of all recipes: who is on the front, which learning rate is chosen, what is trained next, what is told."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterable
from dataclasses import replace
from itertools import combinations, product
from math import inf
from pathlib import Path

import pytest
import torch
from benchmarks import front as study
from benchmarks.front_families import DENSE, FAMILIES, Family
from benchmarks.front_picture import drawn, plot
from benchmarks.front_plan import TUNING_SEEDS, Job, TaskRun, at_the_end, best_rate, is_current, next_tries, plan
from benchmarks.front_report import Front, fronts, page_part
from benchmarks.front_tasks import RATES, SETTINGS
from benchmarks.ladder_tasks import MuonWithAdamW, schedule
from benchmarks.pareto import front
from benchmarks.tasks import TASKS
from benchmarks.virtual_workers import APART
from matplotlib.text import Text
from torch.optim import AdamW, Muon

pytestmark = pytest.mark.nightly

FIRST, SECOND = TUNING_SEEDS
Point = tuple[float, float]
FrontOf = Callable[[Iterable[Point]], list[Point]]


# -- the front -------------------------------------------------------------------------------------------------------


def ours(points: Iterable[Point]) -> list[Point]:
    return front(points, cost=lambda point: point[0], loss=lambda point: point[1])


def with_ties(points: Iterable[Point]) -> list[Point]:
    """The broken twin: keeps what loses as much for more bytes."""
    found: list[Point] = []
    for point in sorted(points):
        if not found or point[1] <= found[-1][1]:
            found.append(point)
    return found


def by_loss_of_the_first(points: Iterable[Point]) -> list[Point]:
    """Another: takes points as they come, dear ones first."""
    return with_ties(sorted(points, reverse=True)[:1])


def check_front(front_of: FrontOf) -> None:
    """By its definition: of distinct points, those that no other one equals or beats in both."""
    draws = random.Random(0)
    for _ in range(200):
        points = [*{(draws.randrange(5), draws.randrange(5)) for _ in range(6)}]
        best = {p for p in points if not any(q != p and q[0] <= p[0] and q[1] <= p[1] for q in points)}
        assert front_of(points) == sorted(best)


def test_the_front_is_what_nothing_beats() -> None:
    check_front(ours)
    assert ours([(1.0, inf), (2.0, 3.0), (3.0, inf)]) == [(2.0, 3.0)], "who diverges is never on it"


@pytest.mark.parametrize("broken", [with_ties, by_loss_of_the_first, sorted])
def test_a_broken_front_is_found_out(broken: FrontOf) -> None:
    with pytest.raises(AssertionError):
        check_front(broken)


# -- learning rates --------------------------------------------------------------------------------------------------


def tuned(optimum: float, middle: float = 3e-3) -> dict[float, dict[int, float]]:
    """All that is tried where the loss is the distance to the optimum on the ladder; the second seed adds 10."""
    losses: dict[float, dict[int, float]] = {}
    while tries := next_tries(losses, middle):
        for rate, seed in tries:
            assert seed not in losses.get(rate, {}), "nothing is tried twice"
            far = abs(RATES.index(rate) - RATES.index(optimum))
            losses.setdefault(rate, {})[seed] = far + 10.0 * (seed == SECOND)
    return losses


def test_three_rates_then_the_finalists_again() -> None:
    found = tuned(3e-3)
    assert {rate: [*by_seed] for rate, by_seed in found.items()} == {
        1e-3: [FIRST, SECOND],
        3e-3: [FIRST, SECOND],
        1e-2: [FIRST],
    }
    assert best_rate(found) == 3e-3
    assert not at_the_end(found)


@pytest.mark.parametrize(("optimum", "beyond"), [(3e-4, 3e-4), (1e-4, 3e-4), (3e-2, 3e-2), (1.0, 3e-2)])
def test_a_fourth_rate_lies_beyond_the_best(optimum: float, beyond: float) -> None:
    found = tuned(optimum)
    assert {*found} == {1e-3, 3e-3, 1e-2, beyond}
    assert best_rate(found) == beyond
    assert at_the_end(found), "one further might be better still, and the page says so"


def test_the_ladder_has_ends() -> None:
    assert {*tuned(1e-4, middle=1e-4)} == {1e-4, 3e-4}
    assert {*tuned(3.0, middle=3.0)} == {1.0, 3.0}


def test_one_lucky_seed_does_not_decide() -> None:
    losses = {1e-3: {FIRST: 2.0, SECOND: 2.0}, 3e-3: {FIRST: 1.9, SECOND: inf}, 1e-2: {FIRST: 1.8}}
    assert best_rate(losses) == 1e-3
    assert best_rate({1e-3: {FIRST: inf, SECOND: inf}, 3e-3: {FIRST: inf, SECOND: inf}}) == 1e-3


def test_every_task_starts_within_the_ladder() -> None:
    assert {setting.rate for setting in SETTINGS.values()} <= {*RATES}


def test_the_rate_rises_and_falls() -> None:
    paces = [schedule(step / 1000) for step in range(1000)]
    assert max(paces) == pytest.approx(1.0, abs=1e-4) == paces[50]
    assert paces[:50] == sorted(paces[:50])
    assert paces[50:] == sorted(paces[50:], reverse=True)
    assert paces[-1] == pytest.approx(0.1, abs=1e-4)


# -- tasks -----------------------------------------------------------------------------------------------------------


def test_muon_and_adamw_share_a_model() -> None:
    """Its step is that of both, each with its own parameters; embeddings and the head are AdamW's."""
    torch.manual_seed(0)
    one, other = TASKS["bytelm"].build(), TASKS["bytelm"].build()
    other.load_state_dict(one.state_dict())
    together = MuonWithAdamW(one.parameters(), 1e-3)
    names = [name for name, p in other.named_parameters() if p.ndim == 2 and name.startswith("blocks.")]
    assert len(names) == 4 * 4
    within = [p for name, p in other.named_parameters() if name in names]
    rest = [p for name, p in other.named_parameters() if name not in names]
    apart = [
        Muon(within, lr=3e-3, adjust_lr_fn="match_rms_adamw", weight_decay=0.01),
        AdamW(rest, lr=3e-3, betas=(0.9, 0.98)),
    ]
    for group in together.param_groups:
        group["lr"] = 3e-3  # as the workers set it
    text = torch.arange(4 * 65).view(4, 65) % 256
    for _ in range(3):
        for model, optimizers in ((one, [together]), (other, apart)):
            model(text).backward()
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
    for mine, theirs in zip(one.parameters(), other.parameters(), strict=True):
        assert torch.equal(mine, theirs)


# -- what is trained -------------------------------------------------------------------------------------------------


def test_what_is_tuned_can_be_read() -> None:
    known = plan("bytelm", ["few-bits", "local-few-bits"], None)
    assert known.unreadable() == []
    assert [*known.recipes()][:2] == [DENSE, APART]
    assert {*known.representatives()} == {DENSE, APART, "few-bits", "local-few-bits"}


def test_what_cannot_be_read_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    later = Family(about="", representative="Later()", recipes={"one": "Later()", "two": "TopK(density=0.01)"})
    monkeypatch.setitem(FAMILIES, "later", later)
    found = plan("bytelm", ["later"], None)
    assert found.unreadable() == ["Later()"]
    assert found.recipes() == {DENSE: DENSE, APART: APART, "TopK(density=0.01)": "later"}
    assert found.representatives()["later"] == "TopK(density=0.01)", "its rate is tuned for one that can"


def test_optimizers_have_families_of_their_own() -> None:
    assert "DGC(density=0.01)" in plan("bytelm-sgd", ["momentum", "adam-moments"], None).recipes()
    assert [*plan("bytelm", ["momentum"], None).recipes()] == [DENSE, APART]
    assert "OneBitAdam(warmup=50)" in plan("bytelm", ["adam-moments"], 1000).recipes(), "a twentieth of all steps"


def test_workers_meet_twice_at_least() -> None:
    long, short = (plan("digits-conv", ["local"], steps).recipes() for steps in (1000, 999))
    assert len(long) == len(short) + 1
    assert any("period=500" in text for text in long)


def made_up(*recipes: str, seeds: int = 3) -> dict[Job, TaskRun]:
    """Dense() at a loss of 1.0; the i-th other recipe sends 1/100^i and loses i tenths."""
    found: dict[Job, TaskRun] = {}

    def add(recipe: str, rate: float, seed: int, sent: float, loss: float) -> None:
        setting = SETTINGS["digits-conv"]
        found[Job("digits-conv", recipe, rate, seed, 400)] = {
            "task": "digits-conv",
            "about": setting.about,
            "recipe": recipe,
            "resolved": "as it is",
            "learning_rate": rate,
            "seed": seed,
            "steps": 400,
            "workers": 4,
            "seconds": 2.0,
            "cpu_seconds": 1.0,
            "bytes_sent": sent,
            "curve": [],
            "held_out": loss,
            "alone": None,
        }

    known = plan("digits-conv", ["few-bits"], None)
    for recipe, rate, seed in product(known.representatives().values(), RATES[2:5], TUNING_SEEDS):
        add(recipe, rate, seed, 1.0, abs(RATES.index(rate) - 3))
    for i, recipe in enumerate((DENSE, *recipes)):
        for seed in range(seeds):
            add(recipe, 3e-3, seed, 4e8 / 100**i, 1.0 + 0.1 * i + 0.01 * (seed - 1))
    return found


def test_the_whole_study_with_one_seed_comes_first() -> None:
    found = plan("digits-conv", ["few-bits"], None)
    jobs = [*found.shown(made_up(), 2)]
    assert [job.seed for job in jobs] == sorted(job.seed for job in jobs)
    assert {job.recipe for job in jobs if job.seed == 0} == {*found.recipes()}
    assert {job.learning_rate for job in jobs} == {3e-3}
    untuned = {job: run for job, run in made_up().items() if job.recipe != "Float4()"}
    assert {job.recipe for job in found.shown(untuned, 1)} == {DENSE, APART}, "a family waits for its rate"


def test_what_means_something_else_by_now_is_not_kept() -> None:
    run = made_up()[Job("digits-conv", DENSE, 3e-3, 0, 400)]
    assert is_current({**run, "resolved": "EveryStep() + Dense() + Complete()"})
    assert not is_current(run)
    assert not is_current({**run, "resolved": "EveryStep() + Dense() + Complete()", "about": "another task"})


# -- what is told ----------------------------------------------------------------------------------------------------


def told(*recipes: str) -> Front:
    (found,) = fronts([plan("digits-conv", ["few-bits"], None)], made_up(*recipes), 3)
    return found


def test_gaps_and_factors() -> None:
    found = told("Int8()", "Float4()")
    assert found.fewer("Float4()") == pytest.approx(1e4)
    assert found.gap("Float4()") == pytest.approx(20.0)
    assert found.spread == pytest.approx(1.0)
    assert found.spreads("Float4()") == pytest.approx(20.0)
    assert (found.best(10), found.best(100.5), found.best(1e5)) == ("Int8()", "Float4()", None)
    assert found.front() == ["Float4()", "Int8()", DENSE]
    assert found.free() == DENSE


def test_gaps_are_to_the_same_seeds() -> None:
    runs = made_up("Int8()")
    one = {job: run for job, run in runs.items() if job.recipe != "Int8()" or job.seed != 2}
    (found,) = fronts([plan("digits-conv", ["few-bits"], None)], one, 3)
    assert found.above("Int8()") == pytest.approx(0.1), "although the seed that is missing is the worst one"
    without_yardstick = {job: run for job, run in runs.items() if job.recipe != DENSE or job.seed != 2}
    (found,) = fronts([plan("digits-conv", ["few-bits"], None)], without_yardstick, 3)
    assert [run["seed"] for run in found.runs["Int8()"]] == [0, 1]


def test_a_page_says_who_is_best() -> None:
    page = page_part([told("Int8()", "Float4()")], ["Written."])
    assert "| digits-conv | `Int8()` | 30 or more | +10.00 % | +10.0 | 1/100 | 3 |" in page
    assert "| digits-conv | `Float4()` | 1,000 or more | +20.00 % | +20.0 | 1/10,000 | 3 |" in page
    assert "digits-conv: nothing that was tried sends fewer bytes and stays within `Dense()`'s own spread" in page
    assert "| `Float4()` | 100 B | 10,000.0 | 1.200 ± 0.010 | 3 | +20.00 % | +20.0 | yes | 0.003 |" in page
    assert "0.003: 0.000 ± 0.000" in page, "how the rate was chosen"
    assert "Not trained yet:" in page


def test_a_picture_is_drawn(tmp_path: Path) -> None:
    runs = made_up("Int8()", "Float4()", "OneBit()")
    diverged = {job: {**run, "held_out": None} if job.recipe == "OneBit()" else run for job, run in runs.items()}
    (found,) = fronts([plan("digits-conv", ["few-bits"], None)], diverged, 3)
    plot(found, tmp_path / "found.png")
    assert (tmp_path / "found.png").read_bytes().startswith(b"\x89PNG")


def test_names_of_points_that_lie_together_do_not_cover_each_other() -> None:
    known = plan("digits-conv", ["few-bits"], None)
    runs = made_up(*(text for text in known.recipes() if text not in (DENSE, APART)))
    together: dict[Job, TaskRun] = {
        job: run if job.recipe == DENSE or job.seed in TUNING_SEEDS else {**run, "bytes_sent": 1e5, "held_out": 1.5}
        for job, run in runs.items()
    }
    (found,) = fronts([known], together, 3)
    figure = drawn(found)
    figure.draw_without_rendering()
    (boxes,) = [[Text.get_window_extent(text) for text in axes.texts] for axes in figure.axes if axes.texts]
    assert len(boxes) >= len(found.talking) - 1 > 3
    assert not any(one.overlaps(other) for one, other in combinations(boxes, 2))


# -- the program -----------------------------------------------------------------------------------------------------


@pytest.fixture
def asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    few = Family(about="few", representative="Float4()", recipes={"4": "Float4()", "none": "Later()"})
    monkeypatch.setitem(FAMILIES, "few-bits", few)
    broken = Family(about="broken", representative="DGC(density=0.1)", recipes={"an SGD's": "DGC(density=0.1)"})
    monkeypatch.setitem(FAMILIES, "adam", broken)
    small = replace(SETTINGS["digits-conv"].task, batch=2)
    monkeypatch.setitem(SETTINGS, "digits-conv", replace(SETTINGS["digits-conv"], task=small))
    page = tmp_path / "page.md"
    page.write_text("# A\n<!-- written by a program: front -->\n<!-- end: front -->\n")
    what = ["--tasks", "digits-conv", "--families", "few-bits", "adam", "--steps", "2", "--seeds", "2"]
    return [*what, "--processes", "1", "--json", str(tmp_path / "found.json"), "--page", str(page)]


def test_a_study_goes_on_where_it_stopped(
    asked: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def trained() -> int:
        return len(json.loads((tmp_path / "found.json").read_text())["runs"])

    study.main(study.options().parse_args([*asked, "--minutes", "0", "--phase", "tune", "run"]))
    assert not (tmp_path / "found.json").exists(), "no training begins when time is up"
    assert "left out, since this version cannot read it: Later()" in capsys.readouterr().err
    study.main(study.options().parse_args([*asked, "--phase", "tune"]))
    err = capsys.readouterr().err
    assert "DGC(density=0.1), lr 0.003: left out, AttachError:" in err
    tuning = trained()
    assert tuning == err.count("held-out loss") >= 3 * (3 + 2)
    study.main(study.options().parse_args(asked))
    first = capsys.readouterr()
    assert first.err.count("held-out loss") == 3 * 2
    assert trained() == tuning + 3 * 2
    assert "| `Float4()` |" in first.out
    study.main(study.options().parse_args(asked))
    second = capsys.readouterr()
    assert second.err.count("held-out loss") == 0
    assert second.out == first.out
    assert "](page.png)" in (tmp_path / "page.md").read_text()
    assert (tmp_path / "page.png").exists()


def test_a_report_needs_a_yardstick(asked: list[str]) -> None:
    with pytest.raises(SystemExit, match="has no runs of"):
        study.main(study.options().parse_args([*asked, "--phase", "report"]))
