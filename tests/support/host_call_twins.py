"""Broken twins that wait for the device on the training thread, each in a way of its own: prints what was counted.

python host_call_twins.py
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import torch
from benchmarks import fake_accelerator, host_calls
from benchmarks.host_calls import on_training_threads

from gossamer.algorithms.compressors import Int8
from gossamer.train.engine.extension import GradientUse
from gossamer.train.session.clipping_and_nonfinite import GradientClip
from gossamer.train.synchronizers.gradients import GradientSynchronizer


def before(function: Callable[..., Any], act: Callable[..., object]) -> Callable[..., Any]:
    def both(*args: Any, **kwargs: Any) -> Any:
        act(*args)
        return function(*args, **kwargs)

    return both


def reads_in_a_hook(_: Any, name: str, parameter: torch.Tensor) -> None:
    parameter.grad.sum().item()  # type: ignore[union-attr]


def copies_before_the_step(_: Any, use: GradientUse) -> None:
    [parameter.grad.cpu() for parameter in use.parameters.values() if parameter.grad is not None]


def selects_in_a_hook(_: Any, name: str, parameter: torch.Tensor) -> None:
    assert parameter.grad is not None
    parameter.grad[parameter.grad > 0]


def reads_in_the_encoder(_: Any, x: Any, *more: Any) -> None:
    if x.flat.is_floating_point() and not x.flat.is_meta:
        float(x.flat.sum())


TWINS = {
    "hook": (GradientSynchronizer, "_ready", reads_in_a_hook),
    "step": (GradientClip, "before_step", copies_before_the_step),
    "index": (GradientSynchronizer, "_ready", selects_in_a_hook),
    "encoder": (Int8, "encode", reads_in_the_encoder),
}


def digest(recipe: str) -> list[float]:
    """A number that follows from each worker's parameters at the end."""
    made, build = list[torch.nn.Module](), host_calls.model

    def build_one() -> torch.nn.Module:
        made.append(build())
        return made[-1]

    host_calls.model = build_one
    host_calls.host_calls(recipe)
    host_calls.model = build
    return [sum(float(p.detach().double().abs().sum()) for p in each.parameters()) for each in made]


def main() -> None:
    torch.set_num_threads(1)
    fake_accelerator.register()
    found: dict[str, Any] = {
        "parameters": {recipe: digest(recipe) for recipe in ("Dense()", "Int8()", "LocalSGD(period=1) + TopK(0.1)")}
    }
    for name, (owner, method, act) in TWINS.items():
        honest = getattr(owner, method)
        setattr(owner, method, before(honest, act))
        calls = host_calls.host_calls("Int8()")
        setattr(owner, method, honest)
        mine = on_training_threads(calls)
        found[name] = {
            "training": sorted({(call.kind, call.thread) for call in mine}),
            "communication": len(calls) - len(mine),
        }
    print(json.dumps(found))


if __name__ == "__main__":
    main()
