"""DDP hook: what it says where a run encrypts."""

from __future__ import annotations

import pytest
from torch import nn

from gossamer import events
from gossamer.session import ddp_hook as hooks
from gossamer.transports.simulated import SimulatedGroup


@pytest.mark.parametrize("told", ["", "a folder"])
def test_what_ddp_does_not_encrypt_is_said(told: str, monkeypatch: pytest.MonkeyPatch) -> None:
    said = []
    monkeypatch.setenv("GOSSAMER_TLS", told)
    monkeypatch.setattr(hooks, "group_transport", lambda *_: SimulatedGroup(1).transports[0])
    end = events.subscribe(lambda event: said.append(event.message) if isinstance(event, events.Noticed) else None)
    state, _ = hooks.ddp_hook(nn.Linear(2, 2), "Int8()")
    end()
    state.comm_thread.close()
    assert ["DDP's own traffic is not encrypted" in each for each in said] == [True] * bool(told)
