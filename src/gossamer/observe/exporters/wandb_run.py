"""Weights & Biases: a run of its own in a project, by its library."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module

from gossamer.observe.exporters.points import Point

STEP = "gossamer/step"


class WandbWriter:
    """project: PROJECT or ENTITY/PROJECT. What else it needs it finds as always: WANDB_API_KEY, WANDB_MODE, ...

    The step is a metric of its own, because W&B drops what is logged for a step before the last.
    """

    def __init__(self, project: str) -> None:
        wandb = import_module("wandb")
        entity, _, name = project.rpartition("/")
        # A run that the script has begun stays the script's; what workers print is the launcher's
        settings = wandb.Settings(silent=True, console="off")
        self._run = wandb.init(entity=entity or None, project=name, reinit="create_new", settings=settings)
        self._run.define_metric("*", step_metric=STEP)

    def write(self, points: Sequence[Point]) -> None:
        for point in points:
            self._run.log({**point.values, STEP: point.step})

    def close(self) -> None:
        self._run.finish()
