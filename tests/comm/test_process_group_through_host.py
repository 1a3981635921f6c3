"""Through host: an engine sees tensors of this machine only, and answers come back to where the operation's lie."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from gossamer.base.op_semantics import answer_all
from gossamer.base.ops import AllGather, AllReduceMean, AllToAll, NeighborAllGather
from gossamer.comm.process_group import through_host

OPS: list[Any] = [
    AllReduceMean(torch.arange(3.0)),
    AllReduceMean(torch.arange(3.0), torch.empty(3)),
    AllGather((torch.arange(3.0), torch.tensor([1]))),
    AllToAll(((torch.arange(3.0),),)),
    NeighborAllGather((torch.arange(3.0),), ((0, 1.0),)),
]


@pytest.mark.parametrize("op", OPS, ids=lambda op: type(op).__name__)
def test_answers_are_those_of_the_engine(op: Any) -> None:
    seen: list[Any] = []

    def begin(here: Any) -> Any:
        seen.append(here)
        return lambda: answer_all([here])[0]

    found, due = through_host(op, begin, 0)(), answer_all([op])[0]
    assert all(tensor.device.type == "cpu" for tensor in seen[0].tensors())
    if isinstance(op, AllReduceMean):
        assert torch.equal(found, due)
        assert op.out is None or found is op.out
    else:
        assert all(torch.equal(*pair) for pair in zip(found[0], due[0], strict=True))
