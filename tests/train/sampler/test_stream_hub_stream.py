"""Hugging Face's datasets and torchdata's loaders: every example once, and resumed runs the same bit for bit."""

from __future__ import annotations

from itertools import chain, islice
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset

import gossamer.train.session.attach as attaching
from gossamer.errors import CheckpointError
from gossamer.train.checkpoint.reshard import fold_positions
from gossamer.train.sampler import HubStreamShard, Shard
from gossamer.train.sampler.position import Regrouping
from gossamer.train.world_state import WorldState, place

datasets = pytest.importorskip("datasets")
torchdata = pytest.importorskip("torchdata.stateful_dataloader")
pytestmark = pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")


def world(rank: int = 0, size: int = 1) -> WorldState:
    return WorldState(rank=rank, size=size, local_rank=rank, device=torch.device("cpu"))


def stream(shards: int = 4) -> Any:
    return datasets.Dataset.from_dict({"x": [float(number) for number in range(24)]}).to_iterable_dataset(shards)


def numbers(part: Any) -> list[int]:
    return [int(example["x"]) for example in part]


@pytest.mark.parametrize(("shards", "size"), [(4, 2), (3, 2), (1, 3)])
def test_ranks_are_disjoint_and_cover(shards: int, size: int) -> None:
    parts = [world(rank, size).shard(stream(shards)) for rank in range(size)]
    assert all(isinstance(part, HubStreamShard) for part in parts)
    for _ in range(2):
        assert sorted(chain(*map(numbers, parts))) == [*range(24)]


def test_a_map_style_dataset_is_dealt_out_as_any() -> None:
    data = datasets.Dataset.from_dict({"x": [*range(10)]})
    parts = [world(rank, 2).shard(data) for rank in range(2)]
    assert all(isinstance(part, Shard) for part in parts)
    assert sorted(data[index]["x"] for index in chain(*parts)) == [*range(10)]


@pytest.mark.parametrize("drawn", [0, 5, 12, 13])
def test_a_resumed_stream_continues_where_it_stood(drawn: int) -> None:
    """12 on this rank; who asked for more was told of the end."""
    straight, stopped, resumed, again = (world(1, 2).shard(stream(8).shuffle(seed=0, buffer_size=1)) for _ in range(4))
    epochs = [numbers(straight) for _ in range(2)]
    assert epochs[0] != epochs[1]
    list(islice(stopped, drawn))
    resumed.load_state_dict(stopped.state_dict())
    again.load_state_dict(resumed.state_dict())  # saved again before anything is drawn
    assert numbers(again) == (epochs[1] if drawn > 12 else epochs[0][drawn:])


def test_set_epoch_begins_a_later_epoch_and_repeats_none() -> None:
    counted, told = (world(1, 2).shard(stream(8).shuffle(seed=0, buffer_size=1)) for _ in range(2))
    epochs = [numbers(counted) for _ in range(6)]
    assert epochs[1] not in (epochs[0], epochs[4])
    taken = []
    for epoch in (1, 4, 2):
        told.set_epoch(epoch)
        taken.append(numbers(told))
    assert taken == [epochs[1], epochs[4], epochs[5]]


def test_positions_in_shards_are_one_ranks_of_so_many() -> None:
    parts = [world(rank, 2).shard(stream()) for rank in range(2)]
    states = [{"shards": [part.state_dict()]} for part in parts]
    with pytest.raises(CheckpointError, match="Start 2 workers again"):
        fold_positions(states, 0, 3)
    with pytest.raises(CheckpointError, match="not a position of rank 0 of 2"):
        parts[0].load_state_dict(parts[1].state_dict())
    with pytest.raises(CheckpointError, match="cannot be divided again"):
        parts[0].regroup([parts[0].state_dict(), None], Regrouping(0, 1, [0]))


def test_even_and_elastic_runs_need_counted_items(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match=r"even='drop' cannot be kept.*IterableDataset of your own"):
        world().shard(stream(), even="drop")
    monkeypatch.setattr("gossamer.train.world_state.is_elastic", lambda: True)
    with pytest.raises(ValueError, match="workers cannot join or leave"):
        world().shard(stream())


class Counted(IterableDataset[Any]):
    """As the errors say: its items are counted, also where the workers of a loader would share its shards."""

    def __iter__(self) -> Any:
        yield from stream()


def test_a_stream_around_it_is_counted_and_not_split_twice() -> None:
    loader = DataLoader(world().shard(Counted()), batch_size=None, num_workers=2)
    assert sorted(numbers(loader)) == [*range(24)]


# -- whole runs --------------------------------------------------------------------------------------------------------


def train(kind: str, workers: int, directory: Path | None, stop: int | None) -> tuple[list[Any], Tensor]:
    """Batches of two epochs of 6 steps with dropout, and the parameters; up to step `stop`, where all is saved."""
    torch.manual_seed(0)
    there = world()
    place(there)
    torch.set_num_threads(1)
    data = datasets.Dataset.from_dict({"x": [float(number) for number in range(24)]}).with_format("torch")
    options: dict[str, Any] = {"batch_size": 4, "num_workers": workers}
    if kind == "map":
        loader = torchdata.StatefulDataLoader(data, sampler=there.shard(data), **options)
    else:
        kept = there.shard(data.to_iterable_dataset(4))  # the world holds it weakly
        loader = (torchdata.StatefulDataLoader if kind == "stateful" else DataLoader)(kept, **options)
    model = nn.Sequential(nn.Linear(1, 8), nn.Dropout(0.5), nn.Linear(8, 1))
    optimizer, seen = torch.optim.SGD(model.parameters(), 1e-3), []
    with attaching.attach(model, optimizer, record=False) as session:
        loader = loader if kind == "plain" else session.track(loader)
        begun = session.load(directory).get("epoch", 0) if directory else 0
        for epoch in range(begun, 2):
            for batch in loader:
                seen.append(batch["x"].tolist())
                model(batch["x"][:, None]).sum().backward()
                optimizer.step()
                optimizer.zero_grad()
                if session.steps == stop:
                    session.save(directory, epoch=epoch)
                    return seen, torch.empty(0)
    return seen, torch.cat([each.detach().flatten() for each in model.parameters()])


@pytest.mark.parametrize(("kind", "workers"), [("plain", 0), ("stateful", 0), ("stateful", 2), ("map", 0), ("map", 2)])
def test_a_resumed_run_is_the_run_bit_for_bit(kind: str, workers: int, tmp_path: Path) -> None:
    """Saved within an epoch, in its last batch, and in the next."""
    seen, parameters = train(kind, workers, None, None)
    for stop in (2, 6, 8) if not workers else (6,):
        directory = tmp_path / str(stop)
        before, _ = train(kind, workers, directory, stop)
        after, resumed = train(kind, workers, directory, None)
        assert before + after == seen
        assert torch.equal(resumed, parameters)
