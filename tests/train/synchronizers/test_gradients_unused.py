"""Backward passes whose gradients no optimizer uses leave no trace: a GAN's generator, a saliency map."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from support.nightly import once_each
from support.virtual_workers import Worker, agree, batch, cluster, loss_of, network, notices, parameters, seeded
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from gossamer.errors import LoopError
from gossamer.train.engine import autograd_hooks
from gossamer.train.engine.bucket import Bucket
from gossamer.train.engine.bucket_reduction import PendingReduction
from gossamer.train.synchronizers import stages

RECIPES = [
    "Dense()",
    "TopK(0.1)",
    "OneBit()",
    "Int8()",
    "Int8(stochastic=True)",
    "PowerSGD(rank=2)",
    "RandomK(0.2)",
    "ARCTopK(density=0.1, row=8)",
    "SharedMask(density=0.1)",
    "DGC(density=0.1)",
    "Route(Feedback(PowerSGD(2)), rest=Feedback(Int8()))",
    "EveryStep() + TopK(0.1) + Ring()",
    "LocalSGD(3)",
    "LocalSGD(2, per_site=2)",
    "DiLoCo(4)",
    "Gossip() + Ring()",
]
# Of an encoder, of draws, of low rank and of local steps, one is above
LIKE_OTHERS = [
    "OneBit()",
    "Int8()",
    "RandomK(0.2)",
    "ARCTopK(density=0.1, row=8)",
    "LocalSGD(3)",
    "EveryStep() + TopK(0.1) + Ring()",
]

Detour = Callable[[nn.Module, int, int], None]


def nothing(model: nn.Module, step: int, rank: int) -> None:
    pass


def generator_pass(model: nn.Module, step: int, rank: int) -> None:
    """As a GAN's generator is trained: backward through the other model, whose gradients are thrown away."""
    (-loss_of(model, 100 + step, rank)).backward()
    model.zero_grad()


def left_for_the_next_step_to_clear(model: nn.Module, step: int, rank: int) -> None:
    (-loss_of(model, 100 + step, rank)).backward()


def cleared_in_place(model: nn.Module, step: int, rank: int) -> None:
    (-loss_of(model, 100 + step, rank)).backward()
    model.zero_grad(set_to_none=False)


def two_passes(model: nn.Module, step: int, rank: int) -> None:
    generator_pass(model, step, rank)
    generator_pass(model, 50 + step, rank)


def saliency(model: nn.Module, step: int, rank: int) -> None:
    """The gradient for the inputs; the parameters' comes along."""
    inputs, _ = batch(step, rank)
    model(inputs.requires_grad_()).sum().backward()
    model.zero_grad()


DETOURS = [generator_pass, left_for_the_next_step_to_clear, two_passes, saliency]


def trained(worker: Worker, recipe: Any, detour: Detour, steps: int = 9, **options: Any) -> tuple[Tensor, Any]:
    model = network(worker.rank)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    session = worker.attach(model, optimizer, recipe, **options)
    for step in range(steps):
        optimizer.zero_grad()
        loss_of(model, step, worker.rank).backward()
        optimizer.step()
        detour(model, step, worker.rank)
    with session.averaged_parameters(model):
        merged = parameters(model)
    state = session.state_dict()
    remembered = {
        f"{name}.{key}": tensor.clone() for name, kept in state["state"].items() for key, tensor in kept.items()
    }
    return merged, remembered | {"step": torch.tensor(state["progress"]["step"])}


def same(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[key], other[key]) for key in one)


@once_each("recipe, detour", RECIPES, DETOURS, not_by_day=LIKE_OTHERS)
def test_a_pass_that_no_optimizer_uses_leaves_no_trace(recipe: str, detour: Detour) -> None:
    """Neither in parameters, nor in what a checkpoint holds, though the last one may still be used."""
    plain = cluster(lambda worker: trained(worker, recipe, nothing), 4)
    detoured = cluster(lambda worker: trained(worker, recipe, detour), 4)
    for (model, remembered), (other, kept) in zip(plain, detoured, strict=True):
        assert torch.equal(model, other)
        assert same(remembered, kept)


def test_without_the_rollback_the_remainder_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    """The twin: this is what spoils a discriminator."""
    monkeypatch.setattr(Bucket, "roll_back", lambda self: None)
    with pytest.raises(AssertionError):
        test_a_pass_that_no_optimizer_uses_leaves_no_trace("TopK(0.1)", generator_pass)


# -- what uses an average ---------------------------------------------------------------------------------------------


def by_hand(model: nn.Module) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.sub_(parameter.grad, alpha=0.1)


def passes(worker: Worker, use: Callable[[nn.Module], Any], count: int = 4) -> tuple[Tensor, int]:
    """Backward passes of a model whose attached optimizer makes no step; `use` comes after each."""
    model, _, session = worker.start(network(worker.rank), lambda m: torch.optim.SGD(m.parameters(), 0.1), "TopK(0.1)")
    for step in range(count):
        model.zero_grad()
        loss_of(model, step, worker.rank).backward()
        use(model)
    remembered = session.state_dict()["state"].values()
    return torch.cat([tensor.flatten() for kept in remembered for tensor in kept.values()]).clone(), session.steps


def by_data(model: nn.Module) -> None:
    for parameter in model.parameters():
        parameter.data -= 0.1 * parameter.grad


def by_another_optimizer(model: nn.Module) -> None:
    torch.optim.SGD(model.parameters(), 0.1).step()


@pytest.mark.parametrize("use", [by_hand, by_data, by_another_optimizer])
def test_an_average_counts_as_used_whoever_uses_it(use: Callable[[nn.Module], Any]) -> None:
    for residual, steps in cluster(lambda worker: passes(worker, use), 2):
        assert steps == 4
        assert residual.count_nonzero() > 0


def test_unused_averages_are_reported_once() -> None:
    with notices() as said:
        results = cluster(lambda worker: passes(worker, lambda model: None, count=30), 2)
    assert {steps for _, steps in results} == {0}
    assert [line for line in said if "without an optimizer step" in line] == said
    assert len(said) == 1


@pytest.mark.parametrize("world", [1, 2])
def test_a_pending_average_of_a_generators_pass_is_no_step_of_the_discriminator(world: int) -> None:
    def work(worker: Worker) -> tuple[int, int, int]:
        model, optimizer, session = worker.start(network(0), lambda m: torch.optim.SGD(m.parameters(), 0.1), "Dense()")
        made = 0
        while session.steps < 3:
            optimizer.zero_grad()
            loss_of(model, made, worker.rank).backward()
            optimizer.step()
            made += 1
            generator_pass(model, made, worker.rank)
        state = session.state_dict()
        return made, session.steps, state["step"]

    assert cluster(work, world) == world * [(3, 3, 3)]


def test_gradients_that_are_accumulated_upon_were_not_thrown_away() -> None:
    """Without state a second pass may be added to the first: both count, as they did."""

    def work(worker: Worker) -> tuple[Tensor, int]:
        model, optimizer, session = worker.start(
            network(worker.rank), lambda m: torch.optim.SGD(m.parameters(), 0.1), "Dense()"
        )
        for step in range(3):
            optimizer.zero_grad()
            loss_of(model, 2 * step, worker.rank).backward()
            loss_of(model, 2 * step + 1, worker.rank).backward()
            optimizer.step()
        return parameters(model), session.steps

    (mine, steps), (theirs, _) = cluster(work, 2)
    assert torch.equal(mine, theirs)
    assert steps == 6


@pytest.mark.parametrize("recipe", ["Dense()", "RandomK(0.2, feedback=False)"])
def test_discarded_passes_that_add_up_are_no_steps(recipe: str) -> None:
    """As two passes of SAC's actor through its critic, whose zero_grad() comes before the critic's own next pass."""

    def work(worker: Worker, detours: int) -> tuple[Tensor, int, int]:
        model = network(worker.rank)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        session = worker.attach(model, optimizer, recipe)
        with session.epoch():
            for step in range(4 if worker.rank else 6):
                optimizer.zero_grad()
                loss_of(model, step, worker.rank).backward()
                optimizer.step()
                for detour in range(detours):
                    loss_of(model, 100 + detour, worker.rank).neg().backward()
        return parameters(model), session.steps, session._synchronizer.passes

    plain, detoured = (cluster(lambda worker, n=n: work(worker, n), 2) for n in (0, 3))
    for (one, *counts), (other, *others) in zip(plain, detoured, strict=True):
        assert torch.equal(one, other)
        assert counts == others == [6, 6]


# -- beside other things ----------------------------------------------------------------------------------------------


def uneven(worker: Worker, recipe: str, detour: Detour) -> Tensor:
    """Rank 1 has fewer batches, in two epochs."""
    model = network(worker.rank)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    session = worker.attach(model, optimizer, recipe)
    for epoch in range(2):
        with session.epoch():
            for step in range(3 if worker.rank == 1 else 7):
                optimizer.zero_grad()
                loss_of(model, 10 * epoch + step, worker.rank).backward()
                optimizer.step()
                detour(model, 10 * epoch + step, worker.rank)
    kept = session.state_dict()["state"]
    return torch.cat([parameters(model), *(t.flatten() for each in kept.values() for t in each.values())])


@once_each("recipe, detour", ["Dense()", "TopK(0.1)", "RandomK(0.2)", "QSGD(4)", "Int8(stochastic=True)"], DETOURS)
def test_rank_without_data_rolls_back_with_the_others(recipe: str, detour: Detour) -> None:
    plain = cluster(lambda worker: uneven(worker, recipe, nothing), 3)
    detoured = cluster(lambda worker: uneven(worker, recipe, detour), 3)
    for one, other in zip(plain, detoured, strict=True):
        assert torch.equal(one, other)


Kept = tuple[nn.Module, dict[str, Any]]


def from_to(worker: Worker, recipe: str, begin: int, end: int, kept: Kept | None = None) -> Kept:
    """Train and save; kept: what was saved before."""
    model = network(worker.rank) if kept is None else kept[0]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    session = worker.attach(model, optimizer, recipe)
    if kept is not None:
        session.load_state_dict(kept[1])
    for step in range(begin, end):
        optimizer.zero_grad()
        loss_of(model, step, worker.rank).backward()
        optimizer.step()
        generator_pass(model, step, worker.rank)
    session._synchronizer.meet_to_save()
    return model, copy.deepcopy(session.state_dict())


@pytest.mark.parametrize("recipe", ["TopK(0.1)", "PowerSGD(rank=2)", "DGC(density=0.1)"])
def test_a_checkpoint_is_of_before_a_pass_that_was_not_used(recipe: str) -> None:
    straight = cluster(lambda worker: from_to(worker, recipe, 0, 9), 2)
    saved = cluster(lambda worker: from_to(worker, recipe, 0, 4), 2)
    broken = cluster(lambda worker: from_to(worker, recipe, 4, 9, saved[worker.rank]), 2)
    for (one, _), (other, _) in zip(straight, broken, strict=True):
        assert torch.equal(parameters(one), parameters(other))


def test_training_continues_after_a_checkpoint_that_came_before_the_step() -> None:
    """The copy that a roll-back would need is not what the save has written over."""

    def work(worker: Worker, saves: bool) -> Tensor:
        model, optimizer, session = worker.start(
            network(worker.rank), lambda m: torch.optim.SGD(m.parameters(), 0.1), "TopK(0.1)"
        )
        for step in range(6):
            optimizer.zero_grad()
            loss_of(model, step, worker.rank).backward()
            optimizer.step()
            generator_pass(model, step, worker.rank)
            if saves:
                session._synchronizer.meet_to_save()
        return parameters(model)

    for one, other in zip(*(cluster(lambda w, s=s: work(w, s), 2) for s in (False, True)), strict=True):  # type: ignore[misc]
        assert torch.equal(one, other)


def test_periods_are_in_steps_for_any_number_of_passes() -> None:
    """Four passes for a step, as users accumulate: LocalSGD(2) talks after every second step."""

    def work(worker: Worker) -> list[Tensor]:
        model, optimizer, _ = worker.start(
            network(worker.rank), lambda m: torch.optim.SGD(m.parameters(), 0.1), "LocalSGD(2)"
        )
        path = []
        for step in range(6):
            optimizer.zero_grad()
            for part in range(4):
                loss_of(model, 4 * step + part, worker.rank).backward()
            optimizer.step()
            path.append(parameters(model))
        return path

    mine, theirs = cluster(work, 2)
    assert [torch.equal(*pair) for pair in zip(mine, theirs, strict=True)] == [False, True] * 3


# -- Reentrant activation checkpointing changes no bit of what is trained, whatever its segments share -----------------
WORLD, STEPS = 2, 4
STEPS_COUNT_LATER = ("LocalSGD(2)",)  # when the optimizer makes them
Run = Callable[..., Tensor]


class SignSteps(torch.optim.Optimizer):
    """Parameters stay integers, or halves of them where they are averaged."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model.parameters(), {})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for parameter in self.param_groups[0]["params"]:
            if parameter.grad is not None:
                parameter -= parameter.grad.sign()


def plain(function: Callable[..., Tensor], *args: Tensor) -> Tensor:
    return function(*args)


def reentrant(function: Callable[..., Tensor], *args: Tensor) -> Tensor:
    return checkpoint(function, *args, use_reentrant=True)


class Layers(nn.Module):
    """Four layers of one shape; integers in, so that sums are exact."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4).double() for _ in range(4))
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.copy_(torch.randint(-2, 3, parameter.shape).double())

    def forward(self, x: Tensor, run: Run) -> Tensor:
        for layer in self.layers:
            x = run(layer, x)
        return x


class Mixed(Layers):
    """The first and the third run as they are."""

    def forward(self, x: Tensor, run: Run) -> Tensor:
        a, b, c, d = self.layers
        return run(d, c(run(b, a(x))))


class PlainBefore(Layers):
    """Nothing but the last layer is seen outside of a segment, and first of all."""

    def forward(self, x: Tensor, run: Run) -> Tensor:
        a, b, c, d = self.layers
        return d(run(c, run(b, run(a, x))))


class Shared(Layers):
    """Two segments use the same layer."""

    def forward(self, x: Tensor, run: Run) -> Tensor:
        a, b, c, d = self.layers
        return run(a, run(c, run(b, run(a, x)))) + run(d, x)


class Tied(Layers):
    """The layer that runs last, as it is, is used in the first segment as well: its first part comes very early."""

    def forward(self, x: Tensor, run: Run) -> Tensor:
        a, b, c, d = self.layers
        return d(run(c, run(b, run(lambda x: d(a(x)), x))))


class Nested(Layers):
    """Segments within a segment."""

    def forward(self, x: Tensor, run: Run) -> Tensor:
        a, b, c, d = self.layers
        return run(lambda x: run(b, run(a, x)), run(lambda x: d(run(c, x)), x))


class Unused(Layers):
    """A segment's input is a dummy that it does not use, as is done where the real one needs no gradient."""

    def forward(self, x: Tensor, run: Run) -> Tensor:
        dummy = torch.zeros(1, requires_grad=True)
        for layer in self.layers:
            x = run(lambda _, x, layer=layer: layer(x), dummy, x.detach()) + x.detach()
        return x


SHAPES: list[type[Layers]] = [Layers, Mixed, PlainBefore, Shared, Tied, Nested, Unused]


def inputs(step: int, rank: int) -> Tensor:
    generator = torch.Generator().manual_seed(100 * step + rank)
    return torch.randint(-2, 3, (3, 4), generator=generator).double().requires_grad_()


def trained_reentrant(
    worker: Worker, shape: type[Layers], run: Run, recipe: str = "Dense()", passes: int = 1
) -> Tensor:
    with seeded(0):
        model = shape()
    optimizer = SignSteps(model)
    session = worker.attach(model, optimizer, recipe)
    for step in range(STEPS):
        optimizer.zero_grad()
        with session.no_sync():
            for again in range(passes - 1):
                model(inputs(50 + again, worker.rank), run).square().sum().backward()
        for again in range(2 if "accumulate" in recipe else 1):
            model(inputs(step + 10 * again, worker.rank), run).square().sum().backward()
        assert session._synchronizer.step == step + (recipe not in STEPS_COUNT_LATER), (
            "backward() returned before the exchange"
        )
        optimizer.step()
    assert session.steps == STEPS
    return parameters(model)


@pytest.fixture
def _small_buckets(monkeypatch: pytest.MonkeyPatch) -> None:
    """A bucket for each tensor, so that most leave during backward."""
    monkeypatch.setattr(stages, "assign_buckets", partial(stages.assign_buckets, bucket_bytes=1))


def same_values(shape: type[Layers], recipe: str = "Dense()", passes: int = 1) -> bool:
    def found(run: Run) -> Tensor:
        return agree(cluster(lambda worker: trained_reentrant(worker, shape, run, recipe, passes), WORLD))

    return torch.equal(found(reentrant), found(plain))


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
@pytest.mark.usefixtures("_small_buckets")
@pytest.mark.parametrize("shape", SHAPES)
def test_checkpointing_changes_no_bit(shape: type[Layers]) -> None:
    assert same_values(shape)


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
@pytest.mark.usefixtures("_small_buckets")
@pytest.mark.parametrize("recipe", ["EveryStep(accumulate=2)", "TopK(0.3)", "LocalSGD(2)", "EveryStep(delay=1)"])
@pytest.mark.parametrize("shape", [Shared, Tied])
def test_every_way_of_averaging_sees_the_outermost_pass(shape: type[Layers], recipe: str) -> None:
    assert same_values(shape, recipe)


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
@pytest.mark.usefixtures("_small_buckets")
@pytest.mark.parametrize("shape", [Mixed, Shared])
def test_gradients_that_add_up_before(shape: type[Layers]) -> None:
    assert same_values(shape, passes=3)


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
@pytest.mark.usefixtures("_small_buckets")
def test_the_check_catches_an_inner_end_that_is_taken_for_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """Twin: whatever is going on counts as the outermost pass."""
    monkeypatch.setattr(autograd_hooks, "outermost_function", lambda: None)
    with pytest.raises((AssertionError, LoopError)):
        assert same_values(Layers)


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
@pytest.mark.usefixtures("_small_buckets")
def test_the_check_catches_a_part_that_is_taken_for_the_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    """Twin: a bucket leaves with the first part of a gradient that comes in two."""
    send = PendingReduction.send

    def send_at_once(self: PendingReduction, *args: Any) -> None:
        send(self, *args)
        self._work[-1].wait()

    monkeypatch.setattr(PendingReduction, "send", send_at_once)
    assert same_values(Tied)
    monkeypatch.setattr(Bucket, "arrive", lambda self, name: self.missing.discard(name))
    assert not same_values(Tied)


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
def test_late_gradient_of_a_shared_parameter_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """In the passes before it no segment shared anything, so that gradients left as soon as they were there."""

    def work(worker: Worker) -> None:
        with seeded(0):
            model: Any = Tied()
        worker.attach(model, SignSteps(model))
        for shape in (PlainBefore, Tied):
            model.__class__ = shape
            model(inputs(0, worker.rank), reentrant).sum().backward()
            model.zero_grad()

    monkeypatch.setattr(stages, "assign_buckets", partial(stages.assign_buckets, bucket_bytes=1))
    with pytest.raises(LoopError, match=r"layers\.3\.(weight|bias).*another part.*use_reentrant=False"):
        cluster(work, WORLD)


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
def test_a_pass_that_failed_within_a_segment_leaves_the_next_one_alone() -> None:
    """Nothing was sent yet; the loop throws the batch away and goes on."""

    class Fails(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, *gradients: Any) -> Any:
            raise MemoryError

    def work(worker: Worker, fails: bool) -> Tensor:
        with seeded(0):
            model = Shared()
        optimizer = SignSteps(model)
        worker.attach(model, optimizer)
        for step in range(STEPS):
            if fails and step == 2:
                with pytest.raises(MemoryError):
                    model(Fails.apply(inputs(9, worker.rank)), reentrant).sum().backward()
                optimizer.zero_grad()
            optimizer.zero_grad()
            model(inputs(step, worker.rank), reentrant).square().sum().backward()
            optimizer.step()
        return parameters(model)

    assert torch.equal(
        agree(cluster(lambda worker: work(worker, True), WORLD)),
        agree(cluster(lambda worker: work(worker, False), WORLD)),
    )
