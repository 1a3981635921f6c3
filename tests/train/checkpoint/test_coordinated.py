"""Coordinated checkpoints: resumed training continues bit for bit, and a half-written one is never chosen."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from support.virtual_workers import Worker, batch, cluster, network, parameters, seeded
from torch import Tensor, nn
from torch.nn.functional import mse_loss
from torch.utils.data import DataLoader, TensorDataset

from gossamer.algorithms.recipes.recipe import resolve
from gossamer.errors import CheckpointError
from gossamer.train import checkpoint
from gossamer.train.session.session import Session
from gossamer.train.world_state import WorldState

RECIPES = ["Dense()", "TopK(0.1)", "Int8()", "PowerSGD(rank=2)", "Route(PowerSGD(2), rest=Int8(block=8))"]
RECIPES += ["ARCTopK(density=0.1, row=8)", "SharedMask(density=0.1)"]


def train(
    worker: Worker, recipe: str, start: int, stop: int, load: Path | None = None, save: Path | None = None
) -> Any:
    model = network(worker.rank)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.7)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=3)
    session = worker.attach(model, optimizer, recipe, scaler=scaler)
    if load is not None:
        mine = session.load(load)
        assert mine["step"] == start
        scheduler.load_state_dict(mine["scheduler"])
    for step in range(start, stop):
        optimizer.zero_grad()
        session.set_batch_weight(3 if step == 4 and worker.rank == 0 else 4)
        inputs, targets = batch(step, worker.rank)
        scaler.scale(mse_loss(model(inputs), targets)).backward()
        scaler.step(optimizer)
        scaler.update()
        scheduler.step()
    if save is not None:
        session.save(save, step=stop, scheduler=scheduler)
    return parameters(model), session.state_dict(), scaler.get_scale(), session.steps


def equal(a: Any, b: Any) -> bool:
    if isinstance(a, Tensor):
        return torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(equal(a[key], b[key]) for key in a)
    if isinstance(a, tuple):
        return len(a) == len(b) and all(map(equal, a, b))
    return bool(a == b)


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("world", [1, 3])
def test_k_steps_save_load_k_steps_are_2k_steps(recipe: str, world: int, tmp_path: Path) -> None:
    whole = cluster(lambda worker: train(worker, recipe, 0, 7), world)
    cluster(lambda worker: train(worker, recipe, 0, 3, save=tmp_path), world)
    resumed = cluster(lambda worker: train(worker, recipe, 3, 7, load=tmp_path), world)
    for one, other in zip(whole, resumed, strict=True):
        assert equal(one, other), "resumed training went another way"


def test_the_resume_law_catches_a_forgotten_residual(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    honest = checkpoint.stage

    def forgetful(directory: Any, step: int, rank: int, tree: Any) -> str:
        for remembered in tree["session"]["state"].values():
            for key in remembered:
                remembered[key] = torch.zeros_like(remembered[key])
        return honest(directory, step, rank, tree)

    monkeypatch.setattr(checkpoint, "stage", forgetful)
    with pytest.raises(AssertionError, match="another way"):
        test_k_steps_save_load_k_steps_are_2k_steps("TopK(0.1)", 3, tmp_path)


def test_random_state_is_part_of_it(tmp_path: Path) -> None:
    def work(worker: Worker, resume: bool) -> tuple[float, float]:
        model = network(0)
        session = worker.attach(model, torch.optim.SGD(model.parameters(), 0.1))
        if resume:
            with seeded(99):
                random.seed(99)
                session.load(tmp_path)
                return float(torch.rand(())), random.random()
        with seeded(5):
            random.seed(5)
            session.save(tmp_path)
            return float(torch.rand(())), random.random()

    assert cluster(lambda worker: work(worker, False), 1) == cluster(lambda worker: work(worker, True), 1)


def test_nothing_saved_yet_is_no_error(tmp_path: Path) -> None:
    def work(worker: Worker) -> dict[str, Any]:
        model = network(0)
        return worker.attach(model, torch.optim.SGD(model.parameters(), 0.1)).load(tmp_path / "none")

    assert cluster(work, 2) == [{}, {}]


def test_another_recipe_or_layout_or_world_is_refused(tmp_path: Path) -> None:
    cluster(lambda worker: train(worker, "TopK(0.1)", 0, 2, save=tmp_path), 2)
    with pytest.raises(CheckpointError, match=r"TopK\(density=0\.1\).*PowerSGD\(rank=2\)"):
        cluster(lambda worker: train(worker, "PowerSGD(rank=2)", 2, 3, load=tmp_path), 2)

    def wider(worker: Worker) -> None:
        model = nn.Linear(6, 9)
        worker.attach(model, torch.optim.AdamW(model.parameters(), 0.1), "TopK(0.1)").load(tmp_path)

    with pytest.raises(CheckpointError, match="layout"):
        cluster(wider, 2)
    with pytest.raises(CheckpointError, match="layout"):
        cluster(wider, 3)
    (tmp_path / "step-00000002" / "rank-1.json").unlink()
    with pytest.raises(CheckpointError, match=r"were written by 2 workers, not 3.*Copy all parts"):
        cluster(lambda worker: train(worker, "TopK(0.1)", 2, 3, load=tmp_path), 3)


def test_a_part_that_cannot_be_written_gives_the_whole_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cluster(lambda worker: train(worker, "TopK(0.1)", 0, 2, save=tmp_path), 2)
    honest = checkpoint.stage

    def full(directory: Any, step: int, rank: int, tree: Any) -> str:
        if rank == 1:
            raise OSError(28, "No space left on device")
        return honest(directory, step, rank, tree)

    with monkeypatch.context() as patched:
        patched.setattr(checkpoint, "stage", full)
        with pytest.raises(CheckpointError, match=r"rank 1.*No space left"):
            cluster(lambda worker: train(worker, "TopK(0.1)", 2, 4, load=tmp_path, save=tmp_path), 2)
    assert checkpoint.complete_steps(tmp_path, 0) == checkpoint.complete_steps(tmp_path, 1) == [2]
    cluster(lambda worker: train(worker, "TopK(0.1)", 2, 3, load=tmp_path), 2)


def test_a_rank_that_died_before_completing_takes_all_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cluster(lambda worker: train(worker, "TopK(0.1)", 0, 2, save=tmp_path), 2)
    honest = checkpoint.complete

    def dies(directory: Any, step: int, rank: int, digests: Any, about: Any, keep: int | None) -> None:
        if rank == 1:
            raise KeyboardInterrupt
        honest(directory, step, rank, digests, about, keep)

    with monkeypatch.context() as patched:
        patched.setattr(checkpoint, "complete", dies)
        with pytest.raises(KeyboardInterrupt):
            cluster(lambda worker: train(worker, "TopK(0.1)", 2, 4, load=tmp_path, save=tmp_path), 2)
    assert 4 in checkpoint.complete_steps(tmp_path, 0)
    cluster(lambda worker: train(worker, "TopK(0.1)", 2, 3, load=tmp_path), 2)


def test_dropout_and_a_loader_resume_in_the_middle_of_an_epoch(tmp_path: Path) -> None:
    """A DataLoader takes a seed from torch's generator whenever it is iterated, also when it is resumed."""

    def work(worker: Worker, start: bool, stop: int | None) -> Tensor:
        world = WorldState(rank=0, size=1, local_rank=0, device=torch.device("cpu"))
        data = TensorDataset(torch.arange(60.0).view(20, 3))
        with seeded(3):
            model = nn.Sequential(nn.Linear(3, 8), nn.Dropout(0.5), nn.Linear(8, 1))
        optimizer = torch.optim.SGD(model.parameters(), 1e-4)
        session = Session(model, optimizer, resolve(None), worker.transport, world=world)
        loader = DataLoader(data, 2, sampler=world.shard(data))
        torch.manual_seed(11)
        epoch = 0 if start else session.load(tmp_path)["epoch"]
        for now in range(epoch, 2):
            for (x,) in loader:
                optimizer.zero_grad()
                model(x).square().mean().backward()
                optimizer.step()
                if session.steps == stop:
                    session.save(tmp_path, epoch=now)
                    return parameters(model)
        return parameters(model)

    whole = cluster(lambda worker: work(worker, True, None), 1)[0]
    for stop in (3, 7, 14):
        cluster(lambda worker, s=stop: work(worker, True, s), 1)
        resumed = cluster(lambda worker, s=stop: work(worker, False, None), 1)[0]
        assert torch.equal(resumed, whole), stop
