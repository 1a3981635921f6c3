"""Gradient guards in real loops: scalers, clipping, closures, kept gradients, and errors that name the rank."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from support.virtual_workers import Worker, agree, closure_of, cluster, loss_of, network, parameters
from torch import Tensor, nn

from gossamer.errors import CheckpointError, LoopError, MismatchError
from gossamer.train import checkpoint


def sgd(model: nn.Module, **options: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), **{"lr": 0.1, **options})


@pytest.mark.parametrize("recipe", ["Dense()", "TopK(0.3)"])
def test_uneven_epochs_with_a_scaler(recipe: str) -> None:
    """The scaler of a rank that ran out early catches up too."""

    def work(worker: Worker) -> tuple[Tensor, float]:
        model = network(0, torch.float32)
        optimizer = sgd(model)
        scaler = torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=2)
        session = worker.attach(model, optimizer, recipe, scaler=scaler)
        for epoch in range(2):
            with session.epoch():
                for step in range([6, 2, 1][worker.rank]):
                    optimizer.zero_grad()
                    scaler.scale(loss_of(model, 10 * epoch + step, worker.rank)).backward()
                    scaler.step(optimizer)
                    scaler.update()
        return parameters(model), scaler.get_scale()

    results = cluster(work, 3)
    agree([ended for ended, _ in results])
    assert len({scale for _, scale in results}) == 1
    assert results[0][1] > 4.0


def test_other_scales_and_other_clipping_are_found() -> None:
    def work(worker: Worker, scale: float, clip: float | None) -> None:
        model = network(0, torch.float32)
        optimizer = sgd(model)
        scaler = torch.amp.GradScaler("cpu", init_scale=scale)
        worker.attach(model, optimizer, scaler=scaler, clip_norm=clip)
        scaler.scale(loss_of(model, 0, worker.rank)).backward()

    with pytest.raises(MismatchError, match=r"scale=4\.0.*scale=8\.0"):
        cluster(lambda worker: work(worker, 4.0 * 2**worker.rank, None), 2)
    with pytest.raises(MismatchError, match=r"clip_norm=None.*clip_norm=1\.0"):
        cluster(lambda worker: work(worker, 4.0, 1.0 if worker.rank else None), 2)


@pytest.mark.parametrize("where", ["before step", "while accumulating"])
def test_saving_keeps_gradients(where: str, tmp_path: Path) -> None:
    def work(worker: Worker, save: bool) -> Tensor:
        model, optimizer, session = worker.start(network(0), sgd, "TopK(0.3)")
        for step in range(4):
            optimizer.zero_grad()
            with session.no_sync():
                loss_of(model, 10 + step, worker.rank).backward()
            if save and where == "while accumulating":
                session.save(tmp_path)
            loss_of(model, step, worker.rank).backward()
            if save and where == "before step":
                session.save(tmp_path)
            optimizer.step()
        return parameters(model)

    assert torch.equal(agree(cluster(lambda w: work(w, True), 2)), cluster(lambda w: work(w, False), 2)[0])


def test_a_parameter_added_later_is_an_error() -> None:
    def work(worker: Worker) -> None:
        model, optimizer, _ = worker.start(network(0), sgd)
        optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(3))]})
        loss_of(model, 0, worker.rank).backward()
        optimizer.step()

    for world in (1, 2):
        with pytest.raises(LoopError, match=r"of shape \(3,\) that is not in the model.*session\.add_parameters\(\)"):
            cluster(work, world)


def test_clip_norm_with_a_closure_is_an_error() -> None:
    def work(worker: Worker) -> None:
        model, optimizer, _ = worker.start(network(0), sgd, clip_norm=0.1)
        optimizer.step(closure_of(model, optimizer, worker.rank))

    with pytest.raises(LoopError, match="clip_grad_norm_"):
        cluster(work, 2)


@pytest.mark.parametrize("recipe", ["Dense()", "TopK(0.9)", "Int8()"])
def test_numbers_whose_sum_overflows_are_skipped(recipe: str) -> None:
    def work(worker: Worker) -> tuple[Tensor, int]:
        model = nn.Linear(20, 20, bias=False)
        nn.init.zeros_(model.weight)
        optimizer = sgd(model)
        session = worker.attach(model, optimizer, recipe)
        for step in range(3):
            optimizer.zero_grad()
            model(torch.full((1, 20), 3e38 if step == 1 else 1.0)).sum().backward()
            optimizer.step()
        return model.weight.detach().clone(), session.steps

    results = cluster(work, 3)
    assert torch.isfinite(agree([weight for weight, _ in results])).all()
    assert {steps for _, steps in results} == {2}


def test_no_gradient_on_a_rank_right_after_an_epoch() -> None:
    def work(worker: Worker) -> Tensor:
        model, optimizer, session = worker.start(network(0), sgd)
        with session.epoch():
            loss_of(model, 0, worker.rank).backward()
            optimizer.step()
            optimizer.zero_grad()
        if worker.rank == 0:
            loss_of(model, 1, worker.rank).backward()
        optimizer.step()
        return parameters(model)

    agree(cluster(work, 2))


def test_a_closed_session_says_so(tmp_path: Path) -> None:
    def work(worker: Worker) -> None:
        model = network(0)
        session = worker.attach(model, sgd(model))
        session._group.comm_thread.close()
        with pytest.raises(LoopError, match=r"attach\(\.\.\.\) again"):
            session.save(tmp_path)

    cluster(work, 2)


def test_a_damaged_part_is_an_error_on_every_rank(tmp_path: Path) -> None:
    def work(worker: Worker, load: bool) -> None:
        model = network(0)
        session = worker.attach(model, sgd(model))
        if not load:
            session.save(tmp_path)
            return
        with pytest.raises(CheckpointError, match=r"rank 1: .*damaged"):
            session.load(tmp_path)

    cluster(lambda worker: work(worker, False), 2)
    (file,) = tmp_path.glob("step-*/rank-1.safetensors")
    raw = bytearray(file.read_bytes())
    raw[-1] ^= 1
    file.write_bytes(raw)
    cluster(lambda worker: work(worker, True), 2)
    assert checkpoint.complete_steps(tmp_path, 0) == [0]


def test_residuals_are_no_part_of_a_graph() -> None:
    def work(worker: Worker) -> bool:
        model = network(0)
        session = worker.attach(model, sgd(model), "TopK(0.3)")
        loss_of(model, 0, worker.rank).backward(create_graph=True)
        remembered = session.state_dict()["state"].values()
        return any(tensor.requires_grad for each in remembered for tensor in each.values())

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's own, about create_graph
        assert cluster(work, 2) == [False, False]


def test_the_model_forgets_the_look_at_its_first_batch() -> None:
    def work(worker: Worker) -> int:
        model = network(0)
        worker.attach(model, sgd(model))
        loss_of(model, 0, worker.rank).backward()
        return len(model._forward_pre_hooks)

    assert cluster(work, 2) == [0, 0]
