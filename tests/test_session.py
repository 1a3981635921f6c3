"""A session on virtual workers: the loop stays as it is, and every oddity of real loops is met."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss
from torch.utils.checkpoint import checkpoint
from virtual import Worker, batch, cluster, network, parameters, seeded

from gossamer import events
from gossamer.compressors import Feedback, TopK
from gossamer.errors import LayoutError, LoopError, MismatchError, NonFiniteError, Stopped
from gossamer.session import Session, open_sessions
from gossamer.transports.base import Transport
from gossamer.words import Word

RECIPES = [
    "Dense()",
    "Dense(dtype='bfloat16')",
    "TopK(0.1)",
    "Int8()",
    "PowerSGD(rank=2)",
    "Route(Feedback(PowerSGD(2)), rest=Feedback(Int8()))",
]


def sgd(model: nn.Module, **options: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), **{"lr": 0.1, "momentum": 0.9, **options})


def same(results: list[Tensor]) -> Tensor:
    for result in results[1:]:
        assert torch.equal(result, results[0]), "the workers ended with different bits"
    return results[0]


def train(worker: Worker, recipe: Any = None, steps: int = 5, *, set_to_none: bool = True, **options: Any) -> Tensor:
    model = network(worker.rank)
    optimizer = sgd(model)
    worker.attach(model, optimizer, recipe, **options)
    for step in range(steps):
        optimizer.zero_grad(set_to_none=set_to_none)
        inputs, targets = batch(step, worker.rank)
        mse_loss(model(inputs), targets).backward()
        optimizer.step()
    return parameters(model)


def alone(world: int, steps: int = 5) -> Tensor:
    """One process on the joined batch."""
    model = network(0)
    optimizer = sgd(model)
    for step in range(steps):
        optimizer.zero_grad()
        parts = [batch(step, rank) for rank in range(world)]
        mse_loss(model(torch.cat([x for x, _ in parts])), torch.cat([y for _, y in parts])).backward()
        optimizer.step()
    return parameters(model)


@pytest.mark.parametrize("world", [1, 2, 3, 4, 5, 8])
@pytest.mark.parametrize("set_to_none", [True, False])
def test_dense_equals_one_process_on_the_joined_batch(world: int, set_to_none: bool) -> None:
    together = same(cluster(lambda worker: train(worker, set_to_none=set_to_none), world))
    torch.testing.assert_close(together, alone(world), atol=1e-12, rtol=1e-12)


def test_the_large_batch_law_catches_a_missing_exchange() -> None:
    def lonely(worker: Worker) -> Tensor:
        model = network(0)
        optimizer = sgd(model)
        session = worker.attach(model, optimizer)
        for step in range(5):
            optimizer.zero_grad()
            with session.no_sync():
                mse_loss(model(batch(step, worker.rank)[0]), batch(step, worker.rank)[1]).backward()
            session._exchange.finished = True  # type: ignore[union-attr]  # the twin forgets to exchange
            optimizer.step()
        return parameters(model)

    with pytest.raises(AssertionError):
        torch.testing.assert_close(cluster(lonely, 3)[0], alone(3), atol=1e-12, rtol=1e-12)


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("world", [2, 3])
def test_workers_agree_bit_for_bit_and_learn(recipe: str, world: int) -> None:
    ended = same(cluster(lambda worker: train(worker, recipe, 8), world))
    assert torch.isfinite(ended).all()
    assert not torch.equal(ended, parameters(network(0)))


def test_a_world_of_one_is_plain_training() -> None:
    for recipe in RECIPES:
        assert torch.equal(cluster(lambda worker, r=recipe: train(worker, r), 1)[0], alone(1))


# -- parameters that do not always have a gradient --------------------------------------------------------------------


class Branches(nn.Module):
    """A trunk, a branch that only some ranks take, one that nobody takes, and one that is frozen; two names for one."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk, self.sometimes, self.never, self.frozen = (nn.Linear(6, 6).double() for _ in range(4))
        self.head = nn.Linear(6, 3).double()
        self.tied = self.trunk
        self.frozen.requires_grad_(False)

    def forward(self, x: Tensor, take: bool) -> Tensor:
        x = torch.tanh(self.tied(self.frozen(torch.tanh(self.trunk(x)))))
        y: Tensor = self.head(self.sometimes(x) if take else x)
        return y


@pytest.mark.parametrize("recipe", ["Dense()", "TopK(0.2)", "PowerSGD(rank=1)"])
def test_unused_frozen_and_tied_parameters(recipe: str) -> None:
    def work(worker: Worker) -> Tensor:
        with seeded(0):
            model = Branches()
        untouched = parameters(model.never)
        optimizer = torch.optim.AdamW(model.parameters(), 0.1)
        session = worker.attach(model, optimizer, recipe)
        for step in range(6):
            optimizer.zero_grad()
            inputs, targets = batch(step, worker.rank)
            mse_loss(model(inputs, take=step > 1 and worker.rank == 1), targets).backward()
            assert model.never.weight.grad is None, "nobody used it, and yet it has a gradient"
            assert (model.sometimes.weight.grad is None) == (step < 2)
            optimizer.step()
        assert torch.equal(parameters(model.never), untouched), "weight decay moved what nobody used"
        remembered = session.state_dict()["state"]
        if "never.weight" in remembered:
            fresh = session.recipe.compressor.init(session._exchange.buckets[0].packed, session._at())  # type: ignore
            for key, value in remembered["never.weight"].items():
                assert torch.equal(value, fresh[key]["never.weight"]), "what nobody used left a trace"
        return parameters(model)

    same(cluster(work, 3))


def test_a_rank_where_no_hook_fires_keeps_the_others_company() -> None:
    def work(worker: Worker) -> Tensor:
        model = network(0)
        optimizer = sgd(model)
        worker.attach(model, optimizer)
        for step in range(3):
            optimizer.zero_grad()
            if worker.rank != 1:
                mse_loss(model(batch(step, worker.rank)[0]), batch(step, worker.rank)[1]).backward()
            optimizer.step()
        return parameters(model)

    same(cluster(work, 3))


def test_state_dict_and_class_stay() -> None:
    def work(worker: Worker) -> None:
        model = network()
        keys, kind, module_list = list(model.state_dict()), type(model), list(model.named_modules())
        optimizer = sgd(model)
        session = worker.attach(model, optimizer)
        assert (list(model.state_dict()), type(model), list(model.named_modules())) == (keys, kind, module_list)
        assert session.steps == 0

    cluster(work, 2)


# -- accumulation -----------------------------------------------------------------------------------------------------


def accumulate(worker: Worker, recipe: str, how: str) -> Tensor:
    model = network(0)
    optimizer = sgd(model)
    session = worker.attach(model, optimizer, recipe)
    for step in range(3):
        optimizer.zero_grad()
        for part in range(3):
            inputs, targets = batch(10 * step + part, worker.rank)
            loss = mse_loss(model(inputs), targets) / 3
            if how == "no_sync" and part < 2:
                with session.no_sync():
                    loss.backward()
            else:
                loss.backward()
        optimizer.step()
    return parameters(model)


def test_no_sync_equals_a_larger_batch_and_so_does_dense_without_it() -> None:
    model = network(0)
    optimizer = sgd(model)
    for step in range(3):
        optimizer.zero_grad()
        parts = [batch(10 * step + part, rank) for rank in range(2) for part in range(3)]
        mse_loss(model(torch.cat([x for x, _ in parts])), torch.cat([y for _, y in parts])).backward()
        optimizer.step()
    for how in ("no_sync", "every"):
        ended = same(cluster(lambda worker, h=how: accumulate(worker, "Dense()", h), 2))
        torch.testing.assert_close(ended, parameters(model), atol=1e-12, rtol=1e-12)


def test_no_sync_with_a_compressor_and_the_error_without() -> None:
    same(cluster(lambda worker: accumulate(worker, "TopK(0.1)", "no_sync"), 2))
    with pytest.raises(LoopError, match="no_sync"):
        cluster(lambda worker: accumulate(worker, "TopK(0.1)", "every"), 2)


def lbfgs(worker: Worker, recipe: str) -> Tensor:
    model = network(0)
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=3)
    worker.attach(model, optimizer, recipe)
    inputs, targets = batch(0, worker.rank)

    def closure() -> float:
        optimizer.zero_grad()
        loss = mse_loss(model(inputs), targets)
        loss.backward()
        return float(loss.detach())

    for _ in range(2):
        optimizer.step(closure)
    return parameters(model)


def test_lbfgs_with_dense_and_the_error_otherwise() -> None:
    cluster(lambda worker: lbfgs(worker, "Dense()"), 2)
    with pytest.raises(LoopError, match="LBFGS"):
        cluster(lambda worker: lbfgs(worker, "TopK(0.1)"), 2)


def test_a_backward_that_was_thrown_away_is_no_error() -> None:
    def work(worker: Worker) -> None:
        model = network(0)
        optimizer = sgd(model)
        worker.attach(model, optimizer, "TopK(0.1)")
        for step in range(4):
            optimizer.zero_grad()
            mse_loss(model(batch(step, worker.rank)[0]), batch(step, worker.rank)[1]).backward()
            if step % 2:
                optimizer.step()

    cluster(work, 2)


# -- numbers that are not finite --------------------------------------------------------------------------------------


def poisoned(
    worker: Worker, recipe: str, poison: Callable[[int, int], float], steps: int
) -> tuple[Tensor, Any, list[Any]]:
    model = network(0)
    optimizer = torch.optim.AdamW(model.parameters(), 0.01)
    session = worker.attach(model, optimizer, recipe)
    seen: list[Any] = []
    for step in range(steps):
        before = parameters(model), _flat(session.state_dict()["state"])
        optimizer.zero_grad()
        inputs, targets = batch(step, worker.rank)
        (mse_loss(model(inputs), targets) * poison(step, worker.rank)).backward()
        optimizer.step()
        seen.append((before, (parameters(model), _flat(session.state_dict()["state"]))))
    return parameters(model), session.steps, seen


def _flat(state: dict[str, dict[str, Tensor]]) -> Tensor:
    parts = [tensor.flatten() for each in state.values() for tensor in each.values()]
    return torch.cat(parts).clone() if parts else torch.zeros(0)


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_bad_gradient_on_one_rank_changes_nothing_anywhere(recipe: str, value: float) -> None:
    def poison(step: int, rank: int) -> float:
        return value if step == 2 and rank == 1 else 1.0

    results = cluster(lambda worker: poisoned(worker, recipe, poison, 5), 3)
    same([ended for ended, _, _ in results])
    for _, steps, seen in results:
        assert steps == 4
        (weights, state), (weights_after, state_after) = seen[2]
        assert torch.equal(weights, weights_after), "a skipped step moved the parameters"
        assert torch.equal(state, state_after), "a skipped step changed what is remembered"
        assert not torch.equal(seen[3][0][0], seen[3][1][0]), "training did not go on"


def test_who_and_where_is_named_and_five_in_a_row_stop() -> None:
    heard: list[events.Event] = []
    stop = events.subscribe(heard.append)
    try:
        with pytest.raises(NonFiniteError, match=r'5 steps in a row.*"\d\.(weight|bias)" on rank 1'):
            cluster(lambda worker: poisoned(worker, "TopK(0.1)", lambda s, r: float("nan") if r == 1 else 1.0, 9), 2)
    finally:
        stop()
    skipped = [event for event in heard if isinstance(event, events.Skipped)]
    assert {event.rank for event in skipped} == {1}


def test_the_skip_test_catches_feedback_that_commits_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    honest = Feedback.aggregate

    def eager(self: Feedback, x: Any, state: Any, at: Any, out: Any = None) -> Any:
        staged = yield from honest(self, x, state, at, out)
        state["residual"].flat.copy_(staged.next_state["residual"].flat)
        return staged

    monkeypatch.setattr(Feedback, "aggregate", eager)
    with pytest.raises(AssertionError, match="remembered"):
        test_a_bad_gradient_on_one_rank_changes_nothing_anywhere("TopK(0.1)", float("nan"))


def scaled(worker: Worker, recipe: str, scale: float, overflow: bool) -> tuple[Tensor, float, int]:
    model = network(0, torch.float32)
    optimizer = sgd(model)
    scaler = torch.amp.GradScaler("cpu", init_scale=scale, growth_interval=1000)
    session = worker.attach(model, optimizer, recipe, scaler=scaler)
    for step in range(5):
        optimizer.zero_grad()
        inputs, targets = batch(step, worker.rank, dtype=torch.float32)
        loss = mse_loss(model(inputs), targets)
        if overflow and step == 2 and worker.rank == 1:
            loss = loss * 1e38 * 1e38
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
    return parameters(model), scaler.get_scale(), session.steps


@pytest.mark.parametrize("recipe", ["Dense()", "TopK(0.1)", "Int8()"])
def test_grad_scaler_decides_alike_everywhere(recipe: str) -> None:
    results = cluster(lambda worker: scaled(worker, recipe, 1024.0, overflow=True), 3)
    same([ended for ended, _, _ in results])
    assert {scale for _, scale, _ in results} == {512.0}
    assert {steps for *_, steps in results} == {4}


@pytest.mark.parametrize("recipe", ["Dense()", "TopK(0.1)", "Int8()"])
def test_residuals_do_not_depend_on_the_loss_scale(recipe: str) -> None:
    one = cluster(lambda worker: scaled(worker, recipe, 1.0, overflow=False), 2)[0][0]
    many = cluster(lambda worker: scaled(worker, recipe, 4096.0, overflow=False), 2)[0][0]
    assert torch.equal(one, many)


def test_float16_that_overflows_is_skipped_not_infinite() -> None:
    def poison(step: int, rank: int) -> float:
        return 1e9 if step == 1 and rank == 0 else 1.0

    results = cluster(lambda worker: poisoned(worker, "Dense(dtype='float16')", poison, 3), 2)
    assert torch.isfinite(same([ended for ended, *_ in results])).all()
    assert results[0][1] == 2


# -- what people do around backward -----------------------------------------------------------------------------------


def test_clipping_scheduling_groups_and_nesterov() -> None:
    def loop(
        model: nn.Module, backward: Callable[[int], None], attach: Callable[[torch.optim.Optimizer], Any]
    ) -> Tensor:
        first, rest = list(model.parameters())[:2], list(model.parameters())[2:]
        optimizer = torch.optim.SGD(
            [{"params": first, "lr": 0.2}, {"params": rest, "weight_decay": 0.1}], lr=0.1, momentum=0.9, nesterov=True
        )
        scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.3, total_steps=8)
        attach(optimizer)
        for step in range(8):
            optimizer.zero_grad()
            backward(step)
            nn.utils.clip_grad_norm_(model.parameters(), 0.3)
            optimizer.step()
            scheduler.step()
        return parameters(model)

    def work(worker: Worker) -> Tensor:
        model = network(worker.rank)

        def backward(step: int) -> None:
            inputs, targets = batch(step, worker.rank)
            mse_loss(model(inputs), targets).backward()

        return loop(model, backward, lambda optimizer: worker.attach(model, optimizer))

    model = network(0)

    def joined(step: int) -> None:
        parts = [batch(step, rank) for rank in range(3)]
        mse_loss(model(torch.cat([x for x, _ in parts])), torch.cat([y for _, y in parts])).backward()

    torch.testing.assert_close(
        same(cluster(work, 3)), loop(model, joined, lambda optimizer: None), atol=1e-12, rtol=1e-12
    )


@pytest.mark.parametrize("world", [1, 3])
def test_clip_norm_is_clip_grad_norm(world: int) -> None:
    def by_hand(worker: Worker) -> Tensor:
        model = network(0)
        optimizer = sgd(model)
        worker.attach(model, optimizer)
        for step in range(4):
            optimizer.zero_grad()
            mse_loss(model(batch(step, worker.rank)[0]), batch(step, worker.rank)[1]).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.2)
            optimizer.step()
        return parameters(model)

    clipped = cluster(lambda worker: train(worker, None, 4, clip_norm=0.2), world)[0]
    assert torch.equal(cluster(by_hand, world)[0], clipped)
    assert not torch.equal(clipped, cluster(lambda worker: train(worker, None, 4), world)[0])


@pytest.mark.parametrize("recipe", ["Dense()", "TopK(0.1)", "PowerSGD(rank=2)"])
def test_bfloat16_parameters_and_autocast(recipe: str) -> None:
    def work(worker: Worker) -> Tensor:
        model = network(0, torch.bfloat16)
        model[0].float()
        optimizer = sgd(model)
        session = worker.attach(model, optimizer, recipe)
        for step in range(3):
            optimizer.zero_grad()
            inputs, targets = batch(step, worker.rank, dtype=torch.float32)
            with torch.autocast("cpu", torch.bfloat16):
                loss = mse_loss(model(inputs).float(), targets)
            loss.backward()
            optimizer.step()
        for remembered in session.state_dict()["state"].values():
            for tensor in remembered.values():
                assert tensor.dtype == torch.float32, "a residual in half precision forgets"
        return torch.cat([parameter.detach().float().flatten() for parameter in model.parameters()])

    same(cluster(work, 2))


def test_buffers_are_rank_zeros() -> None:
    def work(worker: Worker) -> tuple[Tensor, Tensor, Tensor]:
        with seeded(0):
            model = nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5), nn.Linear(5, 3)).double()
        lonely = nn.BatchNorm1d(5).double()
        optimizer = sgd(model, lr=0.0)
        worker.attach(model, optimizer)
        for step in range(3):
            optimizer.zero_grad()
            inputs, targets = batch(step, worker.rank)
            lonely(model[0](inputs))
            mse_loss(model(inputs), targets).backward()
            optimizer.step()
        norm = model[1]
        assert isinstance(norm, nn.BatchNorm1d)
        assert norm.running_mean is not None
        assert lonely.running_mean is not None
        return norm.running_mean.clone(), lonely.running_mean.clone(), norm.num_batches_tracked.clone()  # type: ignore

    results = cluster(work, 3)
    same([mean for mean, _, _ in results])
    assert torch.equal(results[0][0], results[0][1]), "rank 0's statistics are not what rank 0 saw"
    assert not torch.equal(results[1][0], results[1][1])
    assert {int(count) for *_, count in results} == {3}


def test_channels_last() -> None:
    def work(worker: Worker) -> tuple[Tensor, Tensor]:
        with seeded(0):
            model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 4, 3))
        model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        optimizer = sgd(model)
        worker.attach(model, optimizer)
        images = torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(worker.rank))
        images = images.contiguous(memory_format=torch.channels_last)
        for _ in range(2):
            optimizer.zero_grad()
            model(images).square().mean().backward()
            optimizer.step()
        weight = model[0].weight
        assert weight.grad is not None
        assert weight.grad.stride() == weight.stride()
        return weight.detach().clone(), weight.grad.clone()

    same([weight for weight, _ in cluster(work, 2)])


def checkpointed(worker: Worker, reentrant: bool) -> Tensor:
    model = network(0)
    assert isinstance(model, nn.Sequential)
    optimizer = sgd(model)
    worker.attach(model, optimizer)
    for step in range(3):
        optimizer.zero_grad()
        inputs, targets = batch(step, worker.rank)
        hidden = checkpoint(model[:2], inputs.requires_grad_(), use_reentrant=reentrant)
        hidden = checkpoint(model[2:4], hidden, use_reentrant=reentrant)
        mse_loss(model[4](hidden), targets).backward()
        optimizer.step()
    return parameters(model)


def test_activation_checkpointing() -> None:
    assert torch.equal(
        same(cluster(lambda worker: checkpointed(worker, False), 2)),
        cluster(lambda worker: train(worker, None, 3), 2)[0],
    )
    with pytest.raises(LoopError, match="use_reentrant=False"):
        cluster(lambda worker: checkpointed(worker, True), 2)


def test_compiled_models_keep_their_names() -> None:
    def work(worker: Worker) -> tuple[Tensor, tuple[str, ...]]:
        model = network(0)
        compiled = torch.compile(model, backend="aot_eager")
        optimizer = sgd(model)
        session = worker.attach(compiled, optimizer, "TopK(0.5)")  # type: ignore[arg-type]
        assert session._exchange is not None
        for step in range(2):
            optimizer.zero_grad()
            inputs, targets = batch(step, worker.rank)
            mse_loss(compiled(inputs), targets).backward()
            optimizer.step()
        return parameters(model), session._exchange.buckets[0].layout.names

    results = [cluster(work, 1)[0]] if os.environ.get("GOSSAMER_NO_COMPILE") else cluster(work, 2)
    same([ended for ended, _ in results])
    assert all("_orig_mod" not in name for _, names in results for name in names)
    plain = cluster(lambda worker: train(worker, "TopK(0.5)", 2), 2)[0]
    torch.testing.assert_close(results[0][0], plain, atol=1e-12, rtol=1e-12)


# -- uneven data ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("recipe", ["Dense()", "TopK(0.3)"])
def test_ranks_run_out_of_data_at_different_times(recipe: str) -> None:
    def work(worker: Worker) -> tuple[Tensor, int, Tensor]:
        model = network(worker.rank)
        optimizer = torch.optim.AdamW(model.parameters(), 0.01)
        session = worker.attach(model, optimizer, recipe)
        for epoch in range(2):
            with session.epoch():
                for step in range([5, 2, 0][worker.rank]):
                    inputs, targets = batch(100 * epoch + step, worker.rank)
                    mse_loss(model(inputs), targets).backward()
                    optimizer.step()
                    optimizer.zero_grad()
        moments = [state["exp_avg"].flatten() for state in optimizer.state.values()]
        return parameters(model), session.steps, torch.cat(moments)

    results = cluster(work, 3)
    same([ended for ended, *_ in results])
    same([moments for *_, moments in results])
    assert {steps for _, steps, _ in results} == {10}


def test_saving_within_an_epoch(tmp_path: Path) -> None:
    def work(worker: Worker, batches: int) -> Tensor:
        model = network(0)
        optimizer = sgd(model)
        session = worker.attach(model, optimizer, "TopK(0.3)")
        with session.epoch():
            for step in range(batches):
                optimizer.zero_grad()
                mse_loss(model(batch(step, worker.rank)[0]), batch(step, worker.rank)[1]).backward()
                optimizer.step()
                if step == 2:
                    session.save(tmp_path)
        return parameters(model)

    saved = same(cluster(lambda worker: work(worker, 4), 3))
    assert torch.equal(saved, cluster(lambda worker: train(worker, "TopK(0.3)", 4), 3)[0])
    with pytest.raises(LoopError, match=r"ranks 0, 1 called session\.save.*drop_last"):
        cluster(lambda worker: work(worker, 2 if worker.rank == 2 else 4), 3)


def test_weights_make_uneven_batches_one_batch() -> None:
    sizes = [5, 3, 1]

    def work(worker: Worker) -> Tensor:
        model = network(0)
        optimizer = sgd(model)
        session = worker.attach(model, optimizer)
        for step in range(4):
            optimizer.zero_grad()
            inputs, targets = batch(step, worker.rank, sizes[(worker.rank + step) % 3])
            session.weight(len(inputs))
            mse_loss(model(inputs), targets).backward()
            optimizer.step()
        return parameters(model)

    model = network(0)
    optimizer = sgd(model)
    for step in range(4):
        optimizer.zero_grad()
        parts = [batch(step, rank, sizes[(rank + step) % 3]) for rank in range(3)]
        mse_loss(model(torch.cat([x for x, _ in parts])), torch.cat([y for _, y in parts])).backward()
        optimizer.step()
    torch.testing.assert_close(same(cluster(work, 3)), parameters(model), atol=1e-12, rtol=1e-12)


def test_equal_weights_change_no_bit() -> None:
    def work(worker: Worker) -> Tensor:
        model = network(0)
        optimizer = sgd(model)
        session = worker.attach(model, optimizer, "TopK(0.2)")
        for step in range(4):
            optimizer.zero_grad()
            session.weight(7)
            mse_loss(model(batch(step, worker.rank)[0]), batch(step, worker.rank)[1]).backward()
            optimizer.step()
        return parameters(model)

    assert torch.equal(cluster(work, 3)[0], cluster(lambda worker: train(worker, "TopK(0.2)", 4), 3)[0])


# -- ranks that are not alike -----------------------------------------------------------------------------------------


def test_optimizer_state_on_one_rank_only_is_found() -> None:
    def work(worker: Worker) -> None:
        model = network(0)
        optimizer = sgd(model)
        if worker.rank == 0:
            for parameter in model.parameters():
                parameter.grad = torch.ones_like(parameter)
            optimizer.step()
        worker.attach(model, optimizer)

    with pytest.raises(MismatchError, match=r"optimizer.*on rank 0.*on rank"):
        cluster(work, 3)


def test_other_recipe_layout_and_learning_rate_are_found() -> None:
    with pytest.raises(MismatchError, match=r"TopK.*rank 1|rank 1.*TopK"):
        cluster(lambda worker: train(worker, "TopK(0.1)" if worker.rank == 1 else "Dense()", 1), 2)

    def wider(worker: Worker) -> None:
        model = nn.Linear(6, 3 + worker.rank)
        worker.attach(model, torch.optim.SGD(model.parameters(), 0.1))

    with pytest.raises(MismatchError, match=r"layout|names, shapes"):
        cluster(wider, 2)

    def hotter(worker: Worker) -> None:
        model = network(0)
        optimizer = sgd(model)
        worker.attach(model, optimizer)
        for step in range(3):
            mse_loss(model(batch(step, worker.rank)[0]), batch(step, worker.rank)[1]).backward()
            optimizer.step()
            optimizer.param_groups[0]["lr"] *= 0.5 if worker.rank == 1 and step == 1 else 1.0

    with pytest.raises(MismatchError, match=r"lr=0\.1.*rank 0.*lr=0\.05.*rank 1"):
        cluster(hotter, 2)


@pytest.mark.parametrize("equal", [True, False])
def test_equal_first_batches_are_noticed(equal: bool) -> None:
    def work(worker: Worker) -> None:
        model = network(0)
        optimizer = sgd(model)
        worker.attach(model, optimizer)
        inputs, targets = batch(0, 0 if equal else worker.rank)
        mse_loss(model(inputs), targets).backward()

    heard: list[str] = []
    stop = events.subscribe(lambda event: heard.append(event.message) if isinstance(event, events.Noticed) else None)
    try:
        cluster(work, 2)
    finally:
        stop()
    assert len(heard) == equal
    assert all("world.shard" in message for message in heard)


# -- changing models --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("world", [1, 3])
def test_everyone_stops_after_the_same_step(world: int) -> None:
    def loop(worker: Worker, session: Session) -> None:
        with session.epoch():
            for step in range(100 if worker.rank != 1 else 3):
                session.optimizer.zero_grad()
                mse_loss(session.model(batch(step, worker.rank)[0]), batch(step, worker.rank)[1]).backward()
                if step == 5 and worker.rank == world - 1:
                    session.ask_to_stop()
                session.optimizer.step()

    def work(worker: Worker) -> tuple[int, Tensor]:
        model = network(0)
        session = worker.attach(model, sgd(model))
        with pytest.raises(Stopped):
            loop(worker, session)
        return session.steps, parameters(model)

    results = cluster(work, world)
    assert len({steps for steps, _ in results}) == 1
    assert 6 <= results[0][0] <= 7


def test_resizing_asks_for_a_reset() -> None:
    def work(worker: Worker, reset: bool) -> Tensor:
        model = network(0)
        assert isinstance(model, nn.Sequential)
        optimizer = sgd(model)
        session = worker.attach(model, optimizer, "TopK(0.2)")
        for step in range(4):
            if step == 2:
                last = model[4]
                last.weight = nn.Parameter(torch.cat([last.weight.detach(), last.weight.detach()[:1]]))
                last.bias = nn.Parameter(torch.cat([last.bias.detach(), last.bias.detach()[:1]]))
                optimizer.param_groups[0]["params"] = list(model.parameters())
                kept = session.state_dict()["state"].get("0.weight", {})
                if reset:
                    with pytest.raises(LayoutError, match="same call"):
                        session.reset("4.weight")
                    session.reset("4.weight", "4.bias")
                    now = session.state_dict()["state"].get("0.weight", {})
                    assert all(torch.equal(now[key], kept[key]) for key in kept), "reset forgot the others too"
            optimizer.zero_grad()
            inputs, _ = batch(step, worker.rank)
            model(inputs).square().mean().backward()
            optimizer.step()
        return parameters(model)

    same(cluster(lambda worker: work(worker, True), 2))


def test_a_gradient_of_another_shape_is_an_error() -> None:
    def work(worker: Worker) -> None:
        model = nn.Linear(6, 3).double()
        optimizer = sgd(model)
        worker.attach(model, optimizer, "TopK(0.2)")
        model.weight.data = torch.zeros(5, 6, dtype=torch.float64)
        model.bias.data = torch.zeros(5, dtype=torch.float64)
        model(batch(0, worker.rank)[0]).square().mean().backward()

    with pytest.raises(LayoutError, match=r"session\.reset"):
        cluster(work, 2)


def test_thawing_after_attach_is_an_error() -> None:
    def work(worker: Worker) -> None:
        model = network(0)
        first = next(model.parameters())
        first.requires_grad_(False)
        optimizer = sgd(model)
        worker.attach(model, optimizer)
        first.requires_grad_(True)
        mse_loss(model(batch(0, worker.rank)[0]), batch(0, worker.rank)[1]).backward()
        optimizer.step()

    with pytest.raises(LoopError, match="frozen"):
        cluster(work, 2)


def test_a_forked_child_is_inert() -> None:
    def work(worker: Worker) -> Tensor:
        model = network(0)
        optimizer = sgd(model)
        session = worker.attach(model, optimizer)
        session._pid += 1
        assert session._exchange is not None
        session._exchange._pid += 1
        inputs, targets = batch(0, worker.rank)
        mse_loss(model(inputs), targets).backward()
        optimizer.step()
        assert session.steps == 0
        session.close()  # does nothing in a child
        assert session in open_sessions()
        session._pid -= 1
        return parameters(model)

    results = cluster(work, 2)
    assert not torch.equal(results[0], results[1]), "a forked child talked"


# -- overlap ----------------------------------------------------------------------------------------------------------


class Slow:
    """Answers every word 50 ms late."""

    delay_seconds = 0.05

    def __init__(self, inner: Transport) -> None:
        self._inner, self.rank, self.world = inner, inner.rank, inner.world

    def answer(self, word: Word) -> Any:
        return self.begin(word)()

    def begin(self, word: Word) -> Callable[[], Any]:
        answered, due = self._inner.begin(word), time.perf_counter() + self.delay_seconds

        def wait() -> Any:
            time.sleep(max(0.0, due - time.perf_counter()))  # the link's delay, not a synchronisation
            return answered()

        return wait

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


class Pausing(torch.autograd.Function):
    """A layer whose backward takes 60 ms."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        time.sleep(0.06)
        return grads[0]


def test_communication_hides_behind_backward(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gossamer.buckets.BUCKET_BYTES", 1)
    monkeypatch.setattr(
        "gossamer.staging.divide", lambda parameters: __import__("gossamer.buckets").buckets.divide(parameters, 1)
    )
    buckets, waits = 6, list[float]()

    def note(event: events.Event) -> None:
        if isinstance(event, events.StepEnded) and event.step > 1:
            waits.append(event.waiting_seconds)

    def work(worker: Worker) -> None:
        layers = [nn.Linear(6, 6, bias=False).double() for _ in range(buckets)]
        model = nn.ModuleList(layers)
        optimizer = sgd(model)
        worker.attach(model, optimizer)
        for step in range(4):
            optimizer.zero_grad()
            x, _ = batch(step, worker.rank)
            for layer in layers:
                x = layer(Pausing.apply(x.requires_grad_()))
            x.square().mean().backward()
            optimizer.step()

    stop = events.subscribe(note)
    try:
        cluster(work, 2, Slow)  # type: ignore[arg-type]
    finally:
        stop()
    # Of each step's words, the first layer's cannot hide: it comes after backward. Another may arrive as late.
    fit = (buckets - 2) * Slow.delay_seconds
    hidden = [1 - (wait - 2 * Slow.delay_seconds) / fit for wait in waits]
    assert sorted(hidden)[len(hidden) // 2] >= 0.8, hidden


def test_no_feedback_means_nothing_to_remember() -> None:
    def work(worker: Worker) -> dict[str, Any]:
        model = network(0)
        return worker.attach(model, sgd(model), TopK(density=0.5, feedback=False)).state_dict()

    assert cluster(work, 2)[0]["state"] == {}
