import time

import pytest
import torch
from support.virtual_workers import Worker, cluster

from gossamer.algorithms.recipes.recipe import resolve
from gossamer.events import Attached, StepEnded
from gossamer.plan.rehearse import worker
from gossamer.plan.rehearse.model_shapes import Gradient
from gossamer.plan.rehearse.worker import Drifting, Idle, SentBytes, SimulatedModel, heavy_tailed, idle


def test_bytes_are_those_of_whole_periods_in_which_everything_lands():
    sent = SentBytes(delay=1)
    sent(Attached(recipe="", layouts=(), parameters=0, buffer_bytes=0, control_bytes=0, rank=0, world=2, period=3))
    for step, nbytes in enumerate([0, 0, 0, 9, 0, 0, 9, 0], start=1):
        sent(StepEnded(step=step, seconds=0.1, bytes_sent=nbytes))
    assert sent.bytes_per_step == 3.0


# -- simulated model ---------------------------------------------------------------------------------------------------


GRADIENTS = (
    Gradient("first.weight", (40, 30), 1.0),
    Gradient("first.bias", (40,), 1.0),
    Gradient("odd", (3, 5), 0.25),
    Gradient("last", (), 0.5),
)


class FakeTime:
    """A clock on which sleeping takes a little too long, as it does."""

    def __init__(self, oversleep: float = 0.0) -> None:
        self.now, self.oversleep = 100.0, oversleep

    def perf_counter(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        assert seconds > 0
        self.now += seconds + self.oversleep


def appearances(monkeypatch, clock: FakeTime, steps: int = 1) -> list[tuple[str, float]]:
    """When each gradient was there, counted from the beginning of the last of `steps` steps of 3 seconds."""
    monkeypatch.setattr(worker, "time", clock)
    model = SimulatedModel(GRADIENTS, step_seconds=3.0, forward_share=1 / 3)
    seen: list[tuple[str, float]] = []
    for name, parameter in model.named_parameters():
        parameter.register_post_accumulate_grad_hook(lambda _, name=name: seen.append((name, clock.now - began)))
    for _ in range(steps):
        seen.clear()
        began = clock.now
        model().backward()
    return seen


def test_gradients_appear_at_their_moments(monkeypatch):
    seen = appearances(monkeypatch, FakeTime())
    assert [name for name, _ in seen[:2]] == ["odd", "last"]
    assert sorted(seen) == [
        ("first/bias", pytest.approx(3.0)),
        ("first/weight", pytest.approx(3.0)),
        ("last", pytest.approx(2.0)),
        ("odd", pytest.approx(1.5)),
    ]


def test_what_one_sleep_takes_too_long_the_next_makes_up_for(monkeypatch):
    """Sleeping for durations instead of until moments would be late by four times as much."""
    seen = appearances(monkeypatch, FakeTime(oversleep=0.1), steps=3)
    assert dict(seen)["first/weight"] == pytest.approx(3.1)


def test_what_is_late_is_reported(monkeypatch):
    clock = FakeTime(oversleep=0.25)
    monkeypatch.setattr(worker, "time", clock)
    model = SimulatedModel(GRADIENTS, step_seconds=3.0, forward_share=0.0)
    model().backward()
    assert model.late_seconds == pytest.approx(0.25)


def one_step(model: SimulatedModel) -> dict[str, torch.Tensor]:
    model.zero_grad()
    model().backward()
    return {name: parameter.grad for name, parameter in model.named_parameters()}


def quick(seed: int = 0) -> SimulatedModel:
    return SimulatedModel(GRADIENTS, step_seconds=1e-6, forward_share=0.5, seed=seed)


def test_gradients_have_their_shapes_and_lie_in_the_pool():
    """No gradient is copied on its way from the pool: on a large model that would be most of the work."""
    model = quick()
    pool = {stop._variants[0][0].untyped_storage().data_ptr() for stop in model._groups}
    gradients = one_step(model)
    assert {name: tuple(gradient.shape) for name, gradient in gradients.items()} == {
        "first/weight": (40, 30),
        "first/bias": (40,),
        "odd": (3, 5),
        "last": (),
    }
    assert {gradient.untyped_storage().data_ptr() for gradient in gradients.values()} == pool


def test_gradients_differ_by_step_and_seed_and_not_by_run():
    first, again = quick(), quick()
    one, two = one_step(first)["first/weight"], one_step(first)["first/weight"]
    assert torch.equal(one, one_step(again)["first/weight"])
    assert not torch.equal(one, two)
    assert not torch.equal(one, one_step(quick(seed=1))["first/weight"])


def energy_of_largest(x: torch.Tensor, share: float) -> float:
    squares = x.double().square().sort(descending=True).values
    return float(squares[: int(share * len(x))].sum() / squares.sum())


def test_gradients_are_heavy_tailed():
    generator = torch.Generator().manual_seed(0)
    assert energy_of_largest(heavy_tailed(10**6, generator), 0.01) > 0.4
    assert energy_of_largest(torch.randn(10**6, generator=generator), 0.01) < 0.1


def test_a_real_session_averages_the_prepared_gradients():
    def work(worker: Worker) -> tuple[torch.Tensor, torch.Tensor]:
        model = quick(seed=worker.rank)
        own = one_step(model)["first/weight"].clone()
        model = quick(seed=worker.rank)
        optimizer = Idle(model.parameters())
        worker.attach(model, optimizer)
        averaged = one_step(model)["first/weight"].clone()
        optimizer.step()
        assert all(not parameter.any() for parameter in model.parameters())
        return own, averaged

    (own_0, mean_0), (own_1, mean_1) = cluster(work, 2)
    assert torch.equal(mean_0, (own_0 + own_1) / 2)
    assert torch.equal(mean_0, mean_1)


def test_a_step_takes_its_time_and_no_processor():
    model = SimulatedModel(GRADIENTS, step_seconds=0.05, forward_share=1 / 3)
    steps = []
    spent = time.process_time()
    for _ in range(10):
        began = time.perf_counter()
        one_step(model)
        steps.append(time.perf_counter() - began)
    spent = time.process_time() - spent
    assert min(steps) >= 0.05
    assert min(steps) == pytest.approx(0.05, rel=0.2)  # the quickest of ten, on a busy machine
    assert spent < 0.2 * sum(steps)


@pytest.mark.parametrize(
    "recipe", ["DGC(density=0.1)", "OneBitAdam(warmup=2)", "AdamUpdate()", "MicroAdam()", "TopK(density=0.1)"]
)
def test_every_recipe_finds_an_optimizer_that_moves_nothing(recipe: str) -> None:
    def work(worker: Worker) -> list[torch.Tensor]:
        model = quick(seed=worker.rank)
        optimizer = idle(model, resolve(recipe, worker.world))
        worker.attach(model, optimizer, recipe)
        for _ in range(4):
            one_step(model)
            optimizer.step()
        return [parameter.detach() for parameter in model.parameters()]

    for parameters in cluster(work, 2):
        assert all(not parameter.any() for parameter in parameters)


@pytest.mark.parametrize(
    "recipe",
    [
        "DiLoCo(2, fragments=2, delay=1)",
        "LocalSGD(2, optimizer_state='average')",
        "LocalSGD(2, second_moment='agreed')",
        "DelayedAveraging(delay=1)",
    ],
)
def test_what_merges_has_something_to_merge(recipe: str) -> None:
    """Gradients differ by rank, so parameters do until they are merged."""

    def work(worker: Worker) -> tuple[torch.Tensor, torch.Tensor, list[set[str]]]:
        model = quick(seed=worker.rank)
        optimizer = idle(model, resolve(recipe, worker.world))
        session = worker.attach(model, optimizer, recipe)
        one_step(model)
        optimizer.step()
        apart = next(model.parameters()).detach().clone()
        for _ in range(5):
            one_step(model)
            optimizer.step()
        with session.averaged_parameters(model):
            merged = next(model.parameters()).detach().clone()
        return apart, merged, [set(state) for state in optimizer.state.values()]

    (apart_0, merged_0, kept), (apart_1, merged_1, _) = cluster(work, 2)
    assert not torch.equal(apart_0, apart_1)
    assert torch.equal(merged_0, merged_1)
    assert merged_0.any()
    if "agreed" not in recipe:
        assert kept == [{"exp_avg", "exp_avg_sq"}] * 4 * ("average" in recipe)


def test_moving_parameters_takes_no_time_of_the_step(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = FakeTime()
    monkeypatch.setattr(worker, "time", clock)
    model = SimulatedModel(GRADIENTS, step_seconds=3.0, forward_share=1 / 3)
    model.spend(0.5)
    began = clock.now
    model().backward()
    assert clock.now - began == pytest.approx(2.5)
    model().backward()
    assert clock.now - began == pytest.approx(5.5)


def test_parameters_move_once_in_a_period() -> None:
    model = quick()
    optimizer = Drifting(model, 3, averaged=False)
    moved = []
    for _ in range(7):
        before = next(model.parameters()).detach().clone()
        one_step(model)
        optimizer.step()
        moved.append(not torch.equal(before, next(model.parameters())))
    assert moved == [True, False, False, True, False, False, True]
