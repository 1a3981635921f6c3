"""Rehearsal worker, run as `gossamer run plan/rehearse/worker.py SHAPES.json --step-seconds S ...`."""

from __future__ import annotations

import argparse
import os
import time
from pathlib import Path
from statistics import fmean

from gossamer import events
from gossamer.algorithms.recipes.recipe import resolve
from gossamer.plan.rehearse.model_shapes import from_file
from gossamer.plan.rehearse.simulated_model import SimulatedModel, idle
from gossamer.train.session.attach import attach
from gossamer.train.world import init


def main(args: argparse.Namespace) -> None:
    world = init()
    gradients = from_file(args.shapes).gradients
    model = SimulatedModel(gradients, step_seconds=args.step_seconds, forward_share=args.forward_share, seed=world.rank)
    recipe = resolve(os.environ.get("GOSSAMER_RECIPE"), world.size)
    optimizer = idle(model, recipe)
    late, sent = 0.0, SentBytes(recipe.strategy.steady_stage.schedule.delay)
    events.subscribe(sent)
    with attach(model, optimizer) as session:
        began = time.process_time()
        for _ in range(args.steps):
            model().backward()
            optimizer.step()
            optimizer.zero_grad()
            late += model.late_seconds
        spent = time.process_time() - began
        session.log(
            processor_seconds_per_step=spent / args.steps,
            late_seconds_per_step=late / args.steps,
            bytes_sent_per_step=sent.bytes_per_step,
        )


class SentBytes:
    """Listener that averages the bytes of steps over the last whole periods, once rounds in flight land."""

    def __init__(self, delay: int) -> None:
        self._delay, self._period = delay, 1
        self._steps: list[float] = []

    def __call__(self, event: events.Event) -> None:
        if isinstance(event, events.Attached):
            self._period = event.period
        elif isinstance(event, events.StepEnded):
            self._steps.append(event.bytes_sent)

    @property
    def bytes_per_step(self) -> float:
        periods = max(1, (len(self._steps) - self._delay) // self._period)
        return fmean(self._steps[-periods * self._period :])


if __name__ == "__main__":
    options = argparse.ArgumentParser(description="One worker of a rehearsal.")
    options.add_argument("shapes", type=Path)
    options.add_argument("--step-seconds", type=float, required=True)
    options.add_argument("--forward-share", type=float, required=True)
    options.add_argument("--steps", type=int, required=True)
    main(options.parse_args())
