"""What is merged and compared at the end is the whole model: buffers, counters and frozen parameters that move."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from support.nightly import once_each
from support.sessions import sgd
from support.virtual_workers import (
    Worker,
    agree,
    batch,
    cluster,
    heard,
    network,
    notices,
    parameters,
    seeded,
    train_step,
)
from torch import Tensor, nn
from torch.nn.functional import mse_loss

import gossamer
from gossamer import events
from gossamer.errors import AttachError
from gossamer.train.session.session import Session

State = dict[str, Tensor]


class MovingState(nn.Module):
    """BatchNorm's statistics and counter, spectral norm's vectors, a buffer that forward replaces, one that is not
    persistent, and a momentum encoder, which the loop writes through `.data` as DINO's does."""

    seen: Tensor
    hidden: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.utils.parametrizations.spectral_norm(nn.Linear(6, 8))
        self.norm, self.last = nn.BatchNorm1d(8), nn.Linear(8, 3)
        self.momentum = nn.Linear(8, 3).requires_grad_(False)
        self.register_buffer("seen", torch.zeros(6))
        self.register_buffer("hidden", torch.zeros(6), persistent=False)
        self.register_buffer("mask", torch.tensor([True, False]))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.seen = 0.9 * self.seen + 0.1 * x.detach().mean(0)
            self.hidden.mul_(0.5).add_(x.detach()[0])
        out: Tensor = self.last(torch.tanh(self.norm(self.first(x))))
        return out

    def follow(self) -> None:
        for mine, theirs in zip(self.momentum.parameters(), self.last.parameters(), strict=True):
            mine.data.mul_(0.9).add_(theirs.data, alpha=0.1)


def begin(worker: Worker, recipe: str, **options: Any) -> tuple[MovingState, Session]:
    with seeded(worker.rank):
        model = MovingState().double()
    model.momentum.load_state_dict(model.last.state_dict())
    return model, worker.attach(model, torch.optim.SGD(model.parameters(), lr=0.1), recipe, **options)


def train(session: Session, steps: Iterable[int], rank: int) -> list[State]:
    """All state just before each of the optimizer's steps, after which a round may change it."""
    model, found = session.model, []
    assert isinstance(model, MovingState)
    for step in steps:
        session.optimizer.zero_grad()
        inputs, targets = batch(step, rank)
        mse_loss(model(inputs * (1 + rank) + rank), targets).backward()
        found.append(state_of(model))
        session.optimizer.step()
        model.follow()
    return found


def state_of(model: nn.Module) -> State:
    """A copy of parameters and all buffers."""
    return {name: each.detach().clone() for name, each in [*model.named_parameters(), *model.named_buffers()]}


def merged_state(session: Session) -> State:
    with session.averaged_parameters(session.model):
        return state_of(session.model)


def differing(states: list[State]) -> list[str]:
    """Names of what is not the same bits in all of them."""
    return [name for name, each in states[0].items() if not all(torch.equal(each, other[name]) for other in states)]


RECIPES = [
    "LocalSGD(4)",
    "LocalSGD(4) + Int8()",
    "LocalSGD(2, per_site=2)",
    "PostLocalSGD(3, start=1)",
    "DiLoCo(4)",
    "DiLoCo(4, fragments=2, delay=2, mix=0.5)",
    "DelayedAveraging(2)",
    "DelayedAveraging(delay=3, period=2) + TopK(0.3)",
    "Gossip() + Ring()",
    "Gossip() + Int8() + Ring()",
    "Gossip('push-sum', period=2) + Exponential()",
    "EveryStep(delay=1)",
    "EveryStep()",
]
OTHERS = {
    "norm.running_mean", "norm.running_var", "norm.num_batches_tracked", "seen", "hidden", "momentum.weight",
    "momentum.bias", "first.parametrizations.weight.0._u", "first.parametrizations.weight.0._v",
}  # fmt: skip


def between_means(worker: Worker, recipe: str) -> tuple[State, State, State]:
    """(own state, what is merged, own state again) some steps after a mean."""
    model, session = begin(worker, recipe)
    train(session, range(11), worker.rank)
    own, merged = state_of(model), merged_state(session)
    return own, merged, state_of(model)


@pytest.mark.parametrize("recipe", RECIPES)
def test_merged_has_the_same_whole_state_on_every_rank(recipe: str) -> None:
    found = cluster(lambda worker: between_means(worker, recipe), 4)
    assert differing([merged for _, merged, _ in found]) == []
    for own, _, again in found:
        assert differing([own, again]) == []
    if not recipe.startswith(("EveryStep", "DelayedAveraging")):  # these have just landed
        assert {"norm.running_mean", "seen", "hidden"} <= set(differing([own for own, _, _ in found]))


def test_pairwise_gossip_merges_statistics_and_counters_with_the_parameters() -> None:
    def work(worker: Worker) -> tuple[State, State]:
        model, session = begin(worker, "Gossip('pairwise')")
        session.optimizer.param_groups[0]["lr"] = 0.0  # an exchange that is under way moves no parameter
        train(session, range(4 + worker.rank), worker.rank)
        worker.transport.all_gather_text("")  # none trains while the others merge
        found = state_of(model), merged_state(session)
        worker.transport.all_gather_text("")
        session.close()
        return found

    own, merged = zip(*cluster(work, 2), strict=True)
    assert differing(list(merged)) == []
    for name in OTHERS:
        mean = (own[0][name].double() + own[1][name].double()) / 2
        torch.testing.assert_close(merged[0][name].double(), mean if mean.numel() > 1 else mean.round())


@pytest.mark.parametrize("first", [0, 1])
def test_pairwise_gossip_merges_own_statistics_of_a_worker_that_holds_the_merged_ones(first: int) -> None:
    def work(worker: Worker) -> State:
        model, session = begin(worker, "Gossip('pairwise')")
        session.optimizer.param_groups[0]["lr"] = 0.0
        train(session, range(4 + worker.rank), worker.rank)
        worker.transport.all_gather_text("")
        if worker.rank == first:
            with session.averaged_parameters(model), session.averaged_parameters(model):
                found = state_of(model)
                worker.transport.all_gather_text("")  # the other one merges now
                worker.transport.all_gather_text("")
        else:
            worker.transport.all_gather_text("")
            found = merged_state(session)
            worker.transport.all_gather_text("")
        worker.transport.all_gather_text("")
        model.seen.add_(1)  # counts, since no block is open
        worker.transport.all_gather_text("")
        assert differing([found, merged_state(session)]) == ["seen"]
        worker.transport.all_gather_text("")
        session.close()
        return found

    assert differing(cluster(work, 2)) == []


def test_pairwise_gossip_keeps_an_exchange_that_lands_between_two_nested_blocks() -> None:
    def work(worker: Worker) -> tuple[State, State]:
        model, session = begin(worker, "Gossip('pairwise', period=4)")
        model.follow = lambda: None  # type: ignore[method-assign]
        train(session, range(3), worker.rank)
        session.optimizer.param_groups[0]["lr"] = 0.0
        worker.transport.all_gather_text("")
        before = state_of(model)
        if worker.rank == 0:
            with session.averaged_parameters(model):
                worker.transport.all_gather_text("")  # the other one begins an exchange now
                worker.transport.all_gather_text("")
                with session.averaged_parameters(model):
                    pass
        else:
            worker.transport.all_gather_text("")
            train(session, [3], worker.rank)
            for exchange in session._synchronizer._exchanges.values():  # type: ignore[attr-defined]
                exchange.wait()
            worker.transport.all_gather_text("")
        train(session, [4], worker.rank)
        worker.transport.all_gather_text("")
        return before, state_of(model)

    found = cluster(work, 2)
    name = "last.weight"
    first, second = (torch.stack([states[when][name] for states in found]) for when in (0, 1))
    assert not torch.allclose(first[0], first[1])
    torch.testing.assert_close(second, first.mean(0).expand(2, -1, -1))


def across_a_round(worker: Worker, recipe: str) -> tuple[State, State, State]:
    """(the other state as the first round finds it, own state just after it, what is merged a step later)"""
    model, session = begin(worker, recipe)
    if worker.rank == 1:
        model(torch.zeros(4, 6, dtype=torch.float64))  # a batch more than the others: counters differ
    before = train(session, range(4), worker.rank)[-1]
    after = state_of(model)
    train(session, [4], worker.rank)
    return before, after, merged_state(session)


@pytest.mark.parametrize("recipe", ["LocalSGD(4)", "DiLoCo(4)", "DelayedAveraging(delay=0, period=4)"])
def test_other_state_is_merged_as_its_mean_at_the_last_round(recipe: str) -> None:
    found = cluster(lambda worker: across_a_round(worker, recipe), 3)
    for name in OTHERS:
        mean = torch.stack([before[name].double() for before, _, _ in found]).mean(0)
        for _, after, merged in found:
            expected = mean if merged[name].is_floating_point() else mean.round()
            torch.testing.assert_close(merged[name].double(), expected, rtol=1e-12, atol=1e-12)
            if not name.startswith("momentum"):  # which has followed since
                assert torch.equal(after[name], merged[name])
    assert {int(before["norm.num_batches_tracked"]) for before, _, _ in found} == {4, 5}


def test_a_buffer_replaced_within_the_block_is_put_back() -> None:
    def work(worker: Worker) -> bool:
        model, session = begin(worker, "LocalSGD(4)")
        train(session, range(6), worker.rank)
        kept, own = model.seen, model.seen.clone()
        with session.averaged_parameters(model):
            model(torch.ones(4, 6, dtype=torch.float64))
        return model.seen is kept and torch.equal(model.seen, own)

    assert cluster(work, 2) == [True, True]


@pytest.mark.parametrize("recipe", ["EveryStep(delay=1)", "DelayedAveraging(2)", "DiLoCo(4, delay=2, mix=0.5)"])
def test_counters_and_momentum_encoders_lose_no_step_while_a_round_travels(recipe: str) -> None:
    def work(worker: Worker) -> tuple[int, float]:
        model, session = begin(worker, recipe)
        with torch.no_grad():
            model.momentum.bias.zero_()
        session.optimizer.param_groups[0]["lr"] = 0.0
        train(session, range(8), worker.rank)
        return int(model.get_buffer("norm.num_batches_tracked")), float(
            model.momentum.bias[0] / model.last.bias.detach()[0]
        )

    for counted, followed in cluster(work, 2):
        assert (counted, followed) == (8, pytest.approx(1 - 0.9**8))


# -- at the end --------------------------------------------------------------------------------------------------------


def closed(worker: Worker, recipe: str, spoil: bool = False) -> None:
    model, session = begin(worker, recipe)
    train(session, range(6), worker.rank)
    if spoil and worker.rank == 1:
        model.get_buffer("mask").logical_not_()  # of whole numbers, more than one: stays each rank's own
    session.close()


@pytest.mark.parametrize("recipe", ["LocalSGD(4)", "DelayedAveraging(2) + Int8()", "Gossip()", "EveryStep()"])
def test_the_digest_at_the_end_covers_all_state(recipe: str) -> None:
    for spoil, digests, names in ((False, 1, []), (True, 2, ["mask"])):
        with heard(events.Closed) as ended:
            cluster(lambda worker, s=spoil: closed(worker, recipe, s), 2)
        assert len({event.digest for event in ended}) == digests
        assert [name for name in ended[0].tensors if len({event.tensors[name] for event in ended}) > 1] == names
        assert all("hidden" not in event.tensors for event in ended)  # no state_dict() has it


@pytest.mark.parametrize(("recipe", "steps", "held"), [("LocalSGD(4)", 4, True), ("LocalSGD(4)", 5, False)])
def test_rank_holds_merged_model_only_with_merged_buffers(recipe: str, steps: int, held: bool) -> None:
    def work(worker: Worker) -> None:
        model, session = begin(worker, recipe)
        session.optimizer.param_groups[0]["lr"] = 0.0
        model.momentum.load_state_dict(model.last.state_dict())
        train(session, range(steps), worker.rank)
        session.close()

    with heard(events.Closed) as ended:
        cluster(work, 2)
    assert [event.holds_merged for event in ended] == 2 * [held]


@pytest.mark.parametrize(("steps", "lends", "told"), [(5, False, 1), (5, True, 0), (4, False, 0)])
def test_close_between_two_means_explains_how_to_save_the_merged_model(steps: int, lends: bool, told: int) -> None:
    def work(worker: Worker) -> None:
        model, session = begin(worker, "LocalSGD(4)")
        model.follow = lambda: None  # type: ignore[method-assign]
        train(session, range(steps), worker.rank)
        if lends:
            merged_state(session)
        session.close()

    with notices() as said:
        cluster(work, 2)
    assert sum("with session.averaged_parameters(model): torch.save(" in text for text in said) == told


@pytest.mark.parametrize(
    ("recipe", "steps", "told"),
    [
        ("LocalSGD(4)", 3, 1),
        ("LocalSGD(4)", 4, 0),
        ("LocalSGD(4)", 0, 0),
        ("DiLoCo(period=8, fragments=4)", 2, 0),
        ("Gossip(period=4)", 3, 1),
        ("PostLocalSGD(4, start=2)", 3, 0),
        ("Silent()", 3, 0),
    ],
)
def test_a_training_that_ends_before_its_first_average_is_told_so(recipe: str, steps: int, told: int) -> None:
    def work(worker: Worker) -> None:
        model, session = begin(worker, recipe)
        model.follow = lambda: None  # type: ignore[method-assign]
        train(session, range(steps), worker.rank)
        session.close()

    with notices() as said:
        cluster(work, 2)
    assert sum(f"ended after {steps} steps, before the first average" in text for text in said) == told
    assert sum("ended between two averages" in text for text in said) <= 1 - told


def test_a_training_that_averaged_before_a_switch_was_not_alone() -> None:
    def work(worker: Worker) -> None:
        _, session = begin(worker, "LocalSGD(2)")
        train(session, range(2), worker.rank)
        session.switch("LocalSGD(50)")
        train(session, range(2), worker.rank)
        session.close()

    with notices() as said:
        cluster(work, 2)
    assert not any("before the first average" in text for text in said)


# -- frozen parameters -------------------------------------------------------------------------------------------------


def test_frozen_parameters_that_stay_do_not_travel_and_those_that_move_are_reported_once() -> None:
    def work(worker: Worker, moves: bool) -> float:
        model, session = begin(worker, "LocalSGD(4)")
        if not moves:
            model.follow = lambda: None  # type: ignore[method-assign]
        train(session, range(8), worker.rank)
        return float(len(session._buffers.frozen.averaged))

    for moves, count in ((False, 0.0), (True, 2.0)):
        with notices() as said, heard(events.StepEnded) as ended:
            assert cluster(lambda worker, m=moves: work(worker, m), 2) == [count, count]
        told = [text for text in said if "requires_grad=False" in text]
        assert len(told) == moves
        assert all('"momentum.weight", "momentum.bias"' in text and "27 numbers per round" in text for text in told)
        assert sum(event.bytes_sent for event in ended) > 0


def test_a_frozen_parameter_that_moves_on_one_rank_is_averaged_on_all() -> None:
    def work(worker: Worker) -> State:
        model, session = begin(worker, "LocalSGD(4)")
        if worker.rank == 0:
            model.follow = lambda: None  # type: ignore[method-assign]
        train(session, range(4), worker.rank)
        return merged_state(session)

    states = cluster(work, 3)
    assert differing(states) == []


@pytest.mark.parametrize("moves", [False, True])
@pytest.mark.parametrize("recipe", ["PostLocalSGD(2, start=5)", "Dense()", "LocalSGD(2)", "Gossip()"])
def test_frozen_parameters_that_a_checkpoint_replaces_are_averaged_only_if_they_move(
    recipe: str, moves: bool, tmp_path: Path
) -> None:
    """The session that loads has other frozen parameters. Rounds begin after the load, or have begun before it."""

    def work(worker: Worker, first: int) -> tuple[list[str], State]:
        with seeded(first):
            model = MovingState().double()
        session = worker.attach(model, sgd(model, lr=0.01), recipe)
        if first:
            session.load(tmp_path)
        for step in range(first, 9):
            if step == 3 and not first:
                session.save(tmp_path)
            if moves and step < 2:  # and not later
                model.follow()
            train_step(model, session.optimizer, step, worker.rank)
            if step == 5 and recipe == "Dense()":
                session.switch("LocalSGD(2)")
        return session._buffers.frozen.names, {name: p.detach().clone() for name, p in model.named_parameters()}

    whole, resumed = cluster(lambda worker: work(worker, 0), 2), cluster(lambda worker: work(worker, 3), 2)
    for (names, state), (names_after, state_after) in zip(whole, resumed, strict=True):
        assert names == names_after == (["momentum.weight", "momentum.bias"] if moves else [])
        assert differing([state, state_after]) == []


def test_a_checkpoint_before_local_steps_averages_no_frozen_parameter_again(tmp_path: Path) -> None:
    def work(worker: Worker) -> tuple[list[str], list[str], list[str]]:
        model, session = begin(worker, "Dense()")
        train_step(model, session.optimizer, 0, worker.rank)
        session.save(tmp_path)
        session.switch("LocalSGD(2)")
        train(session, range(4), worker.rank)
        during = session._buffers.frozen.names
        session.save(tmp_path / "later")
        session.load(tmp_path)
        before = session._buffers.frozen.names
        session.load(tmp_path / "later")
        return before, during, session._buffers.frozen.names

    moving = ["momentum.weight", "momentum.bias"]
    assert cluster(work, 2) == [([], moving, moving)] * 2


# -- going on ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "recipe", ["LocalSGD(4)", "DiLoCo(4, fragments=2, delay=2)", "DelayedAveraging(delay=3, period=2)", "Gossip()"]
)
def test_a_resumed_run_merges_the_same_state_bit_for_bit(recipe: str, tmp_path: Path) -> None:
    def first(worker: Worker) -> tuple[State, State]:
        _, session = begin(worker, recipe)
        train(session, range(6), worker.rank)
        session.save(tmp_path)
        merged = merged_state(session)
        train(session, range(6, 11), worker.rank)
        return merged, merged_state(session)

    def second(worker: Worker) -> tuple[State, State]:
        _, session = begin(worker, recipe)
        session.load(tmp_path)
        merged = merged_state(session)
        train(session, range(6, 11), worker.rank)
        return merged, merged_state(session)

    for (before, through), (resumed, after) in zip(cluster(first, 3), cluster(second, 3), strict=True):
        assert set(differing([before, resumed])) <= {"hidden"}  # not persistent, so no checkpoint has it
        assert set(differing([through, after])) <= {"hidden"}


def test_a_reset_of_parameters_leaves_the_merged_other_state() -> None:
    def work(worker: Worker) -> tuple[State, State]:
        _, session = begin(worker, "LocalSGD(4)")
        train(session, range(6), worker.rank)
        before = merged_state(session)
        session.reset_compressor_state("last.weight", "last.bias")
        return before, merged_state(session)

    found = cluster(work, 2)
    assert differing([after for _, after in found]) == []
    assert set(differing([*found[0]])) <= {"last.weight", "last.bias"}


@pytest.mark.parametrize(("writers", "readers"), [(2, 3), (1, 2)])
def test_another_number_of_workers_continues_from_the_merged_state(writers: int, readers: int, tmp_path: Path) -> None:
    def save(worker: Worker) -> State:
        _, session = begin(worker, "LocalSGD(4)")
        train(session, range(6), worker.rank)
        session.save(tmp_path)
        return merged_state(session)

    def load(worker: Worker) -> tuple[State, State]:
        model, session = begin(worker, "LocalSGD(4)")
        session.load(tmp_path)
        return state_of(model), merged_state(session)

    (merged, *_), loaded = cluster(save, writers), cluster(load, readers)
    for states in zip(*loaded, strict=True):
        assert set(differing([merged, *states])) <= {"hidden"}  # not persistent


def test_a_switch_to_lock_step_averages_all_other_state() -> None:
    def work(worker: Worker) -> State:
        model, session = begin(worker, "LocalSGD(4)")
        train(session, range(6), worker.rank)
        session.switch("Dense()")
        return state_of(model)

    assert differing(cluster(work, 3)) == []


# -- Calls within torch.inference_mode(): they work, and training continues outside of the block -----------------------

INFERENCE_RECIPES = ["Dense()", "TopK(0.3)", "LocalSGD(3)", "DelayedAveraging(2) + TopK(0.3)", "Gossip() + Ring()"]


def merged_parameters(session: Session, _: Path) -> Tensor:
    with session.averaged_parameters(session.model) as model:
        return parameters(model)


CALLS: dict[str, Callable[[Session, Path], Any]] = {
    "merged": merged_parameters,
    "save": lambda session, folder: session.save(folder),
    "load": lambda session, folder: session.load(folder),
    "switch": lambda session, _: session.switch("Int8()"),
    "add_parameters": lambda session, _: session.add_parameters(),
    "reset": lambda session, _: session.reset_compressor_state("0.weight"),
}


def train_around(worker: Worker, recipe: str, call: str, folder: Path) -> Tensor:
    model = network(0)
    optimizer = sgd(model)
    with torch.inference_mode(call == "attach"):
        session = worker.attach(model, optimizer, recipe)
    for step in range(4):
        train_step(model, optimizer, step, worker.rank)
    session.save(folder)
    if call == "add_parameters":
        model.register_parameter("more", nn.Parameter(torch.ones(3, dtype=torch.float64)))
    with torch.inference_mode():
        CALLS.get(call, merged_parameters)(session, folder)
    for step in range(4, 10):
        train_step(model, optimizer, step, worker.rank)
    return merged_parameters(session, folder)


@once_each("recipe, call", INFERENCE_RECIPES, ["attach", *CALLS])
def test_calls_within_inference_mode_keep_the_model_trainable(recipe: str, call: str, tmp_path: Path) -> None:
    agree(cluster(lambda worker: train_around(worker, recipe, call, tmp_path), 2))


def test_a_model_that_was_built_within_inference_mode_is_refused() -> None:
    with torch.inference_mode():
        model = nn.Linear(2, 2)
    with pytest.raises(AttachError, match=r'"weight" was created within torch\.inference_mode\(\)'):
        gossamer.attach(model, sgd(model))
