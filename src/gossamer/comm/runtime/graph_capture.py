"""Graph capture: refuses to be recorded into a CUDA graph, which would replay kernels and call no hook."""

from __future__ import annotations

import torch

from gossamer.errors import LoopError


def is_capturing() -> bool:
    """Whether the caller's stream records a CUDA graph. Asks no GPU, and nothing where none was used."""
    return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()


def refuse_capture(what: str) -> None:
    """Raise LoopError where `what`, a hook of a session, runs while a graph is recorded."""
    if is_capturing():
        raise LoopError(
            f"a CUDA graph is recorded around {what}, where gossamer talks to the other workers: a replay calls no "
            "hook, so every later step would be trained alone. Record forward and backward without their hooks: "
            "model = torch.cuda.make_graphed_callables(model, (inputs,)) before gossamer.attach(model, optimizer), or "
            'torch.compile(model, mode="reduce-overhead"); and leave loss.backward() and optimizer.step() outside of '
            "torch.cuda.graph(...)."
        )
