"""DistributedOptimizer: recipes inside of it, Horovod's methods and what it refuses, by ranks in threads."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.horovod_workers import horovod, initialize_again
from support.virtual_workers import agree, heard, loss_of, network, parameters, trained_alone
from support.virtual_workers import batch as batch_of
from torch import Tensor, nn

import gossamer.horovod.torch as hvd
from gossamer import events
from gossamer.horovod.exceptions import HorovodInternalError

STEPS = 6
SGD = torch.optim.SGD


def wrapped(model: nn.Module, rule: Callable[..., torch.optim.Optimizer] = SGD, **options: Any) -> Any:
    return hvd.DistributedOptimizer(rule(model.parameters(), lr=0.1), model.named_parameters(), **options)


def trained(rank: int, steps: int = STEPS, **options: Any) -> Tensor:
    """The parameters after a Horovod loop in float64."""
    model = network(rank)
    optimizer = wrapped(model, **options)
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    for step in range(steps):
        optimizer.zero_grad()
        loss_of(model, step, rank).backward()
        optimizer.step()
    return parameters(model)


def test_dense_equals_one_process_on_the_joined_batches() -> None:
    alone = trained_alone(
        lambda model: SGD(model.parameters(), lr=0.1), STEPS, lambda s: (batch_of(s, r) for r in (0, 1))
    )
    assert torch.allclose(agree(horovod(trained)), alone, rtol=1e-12, atol=1e-12)


class Renamed(torch.optim.Optimizer):
    """An optimizer whose constructor has an argument that `defaults` does not have."""

    def __init__(self, parameters: Any, speed: float) -> None:
        super().__init__(parameters, {"lr": speed, "scale": 1.0})
        self.scale = 0.5

    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for each in group["params"]:
                each.data.sub_(each.grad, alpha=group["lr"] * self.scale)


@pytest.mark.parametrize(
    "rule",
    [
        torch.optim.AdamW,
        torch.optim.Adam,
        torch.optim.NAdam,
        torch.optim.Adagrad,
        lambda given, lr: Renamed(given, speed=lr),
    ],
)
def test_any_optimizer_equals_one_process_on_the_joined_batches(rule: Any) -> None:
    alone = trained_alone(
        lambda model: rule(model.parameters(), lr=0.1), STEPS, lambda s: (batch_of(s, r) for r in (0, 1))
    )
    assert torch.allclose(agree(horovod(lambda rank: trained(rank, rule=rule))), alone, rtol=1e-9, atol=1e-9)


def test_servers_follow_the_settings_of_each_group_and_the_scheduler() -> None:
    def train(rank: int, recipe: str) -> Tensor:
        model = network(0)
        first, *others = model.parameters()
        groups = [{"params": [first], "weight_decay": 0.5}, {"params": others, "lr": 0.02}]
        inner = torch.optim.AdamW(groups, lr=0.1, amsgrad=True)
        optimizer = hvd.DistributedOptimizer(inner, model.named_parameters(), recipe=recipe)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.1)
        for step in range(STEPS):
            optimizer.zero_grad()
            loss_of(model, step, rank).backward()
            optimizer.step()
            scheduler.step()
        return parameters(model)

    dense, served = (
        agree(horovod(lambda rank, r=recipe: train(rank, r))) for recipe in ("Dense()", "ParameterServer('sync')")
    )
    assert torch.allclose(served, dense, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize(
    "recipe", ["TopK(0.1)", "Float4()", "PowerSGD(rank=2)", "LocalSGD(period=3)", "DiLoCo(period=3)"]
)
def test_a_recipe_trains_other_parameters_than_dense_and_the_same_on_all_ranks(recipe: str) -> None:
    dense = agree(horovod(trained))
    found = agree(horovod(lambda rank: trained(rank, recipe=recipe)))
    assert not torch.equal(found, dense)
    assert (found - dense).norm() < dense.norm()


def test_a_recipe_of_the_command_line_replaces_the_scripts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GOSSAMER_RECIPE", "TopK(0.1)")
    with heard(events.Attached) as begun:
        agree(horovod(trained))
    assert "TopK" in repr(begun[0])


def test_topk_sends_fewer_bytes_than_dense() -> None:
    def sent(recipe: str) -> int:
        with heard(events.StepEnded) as steps:
            horovod(lambda rank: trained(rank, recipe=recipe))
        return max(step.bytes_sent for step in steps)

    assert 0 < sent("TopK(0.01)") < sent("Dense()") / 2


def test_half_compression_is_a_recipe_of_half_the_bytes() -> None:
    def work(rank: int) -> str:
        model = nn.Linear(3, 2)
        optimizer = wrapped(model, compression=hvd.Compression.fp16)
        model(torch.ones(1, 3)).sum().backward()
        optimizer.step()
        return repr(optimizer._exchange.session.recipe)

    assert all("float16" in each for each in horovod(work))


def test_sums_are_world_times_the_mean() -> None:
    def work(rank: int) -> list[Tensor]:
        model = network(0)
        found = []
        for op in (hvd.Average, hvd.Sum):
            optimizer = wrapped(model, op=op)
            optimizer.zero_grad()
            loss_of(model, 0, rank).backward()
            optimizer.synchronize()
            found.append(torch.cat([each.grad.flatten() for each in model.parameters() if each.grad is not None]))
        return found

    for mean, total in horovod(work):
        assert torch.allclose(total, 2 * mean)


def test_backward_passes_add_up_before_a_step() -> None:
    def work(rank: int) -> tuple[Tensor, Tensor]:
        model = network(0)
        optimizer = wrapped(model, backward_passes_per_step=2)
        for step in range(2):
            loss_of(model, step, rank).backward()
        optimizer.synchronize()
        mine = next(model.parameters()).grad
        twin = network(0)
        for step in range(2):
            for each in range(2):
                (loss_of(twin, step, each) / 2).backward()
        expected = next(twin.parameters()).grad
        assert mine is not None
        assert expected is not None
        return mine, expected

    for mine, expected in horovod(work):
        assert torch.allclose(mine, expected)


def test_clipping_between_synchronize_and_step_uses_means_once() -> None:
    def work(rank: int) -> Tensor:
        model = network(0)
        optimizer = wrapped(model)
        for step in range(2):
            optimizer.zero_grad()
            loss_of(model, step, rank).backward()
            optimizer.synchronize()
            nn.utils.clip_grad_norm_(model.parameters(), 0.01)
            with warnings.catch_warnings():
                warnings.simplefilter("error")
                with optimizer.skip_synchronize():
                    optimizer.step()
        return parameters(model)

    moved = agree(horovod(work)) - parameters(network(0))
    assert 0 < moved.norm() <= 0.1 * 2 * 0.0101


def test_a_step_after_synchronize_warns_and_exchanges_once() -> None:
    def work(rank: int) -> Tensor:
        model = network(0)
        optimizer = wrapped(model)
        loss_of(model, 0, rank).backward()
        optimizer.synchronize()
        for each in model.parameters():
            each.grad = torch.full_like(each, rank)
        with pytest.warns(UserWarning, match="without optimizer.skip_synchronize"):
            optimizer.step()
        return parameters(model)

    for rank, found in enumerate(horovod(work)):
        assert torch.allclose(found, parameters(network(0)) - 0.1 * rank)


def test_parameters_that_some_ranks_do_not_reach_count_as_zeros() -> None:
    def work(rank: int) -> Tensor:
        layers = nn.ModuleList([nn.Linear(1, 1, bias=False), nn.Linear(1, 1, bias=False)])
        optimizer = wrapped(layers)
        layers[rank](torch.ones(1, 1)).sum().backward()
        optimizer.synchronize()
        return torch.stack([each.grad for each in layers.parameters() if each.grad is not None]).flatten()

    assert agree(horovod(work)).tolist() == [0.5, 0.5]


def test_two_optimizers_take_turns_as_a_gan_does() -> None:
    def work(rank: int) -> Tensor:
        first, second = network(0), network(1)
        optimizers = [wrapped(first), wrapped(second)]
        for step in range(4):
            model, optimizer = (first, second)[step % 2], optimizers[step % 2]
            optimizer.zero_grad()
            loss_of(model, step, rank).backward()
            optimizer.step()
        return torch.cat([parameters(first), parameters(second)])

    agree(horovod(work))


@pytest.mark.parametrize("as_dense", [False, True])
def test_sparse_gradients_are_averaged(as_dense: bool) -> None:
    def work(rank: int) -> Tensor:
        table = nn.Embedding(4, 2, sparse=True)
        nn.init.zeros_(table.weight)
        optimizer = hvd.DistributedOptimizer(SGD(table.parameters(), lr=1.0), sparse_as_dense=as_dense)
        for _ in range(2):
            optimizer.zero_grad()
            table(torch.tensor([rank, 3])).sum().backward()
            optimizer.step()
        return table.weight.detach()

    with torch.sparse.check_sparse_tensor_invariants(True):
        assert agree(horovod(work))[:, 0].tolist() == [-1, -1, 0, -2]


def test_the_first_step_gives_all_ranks_the_sparse_parameters_of_the_first() -> None:
    def work(rank: int) -> Tensor:
        table = nn.Embedding(4, 2, sparse=True)
        nn.init.constant_(table.weight, rank)
        optimizer = hvd.DistributedOptimizer(SGD(table.parameters(), lr=1.0))
        table(torch.tensor([rank, 3])).sum().backward()
        optimizer.step()
        return table.weight.detach()

    assert agree(horovod(work))[:, 0].tolist() == [-0.5, -0.5, 0, -1]


def test_a_gradient_that_is_not_finite_skips_the_step_on_all_ranks() -> None:
    def work(rank: int) -> tuple[Tensor, Tensor]:
        model = network(0)
        optimizer = wrapped(model, rule=lambda parameters, lr: SGD(parameters, lr=lr, momentum=0.9))
        loss_of(model, 0, rank).backward()
        if rank == 1:
            next(model.parameters()).grad.fill_(torch.inf)  # type: ignore[union-attr]
        optimizer.step()
        assert not optimizer.state
        skipped = parameters(model)
        optimizer.zero_grad()
        loss_of(model, 1, rank).backward()
        optimizer.step()
        return skipped, parameters(model)

    results = horovod(work)
    assert torch.equal(agree([skipped for skipped, _ in results]), parameters(network(0)))
    after = agree([after for _, after in results])
    assert torch.isfinite(after).all()
    assert not torch.equal(after, parameters(network(0)))


class Scaler:
    """Skips the optimizer's step where a gradient is not finite, as GradScaler does."""

    def step(self, optimizer: torch.optim.Optimizer) -> bool:
        grads = [each.grad for group in optimizer.param_groups for each in group["params"]]
        if finite := all(bool(torch.isfinite(each).all()) for each in grads):
            optimizer.step()
        return finite


def test_a_scaler_sees_the_same_on_all_ranks_and_training_continues() -> None:
    def work(rank: int) -> list[bool]:
        model, made = network(0), []
        optimizer = wrapped(model)
        for step in range(3):
            optimizer.zero_grad()
            loss_of(model, step, rank).backward()
            if rank == 1 and step == 1:
                next(model.parameters()).grad.fill_(torch.inf)  # type: ignore[union-attr]
            optimizer.synchronize()
            with optimizer.skip_synchronize():
                made.append(Scaler().step(optimizer))
        return made

    assert horovod(work) == [[True, False, True]] * 2


def test_a_grad_scaler_finds_its_scale_in_any_number_of_skipped_steps() -> None:
    def work(rank: int) -> tuple[float, bool]:
        model, scaler = network(0, torch.float32), torch.amp.GradScaler("cpu", init_scale=2.0**126)
        optimizer = wrapped(model)
        before = parameters(model)
        for step in range(16):
            optimizer.zero_grad()
            scaler.scale(2.0**10 * loss_of(model, step, rank)).backward()
            optimizer.synchronize()
            scaler.unscale_(optimizer)
            with optimizer.skip_synchronize():
                scaler.step(optimizer)
            scaler.update()
        return scaler.get_scale(), torch.equal(parameters(model), before)

    (scale, untrained), other = horovod(work)
    assert (scale, untrained) == other
    assert scale < 2.0**121, "more steps in a row were skipped than a run without a scaler may skip"
    assert not untrained


def test_accumulating_recipes_make_a_step_of_the_optimizer_for_several_of_the_loop() -> None:
    def work(rank: int) -> list[Tensor]:
        model = network(0)
        optimizer = wrapped(model, recipe="EveryStep(accumulate=2)")
        found = []
        for step in range(4):
            optimizer.zero_grad()
            loss_of(model, step, rank).backward()
            optimizer.step()
            found.append(parameters(model))
        return found

    first, second, third, fourth = horovod(work)[0]
    assert torch.equal(first, parameters(network(0)))
    assert not torch.equal(second, first)
    assert torch.equal(third, second)
    assert not torch.equal(fourth, third)


def test_broadcast_parameters_begins_the_recipe_again() -> None:
    """Else DiLoCo would average with what was agreed on before a restore."""

    def work(rank: int) -> Tensor:
        model = network(0)
        optimizer = wrapped(model, recipe="DiLoCo(period=2)")
        first = copy.deepcopy(model.state_dict())
        for step in range(3):
            optimizer.zero_grad()
            loss_of(model, step, rank).backward()
            optimizer.step()
        model.load_state_dict(first)
        hvd.broadcast_parameters(model.state_dict(), 0)
        with torch.no_grad():
            for each in model.parameters():
                each.grad = torch.zeros_like(each)
        for _ in range(2):
            optimizer.step()
        return parameters(model)

    assert torch.allclose(agree(horovod(work)), parameters(network(0)))


def test_an_optimizer_continues_after_shutdown_and_init() -> None:
    def work(rank: int) -> Tensor:
        model = network(0)
        optimizer = wrapped(model)
        for step in range(2):
            optimizer.zero_grad()
            loss_of(model, step, rank).backward()
            optimizer.step()
            hvd.barrier()
            initialize_again()
        return parameters(model)

    assert torch.equal(agree(horovod(work)), agree(horovod(lambda rank: trained(rank, steps=2))))


def test_a_process_set_exchanges_within_itself() -> None:
    def work(rank: int) -> tuple[Tensor, Tensor]:
        pair = hvd.add_process_set([0, 2])
        model = network(0)
        optimizer = wrapped(model, process_set=pair, recipe="TopK(0.5)")
        for step in range(2):
            optimizer.zero_grad()
            loss_of(model, step, rank).backward()
            optimizer.step()
        return parameters(model), hvd.allgather(parameters(model)[None])

    (_, all_of_them), *_ = horovod(work, 3)
    first, alone, third = all_of_them
    assert torch.equal(first, third)
    assert not torch.equal(first, alone)


def test_a_rank_without_data_joins_and_takes_over_the_others_parameters() -> None:
    def work(rank: int) -> tuple[Tensor, int]:
        model = network(0)
        optimizer = wrapped(model, rule=lambda parameters, lr: SGD(parameters, lr=lr, momentum=0.9))
        for step in range(2 + 2 * rank):
            optimizer.zero_grad()
            loss_of(model, step, rank).backward()
            optimizer.step()
        last = hvd.join()
        momenta = [state["momentum_buffer"].flatten() for state in optimizer.state.values()]
        return torch.cat([parameters(model), *momenta]), last

    results = horovod(work)
    agree([found for found, _ in results])
    assert [last for _, last in results] == [1, 1]


def test_a_rank_that_joins_before_its_first_step_is_told_to_make_one() -> None:
    def work(rank: int) -> None:
        if rank == 0:
            hvd.join()
        model = network(0)
        loss_of(model, 0, rank).backward()
        wrapped(model).step()

    with pytest.raises(HorovodInternalError, match=r"each rank makes one step with it before join\(\)"):
        horovod(work)


def test_parameters_that_are_unfrozen_or_added_later_are_exchanged() -> None:
    def work(rank: int) -> Tensor:
        layers = nn.ModuleList([nn.Linear(1, 1, bias=False) for _ in range(3)])
        for layer in layers:
            nn.init.ones_(layer.weight)  # type: ignore[arg-type]
        layers[1].requires_grad_(False)
        optimizer = wrapped(nn.ModuleList(layers[:2]))
        for step in range(2):
            optimizer.zero_grad()
            (sum(layer(torch.ones(1, 1)) for layer in layers) * (rank + 1)).sum().backward()
            optimizer.step()
            layers[1].requires_grad_(True)
            if step == 0:
                optimizer.add_param_group({"params": layers[2].parameters()})
        return torch.cat([layer.weight.detach().flatten() for layer in layers])  # type: ignore[operator, misc]

    assert torch.allclose(agree(horovod(work)), torch.tensor([0.7, 0.85, 0.85]))


@pytest.mark.parametrize("recipe", ["Dense()", "LocalSGD(period=2)"])
def test_parameters_that_are_frozen_later_keep_their_values(recipe: str) -> None:
    def work(rank: int) -> None:
        model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 1))
        inner = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=0.1)
        optimizer = hvd.DistributedOptimizer(inner, model.named_parameters(), recipe=recipe)

        def train() -> None:
            for _ in range(2):
                optimizer.zero_grad()
                model(torch.ones(3, 2)).sum().backward()
                optimizer.step()

        train()
        frozen, trained = (layer.weight.detach().clone() for layer in model)
        model[0].requires_grad_(False)
        train()
        assert torch.equal(model[0].weight, frozen)
        assert not torch.equal(model[1].weight, trained)

    horovod(work)


def test_schedulers_and_closures_work_with_the_new_object() -> None:
    def work(rank: int) -> float:
        model = network(0)
        plain = SGD(model.parameters(), lr=0.1)
        early = torch.optim.lr_scheduler.StepLR(plain, 1)
        optimizer = hvd.DistributedOptimizer(plain, model.named_parameters())
        assert isinstance(optimizer, SGD)
        late = torch.optim.lr_scheduler.StepLR(optimizer, 1)

        def closure() -> Tensor:
            optimizer.zero_grad()
            loss = loss_of(model, 0, rank)
            loss.backward()  # type: ignore[no-untyped-call]
            return loss

        assert optimizer.step(closure).item() > 0
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            early.step()
        late.step()
        return float(optimizer.param_groups[0]["lr"])

    assert horovod(work) == [pytest.approx(0.001)] * 2


@pytest.mark.parametrize(
    ("options", "error", "about"),
    [
        ({"op": hvd.Adasum}, NotImplementedError, "Adasum.*hvd.Average"),
        ({"op": hvd.Max}, ValueError, "Average or hvd.Sum"),
        ({"op": hvd.Sum, "gradient_predivide_factor": 2.0}, ValueError, "predivide"),
        ({"backward_passes_per_step": 0}, ValueError, "> 0"),
        ({"groups": -1}, ValueError, "non-negative"),
        ({"groups": [[torch.ones(1)], ["text"]]}, ValueError, "torch.Tensor"),
        ({"compression": dict}, ValueError, "recipe="),
        ({"rule": torch.optim.LBFGS}, ValueError, "LBFGS"),
    ],
)
def test_wrong_options_are_refused(options: dict[str, Any], error: type[Exception], about: str) -> None:
    with pytest.raises(error, match=about):
        wrapped(nn.Linear(1, 1), **options)


def test_names_must_be_complete_and_unique() -> None:
    model = nn.Linear(1, 1)
    named = list(model.named_parameters())
    for wrong, about in ((named[:1], "not named"), (named + named, "unique"), ([model.weight], "tuples")):
        with pytest.raises(ValueError, match=about):
            hvd.DistributedOptimizer(SGD(model.parameters(), lr=0.1), wrong)  # type: ignore[arg-type]
    optimizer = wrapped(model)
    with pytest.raises(ValueError, match="already"):
        hvd.DistributedOptimizer(optimizer)
