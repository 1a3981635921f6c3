"""A worker with two of four pipeline stages: torch's schedules for several stages a rank, and an exact codec.

Fails unless gradients have the bits of the whole model's in one process.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import pipelining
from torch.nn.functional import mse_loss

from gossamer.train.parallel import CompressedStage, boundary

STAGES, MICROBATCHES = 4, 4
PLACES = {"ScheduleInterleaved1F1B": ((0, 2), (1, 3)), "ScheduleZBVZeroBubble": ((0, 3), (1, 2))}  # by rank
INPUTS, TARGETS = torch.arange(256.0).view(16, 16).sin(), torch.arange(256.0).view(16, 16).cos()


def layers(index: int) -> nn.Module:
    torch.manual_seed(index)
    return nn.Sequential(nn.Linear(16, 16), nn.Tanh())


def train(schedule: str) -> None:
    mine = PLACES[schedule][dist.get_rank()]
    edge = boundary("Dense()", shape=(4, 16))
    modules = {
        index: CompressedStage(
            layers(index), before=edge if index > 0 else None, after=edge if index < STAGES - 1 else None
        )
        for index in mine
    }
    stages = [
        pipelining.PipelineStage(
            module,
            index,
            STAGES,
            torch.device("cpu"),
            input_args=edge.carrier() if index > 0 else INPUTS[:4],
            output_args=edge.carrier() if index < STAGES - 1 else TARGETS[:4],
        )
        for index, module in modules.items()
    ]
    runner = getattr(pipelining, schedule)(stages, MICROBATCHES, loss_fn=mse_loss)
    runner.step(*([INPUTS] if 0 in mine else []), target=TARGETS if STAGES - 1 in mine else None)
    whole = nn.Sequential(*map(layers, range(STAGES)))
    for x, y in zip(INPUTS.chunk(MICROBATCHES), TARGETS.chunk(MICROBATCHES), strict=True):
        mse_loss(whole(x), y).backward()  # type: ignore[no-untyped-call]
    for index, module in modules.items():
        for found, exact in zip(module.module.parameters(), whole[index].parameters(), strict=True):
            assert found.grad is not None
            assert exact.grad is not None
            assert torch.equal(found.grad, exact.grad / MICROBATCHES), f"{schedule}, stage {index}"
    print("equal", schedule, *mine)


if __name__ == "__main__":
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    for each in PLACES:
        train(each)
    dist.destroy_process_group()
