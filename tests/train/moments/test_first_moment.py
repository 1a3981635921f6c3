"""First moment: what is true of Adam by every rule. Runs that stop, fail, end unevenly and go on with others."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from support.adam_training import Adam, adam, everywhere, matrices, schedule, unused_rows
from support.nightly import once_each
from support.session_laws import check_a_bad_gradient_changes_nothing, check_the_loss_scale_does_not_show, resumed
from support.virtual_workers import Worker, agree, cluster, loss_of, network, parameters, train_step
from torch import Tensor, nn

from gossamer.errors import AttachError, LoopError
from gossamer.train.moments.first_moment import AdamRule

SPARSE = "TopK(density=0.1)"
RULES = [
    f'CompressedAdam({SPARSE}, variance="momentum")',
    f'CompressedAdam({SPARSE}, variance="agreed")',
    f'CompressedAdam({SPARSE}, variance="rows", warmup=3)',
    'CompressedAdam(OneBit(), variance="frozen", warmup=3, clip=1.0)',
    f"MicroAdam({SPARSE}, window=3)",
    f"AdamUpdate({SPARSE})",
    "AdamUpdate(Int8(), clip=1.0)",
]


def kept_by_adam(optimizer: torch.optim.Optimizer) -> Tensor:
    return torch.cat([torch.zeros(1), *(t.flatten() for each in optimizer.state.values() for t in each.values())])


@pytest.mark.parametrize("term", RULES)
def test_ranks_have_the_same_bits(term: str) -> None:
    def work(worker: Worker) -> tuple[Tensor, Tensor]:
        model, optimizer, _ = worker.start(network(worker.rank, torch.float32), adam, everywhere(term))
        for step in range(8):
            schedule(optimizer, step)
            train_step(model, optimizer, step, worker.rank)
        return parameters(model), kept_by_adam(optimizer)

    models, kept = zip(*cluster(work, 3), strict=True)
    agree(models)
    agree(kept)


@once_each("term, bad", RULES, [0, 5])
def test_a_bad_gradient_on_one_rank_changes_nothing_anywhere(term: str, bad: int) -> None:
    check_a_bad_gradient_changes_nothing(adam, everywhere(term), bad)


@once_each("term, stop", RULES, [2, 5])
def test_a_resumed_run_has_the_same_bits(term: str, stop: int, tmp_path: Path) -> None:
    whole, found = resumed(adam, everywhere(term), stop, tmp_path, schedule)
    assert torch.equal(found, whole)


def test_moments_outside_the_optimizers_state_would_be_found(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A twin that begins them anew after loading."""
    honest = AdamRule._move
    known: dict[int, nn.Parameter] = {}  # held, so that no other is at the same place later

    def forgetful(self: AdamRule, parameter: nn.Parameter, group: Any) -> None:
        if id(parameter) not in known:
            known[id(parameter)] = parameter
            self.optimizer.state[parameter].clear()
        honest(self, parameter, group)

    monkeypatch.setattr(AdamRule, "_move", forgetful)
    whole, found = resumed(adam, everywhere(RULES[1]), 5, tmp_path, schedule)
    assert not torch.equal(found, whole)


@pytest.mark.parametrize("term", RULES)
def test_the_loss_scale_does_not_show(term: str) -> None:
    check_the_loss_scale_does_not_show(adam, everywhere(term))


@pytest.mark.parametrize("term", RULES)
def test_ranks_that_run_out_of_data_agree_in_the_end(term: str) -> None:
    def work(worker: Worker) -> Tensor:
        model, optimizer, session = worker.start(network(0), adam, everywhere(term))
        for epoch in range(3):
            with session.epoch():
                for step in range([5, 4, 4][worker.rank]):
                    schedule(optimizer, step)
                    train_step(model, optimizer, 10 * epoch + step, worker.rank)
        return parameters(model)

    agree(cluster(work, 3))


@pytest.mark.parametrize("term", RULES)
def test_another_number_of_workers_goes_on(term: str, tmp_path: Path) -> None:
    def work(worker: Worker, steps: int) -> tuple[Tensor, Tensor, Tensor]:
        model, optimizer, session = worker.start(network(worker.rank), adam, everywhere(term))
        session.load(tmp_path)
        begun = parameters(model), kept_by_adam(optimizer)
        for step in range(session.steps, steps):
            train_step(model, optimizer, step, worker.rank)
        if steps == 5:
            session.save(tmp_path)
            begun = parameters(model), kept_by_adam(optimizer)
        return *begun, parameters(model)

    before = cluster(lambda worker: work(worker, 5), 3)
    after = cluster(lambda worker: work(worker, 8), 2)
    for begun in after:
        assert torch.equal(begun[0], before[0][0])
        assert torch.equal(begun[1], before[0][1])
    agree([each[2] for each in after])
    assert not torch.equal(after[0][2], after[0][0])


@pytest.mark.parametrize("term", [rule for rule in RULES if SPARSE in rule])
def test_rows_that_nobody_used_stay_bit_for_bit(term: str) -> None:
    before, after, _ = unused_rows(term)
    assert torch.equal(before, after)


@once_each("term, options", RULES, [{"foreach": True}, {"fused": True}])
def test_kernels_of_the_optimizer_make_no_difference(term: str, options: dict[str, Any]) -> None:
    """Biases stay with the optimizer, which steps them by whatever it has."""

    def work(worker: Worker, **options: Any) -> Tensor:
        model, optimizer, _ = worker.start(network(0), lambda m: adam(m, **options), term)
        for step in range(6):
            train_step(model, optimizer, step, worker.rank)
        return parameters(model)

    plain, special = agree(cluster(work, 2)), agree(cluster(lambda worker: work(worker, **options), 2))
    torch.testing.assert_close(plain, special, atol=1e-9, rtol=1e-9)


@pytest.mark.parametrize("term", [RULES[0], RULES[1], RULES[4]])
def test_a_parameter_may_have_its_first_gradient_late(term: str) -> None:
    def work(worker: Worker) -> Tensor:
        model = network(0)
        assert isinstance(model, nn.Sequential)
        optimizer = adam(model)
        worker.attach(model, optimizer, everywhere(term))
        for step in range(5):
            optimizer.zero_grad()
            part = model if step >= 3 else model[:2]
            before = parameters(model[4])
            part(torch.ones(4, 6, dtype=torch.float64) * (step + worker.rank + 1)).square().mean().backward()
            optimizer.step()
            assert torch.equal(parameters(model[4]), before) == (step < 3)
        assert float(optimizer.state[model.get_parameter("4.weight")]["step"]) == 2
        return parameters(model)

    agree(cluster(work, 2))


def test_adam_goes_on_when_the_session_is_closed() -> None:
    """The moments are where torch keeps them; the agreed variance is Adam's own, so nothing is noticed."""

    def work(worker: Worker) -> Tensor:
        model = matrices(0)
        optimizer = adam(model)
        session = worker.attach(model, optimizer, everywhere('CompressedAdam(Dense(), variance="agreed")'))
        for step in range(8):
            if step == 4:
                session.close()
            train_step(model, optimizer, step, 0)
        return parameters(model)

    def alone() -> Tensor:
        model = matrices(0)
        optimizer = adam(model)
        for step in range(8):
            train_step(model, optimizer, step, 0)
        return parameters(model)

    torch.testing.assert_close(agree(cluster(work, 2)), alone(), atol=1e-12, rtol=1e-12)


@pytest.mark.parametrize("term", RULES)
def test_a_closure_is_refused(term: str) -> None:
    def work(worker: Worker) -> None:
        model, optimizer, _ = worker.start(network(0), adam, everywhere(term.replace("warmup=3", "warmup=1")))
        for step in range(3):
            optimizer.zero_grad()
            loss_of(model, step, worker.rank).backward()
            optimizer.step(lambda: 0.0)

    with pytest.raises(LoopError, match=r"without a closure"):
        cluster(work, 2)


@pytest.mark.parametrize("term", RULES)
@pytest.mark.parametrize(
    ("options", "wrong"),
    [({"amsgrad": True}, "Leave amsgrad out"), ({"maximize": True}, "Leave maximize out")],
)
def test_settings_that_would_not_be_honored_are_refused(term: str, options: dict[str, Any], wrong: str) -> None:
    with pytest.raises(AttachError, match=wrong):
        cluster(lambda worker: worker.start(network(0), lambda m: adam(m, **options), everywhere(term)), 2)


def second_momentum(model: nn.Module) -> Adam:
    optimizer = adam(model)
    optimizer.param_groups[0]["betas"] = (0.5, 0.95)
    return optimizer


@pytest.mark.parametrize("term", RULES)
def test_first_betas_that_differ_are_refused(term: str) -> None:
    if "MicroAdam" in term:  # nothing that travels has a beta in it
        cluster(lambda worker: worker.start(network(0), second_momentum, everywhere(term)), 2)
        return
    with pytest.raises(AttachError, match="different momenta"):
        cluster(lambda worker: worker.start(network(0), second_momentum, everywhere(term)), 2)
