"""What a script may not do in a process that it shares."""

from __future__ import annotations

import signal

import pytest
import torch
from torch.utils.data import DataLoader

from gossamer.plan.simulate import SimulationError
from gossamer.plan.simulate.script_guards import guarded

DATA = [torch.tensor(float(number)) for number in range(6)]


def test_nothing_forks() -> None:
    said: list[str] = []
    with guarded(said.append):
        loaders = [
            DataLoader(DATA, batch_size=2, num_workers=2, prefetch_factor=3, persistent_workers=True, timeout=9),
            DataLoader(DATA, 2, False, None, None, 2),  # type: ignore[arg-type]
            DataLoader(DATA, batch_size=2),
        ]
        assert [loader.num_workers for loader in loaders] == [0, 0, 0]
        assert [[batch.tolist() for batch in loader] for loader in loaders] == 3 * [[[0, 1], [2, 3], [4, 5]]]
    assert len(said) == 2
    assert "asks for 2 processes" in said[0]
    assert DataLoader(DATA, num_workers=1).num_workers == 1


def test_no_signal_is_handled() -> None:
    said: list[str] = []
    before = signal.getsignal(signal.SIGUSR1)
    with guarded(said.append):
        assert signal.signal(signal.SIGUSR1, lambda *_: None) is before
    assert signal.getsignal(signal.SIGUSR1) is before
    assert "SIGUSR1 is left out" in said[0]


def test_no_process_group_is_made() -> None:
    begin = torch.distributed.init_process_group
    with guarded(lambda text: None), pytest.raises(SimulationError, match=r"uses torch\.distributed directly"):
        torch.distributed.init_process_group("gloo", rank=0, world_size=1)
    assert torch.distributed.init_process_group is begin
