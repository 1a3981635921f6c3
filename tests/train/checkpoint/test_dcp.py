"""DCP: torch's own tools read what is exported, and training begins from what they wrote; nothing in it is run."""

from __future__ import annotations

import io
import pickle
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as torch_dcp
from support.virtual_workers import Worker, cluster, network, parameters, train_step
from torch import nn
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.optim import SGD, AdamW, Optimizer

from gossamer.errors import CheckpointError
from gossamer.train.checkpoint import dcp


@pytest.fixture(autouse=True)
def alone() -> Iterator[None]:
    """torch's own tools warn of a single process."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled")
        yield


def groups(model: nn.Module) -> AdamW:
    """Two groups, the later parameters first."""
    first, *rest = model.parameters()
    return AdamW([{"params": rest[::-1], "lr": 0.02}, {"params": [first], "lr": 0.01}], weight_decay=0.1)


def saved(folder: Path, recipe: str = "Dense()", world: int = 2, steps: int = 3) -> list[Any]:
    """(merged parameters, those three steps later), by rank."""

    def work(worker: Worker) -> Any:
        model = network(worker.rank)
        optimizer = groups(model)
        session = worker.attach(model, optimizer, recipe)
        for step in range(steps):
            train_step(model, optimizer, step, worker.rank)
        session.save(folder)
        with session.averaged_parameters(model):
            merged = parameters(model)
        trained_on(model, optimizer)
        return merged, parameters(model)

    return cluster(work, world)


def trained_on(model: nn.Module, optimizer: Optimizer, steps: int = 3) -> torch.Tensor:
    for step in range(10, 10 + steps):
        train_step(model, optimizer, step, 0)
    return parameters(model)


def check_torch_goes_on(folder: Path, out: Path) -> None:
    ((merged, later),) = saved(folder, world=1)
    dcp.export(folder, out)
    model = network(7)
    optimizer = groups(model)
    state = {"model": get_model_state_dict(model), "optimizer": get_optimizer_state_dict(model, optimizer)}
    torch_dcp.load(state, checkpoint_id=out, no_dist=True)
    set_model_state_dict(model, state["model"])
    set_optimizer_state_dict(model, optimizer, state["optimizer"])
    assert torch.equal(parameters(model), merged)
    assert torch.equal(trained_on(model, optimizer), later), "it goes another way"


def test_torch_continues_from_what_is_exported_bit_for_bit(tmp_path: Path) -> None:
    check_torch_goes_on(tmp_path / "kept", tmp_path / "out")


def test_names_in_another_order_are_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    honest = dcp._by_name

    def misnamed(optimizer: Any, names: Any) -> Any:
        first, *rest = names[0]
        return honest(optimizer, [[*rest[:2], first, *rest[2:]], *names[1:]])

    monkeypatch.setattr(dcp, "_by_name", misnamed)
    with pytest.raises((AssertionError, torch_dcp.CheckpointException, RuntimeError)):
        check_torch_goes_on(tmp_path / "kept", tmp_path / "out")


def test_torch_makes_one_file_of_it(tmp_path: Path) -> None:
    saved(tmp_path / "kept")
    told = dcp.export(tmp_path / "kept", tmp_path / "out")
    assert (told.step, told.world) == (3, 2)
    dcp_to_torch_save(tmp_path / "out", tmp_path / "out.pt")
    whole = torch.load(tmp_path / "out.pt")
    assert whole["model"].keys() == network(0).state_dict().keys()
    assert whole["optimizer"]["param_groups"][1]["params"] == ["0.weight"]
    assert whole["optimizer"]["state"]["0.weight"].keys() == {"step", "exp_avg", "exp_avg_sq"}


@pytest.mark.parametrize("recipe", ["TopK(0.1)", "LocalSGD(period=2)", "DiLoCo(period=2)", "Gossip()"])
def test_the_model_is_what_the_workers_agree_on(recipe: str, tmp_path: Path) -> None:
    merged = [each for each, _ in saved(tmp_path / "kept", recipe, steps=4)]
    dcp.export(tmp_path / "kept", tmp_path / "out")
    model = network(5)
    dcp.import_(tmp_path / "out", model)
    torch.testing.assert_close(parameters(model), merged[0], rtol=1e-12, atol=1e-12)


def test_the_model_has_the_names_of_its_state_dict(tmp_path: Path) -> None:
    """A buffer that is not saved is averaged, too."""

    def work(worker: Worker) -> None:
        model = network(worker.rank)
        model.register_buffer("scale", torch.ones(2), persistent=False)
        session = worker.attach(model, groups(model), "LocalSGD(period=2)")
        session.save(tmp_path / "kept")

    cluster(work, 2)
    dcp.export(tmp_path / "kept", tmp_path / "out")
    assert dcp.load(tmp_path / "out")["model"].keys() == network(0).state_dict().keys()


def test_a_run_begins_from_what_torch_wrote(tmp_path: Path) -> None:
    model = network(3)
    optimizer = groups(model)
    trained_on(model, optimizer, 2)
    state = {"model": get_model_state_dict(model), "optimizer": get_optimizer_state_dict(model, optimizer), "epoch": 4}
    torch_dcp.save(state, checkpoint_id=tmp_path / "torch", no_dist=True)
    whole = trained_on(model, optimizer)

    def work(worker: Worker) -> torch.Tensor:
        model = network(worker.rank)
        optimizer = groups(model)
        assert dcp.import_(tmp_path / "torch", model, optimizer) == {"epoch": 4}
        worker.attach(model, optimizer)
        return trained_on(model, optimizer)

    for found in cluster(work, 1):
        assert torch.equal(found, whole)
    for found in cluster(work, 2):
        torch.testing.assert_close(found, whole)


def test_a_state_by_numbers_is_taken_too(tmp_path: Path) -> None:
    model = network(3)
    optimizer = SGD(model.parameters(), 0.1, momentum=0.9)
    trained_on(model, optimizer, 2)
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    torch_dcp.save(state, checkpoint_id=tmp_path / "torch", no_dist=True)
    again = network(4)
    rule = SGD(again.parameters(), 0.3, momentum=0.9)
    dcp.import_(tmp_path / "torch", again, rule)
    assert torch.equal(trained_on(again, rule), trained_on(model, optimizer))


def test_what_does_not_fit_changes_nothing(tmp_path: Path) -> None:
    saved(tmp_path / "kept")
    dcp.export(tmp_path / "kept", tmp_path / "out")
    other = nn.Linear(2, 2)
    before = parameters(other)
    with pytest.raises(CheckpointError, match=r"do not fit.*Build the model"):
        dcp.import_(tmp_path / "out", other)
    assert torch.equal(parameters(other), before)
    model = network(0)
    before = parameters(model)
    with pytest.raises(CheckpointError, match=r"do not fit"):
        dcp.import_(tmp_path / "out", model, SGD(model.parameters(), 0.1))
    assert torch.equal(parameters(model), before)


def test_nothing_is_written_over(tmp_path: Path) -> None:
    saved(tmp_path / "kept")
    (tmp_path / "out").mkdir()
    with pytest.raises(CheckpointError, match="exists already"):
        dcp.export(tmp_path / "kept", tmp_path / "out")
    with pytest.raises(CheckpointError, match="no complete checkpoint"):
        dcp.export(tmp_path / "out", tmp_path / "more")


# -- hostile -----------------------------------------------------------------------------------------------------------


class Payload:
    def __init__(self, touched: Path) -> None:
        self.touched = touched

    def __reduce__(self) -> Any:
        return Path.touch, (self.touched,)


def test_a_description_that_runs_something_is_refused(tmp_path: Path) -> None:
    """torch's own reader runs it."""
    folder, touched = tmp_path / "evil", tmp_path / "touched"
    folder.mkdir()
    (folder / ".metadata").write_bytes(pickle.dumps(Payload(touched)))
    with pytest.raises(CheckpointError, match="not part of the format"):
        dcp.load(folder)
    assert not touched.exists()
    with pytest.raises(AttributeError):
        torch_dcp.FileSystemReader(folder).read_metadata()
    assert touched.exists()


def test_a_value_that_runs_something_is_refused(tmp_path: Path) -> None:
    folder, touched = tmp_path / "evil", tmp_path / "touched"
    torch_dcp.save({"model": {"x": torch.ones(2)}, "mine": Payload(touched)}, checkpoint_id=folder, no_dist=True)
    with pytest.raises(CheckpointError, match="cannot be read"):
        dcp.load(folder)
    assert not touched.exists()
    state = {"mine": None}
    torch_dcp.load(state, checkpoint_id=folder, no_dist=True)
    assert touched.exists()


@pytest.mark.parametrize("times", [1.5, 2.0**40])
def test_a_size_that_is_not_there_is_refused_before_it_is_allocated(times: float, tmp_path: Path) -> None:
    folder = tmp_path / "evil"
    torch_dcp.save({"x": torch.ones(3)}, checkpoint_id=folder, no_dist=True)
    metadata = pickle.loads((folder / ".metadata").read_bytes())
    there = sum(path.stat().st_size for path in folder.iterdir())
    metadata.state_dict_metadata["x"].size = torch.Size([int(times * there / 4)])
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))
    with pytest.raises(CheckpointError, match=r"its tensors have [\d,]+ bytes, but its files"):
        dcp.load(folder)


@pytest.mark.parametrize("content", [b"", b"junk", pickle.dumps([]), None], ids=repr)
def test_another_folder_is_refused(content: bytes | None, tmp_path: Path) -> None:
    if content is not None:
        (tmp_path / ".metadata").write_bytes(content)
    with pytest.raises(CheckpointError, match="cannot be read as torch's distributed checkpoint"):
        dcp.load(tmp_path)


def test_paths_that_python_3_13_wrote_are_read_by_every_version() -> None:
    written = b"cpathlib._local\nPosixPath\n(S'data'\ntR."
    assert dcp._PlainUnpickler(io.BytesIO(written)).load() == Path("data")
