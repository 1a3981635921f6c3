"""The convergence benchmark: its workers are a group, its bytes are the price, its verdicts follow from its numbers."""

from __future__ import annotations

import json
import logging
import random
from collections.abc import Callable, Iterable, Iterator
from math import inf
from pathlib import Path
from typing import Any

import pytest
import torch
from benchmarks import picture
from benchmarks.closing import closing_part, pareto_front
from benchmarks.convergence import PARTS, jobs, main, options
from benchmarks.dot_plot import Dot, Panel, draw
from benchmarks.markdown_tables import Loss, loss, rows
from benchmarks.page import PAGE, around, put_between
from benchmarks.picture import plot
from benchmarks.report import Table, page_part, verdict
from benchmarks.studies import COMPRESSORS, DENSE, EVERY, STUDIES, TOP_K, without_feedback
from benchmarks.tasks import ADAMW_TASK, ADAMW_TASKS, SGD_TASK, TASKS, Adaptive, Task
from benchmarks.training import Run, Workers, train
from support.linear_regression import samples
from torch import nn
from torch.nn.functional import mse_loss

from gossamer.plan.bench import case_texts, with_feedback

pytestmark = pytest.mark.nightly


@pytest.fixture(autouse=True)
def set_back() -> Iterator[None]:
    """What the benchmark sets for its process."""
    logger = logging.getLogger("gossamer")
    level = logger.level
    yield
    logger.setLevel(level)


PLAIN = Task(
    about="a linear map",
    steps=8,
    seeds=2,
    dense_seeds=2,
    batch=4,
    trained_by=torch.optim.SGD,
    build=lambda: nn.Linear(12, 24, bias=False).double(),
    optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.05, momentum=0.9),
    loss=lambda model, x, y: mse_loss(model(x), y),
    samples=samples,
)


def weights(text: str, steps: int = 8, world: int = 4) -> tuple[torch.Tensor, Workers]:
    workers = Workers(PLAIN, text, 0, world)
    batches = PLAIN.batches(world, 0)
    for _ in range(steps):
        workers.train(next(batches))
    return next(workers.model.parameters()).detach().clone(), workers


# -- training ------------------------------------------------------------------------------------------------------


def test_four_workers_equal_one_with_all_samples() -> None:
    torch.manual_seed(0)
    model = PLAIN.build()
    optimizer, batches = PLAIN.optimizer(model.parameters()), PLAIN.batches(4, 0)
    for _ in range(8):
        optimizer.zero_grad()
        PLAIN.loss(model, *(torch.cat(parts) for parts in zip(*next(batches), strict=True))).backward()
        optimizer.step()
    torch.testing.assert_close(weights(DENSE)[0], next(model.parameters()).detach(), atol=1e-12, rtol=1e-12)


def test_momentum_moves_into_the_compressor() -> None:
    dense = weights(DENSE)[0]
    torch.testing.assert_close(weights("DGC(density=1.0, masking=False)")[0], dense, atol=1e-12, rtol=1e-12)
    assert not torch.allclose(weights("DGC(density=1.0)")[0], dense, atol=1e-3), "masked, it is plain SGD"


def test_feedback_makes_up_for_what_was_lost() -> None:
    def loss(text: str) -> float:
        return weights(text, steps=30)[1].loss() or 0.0

    assert loss("TopK(density=0.05)") < loss("TopK(density=0.05, feedback=False)")


def test_bytes_are_what_the_words_cost() -> None:
    assert weights(DENSE)[1].bytes_sent == 8 * 2 * 3 / 4 * 8 * 288
    assert weights("TopK(density=0.1)")[1].bytes_sent < weights(DENSE)[1].bytes_sent / 4


def test_batches_are_disjoint_and_depend_on_the_seed() -> None:
    def places(seed: int) -> list[float]:
        return torch.cat([x[:, 0] for x, _ in next(PLAIN.batches(4, seed))]).tolist()

    assert len(set(places(0))) == 16
    assert places(0) == places(0) != places(1)


def test_a_training_that_diverges_has_no_loss_at_the_end() -> None:
    wild = Task(**{**vars(PLAIN), "optimizer": lambda parameters: torch.optim.SGD(parameters, lr=1e60)})
    run = train("plain", wild, "TopK(density=0.1)", 0, 40, 4, 1)
    assert run["curve"][-1][2] is None
    assert run["curve"][0][2] is not None


def test_clipping_bounds_what_the_optimizer_sees() -> None:
    model = nn.Linear(4, 1, bias=False)
    optimizer = Adaptive(clip=0.5)(model.parameters())
    (3 * model(torch.ones(1, 4))).sum().backward()
    optimizer.step()
    assert model.weight.grad is not None
    torch.testing.assert_close(model.weight.grad.norm(), torch.tensor(0.5), atol=1e-5, rtol=0)


@pytest.mark.parametrize("name", TASKS)
def test_tasks_can_be_trained(name: str) -> None:
    run = train(name, TASKS[name], "TopK(density=0.05)", 0, 1, 2, 1)
    assert [step for step, _, _ in run["curve"]] == [0, 1]


# -- who takes part ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "twin"),
    [
        ("TopK(density=0.01)", "TopK(density=0.01, feedback=False)"),
        ("Chain(TopK(density=0.1), Int8())", "Chain(TopK(density=0.1, feedback=False), Int8(feedback=False))"),
        ("Dense()", None),
        ("DGC(density=0.01)", None),
    ],
)
def test_biased_compressors_have_a_mutant(text: str, twin: str | None) -> None:
    assert without_feedback(text) == twin


def test_mutants_forget() -> None:
    for text in case_texts(COMPRESSORS):
        twin = without_feedback(text)
        assert twin is None or "Feedback" not in repr(with_feedback(twin))


def test_every_study_can_be_asked_for_and_has_a_place_on_the_page() -> None:
    for name in STUDIES:
        assert {job.task for job in jobs(options().parse_args(["--study", name]))} == set(STUDIES[name].tasks)
        assert name in PARTS
        around(PAGE, name)  # exits where it has none


def test_optimizers_are_not_asked_for_what_they_cannot_do() -> None:
    asked = {(job.task, job.compressor.partition("(")[0]) for job in jobs(options().parse_args([]))}
    assert not asked & {("bytelm", "OneBitAdam"), (ADAMW_TASK, "DGC"), ("digits-conv-adamw", "DGC")}
    assert {("bytelm", "DGC"), (ADAMW_TASK, "OneBitAdam")} <= asked


def test_dense_has_more_seeds_and_comes_first_of_each() -> None:
    found = [job for job in jobs(options().parse_args(["--tasks", "bytelm"])) if job.seed < 2]
    assert [job.seed for job in found] == sorted(job.seed for job in found)
    assert found[0].compressor == DENSE
    assert all(task.dense_seeds >= task.seeds for task in EVERY.values())


# -- tables --------------------------------------------------------------------------------------------------------


def run_of(
    compressor: str, seed: int, losses: list[float | None], bytes_a_step: float, task: str = "digits-conv"
) -> Run:
    curve = [(step, step * bytes_a_step, loss) for step, loss in enumerate(losses)]
    return {
        "task": task,
        "compressor": compressor,
        "resolved": compressor,
        "seed": seed,
        "steps": len(losses) - 1,
        "workers": 4,
        "seconds": 1.0,
        "curve": curve,
        "held_out": losses[-1],
    }


TWIN = "TopK(density=0.1, feedback=False)"


def table(compressed: float | None, forgetful: float | None, start: float = 2.0) -> Table:
    dense = [run_of(DENSE, seed, [start, 1.0, 0.5, 0.4, 0.3 + shift], 100.0) for seed, shift in ((0, -0.01), (1, 0.01))]
    ours = [run_of("TopK(density=0.1)", seed, [start, None, None, None, compressed], 60.0) for seed in (0, 1)]
    twin = [run_of(TWIN, seed, [start, None, None, None, forgetful], 60.0) for seed in (0, 1)]
    return Table("digits-conv", {DENSE: dense, "TopK(density=0.1)": ours, TWIN: twin})


def test_gaps_are_counted_in_spreads() -> None:
    found = table(0.35, 0.6)
    assert found.spread == pytest.approx(0.01 * 2**0.5)
    assert found.gap("TopK(density=0.1)") == pytest.approx(0.05 / found.spread)
    assert found.improvement == pytest.approx(1.7 / found.spread)


def test_gaps_are_between_runs_of_the_same_seeds() -> None:
    found = table(0.35, 0.6).runs
    only = Table("digits-conv", {**found, "TopK(density=0.1)": found["TopK(density=0.1)"][1:]})
    assert only.gap("TopK(density=0.1)") == pytest.approx((0.35 - 0.31) / only.spread)


def test_a_column_that_nobody_fills_is_left_out() -> None:
    found = table(0.35, 0.6).runs
    runs = [run for text in (DENSE, "TopK(density=0.1)") for run in found[text]]
    assert "without feedback" not in page_part(runs, [])


def test_dense_stops_at_the_same_bytes() -> None:
    steps, losses = table(0.35, 0.6).dense_at_equal_bytes("TopK(density=0.1)")
    assert (steps, losses.mean) == (2, 0.5)


@pytest.mark.parametrize(
    ("forgetful", "start", "said"),
    [
        (0.6, 2.0, "At least 3 SD worse without feedback: `TopK(density=0.1)`"),
        (None, 2.0, "At least 3 SD worse without feedback: `TopK(density=0.1)`"),
        (0.36, 2.0, "Less than 3 SD worse without feedback: `TopK(density=0.1)`"),
        (0.6, 0.4, "**this task cannot distinguish compressors.**"),
    ],
)
def test_a_verdict_follows_from_the_numbers(forgetful: float | None, start: float, said: str) -> None:
    found = table(0.35, forgetful, start)
    assert said in verdict(found, found.twins())


def test_what_diverged_is_said_to_have() -> None:
    runs = [run for runs in table(None, 0.6).runs.values() for run in runs]
    found = page_part(runs, ["on this machine"])
    (line,) = [line for line in found.splitlines() if line.startswith("| `TopK")]
    assert (
        "diverged (2 of 2) | - | diverged (2 of 2) | 60 B | 1/1.7 | 0.500 ± 0.000 (2 steps) | 0.600 ± 0.000 |" in line
    )


def test_nothing_is_trained_twice(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "found.json"
    asked = ["--tasks", "digits-conv", "--compressors", "TopK(density=0.1)", "--seeds", "2", "--steps", "3"]
    arguments = options().parse_args([*asked, "--json", str(file), "--processes", "1"])
    main(arguments)
    first = capsys.readouterr()
    assert "6 of 6: digits-conv, TopK(density=0.1, feedback=False), seed 1" in first.err
    assert "| `TopK(density=0.1)` |" in first.out
    assert len(json.loads(file.read_text())["runs"]) == 6
    main(arguments)
    second = capsys.readouterr()
    assert "of 6:" not in second.err
    assert second.out == first.out


def trained(task: str, text: str, loss: float, bytes_a_step: float) -> list[Run]:
    shifts = (-0.01, 0.01) if text == DENSE else (0.0, 0.0)
    return [run_of(text, seed, [5.0, 3.0, 2.5, loss + shift], bytes_a_step, task) for seed, shift in enumerate(shifts)]


def closing_runs(frozen: float) -> list[Run]:
    tasks = {changed: name for name, changed in zip(ADAMW_TASKS, ("lr", "beta"), strict=False)}
    return [
        *trained(ADAMW_TASK, DENSE, 2.0, 100.0),
        *trained(ADAMW_TASK, TOP_K, 3.0, 10.0),
        *trained(ADAMW_TASK, "OneBitAdam(warmup=40)", frozen, 30.0),
        *trained(ADAMW_TASK, "TopK(density=0.03)", 2.4, 20.0),
        *trained(ADAMW_TASK, "Chain(TopK(density=0.01), Int8())", 3.02, 8.0),
        *trained(ADAMW_TASK, "TopK(density=0.01, feedback=False)", 3.5, 10.0),
        *trained(tasks["lr"], DENSE, 1.9, 100.0),
        *trained(tasks["lr"], TOP_K, 2.8, 10.0),
    ]


def test_what_closes_a_gap_follows_from_the_numbers() -> None:
    found = closing_part(closing_runs(2.01), ["on this machine"])
    assert "`TopK(density=0.01)` ends 71 SD above `Dense()`." in found
    assert "Gap below 3 SD**: `OneBitAdam(warmup=40)` (+0.7, 3.0 times the bytes)." in found
    assert (
        "Best for their bytes: `TopK(density=0.03)` (+28.3, 2.0 times the bytes), "
        "`OneBitAdam(warmup=40)` (+0.7, 3.0 times the bytes)." in found
    )
    assert "`Chain(TopK(density=0.01), Int8())` (+72.1, 0.8 times the bytes)." in found
    assert "Larger gap: `TopK(density=0.01, feedback=False)` (+106.1, 1.0 times the bytes)." in found
    assert "| lr 0.003 | `TopK(density=0.01)` | 2.800 ± 0.000 | 1.900 ± 0.014 | +63.6 | 10% |" in found


@pytest.mark.parametrize(
    ("frozen", "ops"),
    [
        (2.8, "does not close the gap: +56.6 versus +56.6"),
        (2.3, "closes 50% more of the gap: +21.2 versus +56.6"),
    ],
)
def test_variance_is_to_blame_only_where_freezing_it_helps(frozen: float, ops: str) -> None:
    runs = [
        *closing_runs(2.01),
        *trained(ADAMW_TASK, "Warmup(TopK(density=0.01), steps=25)", 2.8, 40.0),
        *trained(ADAMW_TASK, "OneBitAdam(warmup=25, inner=TopK(density=0.01))", frozen, 40.0),
    ]
    found = closing_part(runs, [])
    assert f"Freezing Adam's variance after 25 dense steps, and sending its momentum, {ops}" in found


def test_the_gap_under_sgd_stands_beside() -> None:
    runs = [*closing_runs(2.01), *trained(SGD_TASK, DENSE, 2.5, 100.0), *trained(SGD_TASK, TOP_K, 2.75, 10.0)]
    found = closing_part(runs, [])
    assert "With SGD and momentum `TopK(density=0.01)` ends 0.250 above `Dense()`, with AdamW 1.000. A likely" in found


def test_where_nothing_closes_a_gap_it_reports_it() -> None:
    assert "No change reduces the gap" in closing_part(closing_runs(2.05), [])


Point = tuple[float, float]
FrontOf = Callable[[Iterable[Point]], list[Point]]


def front_of_points(points: Iterable[Point]) -> list[Point]:
    return pareto_front(points, cost=lambda point: point[0], loss=lambda point: point[1])


def front_with_ties(points: Iterable[Point]) -> list[Point]:
    """Mutant: keeps points of the same loss at a higher cost."""
    found: list[Point] = []
    for point in sorted(points):
        if not found or point[1] <= found[-1][1]:
            found.append(point)
    return found


def front_of_the_dearest(points: Iterable[Point]) -> list[Point]:
    """Mutant: starts at the highest cost."""
    return sorted(points, reverse=True)[:1]


def check_front(front_of: FrontOf) -> None:
    """By definition: of distinct points, those that no other point equals or beats in both coordinates."""
    draws = random.Random(0)
    for _ in range(200):
        points = [*{(draws.randrange(5), draws.randrange(5)) for _ in range(6)}]
        best = {p for p in points if not any(q != p and q[0] <= p[0] and q[1] <= p[1] for q in points)}
        assert front_of(points) == sorted(best)


def test_pareto_front_holds_the_points_that_no_other_point_beats() -> None:
    check_front(front_of_points)
    assert front_of_points([(1.0, inf), (2.0, 3.0), (3.0, inf)]) == [(2.0, 3.0)], "diverged trainings are left out"


@pytest.mark.parametrize("broken", [front_with_ties, front_of_the_dearest, sorted])
def test_broken_pareto_front_is_detected(broken: FrontOf) -> None:
    with pytest.raises(AssertionError):
        check_front(broken)


def test_a_picture_is_drawn_from_what_the_page_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    drawn: list[Any] = []
    monkeypatch.setattr(picture, "draw", lambda panels, names, path, **_: drawn.extend([panels, names]))
    runs = [run for runs in table(0.35, 0.6).runs.values() for run in runs]
    text = page_part(runs, [])
    plot(text, tmp_path / "found.png")
    (panel,), names = drawn
    lines = {line["compressor"]: line for line in rows(text)}
    assert set(names) == set(lines) - {DENSE}
    assert {name: f"{dot.loss:.3f}" for name, dot in panel.dots.items()} == {
        name: lines[name]["training loss"].partition(" ")[0] for name in names
    }
    assert f"{panel.dense.loss:.3f} ± {panel.dense.spread:.3f}" == lines[DENSE]["training loss"]


def test_compressors_that_send_most_stand_at_the_top() -> None:
    part = "### a\n\n| compressor | training loss | of Dense() |\n| --- | ---: | ---: |\n"
    part += "| `Dense()` | 1.0 ± 0.1 | 1/1.0 |\n| `B()` | diverged (1 of 2) | 1/20.0 |\n| `A()` | 1.1 | 1/3.0 |\n"
    tasks = {"a": {line["compressor"]: line for line in rows(part)}}
    assert picture._order(tasks) == ["A()", "B()"]
    assert (loss("diverged (1 of 2)").mean, loss("-0.5 ± 0.25")) == (inf, Loss(-0.5, 0.25))


@pytest.mark.parametrize("count", [1, 30])
def test_a_picture_has_room_for_all_names(tmp_path: Path, count: int) -> None:
    names = [f"TopK(density=0.{number:02})" + " + more" * number for number in range(count)]
    dots = {name: Dot(inf if number == 3 else 1.0 + number, 0.1, "3x", 2.0) for number, name in enumerate(names)}
    panels = [Panel("one", dots, Dot(1.0, 0.1, ""), {"apart": 2.0}), Panel("other", {}, Dot(1.0, 0.0, ""))]
    draw(panels, names, tmp_path / "found.png", across="loss", says="what it says", log=True)
    assert (tmp_path / "found.png").read_bytes().startswith(b"\x89PNG")


def test_the_pages_own_tables_can_be_drawn(tmp_path: Path) -> None:
    page = tmp_path / "compressors.md"
    page.write_text(PAGE.read_text(encoding="utf-8"), encoding="utf-8")
    main(options().parse_args(["--redraw", str(page)]))
    assert page.with_suffix(".png").read_bytes().startswith(b"\x89PNG")


# -- the page ------------------------------------------------------------------------------------------------------


def test_only_what_stands_between_the_markers_is_replaced(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("A\n<!-- written by a program: x -->\nold\n<!-- end: x -->\nB\n")
    put_between(page, "x", "new")
    assert page.read_text() == "A\n<!-- written by a program: x -->\n\nnew\n\n<!-- end: x -->\nB\n"
    with pytest.raises(SystemExit, match="no lines"):
        put_between(page, "y", "new")
