"""Options of traced runs: --trace and --torch-profiler, their checks, and what workers are told of them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from gossamer.base.tracing import active
from gossamer.base.tracing.step_range import StepRange, read_steps

Command = Callable[..., Any]


def check_steps(context: click.Context, option: click.Parameter, text: str | None) -> StepRange | None:
    try:
        return None if text is None else read_steps(text)
    except ValueError as error:
        raise click.BadParameter(str(error)) from None


trace_option = click.option(
    "--trace",
    metavar="STEPS",
    callback=check_steps,
    help='Record what every rank does in these steps, such as 100:110, or "all", for `gossamer trace`.',
)


def check_ranks(context: click.Context, option: click.Parameter, text: str | None) -> str | None:
    from gossamer.train.session.operator_profile import read_ranks  # imports torch, which a command's help does without

    try:
        if text is not None:
            read_ranks(text)
    except ValueError as error:
        raise click.BadParameter(str(error)) from None
    return text


profiler_option = click.option(
    "--torch-profiler",
    metavar="RANKS",
    callback=check_ranks,
    help='With --trace: the operators of these ranks as well, by torch.profiler, such as 0,2, or "all".',
)


def trace_options(command: Command) -> Command:
    """Both of them, --trace first."""
    return trace_option(profiler_option(command))


def check_profiled(steps: StepRange | None, profiled: str | None, world: int | None) -> None:
    """Before anything is made. world: how many ranks there will be; None where workers come and go. Raises UsageError
    where operators are asked for, but no steps, or of ranks that there will not be."""
    if profiled is None:
        return
    if steps is None:
        raise click.UsageError(
            "--torch-profiler profiles the steps that --trace names, and it names none: add --trace 100:102"
        )
    from gossamer.train.session.operator_profile import read_ranks

    ranks = read_ranks(profiled) or frozenset()
    if world is not None and (beyond := sorted(rank for rank in ranks if rank >= world)):
        there = ",".join(map(str, sorted(ranks.difference(beyond)) or range(min(world, 2))))
        raise click.UsageError(
            f"--torch-profiler {profiled} names ranks that this run does not have ({', '.join(map(str, beyond))}): it "
            f"counts them from 0 to {world - 1}. Write --torch-profiler {there}, or all"
        )


def trace_settings(steps: StepRange | None, profiled: str | None, logs: Path) -> dict[str, str]:
    """What the environment of workers says of it."""
    if steps is None:
        return {}
    from gossamer.train.session.operator_profile import PROFILED

    told = {active.TRACE: str(logs.resolve()), active.STEPS: str(steps)}
    return told if profiled is None else told | {PROFILED: profiled}
