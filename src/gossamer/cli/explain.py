"""`gossamer explain`: schedule, traffic, memory and step time of a recipe, without training."""

from __future__ import annotations

import json
import re
import shlex
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import groupby
from pathlib import Path
from typing import Any

import click

from gossamer.algorithms.compressors import Codec
from gossamer.algorithms.recipes import retained_benefit
from gossamer.algorithms.recipes.advice_reference import read_recipe
from gossamer.algorithms.recipes.auto import Auto
from gossamer.algorithms.recipes.recipe import Recipe, automatic, resolve
from gossamer.algorithms.recipes.wrapping import replace_tables, tables_of
from gossamer.algorithms.strategies import (
    AveragingStage,
    FederatedStage,
    GradientStage,
    PeriodicSchedule,
    Strategy,
    SyncRound,
)
from gossamer.algorithms.strategies.forms_by_speed import forms_by_speed, speed_use
from gossamer.algorithms.strategies.shares_by_speed import LEAST_GAIN
from gossamer.base.units import rate_text, seconds_text
from gossamer.cli.console import echo
from gossamer.cli.explain_federated import NO_STEP_TIME, explain_federated
from gossamer.cli.options import FiniteRange, output_option, speeds_option
from gossamer.cli.program import ScriptCommand, ScriptPath
from gossamer.cli.script_terms import register_terms
from gossamer.comm.mesh.collective_selector import AUTO
from gossamer.comm.network import read_network
from gossamer.events import Attached
from gossamer.plan.estimate.step_time import (
    NOT_PREDICTABLE,
    StepTimeEstimate,
    estimate_step_time,
    is_predictable,
    placed_on,
)
from gossamer.plan.estimate.timeline import AT_ONCE, LANDS, LEAVES, TRAINS, TRAVELS, draw
from gossamer.plan.estimate.worker_speeds import MOST_WORKERS, read_speeds
from gossamer.plan.profile.profile_runs import ProfileError, assume_profile, profile_script
from gossamer.plan.profile.synthetic_shapes import assumed
from gossamer.plan.profile.user_script import attached_by
from gossamer.train.auto.decision import ladder_text
from gossamer.train.auto.ladder import admitted, beginning
from gossamer.train.traffic.traffic import TrafficEstimate, bits_per_second_to_hide, estimate_traffic

ASSUMED_PARAMETERS = 10_000_000
MOST_PARAMETERS = 10**12
THIS, MOST_SHOWN = "this recipe", 16  # workers with shares in one line
FLAGS = ("--help", "-h", "--own-machines")
COLORS = {"bright_black": TRAINS, "cyan": LEAVES + TRAVELS, "green": LANDS + AT_ONCE}


class _OptionsUntilScript(ScriptCommand):
    """Options are allowed before and after RECIPE; all words after SCRIPT belong to the script."""

    allow_interspersed_args = False

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        recipe = _first_positional(args, 0)
        script = _first_positional(args, recipe + 1)
        if args[recipe : recipe + 1] and args[recipe].endswith(".py"):
            words = shlex.join([*(args[script : script + 1] or ["Int8()"]), args[recipe]])
            raise click.UsageError(f"The recipe must precede the script. Write: {ctx.command_path} {words}", ctx)
        return super().parse_args(
            ctx, args[:recipe] + args[recipe + 1 : script] + args[recipe : recipe + 1] + args[script:]
        )


def _first_positional(args: list[str], start: int) -> int:
    """Index of the first positional argument from `start` on. Every option except the flags takes a value."""
    at = start
    while at < len(args) and args[at].startswith("-"):
        at += 1 if "=" in args[at] or args[at] in FLAGS else 2
    return min(at, len(args))


@click.command(cls=_OptionsUntilScript)
@click.argument("recipe")
@click.argument("script", required=False, type=ScriptPath())
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED, metavar="[ARGS]...")
@click.option(
    "--workers", default=4, show_default=True, type=click.IntRange(1, MOST_WORKERS), help="Number of workers."
)
@click.option(
    "--parameters",
    type=click.IntRange(1, MOST_PARAMETERS),
    help=f"Assume a model of this size if there is no SCRIPT. [default: {ASSUMED_PARAMETERS}]",
)
@click.option("--network", metavar="SPEC", help="Estimate the step time on it: 100mbit,20ms or a TOML file.")
@click.option(
    "--step-seconds",
    type=FiniteRange(min=0, min_open=True),
    help="Compute time of a step on one worker; with a SCRIPT, replaces the measurement.",
)
@speeds_option
@click.option(
    "--steps",
    type=click.IntRange(min=1),
    help="Steps of the training: shows what measured recipes retained with as many rounds, and other periods.",
)
@click.option(
    "--own-machines",
    is_flag=True,
    help="Each worker has a machine like this one.  [default: all share this one, as with gossamer run]",
)
@output_option("json", "Also write the result as JSON.")
def explain(
    recipe: str,
    script: Path | None,
    arguments: tuple[str, ...],
    workers: int,
    parameters: int | None,
    network: str | None,
    step_seconds: float | None,
    speeds_text: str | None,
    steps: int | None,
    own_machines: bool,
    json_file: Path | None,
) -> None:
    """Show the terms, schedule, traffic and memory of RECIPE.

    SCRIPT runs with its ARGS until it calls gossamer.attach; then its model is priced, and nothing is sent. A few steps
    of it are also timed alone: they give the link rate that hides communication and, with --network, the step time on
    that network. With --speeds, also the part of the workers' speeds that RECIPE uses. With a federated RECIPE, SCRIPT
    is one of `gossamer federate`, and --workers counts its clients.
    """
    _refuse_contradictions(recipe, script, parameters, network, step_seconds)
    recipe = read_recipe(recipe)
    speeds = () if speeds_text is None else read_speeds(speeds_text, workers)
    if script is not None:
        register_terms(script, arguments, [recipe])
    auto = automatic(recipe)
    if auto is not None and auto.steps is None:
        auto = replace(auto, steps=steps)
    first = recipe if auto is None else beginning(admitted(auto, adaptive=False)).written
    resolved = resolve(first, workers)
    if isinstance(resolved.strategy.steady_stage, FederatedStage):
        if network is not None or step_seconds is not None or own_machines or speeds_text is not None:
            raise click.UsageError(NO_STEP_TIME)
        facts, record = explain_federated(resolved, script, arguments, parameters or ASSUMED_PARAMETERS, workers)
        _print_report(facts, record, json_file)
        return
    if network is not None:
        resolved = placed_on(resolved, read_network(network, workers), workers)
    model, attached = _model(resolved, script, arguments, parameters)
    traffic = estimate_traffic(resolved, attached, workers=workers)
    step = _step(resolved, attached, script, arguments, workers, network, step_seconds, own_machines, speeds)
    for line in _choice_lines(auto) if auto is not None else ():
        echo(line)
    for line in _lines(resolved, model, traffic):
        echo(line)
    by_codec = _bytes_by_codec(resolved, attached, workers)
    for line in _codec_lines(resolved, by_codec, workers):
        echo(line)
    for line in _measured_lines(resolved, workers, steps):
        echo(line)
    for line in _hiding_lines(resolved, traffic, step):
        echo(line)
    for line in _time_lines(traffic, step.estimate) if step.estimate is not None else ():
        echo(line)
    if network is not None and step.estimate is None:
        echo(f"\n{NOT_PREDICTABLE}")
    for line in _speed_lines(resolved, speeds, step.estimate) if speeds else ():
        echo(line)
    if json_file is not None:
        record = _record(resolved, model, traffic, step)
        if speeds:
            record["speeds"] = {"speeds": speeds, "use": _uses(resolved, speeds)}
        if by_codec:
            record["bytes_sent_per_step_by_codec"] = {repr(codec): sent for codec, sent in by_codec.items()}
        if steps is not None:
            record["training"] = {"steps": steps, "rounds": retained_benefit.rounds_of(resolved, steps)}
        json_file.write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")


def _print_report(lines: list[str], record: dict[str, Any], json_file: Path | None) -> None:
    for line in lines:
        echo(line)
    if json_file is not None:
        json_file.write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")


def _refuse_contradictions(
    recipe: str, script: Path | None, parameters: int | None, network: str | None, step_seconds: float | None
) -> None:
    if script is not None and parameters is not None:
        raise click.UsageError(
            "SCRIPT has a model, so --parameters has no effect. Leave out one of the two: "
            f"gossamer explain '{recipe}' {script}"
        )
    if network is not None and script is None and step_seconds is None:
        raise click.UsageError(
            "the step time on a network depends on the compute time of a step. Name a SCRIPT to measure it, or write "
            f"it: gossamer explain '{recipe}' --network {network} --step-seconds 0.2"
        )


@dataclass(frozen=True)
class _Step:
    """Measured and estimated times of a step."""

    compute_seconds: float | None
    estimate: StepTimeEstimate | None = None  # on the network; None without one
    unknown: str | None = None  # why the step of the script could not be timed


def _step(
    recipe: Recipe,
    model: Attached,
    script: Path | None,
    arguments: tuple[str, ...],
    workers: int,
    network: str | None,
    step_seconds: float | None,
    own_machines: bool,
    speeds: Sequence[float] = (),
) -> _Step:
    """Compute time as given or as measured with the script, and the step time estimated from it on the network."""
    there = read_network(network, workers) if network is not None else None  # first, to report a wrong network at once
    copies = 1 if own_machines or there is None else workers
    if there is None or not is_predictable(recipe):
        if script is None or step_seconds is not None:
            return _Step(step_seconds)
        try:  # the compute time does not depend on the recipe
            return _Step(profile_script(script, arguments, resolve(None), workers, copies).compute_seconds)
        except ProfileError as error:
            return _Step(None, unknown=str(error))
    if step_seconds is not None:
        measured = assume_profile(model, recipe, step_seconds, workers)
    else:
        assert script is not None  # checked by _refuse_contradictions
        measured = profile_script(script, arguments, recipe, workers, copies)
    estimate = estimate_step_time(recipe, replace(measured, speeds=speeds), there, workers)
    return _Step(measured.compute_seconds, estimate)


def _model(
    recipe: Recipe, script: Path | None, arguments: tuple[str, ...], parameters: int | None
) -> tuple[str, Attached]:
    """The model to estimate: its description and its Attached event."""
    if script is not None:
        return str(script), attached_by(script, arguments, recipe)
    return "shapes assumed, like a transformer's", assumed(parameters or ASSUMED_PARAMETERS, recipe)


def _choice_lines(auto: Auto) -> Iterator[str]:
    """Candidates of a recipe that is chosen while training. The lines after them describe the first one."""
    yield from ladder_text(auto)
    yield "\nThe first recipe:"


def _lines(recipe: Recipe, model: str, traffic: TrafficEstimate) -> Iterator[str]:
    yield f"recipe      {recipe!r}"
    yield f"workers     {traffic.workers}"
    yield f"parameters  {traffic.parameters:,} in {traffic.tensors:,} tensors ({model})"
    yield f"batch       {_batch(recipe, traffic.workers)}"
    yield from _rate_lines(_batches(recipe, traffic.workers))
    yield from _schedule_lines(recipe.strategy.among(traffic.workers))
    yield ""
    yield f"{_cycle(traffic)} sends, in bytes per worker:"
    for where, op, sent in _table(traffic):
        yield f"  {where:<18}{op:<18}{sent:>12,.0f}"
    if traffic.passes == 1:
        yield f"  {'total':<28}{traffic.bytes_sent:>20,.0f}{_comparison(traffic)}"
    else:
        yield f"  {'total':<28}{traffic.cycle_bytes_sent:>20,.0f}"
        yield f"  {'per backward pass':<28}{traffic.bytes_sent_per_pass:>20,.0f}{_comparison(traffic)}"
    each = "   in every backward pass" * (traffic.passes > 1)
    yield f"  {'dense float32 ring':<28}{traffic.dense_bytes_sent:>20,.0f}{each}"
    yield ""
    yield "State of each worker between steps, in bytes:"
    yield f"  {'residuals':<28}{traffic.residual_bytes:>20,}"
    yield f"  {'other state':<28}{traffic.other_state_bytes:>20,}"
    if traffic.strategy_bytes:
        yield f"  {'for the strategy':<28}{traffic.strategy_bytes:>20,}"


def _bytes_by_codec(recipe: Recipe, model: Attached, workers: int) -> dict[Codec, float]:
    """Bytes per step of a worker with each codec; empty if the recipe has one for all."""

    def sent(codec: Codec) -> float:
        compressor = replace_tables(
            recipe.compressor, lambda table: codec if codec in table.codecs else table.codecs[0]
        )
        return estimate_traffic(replace(recipe, compressor=compressor), model, workers=workers).bytes_sent

    return {codec: sent(codec) for table in tables_of(recipe.compressor) for codec in table.codecs}


def _codec_lines(recipe: Recipe, by_codec: Mapping[Codec, float], workers: int) -> Iterator[str]:
    """Bytes of the workers with each codec, if they differ."""
    if not by_codec:
        return
    table = tables_of(recipe.compressor)[0]
    ranks = {codec: _ranges(of) for codec, of in table.senders(workers)} if table.is_placed else {}
    yield ""
    yield "Bytes per step of a worker, by its codec:"
    for codec, sent in by_codec.items():
        who = f"   rank{'s' * (not ranks[codec].isdecimal())} {ranks[codec]}" if codec in ranks else ""
        yield f"  {codec!r:<28}{sent:>20,.0f}{who}"
    if table.is_placed:
        yield "The table above has means over the workers."
    else:
        yield f"The table above counts all workers as usual: a session selects the slow ones by {table!r}."


def _ranges(ranks: Sequence[int]) -> str:
    """Text of ascending ranks, such as "0-2, 5"."""
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and rank == runs[-1][-1] + 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    return ", ".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else f"{run[0]}" for run in runs)


def _measured_lines(recipe: Recipe, workers: int, steps: int | None) -> Iterator[str]:
    """Measured retained benefit of communication: of the recipe, and over rounds."""
    measured = retained_benefit.measured_share(recipe, workers)
    if measured is not None:
        yield from _share_lines(measured)
    period = retained_benefit.averaging_period(recipe)
    if period <= 1 or not (known := retained_benefit.measured_bands()):
        return
    yield ""
    if steps is not None:
        yield from _training_lines(period, steps, known)
        return
    yield f"Retained benefit of all measured recipes with periods, by rounds (steps of the training / {period}):"
    for band in known:
        yield f"  {band.rounds:<12}  {band.retained}"


def _training_lines(period: int, steps: int, known: Sequence[retained_benefit.RoundsBand]) -> Iterator[str]:
    """Rounds of a training, and the periods that give it more or fewer."""
    yield f"A training of {steps:,} steps has {steps / period:,.4g} rounds of {period:,} steps. By rounds, measured"
    yield "recipes retained this benefit of communication:"
    yield f"  {'rounds':<12}  {'retained':<13} period of this training"
    mine = retained_benefit.band_of(period, steps)
    for band in known:
        if periods := band.periods(steps):
            to = f" to {periods[-1]:,}" if len(periods) > 1 else ""
            yield f"  {band.rounds:<12}  {band.retained:<13} {periods[0]:,}{to}{'   this recipe' * (band == mine)}"
    if period > steps:
        yield f"  warning: the training ends before its first round. Write {retained_benefit.with_many_rounds(steps)}"
    elif mine is not None and mine.is_low:
        yield f"  warning: less than half. Write {retained_benefit.with_many_rounds(steps)}"


def _share_lines(measured: retained_benefit.MeasuredShare) -> Iterator[str]:
    yield ""
    yield f"Retained benefit of communication, measured on {measured.where}:"
    yield f"  {retained_benefit.text(measured.share)}; lock step 100 %, training alone 0 %"
    if measured.is_low and (better := retained_benefit.better_share(measured)) is not None:
        yield f"  warning: less than half. With at most as many bytes: {better.recipe}"
        yield f"  kept {retained_benefit.text(better.share)}"


def _hiding_lines(recipe: Recipe, traffic: TrafficEstimate, step: _Step) -> Iterator[str]:
    """Link rate of a worker at which communication is hidden behind computation."""
    if not traffic.bytes_sent:
        return
    yield ""
    if step.compute_seconds is None:
        yield f"To hide communication, the {8 * traffic.bytes_sent_per_pass:,.0f} bits of a backward pass must be sent"
        yield "while a step computes. For the required rate, name a SCRIPT or the compute time: --step-seconds 0.2"
        if step.unknown is not None:
            yield f"({step.unknown})"
        return
    computing = seconds_text(step.compute_seconds)
    yield f"To hide communication behind the {computing} of computation per step, each worker must send at least:"
    for name, rate in _rates_to_hide(traffic, step.compute_seconds).items():
        yield f"  {name:<28}{rate_text(rate):>20}"
    stage = recipe.strategy.steady_stage
    if isinstance(stage, AveragingStage) and not stage.schedule.delay:
        yield "on average. Without a delay, workers wait for each whole round at any link rate"


def _rates_to_hide(traffic: TrafficEstimate, compute_seconds: float) -> dict[str, float]:
    sent = {"this recipe": traffic.bytes_sent_per_pass, "dense float32 ring": traffic.dense_bytes_sent}
    return {name: bits_per_second_to_hide(nbytes, compute_seconds) for name, nbytes in sent.items()}


def _cycle(traffic: TrafficEstimate) -> str:
    """The period in which the bytes are counted."""
    if traffic.steps > 1:
        return f"One period of {traffic.passes:,} steps"
    return "One step" if traffic.passes == 1 else f"One exchange of {traffic.passes:,} backward passes"


def _batch(recipe: Recipe, workers: int) -> str:
    """Samples per optimizer step, at first."""
    stage, loop = recipe.strategy.stages[0], "your loop's batch size on each"
    if isinstance(stage, GradientStage) and stage.batches is not None:
        return f"{stage.batches} backward passes x {loop}, shared among {workers} workers"
    if isinstance(stage, AveragingStage) and stage.per_site is not None:
        size = stage.site_size(workers) if workers > 1 else 1
        return f"{size} workers x {loop}, in {workers // size} sites apart"
    passes = f"{stage.passes_per_step} backward passes x " * (stage.passes_per_step > 1)
    return f"{workers} workers x {passes}{loop}" + ", apart" * stage.local_parameters


def _batches(recipe: Recipe, workers: int) -> int:
    """Number of the loop's batches per optimizer step, at first."""
    stage = recipe.strategy.stages[0]
    if isinstance(stage, GradientStage) and stage.batches is not None:
        return stage.batches
    return stage.passes_per_step * stage.gradient_group(workers)


def _rate_lines(batches: int) -> Iterator[str]:
    """Learning rate rules for larger batches. None of them is applied here."""
    if batches > 1:
        yield f"advice      for a batch {batches}x as large as one worker's, multiply the learning rate by"
        yield f"            {batches} with SGD, warmed up over the first epochs (Goyal et al. 2017, arXiv:1706.02677),"
        yield f"            {batches**0.5:.3g} with Adam and its kin (Malladi et al. 2022, NeurIPS, arXiv:2205.10287)"


def _schedule_lines(strategy: Strategy) -> Iterator[str]:
    """One line if all backward passes are alike, else a drawing of the schedule."""
    at_once = "gradients are sent during every backward pass, and are averaged when it returns"
    *_, lasting = stages = strategy.stages
    if len(stages) > 1:
        yield f"schedule    until backward pass {lasting.start:,} {at_once}"
    elif (
        lasting.averages_gradients_at_once and lasting.schedule == PeriodicSchedule(1) and not lasting.local_parameters
    ):
        yield f"schedule    {at_once}"
        return
    drawing = draw(lasting)
    column = "one" if drawing.passes_per_column == 1 else f"{drawing.passes_per_column:,}"
    width = max(len(name) for name, _ in drawing.rows)
    yield ""
    yield f"Backward passes{f' after {lasting.start:,}' * (lasting.start > 0)}, {column} per column:"
    yield f"  {'':<{width}}  {drawing.axis}"
    for name, marks in drawing.rows:
        yield f"  {name:<{width}}  {_colored(marks)}".rstrip()
    if drawing.hidden_rows:
        yield f"  and {drawing.hidden_rows:,} more in the same way"
    yield f"  {_colored(drawing.legend)}"


def _colored(text: str) -> str:
    """Color the marks; click removes colors without a terminal."""
    for color, marks in COLORS.items():
        text = re.sub(f"([{marks}]+)", click.style(r"\1", fg=color), text)
    return text


def _time_lines(traffic: TrafficEstimate, estimate: StepTimeEstimate) -> Iterator[str]:
    inputs = estimate.inputs
    copies = inputs["copies_measured_side_by_side"]
    computing = f"measured in {copies} processes at once here" if copies else "as given; compressing measured here"
    yield ""
    what = "A step takes, on average over a period" if traffic.steps > 1 else f"{_cycle(traffic)} takes"
    by = "" if inputs["collective"] == AUTO else f", all-reduce by {inputs['collective']}"
    yield f"{what}, in seconds, estimated for {inputs['network']}{by}:"
    yield f"  {'computing':<28}{estimate.computing_seconds:>20.4f}   {computing}"
    yield f"  {'waiting':<28}{estimate.waiting_seconds:>20.4f}   {estimate.waiting_share:.1%} of the step"
    yield f"  {'total':<28}{estimate.step_seconds:>20.4f}   {estimate}"
    if estimate.interval is not None:
        of = estimate.interval.kind.replace("all", "all kinds, since too few were of this kind")
        yield f"from the errors of {estimate.interval.pairs} earlier estimates ({of})"
    yield (
        f"during or after computation: {estimate.wire_seconds:.4f} on the network, "
        f"{estimate.codec_seconds:.4f} compressing "
        f"{inputs['buckets']} bucket{'s' * (inputs['buckets'] != 1)}"
    )
    if estimate.caution is not None:
        yield estimate.caution


def _uses(recipe: Recipe, speeds: Sequence[float]) -> dict[str, float]:
    """Part of the sum of speeds that the recipe's strategy uses, and that others use if it is not nearly all."""
    seconds = [1 / speed for speed in speeds]
    own = speed_use(recipe.strategy, seconds)
    others = forms_by_speed(seconds) if own < 1 - LEAST_GAIN else {}
    return {THIS: own, **{repr(strategy): use for strategy, use in others.items()}}


def _speed_lines(recipe: Recipe, speeds: Sequence[float], estimate: StepTimeEstimate | None) -> Iterator[str]:
    """Useful samples per second of the recipe, and of forms that divide the work by speed."""
    uses = _uses(recipe, speeds)
    width = max(28, *(len(name) + 2 for name in uses))
    yield ""
    yield f"Useful samples per second of {len(speeds)} workers of speeds {_speeds_text(speeds)}, as a part of what they"
    yield "compute without communication:"
    for name, use in uses.items():
        yield f"  {name:<{width}}{use:>8.2f}{_parts_text(recipe, speeds) if name == THIS else ''}"
        if name == THIS and estimate is not None:
            yield f"  {'with its messages':<{width}}{estimate.speed_use:>8.2f}   on {estimate.inputs['network']}"


def _parts_text(recipe: Recipe, speeds: Sequence[float]) -> str:
    """The parts of a step, or the local steps, of few workers with different ones."""
    stage = recipe.strategy.steady_stage
    parts = stage.parts_at([1 / speed for speed in speeds]) if stage.follows_speed else None
    if parts is None or len(parts) > MOST_SHOWN:
        return ""
    kind = "local steps" if stage.local_parameters else "shares"
    return f"   {kind} {', '.join(map(str, parts))}"


def _speeds_text(speeds: Sequence[float]) -> str:
    """For example: 1 (3 workers), 0.2."""
    runs = [(speed, len(list(same))) for speed, same in groupby(speeds)]
    return ", ".join(f"{speed:g} ({count} workers)" if count > 1 else f"{speed:g}" for speed, count in runs)


def _table(traffic: TrafficEstimate) -> Iterator[tuple[str, str, float]]:
    """(bucket, operation, bytes) of each operation. Buckets that send the same share their lines."""
    for ops, count in Counter(traffic.buckets).items():
        where = f"bucket {traffic.buckets.index(ops)}" if count == 1 else f"{count} buckets, each"
        for op in ops:
            yield where, op.op, op.bytes_sent
    for other in traffic.others:
        if other.bytes_sent or other.where == "control":
            yield other.where, other.op, other.bytes_sent


def _comparison(traffic: TrafficEstimate) -> str:
    if traffic.share_of_dense is None:
        return "   a single worker sends nothing"
    return f"   {traffic.share_of_dense:.2%} of the ring's"


def _rounds(recipe: Recipe, workers: int) -> list[SyncRound]:
    return recipe.strategy.among(workers).steady_stage.period_rounds


def _record(recipe: Recipe, model: str, traffic: TrafficEstimate, step: _Step) -> dict[str, Any]:
    estimate, seconds = step.estimate, step.compute_seconds
    batches = _batches(recipe, traffic.workers)
    return {
        "recipe": repr(recipe),
        "model": model,
        "workers": traffic.workers,
        "parameters": traffic.parameters,
        "words": [
            {"where": f"bucket {number}", "word": op.op, "bytes_sent": op.bytes_sent}
            for number, ops in enumerate(traffic.buckets)
            for op in ops
        ]
        + [{"where": other.where, "word": other.op, "bytes_sent": other.bytes_sent} for other in traffic.others],
        "period": traffic.passes,
        "schedule": [each._asdict() for each in _rounds(recipe, traffic.workers)],
        "bytes_sent_per_period": traffic.cycle_bytes_sent,
        "bytes_sent_per_step": traffic.bytes_sent,
        "dense_bytes_sent_per_step": traffic.dense_bytes_sent,
        "share_of_dense": traffic.share_of_dense,
        "compute_seconds": seconds,
        "bits_per_second_to_hide": None if seconds is None else _rates_to_hide(traffic, seconds),
        "memory_bytes": {
            "residuals": traffic.residual_bytes,
            "other_state": traffic.other_state_bytes,
            "strategy": traffic.strategy_bytes,
        },
        "batch": {"times": batches, "learning_rate_times": {"sgd": batches, "adam": batches**0.5}},
        "estimate": None if estimate is None else asdict(estimate) | {"waiting_share": estimate.waiting_share},
    }
