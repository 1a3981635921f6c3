"""Averaging without a session: what are no tensors is named."""

from __future__ import annotations

from io import BytesIO
from typing import Any

import pytest
import torch
from laws.laws import in_threads

import gossamer
from gossamer.algorithms.compressors import Compressor, Feedback, PowerSGD, TopK
from gossamer.base import rng
from gossamer.base.layout import FlatTensors
from gossamer.comm.simulated import SimulatedGroup
from gossamer.errors import CheckpointError
from gossamer.train.session import average
from gossamer.train.session.average import AverageState, CallLane
from gossamer.train.world_state import WorldState


@pytest.mark.parametrize("given", [None, 3, [1.0], {"loss": 0.5}, [torch.ones(1), None]], ids=repr)
def test_invalid_tensors_are_named(given: Any) -> None:
    """Alone, too, where nothing would be averaged."""
    with pytest.raises(TypeError, match=r"average_ overwrites tensors.*gossamer\.average_\(\[tensor\], \.\.\.\)"):
        gossamer.average_(given, "Dense()")


def test_tensors_in_any_container_are_served() -> None:
    tensors = [torch.ones(2), torch.zeros(1)]
    for given in (tensors, tuple(tensors), iter(tensors), dict(enumerate(tensors))):
        gossamer.average_(given, "Dense()")  # type: ignore[arg-type]
    assert tensors[0].tolist() == [1.0, 1.0]


# -- what a compressor remembers, saved and loaded --------------------------------------------------------------------

SHAPES = {"a": (8, 6), "b": (5,), "c": (4, 3)}
ALTOGETHER, APART = (["abc"], ["cb", "a"])


def saved(state: dict[str, Any]) -> dict[str, Any]:
    """As it comes back from a file."""
    file = BytesIO()
    torch.save(state, file)
    file.seek(0)
    found: dict[str, Any] = torch.load(file, weights_only=True)
    return found


def averaged(memory: AverageState, rank: int, steps: range, buckets: list[str]) -> list[torch.Tensor]:
    found = []
    for step in steps:
        for bucket in buckets:
            make = {name: torch.randn(SHAPES[name], generator=rng.generator(step, rank, name)) for name in bucket}
            x = FlatTensors.pack(make)
            memory.average_(x)
            found += [view.clone() for _, view in sorted(x.items())]
        memory.step += 1
    return found


@pytest.mark.parametrize("buckets", [ALTOGETHER, APART], ids=["alike", "in other buckets"])
@pytest.mark.parametrize("compressor", [Feedback(TopK(density=0.1)), PowerSGD(rank=1)], ids=repr)
def test_training_continues_with_the_residuals_that_were_saved(compressor: Compressor, buckets: list[str]) -> None:
    transports = SimulatedGroup(2).transports

    def work(rank: int) -> None:
        memory = AverageState(compressor, transports[rank])
        averaged(memory, rank, range(3), ALTOGETHER)
        state = saved(memory.state_dict())
        fresh = AverageState(compressor, transports[rank])
        fresh.load_state_dict(state)
        whole, resumed = (averaged(each, rank, range(3, 6), buckets) for each in (memory, fresh))
        assert all(torch.equal(mine, other) for mine, other in zip(whole, resumed, strict=True))
        assert saved(memory.state_dict())["step"] == fresh.step == 6

    in_threads(work, 2)


def test_a_saved_state_is_a_copy() -> None:
    memory = AverageState(Feedback(TopK(density=0.1)), SimulatedGroup(1).transports[0])
    averaged(memory, 0, range(1), ALTOGETHER)
    state = memory.state_dict()
    before = {key: each["flat"].clone() for key, each in state["remembered"][0].items()}
    averaged(memory, 0, range(1, 3), ALTOGETHER)
    assert all(torch.equal(each["flat"], before[key]) for key, each in state["remembered"][0].items())


@pytest.mark.parametrize(
    ("changed", "named"),
    [
        ({"compressor": "Int8()"}, "has the compressor 'Int8\\(\\)', but this run has"),
        ({"rank": 1}, "has the rank 1, but this run has 0"),
        ({"world": 2}, "has the world 2, but this run has 1"),
        ({"remembered": [{"residual": {"slots": [["a", [4], 0, [1]]], "flat": torch.zeros(2)}}]}, "2 of 4 entries"),
        ({"remembered": [{"residual": {}}]}, "damaged or incomplete"),
    ],
)
def test_a_state_of_another_run_is_refused(changed: dict[str, Any], named: str) -> None:
    memory = AverageState(Feedback(TopK(density=0.1)), SimulatedGroup(1).transports[0])
    with pytest.raises(CheckpointError, match=named):
        memory.load_state_dict(memory.state_dict() | changed)


def test_average_continues_from_the_state_that_is_passed_as_it_was_saved(monkeypatch: pytest.MonkeyPatch) -> None:
    transport = SimulatedGroup(1).transports[0]
    place = WorldState(rank=0, size=2, local_rank=0, device=torch.device("cpu"))
    lane = CallLane("average_", transport, lambda script: average.run_script(script(), transport).result)
    monkeypatch.setattr(average, "current", lambda: place)
    monkeypatch.setattr(average.CallLane, "of_this_process", lambda caller: lane)
    state, compressor = dict[str, Any](), Feedback(TopK(density=0.1))
    gossamer.average_([torch.arange(10.0)], compressor, state)
    again = {kind: saved(each.state_dict()) for kind, each in state.items()}
    first, second = torch.arange(10.0), torch.arange(10.0)
    gossamer.average_([first], compressor, state)
    gossamer.average_([second], compressor, again)
    assert torch.equal(first, second)
    assert first[8] == 16.0, "what the first call did not send was added"
