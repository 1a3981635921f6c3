"""DDP hook: what it says where a run encrypts."""

from __future__ import annotations

import pytest
import torch
from support.virtual_workers import heard
from torch import nn

from gossamer import events
from gossamer.base.layout import FlatTensors
from gossamer.comm.simulated import SimulatedGroup
from gossamer.errors import AttachError
from gossamer.train.session import ddp_hook as hooks


@pytest.mark.parametrize("told", ["", "a folder"])
def test_unencrypted_traffic_of_ddp_is_reported(told: str, monkeypatch: pytest.MonkeyPatch) -> None:
    said = []
    monkeypatch.setenv("GOSSAMER_TLS", told)
    monkeypatch.setattr(hooks, "group_transport", lambda *_: SimulatedGroup(1).transports[0])
    end = events.subscribe(lambda event: said.append(event.message) if isinstance(event, events.Noticed) else None)
    state, _ = hooks.ddp_hook(nn.Linear(2, 2), "Int8()")
    end()
    state.comm_thread.close()
    assert ["DDP's own traffic is not encrypted" in each for each in said] == [True] * bool(told)


def test_the_state_of_the_hook_is_saved_and_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hooks, "group_transport", lambda *_: SimulatedGroup(1).transports[0])
    with heard(events.WithoutSession) as told:
        first, second = (hooks.ddp_hook(nn.Linear(2, 2), "Route(Feedback(TopK(0.5)), smallest=0)")[0] for _ in range(2))
    assert [event.trains for event in told] == [True, True]
    first.memory.average_(FlatTensors.pack({"weight": torch.tensor([[1.0, 2.0], [3.0, 4.0]])}))
    first.memory.step = 7
    second.load_state_dict(first.state_dict())
    x = FlatTensors.pack({"weight": torch.zeros(2, 2)})
    second.memory.average_(x)
    assert x["weight"].tolist() == [[1.0, 2.0], [0.0, 0.0]], "what was not sent before"
    assert second.memory.step == 7
    for state in (first, second):
        state.comm_thread.close()


class Wrapper(nn.Module):
    """A model with a parameter of the same name as that of its own part "module"."""

    def __init__(self) -> None:
        super().__init__()
        self.module, self.weight = nn.Linear(2, 2, bias=False), nn.Parameter(torch.ones(2, 2))


def test_parameters_of_a_model_with_a_part_named_module_have_different_names(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hooks, "group_transport", lambda *_: SimulatedGroup(1).transports[0])
    model = Wrapper()
    state, _ = hooks.ddp_hook(model, "TopK(0.5)")
    state.comm_thread.close()
    assert [state.names[id(parameter)] for parameter in model.parameters()] == ["weight", "module.weight"]


def test_sparse_gradients_are_refused() -> None:
    with pytest.raises(AttachError, match=r"^0\.weight has sparse gradients.*sparse=False; or .*gossamer\.attach"):
        hooks.ddp_hook(nn.Sequential(nn.Embedding(4, 2, sparse=True), nn.Linear(2, 2)), "Dense()")
