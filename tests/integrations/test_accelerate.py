"""An Accelerator in this process, a world of one; two workers are in test_transformers.py."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("accelerate")

from accelerate import Accelerator
from accelerate.state import AcceleratorState
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from gossamer.errors import AttachError, CheckpointError
from gossamer.integrations import accelerate as adapter


@pytest.fixture
def accelerator() -> Iterator[Accelerator]:
    yield Accelerator(cpu=True, gradient_accumulation_steps=2)
    AcceleratorState._reset_state(reset_partial_state=True)


def parts() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Linear(4, 1)
    return model, torch.optim.SGD(model.parameters(), 0.5, momentum=0.5)


def step(accelerator: Accelerator, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    accelerator.backward(model(torch.ones(2, 4)).square().mean())
    optimizer.step()
    optimizer.zero_grad()


def test_the_model_stays_itself_and_saves_with_its_session(accelerator: Accelerator, tmp_path: Path) -> None:
    model, optimizer = parts()
    with adapter.attach(accelerator, model, optimizer, "TopK(0.5)") as session:
        prepared, stepped = accelerator.prepare(model, optimizer)
        assert prepared is model
        step(accelerator, prepared, stepped)
        accelerator.save_state(str(tmp_path / "saved"))
        then = model.weight.detach().clone()
        step(accelerator, prepared, stepped)
        after = model.weight.detach().clone()
        accelerator.load_state(str(tmp_path / "saved"))
        assert session.steps == 1
        assert model.weight.equal(then)
        step(accelerator, prepared, stepped)
        assert model.weight.equal(after)


def test_a_state_without_its_session_is_refused(accelerator: Accelerator, tmp_path: Path) -> None:
    model, optimizer = parts()
    with adapter.attach(accelerator, model, optimizer):
        prepared, stepped = accelerator.prepare(model, optimizer)
        step(accelerator, prepared, stepped)
        accelerator.save_state(str(tmp_path / "saved"))
        (tmp_path / "saved" / "gossamer").rename(tmp_path / "elsewhere")
        with pytest.raises(CheckpointError, match="has no folder 'gossamer'"):
            accelerator.load_state(str(tmp_path / "saved"))


def test_a_state_that_an_interrupted_save_has_mixed_is_refused(
    accelerator: Accelerator, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, optimizer = parts()
    with adapter.attach(accelerator, model, optimizer):
        prepared, stepped = accelerator.prepare(model, optimizer)
        for _ in range(2):  # the same folder again is no error
            step(accelerator, prepared, stepped)
            accelerator.save_state(str(tmp_path / "saved"))
        accelerator.load_state(str(tmp_path / "saved"))
        step(accelerator, prepared, stepped)
        with monkeypatch.context() as patch:
            patch.setattr("accelerate.accelerator.save_accelerator_state", interrupted)
            with pytest.raises(KeyboardInterrupt):
                accelerator.save_state(str(tmp_path / "saved"))
        with pytest.raises(CheckpointError, match=r"the session's of step 3, the library's of step 2.*save_state\("):
            accelerator.load_state(str(tmp_path / "saved"))


def interrupted(*_: object, **__: object) -> None:
    raise KeyboardInterrupt


def test_two_sessions_of_an_accelerator_are_saved_side_by_side(accelerator: Accelerator, tmp_path: Path) -> None:
    (generator, first), (critic, second) = parts(), parts()
    with torch.no_grad():
        critic.weight.add_(1.0)
    with adapter.attach(accelerator, generator, first, "TopK(0.5)"):
        session = adapter.attach(accelerator, critic, second, "TopK(0.5)")
        pairs = list(zip(accelerator.prepare(generator, critic), accelerator.prepare(first, second), strict=True))
        for model, optimizer in pairs:
            step(accelerator, model, optimizer)
        accelerator.save_state(str(tmp_path / "saved"))
        then = [model.weight.detach().clone() for model, _ in pairs]
        assert not then[0].equal(then[1])
        for model, optimizer in pairs:
            step(accelerator, model, optimizer)
        accelerator.load_state(str(tmp_path / "saved"))
        assert all(model.weight.equal(each) for (model, _), each in zip(pairs, then, strict=True))
        assert sorted(each.name for each in (tmp_path / "saved").glob("gossamer*")) == ["gossamer", "gossamer-1"]
        session.close()


def test_a_session_takes_the_place_of_a_closed_one_in_a_state(accelerator: Accelerator, tmp_path: Path) -> None:
    for fold in ("first", "second"):
        model, optimizer = parts()
        with adapter.attach(accelerator, model, optimizer):
            step(accelerator, *accelerator.prepare(model, optimizer))
            accelerator.save_state(str(tmp_path / fold))
            accelerator.load_state(str(tmp_path / fold))
        accelerator.free_memory()
        assert [each.name for each in (tmp_path / fold).glob("gossamer*")] == ["gossamer"]


def test_no_sync_is_the_sessions_for_its_model_only(accelerator: Accelerator) -> None:
    (model, optimizer), other = parts(), nn.Linear(1, 1)
    with adapter.attach(accelerator, model, optimizer) as session:
        with accelerator.no_sync(model):
            assert session._synchronizer.controls.muted
        with accelerator.no_sync(other):
            assert not session._synchronizer.controls.muted
        with accelerator.accumulate(model):  # the first of two
            assert session._synchronizer.controls.muted
        with accelerator.accumulate(model):
            assert not session._synchronizer.controls.muted


def test_other_models_are_prepared_as_ever(accelerator: Accelerator) -> None:
    asked: list[bool] = []
    accelerator.prepare_model = lambda model, device_placement=None, evaluation_mode=False: asked.append(
        evaluation_mode
    )
    (model, optimizer), other = parts(), nn.Linear(1, 1)
    with adapter.attach(accelerator, model, optimizer):
        accelerator.prepare_model(model)
        accelerator.prepare_model(other)
        accelerator.prepare_model(other, evaluation_mode=True)
    assert asked == [True, False, True]


def test_the_scaler_is_the_accelerators(accelerator: Accelerator) -> None:
    accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    model, optimizer = parts()
    with adapter.attach(accelerator, model, optimizer) as session:
        assert session.scaler is accelerator.scaler


@pytest.mark.parametrize(
    ("kind", "place", "line"),
    [
        ("MULTI_CPU", (1, 2), r"rank 0 of 1 in Gossamer, and rank 1 of 2.*use_cpu=True"),
        ("FSDP", (0, 1), r"shard this model.*\(FSDP\).*Remove the plugin"),
        ("DEEPSPEED", (0, 1), r"shard this model.*\(DEEPSPEED\)"),
    ],
)
def test_what_does_not_go_together_is_refused(kind: str, place: tuple[int, int], line: str) -> None:
    sees = SimpleNamespace(distributed_type=SimpleNamespace(value=kind), process_index=place[0], num_processes=place[1])
    with pytest.raises(AttachError, match=line):
        adapter.refuse_other_world(sees)


def test_a_world_that_both_see_is_taken() -> None:
    kind = SimpleNamespace(value="NO")
    adapter.refuse_other_world(SimpleNamespace(distributed_type=kind, process_index=0, num_processes=1))


def test_an_elastic_run_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(adapter, "is_elastic", lambda: True)
    with pytest.raises(AttachError, match="gossamer run --workers 4"):
        adapter.refuse_other_world(SimpleNamespace())


def test_a_wrapped_model_is_refused(accelerator: Accelerator) -> None:
    _, optimizer = parts()
    wrapped = DistributedDataParallel.__new__(DistributedDataParallel)
    with pytest.raises(AttachError, match=r"above accelerator\.prepare"):
        adapter.attach(accelerator, wrapped, optimizer)
