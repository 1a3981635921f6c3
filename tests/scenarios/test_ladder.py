"""The study of retained benefit: learning-rate searches, planted results, transfer over size, resuming."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from math import isnan, log, sqrt
from pathlib import Path

import pytest
import torch
from benchmarks import ladder
from benchmarks.ladder_arms import ARMS, DENSE
from benchmarks.ladder_picture import plot
from benchmarks.ladder_plan import (
    TUNING_SEEDS,
    Job,
    LadderRun,
    at_an_end,
    best_confirmed,
    best_rate,
    confirmations,
    is_current,
    next_tries,
    parabola_minimum,
    predicted_rate,
    tuned_rate,
    wanted,
    workers_of,
)
from benchmarks.ladder_report import (
    LOCK_STEP,
    SILENCE,
    families,
    irreducible_loss,
    kendall,
    measured,
    page_part,
    predict,
    predictions,
    results,
    slope,
)
from benchmarks.ladder_tasks import RATES, WORKERS, MuonWithAdamW, library, rungs, schedule
from benchmarks.tasks import TASKS
from torch.optim import AdamW, Muon

FIRST, SECOND = TUNING_SEEDS
SMALL, LARGE, PREDICTED, LARGEST = "bytelm-57k-b16", "bytelm-113k-b16", "bytelm-237k-b16", "bytelm-503k-b16"
FEW, HARMFUL = "4 bits", "top 1 %, 2 bits"


# -- learning rates --------------------------------------------------------------------------------------------------


def searched(optimum: float, first: float = 1e-2) -> dict[float, dict[int, float]]:
    """All tries where the loss is the distance to the optimum on the grid."""
    losses: dict[float, dict[int, float]] = {}
    while tries := next_tries(losses, first):
        for rate, seed in tries:
            assert seed not in losses.get(rate, {}), "nothing is trained twice"
            losses.setdefault(rate, {})[seed] = float(abs(RATES.index(rate) - RATES.index(optimum)))
    return losses


@pytest.mark.parametrize("optimum", [1e-4, 3e-3, 1e-2, 3e-2, 1.0])
def test_search_ends_with_a_worse_neighbor_on_both_sides(optimum: float) -> None:
    found = searched(optimum)
    assert best_rate(found) == optimum
    assert not at_an_end(found)
    assert SECOND in found[optimum]


@pytest.mark.parametrize("optimum", [RATES[0], RATES[-1]])
def test_best_rate_at_the_end_of_the_grid_is_marked(optimum: float) -> None:
    assert at_an_end(searched(optimum))


def test_one_lucky_seed_does_not_decide() -> None:
    losses = {3e-3: {FIRST: 2.0}, 1e-2: {FIRST: 1.9}, 3e-2: {FIRST: 1.8}, 1e-1: {FIRST: 2.2}}
    assert next_tries(losses, 1e-2) == [(3e-2, SECOND)]
    losses[3e-2][SECOND] = 2.5
    assert next_tries(losses, 1e-2) == [(1e-2, SECOND)]
    losses[1e-2][SECOND] = 1.9
    assert next_tries(losses, 1e-2) == []
    assert best_rate(losses) == 1e-2


def test_search_on_the_same_rung_starts_at_the_first_arms_best_rate() -> None:
    runs = {job: run for job, run in planted({SMALL: {}}).items() if job.arm == LOCK_STEP and job.seed == FIRST}
    (job, *_) = wanted(runs, [SMALL], [SILENCE], 1)
    assert job.learning_rate == 1e-2


def test_schedule_warms_up_and_decays_to_a_tenth() -> None:
    paces = [schedule(step / 1000) for step in range(1000)]
    assert max(paces) == pytest.approx(1.0, abs=1e-4) == paces[50]
    assert paces[:50] == sorted(paces[:50])
    assert paces[50:] == sorted(paces[50:], reverse=True)
    assert paces[-1] == pytest.approx(0.1, abs=1e-4)


# -- tasks -----------------------------------------------------------------------------------------------------------


def test_no_window_is_trained_on_twice_and_held_out_files_are_disjoint() -> None:
    learn, tune, exam = library()
    texts = [{bytes(window.tolist()) for window in part} for part in (tune, exam)]
    assert not texts[0] & texts[1]
    for rung in rungs().values():
        if rung.name.startswith("bytelm"):
            assert rung.task.steps * rung.workers * rung.task.batch <= len(learn)
            assert rung.task.steps >= 1000


def test_first_learning_rate_is_on_the_grid() -> None:
    assert {rung.first_rate for rung in rungs().values()} <= {*RATES}


def test_muon_and_adamw_step_as_they_do_apart() -> None:
    torch.manual_seed(0)
    one, other = TASKS["bytelm"].build(), TASKS["bytelm"].build()
    other.load_state_dict(one.state_dict())
    together = MuonWithAdamW(one.parameters(), 3e-3)
    for group in together.param_groups:
        group["lr"] = 1e-3  # as the workers set the learning rate of each step
    names = [name for name, p in other.named_parameters() if p.ndim == 2 and name.startswith("blocks.")]
    assert len(names) == 4 * 4, "four matrices per block; embeddings and head are AdamW's"
    inner = [p for name, p in other.named_parameters() if name in names]
    rest = [p for name, p in other.named_parameters() if name not in names]
    apart = [
        Muon(inner, lr=1e-3, adjust_lr_fn="match_rms_adamw", weight_decay=0.01),
        AdamW(rest, lr=1e-3, betas=(0.9, 0.98)),
    ]
    text = torch.arange(4 * 65).view(4, 65) % 256
    for _ in range(2):
        for model, optimizers in ((one, [together]), (other, apart)):
            model(text).backward()
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(one.parameters(), other.parameters(), strict=True))


# -- planted results -------------------------------------------------------------------------------------------------

Loss = Callable[[str, int], float]  # of arm and seed


def planted(shares: dict[str, dict[str, float]], seeds: int = 3) -> dict[Job, LadderRun]:
    """Silence at 2.0 and lock step at 1.5; shares: the retained benefit by rung and arm. The best rate is 0.01."""
    found: dict[Job, LadderRun] = {}
    for rung, mine in shares.items():
        for place, (arm, share) in enumerate({LOCK_STEP: 1.0, SILENCE: 0.0, **mine}.items()):
            for rate in (3e-3, 1e-2, 3e-2):
                for seed in (*TUNING_SEEDS, *(range(seeds) if rate == 1e-2 else ())):
                    loss = 2.0 - 0.5 * share + 0.001 * (seed % 3) + (rate != 1e-2)
                    found[Job(rung, arm, rate, seed)] = run_of(rung, arm, rate, seed, loss, 4e8 / 100**place)
    return found


def run_of(rung: str, arm: str, rate: float, seed: int, loss: float | None, sent: float) -> LadderRun:
    recipe = ARMS[arm].recipe
    return {
        "rung": rung,
        "arm": arm,
        "about": rungs()[rung].about,
        "recipe": recipe,
        "resolved": "EveryStep() + Dense() + Complete()" if recipe == DENSE else recipe,
        "learning_rate": rate,
        "seed": seed,
        "steps": rungs()[rung].task.steps,
        "workers": 4,
        "seconds": 2.0,
        "cpu_seconds": 1.0,
        "bytes_sent": 0.0 if arm == SILENCE else sent,
        "curve": [],
        "held_out": loss,
        "alone": None,
    }


def test_planted_shares_are_reported_with_their_bytes() -> None:
    (found,) = results(planted({SMALL: {FEW: 0.8, HARMFUL: -0.1}}), [SMALL], 3)
    assert found.retained(FEW).value == pytest.approx(0.8)
    assert found.times_fewer(FEW) == pytest.approx(1e4)
    assert (found.best(10), found.best(1e5), found.best(1e7)) == (FEW, HARMFUL, None)
    page = page_part([found], ["Written."])
    assert "admitted" in page
    assert "80 % (80 to 80)" in page
    assert "-10 % (-10 to -10), worse than silence" in page


def test_shares_of_admitted_rungs_are_kept_for_explain() -> None:
    (share,) = measured(results(planted({SMALL: {FEW: 0.8}}), [SMALL], 3))
    assert (share["recipe"], share["task"], share["value"]) == (ARMS[FEW].recipe, SMALL, pytest.approx(0.8))
    assert measured(results(planted({SMALL: {FEW: 0.8}}), [SMALL], 2)) == []
    others = {"one worker, as many samples": 1.1, "lock step, 1/20 of the steps": -1.7}
    kept = measured(results(planted({SMALL: {FEW: 0.8, **others}}), [SMALL], 3))
    assert kept == [share], "an arm with another number of workers or steps says nothing about its recipe"


def test_task_without_a_price_of_silence_is_not_admitted() -> None:
    runs = planted({SMALL: {FEW: 0.8}})
    flat: dict[Job, LadderRun] = {
        job: run if job.seed in TUNING_SEEDS else {**run, "held_out": 1.9 + 0.05 * (run["arm"] == SILENCE)}
        for job, run in runs.items()
    }
    (found,) = results(flat, [SMALL], 3)
    assert not found.is_admitted
    assert "cannot rank recipes" in page_part([found], [])


def with_losses(silent: list[float], dense: list[float]) -> dict[Job, LadderRun]:
    """Planted runs whose reported losses of both baselines are these, by seed."""
    own = {SILENCE: silent, LOCK_STEP: dense}
    return {
        job: {**run, "held_out": own[job.arm][job.seed]} if job.arm in own and job.seed not in TUNING_SEEDS else run
        for job, run in planted({SMALL: {FEW: 0.8}}, seeds=len(silent)).items()
    }


def test_what_a_seed_adds_to_both_baselines_is_no_spread_of_the_gap() -> None:
    (found,) = results(with_losses([2.0, 2.1, 2.2], [1.5, 1.61, 1.7]), [SMALL], 3)
    assert found.gap_in_spreads == pytest.approx((1.49 / 3) / (sqrt(1e-4 / 3) / sqrt(2)))
    assert found.is_admitted


def test_spread_of_the_gap_between_baselines_is_counted() -> None:
    (found,) = results(with_losses([2.0, 2.1, 2.0], [1.6, 1.5, 1.6]), [SMALL], 3)
    assert found.gap == pytest.approx(6.1 / 4.7 - 1)
    assert not found.is_admitted


def test_two_seeds_admit_no_task() -> None:
    (found,) = results(with_losses([2.0, 2.1], [1.5, 1.6]), [SMALL], 2)
    assert not found.is_admitted


def test_rung_without_both_baselines_has_no_results() -> None:
    runs = {job: run for job, run in planted({SMALL: {FEW: 0.8}}).items() if job.arm != SILENCE}
    assert results(runs, [SMALL], 3) == []


def test_divergence_is_shown() -> None:
    runs = planted({SMALL: {FEW: 0.8}})
    diverged: dict[Job, LadderRun] = {
        job: {**run, "held_out": None} if job.arm == FEW and job.seed == 1 else run for job, run in runs.items()
    }
    (found,) = results(diverged, [SMALL], 3)
    assert "| diverged |" in page_part([found], [])


# -- over model size -------------------------------------------------------------------------------------------------


def test_share_that_falls_with_size_does_not_transfer() -> None:
    found = results(planted({SMALL: {FEW: 0.9, HARMFUL: 0.5}, LARGE: {FEW: 0.6, HARMFUL: 0.5}}), [SMALL, LARGE], 3)
    (family,) = families(found)
    falling, level = slope(family, FEW), slope(family, HARMFUL)
    assert falling is not None
    assert level is not None
    assert falling.value == pytest.approx(-0.3, rel=0.02)
    assert falling.high < 0
    assert level.value == pytest.approx(0, abs=1e-9)
    (row,) = (line for line in page_part(found, []).splitlines() if line.startswith(f"| {FEW} | 90 %"))
    assert row.endswith("| no |")


def test_ranking_that_turns_round_is_named() -> None:
    found = results(planted({SMALL: {FEW: 0.9, HARMFUL: 0.5}, LARGE: {FEW: 0.5, HARMFUL: 0.9}}), [SMALL, LARGE], 3)
    assert "the ranking does not transfer" in page_part(found, [])


def test_kendall_counts_ordered_pairs() -> None:
    assert kendall([1, 2, 3], [1, 2, 3]) == pytest.approx(1)
    assert kendall([1, 2, 3], [3, 2, 1]) == pytest.approx(-1)
    assert kendall([1, 2, 3, 4], [1, 2, 4, 3]) == pytest.approx(2 / 3)
    assert isnan(kendall([1], [1]))
    assert kendall([1, 1, 2, 2], [1, 1, 2, 2]) == pytest.approx(1)
    assert kendall([1, 1, 2], [1, 2, 3]) == pytest.approx(2 / sqrt(6))
    assert isnan(kendall([1, 1], [1, 2]))


def test_shares_are_ordered_by_rounds_over_all_rungs() -> None:
    every = "parameters averaged every {} steps, 1 bit"
    shares = {SMALL: {every.format(4): 0.6, every.format(8): 0.3}, LARGE: {every.format(4): 0.9, every.format(8): 0.5}}
    found = results(planted(shares), [SMALL, LARGE], 3)
    steps = [each.rung.task.steps for each in found]
    assert [each.rounds(every.format(8)) for each in found] == [count / 8 for count in steps]
    assert {each.rounds(arm) for each in found for arm in (LOCK_STEP, SILENCE)} == {0}
    page = page_part(found, [])
    assert "## Change with the number of rounds" in page
    assert "these 4 results" in page
    assert "## Change with the number of rounds" not in page_part(found[:0], [])


def test_power_law_is_continued() -> None:
    sizes = [60, 120, 240]
    assert predict(sizes, [3.0 * size**-0.1 for size in sizes], 480) == pytest.approx(3.0 * 480**-0.1)


def test_irreducible_loss_is_found_from_three_sizes_and_left_out_of_the_power_law() -> None:
    sizes = [57, 113, 237]
    losses = [1.2 + 3.0 * size**-0.5 for size in sizes]
    least = irreducible_loss(sizes, losses)
    assert least == pytest.approx(1.2, abs=0.002)
    assert predict(sizes, losses, 503, least) == pytest.approx(1.2 + 3.0 * 503**-0.5, abs=0.002)
    assert irreducible_loss(sizes[:2], losses[:2]) == 0, "two sizes do not determine it"


def curved(rung: str, arm: str, optimum: float, loss: float) -> dict[Job, LadderRun]:
    """A finished search with a loss that is a parabola over the logarithm of the rate, and three reported seeds."""
    found: dict[Job, LadderRun] = {}

    def add(rate: float, seed: int) -> None:
        here = loss + log(rate / optimum) ** 2
        found[Job(rung, arm, rate, seed)] = run_of(rung, arm, rate, seed, here, 4e8)

    losses: dict[float, dict[int, float]] = {}
    while tries := next_tries(losses, 1e-2):
        for rate, seed in tries:
            add(rate, seed)
            losses.setdefault(rate, {})[seed] = loss + log(rate / optimum) ** 2
    for seed in range(3):
        add(best_rate(losses), seed)
    return found


def two_sizes() -> dict[Job, LadderRun]:
    """Lock step and silence on two rungs; the best rate falls with the square root of the parameters."""
    found: dict[Job, LadderRun] = {}
    for rung in (SMALL, LARGE):
        share = rungs()[rung].parameters / rungs()[SMALL].parameters
        for arm, loss in ((LOCK_STEP, 1.5), (SILENCE, 2.0)):
            found |= curved(rung, arm, 0.02 * share**-0.5, loss * share**-0.1)
    return found


def test_rate_between_two_of_the_grid_is_found() -> None:
    runs = curved(SMALL, LOCK_STEP, 0.017, 1.5)
    losses = {job.learning_rate: {FIRST: run["held_out"] or 0.0} for job, run in runs.items() if job.seed == FIRST}
    assert parabola_minimum(losses) == pytest.approx(0.017)


def test_rate_of_a_larger_model_follows_a_power_law() -> None:
    share = rungs()[PREDICTED].parameters / rungs()[SMALL].parameters
    assert predicted_rate(two_sizes(), PREDICTED, LOCK_STEP) == pytest.approx(0.02 * share**-0.5, rel=0.05)
    one_size = {job: run for job, run in two_sizes().items() if job.rung == SMALL}
    assert predicted_rate(one_size, PREDICTED, LOCK_STEP) is None


def test_rate_of_the_largest_model_follows_the_confirmed_rate_of_a_predicted_one() -> None:
    runs = two_sizes()
    before, middle = predicted_rate(runs, LARGEST, LOCK_STEP), predicted_rate(runs, PREDICTED, LOCK_STEP)
    assert before is not None
    assert middle is not None
    for factor, loss in ((0.5, 1.1), (1.0, 1.0), (2.0, 1.2)):
        rate = float(f"{factor * middle:.1e}")
        runs[Job(PREDICTED, LOCK_STEP, rate, FIRST)] = run_of(PREDICTED, LOCK_STEP, rate, FIRST, loss, 4e8)
        if factor < 2:
            assert predicted_rate(runs, LARGEST, LOCK_STEP) == before, "not yet between two worse ones"
    after = predicted_rate(runs, LARGEST, LOCK_STEP)
    assert after is not None
    assert 0.8 * before < after < before, "its best rate is below the predicted one"


def test_predicted_rate_is_confirmed_and_replaced_by_a_better_one() -> None:
    runs = two_sizes()
    rate = predicted_rate(runs, PREDICTED, LOCK_STEP)
    assert rate is not None
    assert tuned_rate(runs, PREDICTED, LOCK_STEP) == rate
    tried = []
    while jobs := confirmations(runs, PREDICTED, LOCK_STEP):
        job = jobs[0]
        tried.append((round(job.learning_rate / rate, 1), job.seed))
        runs[job] = run_of(*job, 1.0 + abs(log(job.learning_rate / (1.9 * rate))), 4e8)
    seeds = [(1.0, FIRST), (2.0, FIRST), (4.0, FIRST), (2.0, SECOND), (1.0, SECOND)]
    assert tried == seeds, "further until the best rate has a worse neighbor on both sides; the two best once more"
    assert tuned_rate(runs, PREDICTED, LOCK_STEP) == pytest.approx(2 * rate, rel=0.05)


@pytest.mark.parametrize(
    ("of_best", "of_other", "chosen"), [(1.3, 1.4, 0.01), (1.4, 1.2, 0.02), (1.4, None, 0.01), (None, 0.5, 0.01)]
)
def test_the_second_tuning_seed_decides_between_the_two_best_rates_if_both_have_it(
    of_best: float | None, of_other: float | None, chosen: float
) -> None:
    seconds = [{} if loss is None else {SECOND: loss} for loss in (of_best, of_other)]
    assert (
        best_confirmed({0.01: {FIRST: 1.0} | seconds[0], 0.02: {FIRST: 1.1} | seconds[1], 0.04: {FIRST: 2.0}}) == chosen
    )


def test_ends_of_the_scale_are_confirmed_before_the_reported_seeds_and_other_arms_after_them() -> None:
    runs = two_sizes()
    for rung in (SMALL, LARGE):
        runs |= curved(rung, FEW, 0.01, 1.6)
    jobs = list(wanted(runs, [PREDICTED], [FEW, LOCK_STEP], 2))
    order = list(dict.fromkeys((job.arm, job.seed) for job in jobs))
    assert order == [(LOCK_STEP, FIRST), (FEW, 0), (LOCK_STEP, 0), (FEW, 1), (LOCK_STEP, 1), (FEW, FIRST)]


def test_prediction_is_compared_with_the_runs() -> None:
    runs = two_sizes()
    predicted = predictions(runs, PREDICTED, 3)
    assert [line["arm"] for line in predicted] == [LOCK_STEP, SILENCE]
    for line in predicted:
        for factor in (1.0, 2.0):
            rate = float(f"{factor * line['learning_rate']:.1e}")
            for seed in (0, 1, FIRST):
                loss = 1.1 * line["held_out"] + (factor == 2.0) * 0.25
                runs[Job(PREDICTED, line["arm"], rate, seed)] = run_of(PREDICTED, line["arm"], rate, seed, loss, 4e8)
    page = page_part(results(runs, [SMALL, LARGE, PREDICTED], 3), [], predicted)
    assert page.count("| +10.0 % |") == 2
    assert f"{predicted[0]['learning_rate']:g} (tried: " in page


# -- the program -----------------------------------------------------------------------------------------------------


def test_searches_come_before_reported_seeds() -> None:
    jobs = list(wanted({}, [SMALL], [LOCK_STEP, SILENCE], 3))
    assert {job.seed for job in jobs} == {FIRST}
    done = planted({SMALL: {}}, seeds=1)
    assert tuned_rate(done, SMALL, LOCK_STEP) == 1e-2
    assert [job.seed for job in wanted(done, [SMALL], [LOCK_STEP, SILENCE], 3)] == [1, 1, 2, 2]


def test_search_on_another_rung_starts_at_the_known_rate() -> None:
    runs = planted({SMALL: {}})
    (job, *_) = wanted(runs, [LARGE], [LOCK_STEP], 1)
    assert job.learning_rate == 1e-2


def test_runs_of_a_changed_recipe_or_task_are_not_kept() -> None:
    run = planted({SMALL: {}})[Job(SMALL, LOCK_STEP, 1e-2, 0)]
    assert is_current(run)
    assert not is_current({**run, "resolved": "EveryStep() + Int8() + Complete()"})
    assert not is_current({**run, "about": "another task"})
    assert not is_current({**run, "steps": 8}), "a short trial is no result"
    assert is_current({**run, "steps": 8}, steps=8)
    assert not is_current({**run, "arm": "an arm that is gone"})


def test_one_worker_sees_as_many_samples() -> None:
    arm, rung = ARMS["one worker, as many samples"], rungs()[SMALL]
    assert ladder.steps_of(arm, rung) * workers_of(arm, rung) == rung.task.steps * WORKERS


def test_a_rung_has_its_own_number_of_workers() -> None:
    rung = rungs()["bytelm-57k-b2-w16"]
    assert ladder.steps_of(ARMS["lock step"], rung) == rung.task.steps
    assert [workers_of(ARMS[arm], rung) for arm in ("lock step", "one worker, as many samples")] == [16, 1]
    assert ladder.steps_of(ARMS["one worker, as many samples"], rung) == 16 * rung.task.steps


@pytest.fixture
def asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    rung = rungs()["digits-conv"]
    monkeypatch.setitem(rungs(), "digits-conv", replace(rung, task=replace(rung.task, batch=2)))
    page = tmp_path / "page.md"
    page.write_text("# A\n<!-- written by a program: ladder -->\n<!-- end: ladder -->\n")
    monkeypatch.setattr(ladder, "ProcessPoolExecutor", InThisProcess)
    arms = ["--arms", LOCK_STEP, SILENCE, FEW]
    files = ["--processes", "1", "--runs", str(tmp_path / "runs.jsonl"), "--page", str(page)]
    return ["--rungs", "digits-conv", *arms, "--steps", "2", "--seeds", "2", *files]


class InThisProcess:
    """A pool of one process that is this one."""

    def __init__(self, *_: object, **__: object) -> None:
        pass

    def __enter__(self) -> InThisProcess:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def submit(self, work: Callable[[Job], object], job: Job) -> object:
        from concurrent.futures import Future

        future: Future[object] = Future()
        future.set_result(work(job))
        return future


def test_study_continues_where_it_stopped(asked: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    runs = tmp_path / "runs.jsonl"
    with pytest.raises(SystemExit, match="no rung with a tuned run"):
        ladder.main(ladder.options().parse_args([*asked, "--minutes", "0"]))
    assert not runs.exists(), "no training begins after the time is up"
    ladder.main(ladder.options().parse_args(asked))
    first = capsys.readouterr()
    lines = runs.read_text().splitlines()
    assert first.err.count("held-out loss") == len(lines)
    assert {json.loads(line)["seed"] for line in lines} == {0, 1, *TUNING_SEEDS}
    ladder.main(ladder.options().parse_args(asked))
    second = capsys.readouterr()
    assert second.err.count("held-out loss") == 0
    assert second.out == first.out
    assert "](page.png)" in (tmp_path / "page.md").read_text()
    assert (tmp_path / "page.png").exists()


def test_recipe_that_an_optimizer_cannot_serve_does_not_end_the_study(
    asked: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(ARMS, FEW, replace(ARMS[FEW], recipe="DGC(density=0.1)"))
    ladder.main(ladder.options().parse_args([*asked, "--arms", LOCK_STEP, SILENCE, FEW, "1 bit"]))
    said = capsys.readouterr()
    assert f"{FEW}, learning rate 0.01, seed {FIRST}: left out, AttachError:" in said.err
    assert f"| {SILENCE} |" in said.out


def test_picture_is_drawn_with_points_beyond_its_axis(tmp_path: Path) -> None:
    found = results(planted({SMALL: {FEW: 0.8, HARMFUL: -3.0}}), [SMALL], 3)
    plot(found, tmp_path / "found.png")
    assert (tmp_path / "found.png").read_bytes().startswith(b"\x89PNG")
