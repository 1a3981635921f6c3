"""A worker of torch's pipelining over Gloo: trains one of two stages a few steps, and says what came out.

python pipeline_worker.py CODEC FEEDBACK SCHEDULE; CODEC none: without a boundary.
"""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Iterable

import torch
import torch.distributed as dist
from support.two_stages import halves
from torch import Tensor
from torch.distributed import pipelining
from torch.nn.functional import mse_loss

from gossamer.train.parallel import Boundary, CompressedStage, boundary

MICROBATCHES, BATCH, STEPS, WIDTH = 4, 16, 2, 256
INPUTS, TARGETS, IDS = (
    torch.arange(128.0).view(BATCH, 8).sin(),
    torch.arange(32.0).view(BATCH, 2).cos(),
    torch.arange(BATCH),
)


def edge_of(codec: str, feedback: str) -> Boundary | None:
    if codec == "none":
        return None
    differing = {"feedback": feedback, "samples": BATCH} if feedback != "none" else {}
    return boundary(codec, shape=(BATCH // MICROBATCHES, WIDTH), **differing)  # type: ignore[arg-type]


def digest(gradients: Iterable[Tensor | None]) -> str:
    found = hashlib.sha256()
    for gradient in gradients:
        assert gradient is not None
        found.update(gradient.numpy().tobytes())
    return found.hexdigest()


def main(codec: str, feedback: str, schedule: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, edge = dist.get_rank(), edge_of(codec, feedback)
    module = CompressedStage(
        halves(width=WIDTH)[rank], before=edge if rank == 1 else None, after=edge if rank == 0 else None
    )
    rows = BATCH // MICROBATCHES
    crossing = torch.empty(rows, WIDTH, requires_grad=True) if edge is None else edge.carrier()
    stage = pipelining.PipelineStage(
        module,
        rank,
        2,
        torch.device("cpu"),
        input_args=INPUTS[:rows] if rank == 0 else crossing,
        output_args=crossing if rank == 0 else TARGETS[:rows],
    )
    sent = _counted(stage)
    runner = getattr(pipelining, schedule)(stage, MICROBATCHES, loss_fn=mse_loss)
    samples = {"samples": IDS} if feedback != "none" else {}
    losses: list[Tensor] = []
    for _ in range(STEPS):
        if rank == 0:
            runner.step(INPUTS, **samples)
        else:
            runner.step(target=TARGETS, losses=losses, **samples)
    gradients = digest(parameter.grad for parameter in module.module.parameters())  # torch's eval() scales them, too
    answers = None
    if rank == 1:
        answers = runner.eval(target=TARGETS, **samples).tolist()
    else:
        runner.eval(INPUTS, **samples)
    found = {
        "gradients": gradients,
        "losses": [loss.item() for loss in losses],
        "answers": answers,
        "sent_bytes": sent,
    }
    print("said", json.dumps(found))
    dist.destroy_process_group()


def _counted(stage: pipelining.PipelineStage) -> list[int]:
    """The bytes of each tensor that the stage hands to Gloo, while it trains and while it answers."""
    sent: list[int] = []

    def counting(ops_of):  # type: ignore[no-untyped-def]
        def ops(microbatch: int) -> list[dist.P2POp]:
            found: list[dist.P2POp] = ops_of(microbatch)
            sent.extend(op.tensor.numel() * op.tensor.element_size() for op in found)
            return found

        return ops

    stage.get_fwd_send_ops = counting(stage.get_fwd_send_ops)  # type: ignore[method-assign]
    stage.get_bwd_send_ops = counting(stage.get_bwd_send_ops)  # type: ignore[method-assign]
    return sent


if __name__ == "__main__":
    main(*sys.argv[1:])
