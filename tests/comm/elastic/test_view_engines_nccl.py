"""NCCL group: what torch is asked for, in order; its own class is not there without CUDA, and has a stand-in."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
import torch.distributed as dist

from gossamer.comm.elastic.view_engines import OWN_ERROR_HANDLING, nccl_group


def test_a_group_is_connected_at_once_and_its_errors_do_not_end_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[Any] = []

    class Engine:
        Options = staticmethod(lambda: "options")

        def __init__(self, *given: object) -> None:
            calls.append((*given, os.environ.get(OWN_ERROR_HANDLING[0])))

        def _set_sequence_number_for_group(self) -> None:
            calls.append("numbered")

        def eager_connect_single_device(self, device: torch.device) -> None:
            calls.append(device)

    monkeypatch.setattr(dist, "ProcessGroupNCCL", Engine, raising=False)
    monkeypatch.setattr(torch.cuda, "set_device", calls.append)
    monkeypatch.delenv(OWN_ERROR_HANDLING[0], raising=False)
    device = torch.device("cuda", 3)
    try:
        made = nccl_group("a store", 1, 2, device)  # type: ignore[arg-type]
    finally:
        os.environ.pop(OWN_ERROR_HANDLING[0], None)
    assert isinstance(made, Engine)
    assert calls == [device, ("a store", 1, 2, "options", "0"), "numbered", device]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_a_group_of_one_gpu_answers_and_is_aborted() -> None:
    from gossamer.base.ops import AllReduceMean
    from gossamer.comm.elastic.view_engines import ViewEngine
    from gossamer.comm.process_group import MeetingPeers

    group = nccl_group(dist.HashStore(), 0, 1, torch.device("cuda", 0))
    engine = ViewEngine(group, 1, MeetingPeers(0, 1), 30.0)
    mean = engine.answer(AllReduceMean(torch.arange(5.0, device="cuda")))
    assert mean.tolist() == [0.0, 1.0, 2.0, 3.0, 4.0]
    engine.abort()
