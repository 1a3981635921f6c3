"""Models of many kinds, and models that change under a session."""

from __future__ import annotations

import os
from collections.abc import Collection
from functools import partial
from typing import Any

import pytest
import torch
from support.sessions import sgd, train
from support.virtual_workers import (
    Worker,
    agree,
    batch,
    cluster,
    grow,
    loss_of,
    network,
    parameters,
    seeded,
    train_step,
)
from torch import Tensor, nn
from torch.nn.functional import mse_loss
from torch.utils.checkpoint import checkpoint

from gossamer.comm.runtime.comm_thread import CommThread
from gossamer.errors import LayoutError, LoopError
from gossamer.train.session import session_base


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

    agree(cluster(work, 2))


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
    agree([mean for mean, _, _ in results])
    assert torch.equal(results[0][0], results[0][1]), "rank 0's statistics are not what rank 0 saw"
    assert not torch.equal(results[1][0], results[1][1])
    assert {int(count) for *_, count in results} == {3}


def test_two_backward_passes_of_one_graph_through_batch_norm_average_both() -> None:
    """The first exchange gives all ranks the statistics of rank 0, which the retained graph holds."""

    def work(worker: Worker, *, retained: bool) -> Tensor:
        with seeded(0):
            model = nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5), nn.Linear(5, 2)).double()
        optimizer = sgd(model)
        worker.attach(model, optimizer)
        for step in range(2):
            optimizer.zero_grad()
            first, second = model(batch(step, worker.rank)[0]).square().mean(0)
            if retained:
                first.backward(retain_graph=True)
                second.backward()
            else:
                (first + second).backward()
            optimizer.step()
        return parameters(model)

    both, joint = (agree(cluster(partial(work, retained=each), 2)) for each in (True, False))
    torch.testing.assert_close(both, joint)


def test_buffers_are_handed_out_at_attach() -> None:
    def work(worker: Worker) -> tuple[Tensor, Tensor, Tensor]:
        with seeded(0):
            model = nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5))
        model.register_buffer("mask", torch.full((3,), float(worker.rank)))
        model.register_buffer("constant", torch.tensor([torch.inf, worker.rank]))
        norm = model[1]
        assert isinstance(norm, nn.BatchNorm1d)
        assert norm.running_mean is not None
        norm.running_mean += worker.rank
        worker.attach(model, sgd(model))
        return norm.running_mean.clone(), model.mask.clone(), model.constant.clone()  # type: ignore[operator]

    for mean, mask, constant in cluster(work, 3):
        assert torch.equal(mean, torch.zeros(5))
        assert torch.equal(mask, torch.zeros(3))
        assert torch.equal(constant, torch.tensor([torch.inf, 0.0]))


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

    agree([weight for weight, _ in cluster(work, 2)])


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


@pytest.mark.parametrize("reentrant", [False, True])
def test_activation_checkpointing(reentrant: bool) -> None:
    assert torch.equal(
        agree(cluster(lambda worker: checkpointed(worker, reentrant), 2)),
        cluster(lambda worker: train(worker, None, 3), 2)[0],
    )


def test_compiled_models_keep_their_names() -> None:
    def work(worker: Worker) -> tuple[Tensor, tuple[str, ...]]:
        model = network(0)
        compiled = torch.compile(model, backend="aot_eager")
        optimizer = sgd(model)
        session = worker.attach(compiled, optimizer, "TopK(0.5)")  # type: ignore[arg-type]
        for step in range(2):
            train_step(compiled, optimizer, step, worker.rank)
        return parameters(model), session._synchronizer.buckets[0].layout.names

    results = [cluster(work, 1)[0]] if os.environ.get("GOSSAMER_NO_COMPILE") else cluster(work, 2)
    agree([ended for ended, _ in results])
    assert all("_orig_mod" not in name for _, names in results for name in names)
    plain = cluster(lambda worker: train(worker, "TopK(0.5)", 2), 2)[0]
    torch.testing.assert_close(results[0][0], plain, atol=1e-12, rtol=1e-12)


# -- changing models ---------------------------------------------------------------------------------------------------


def test_resizing_asks_for_a_reset() -> None:
    def work(worker: Worker, reset: bool) -> Tensor:
        model = network(0)
        assert isinstance(model, nn.Sequential)
        optimizer = sgd(model)
        session = worker.attach(model, optimizer, "TopK(0.2)")
        for step in range(4):
            if step == 2:
                grow(model[4])
                optimizer.param_groups[0]["params"] = list(model.parameters())
                kept = session.state_dict()["state"].get("0.weight", {})
                if reset:
                    with pytest.raises(LayoutError, match="same call"):
                        session.reset_compressor_state("4.weight")
                    session.reset_compressor_state("4.weight", "4.bias")
                    now = session.state_dict()["state"].get("0.weight", {})
                    assert all(torch.equal(now[key], kept[key]) for key in kept), "reset forgot the others too"
            optimizer.zero_grad()
            inputs, _ = batch(step, worker.rank)
            model(inputs).square().mean().backward()
            optimizer.step()
        return parameters(model)

    agree(cluster(lambda worker: work(worker, True), 2))


def test_a_reset_alone_is_remembered_too() -> None:
    """A checkpoint that is written after it fits a session that begins with the new shapes."""

    def work(worker: Worker) -> tuple[str, str]:
        model = network(0)
        assert isinstance(model, nn.Sequential)
        optimizer = sgd(model)
        session = worker.attach(model, optimizer)
        grow(model[4])
        optimizer.param_groups[0]["params"] = list(model.parameters())
        session.reset_compressor_state("4.weight", "4.bias")
        state = session.state_dict()
        session.close()
        again = worker.attach(model, optimizer)
        again.load_state_dict(state)
        return state["layout"], again.state_dict()["layout"]

    ((before, after),) = cluster(work, 1)
    assert before == after


def test_a_gradient_of_another_shape_is_an_error() -> None:
    def work(worker: Worker) -> None:
        model = nn.Linear(6, 3).double()
        optimizer = sgd(model)
        worker.attach(model, optimizer, "TopK(0.2)")
        model.weight.data = torch.zeros(5, 6, dtype=torch.float64)
        model.bias.data = torch.zeros(5, dtype=torch.float64)
        model(batch(0, worker.rank)[0]).square().mean().backward()

    with pytest.raises(LayoutError, match=r"session\.reset_compressor_state"):
        cluster(work, 2)


def test_thawing_after_attach_is_an_error() -> None:
    def work(worker: Worker) -> None:
        model = network(0)
        first = next(model.parameters())
        first.requires_grad_(False)
        optimizer = sgd(model)
        worker.attach(model, optimizer)
        first.requires_grad_(True)
        loss_of(model, 0, worker.rank).backward()
        optimizer.step()

    with pytest.raises(LoopError, match="frozen"):
        cluster(work, 2)


def test_every_device_of_a_model_is_one_of_its_communication_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """A device without memory stands for the second one: alone, nothing is sent."""
    seen: list[set[torch.device]] = []

    def noted(devices: Collection[torch.device], *rest: Any) -> CommThread:
        seen.append(set(devices))
        return CommThread(devices, *rest)

    monkeypatch.setattr(session_base, "CommThread", noted)
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2, device="meta"))
    cluster(lambda worker: worker.attach(model, sgd(model)), 1)
    assert seen == [{torch.device("cpu"), torch.device("meta")}]
