"""`gossamer advise`: recommends the recipe that reaches a loss first for a script on a network, and its cost."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import click
from rich.console import Console

from gossamer.base.units import seconds_text
from gossamer.cli.compare import target_option, train_for_record
from gossamer.cli.console import columns, echo, progress, wide_console, wrapped
from gossamer.cli.options import FiniteRange, output_option, speeds_option
from gossamer.cli.program import ScriptCommand, ScriptPath
from gossamer.cli.worker import SECONDS, UNTIL
from gossamer.comm.network import Network, read_network
from gossamer.launcher.job import MOST_WORKERS
from gossamer.observe.comparison import compare
from gossamer.observe.target import Target
from gossamer.plan.advise.advice_file import Advice, ConfirmedRow, write_advice
from gossamer.plan.advise.advisor import Advisor, top
from gossamer.plan.advise.answer import Setting
from gossamer.plan.advise.measured_links import HOW, contradictions, read_links
from gossamer.plan.advise.page import write_advice_page
from gossamer.plan.advise.race import RaceResult
from gossamer.plan.estimate.worker_speeds import read_speeds

HERE = "here"
NOT_HERE = (
    "the links to other machines cannot be measured from this machine alone. Describe them: --network 100mbit,20ms; or "
    f"measure them and name the file: --links links.json. {HOW}"
)
CONFIRM_BY = "--network 100mbit,20ms in addition to --links, or a TOML file, with --confirm"
CONFIRMED = 2  # number of recipes in real runs
PLAIN_SECONDS = 10.0  # between lines of progress without a terminal


@click.command(
    "advise", cls=ScriptCommand, context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False}
)
@click.option(
    "--workers", type=click.IntRange(2, MOST_WORKERS), default=4, show_default=True, help="Number of workers."
)
@click.option("--network", "network_text", metavar="SPEC", help="RATE[,ROUND_TRIP][,loss=P] per host, or a TOML file.")
@click.option(
    "--links",
    type=click.Path(dir_okay=False, path_type=Path),
    metavar="FILE",
    help="Measurements of `gossamer doctor --json`: the network, or a check of --network.",
)
@speeds_option
@target_option("The target to reach first, such as validation_loss<2.2.")
@click.option(
    "--minutes", type=FiniteRange(0, min_open=True), default=10.0, show_default=True, help="Wall time of the race."
)
@click.option(
    "--most",
    type=click.IntRange(1),
    default=16,
    show_default=True,
    help="Maximum of recipes in the race.",
)
@click.option(
    "--steps",
    type=click.IntRange(min=1),
    help="Steps of the training that the recipe is for: notes what measured recipes retained with as many rounds.",
)
@click.option("--own-machines", is_flag=True, help="Each worker has a machine like this one.  [default: all share it]")
@click.option("--confirm", is_flag=True, help="Also run the best recipe and Dense() on this network, emulated.")
@output_option("json", "Write the advice as JSON; then --recipe @FILE means the recommended recipe.")
@output_option("page", "Write an HTML page.")
@click.argument("script", type=ScriptPath())
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def advise_command(
    workers: int,
    network_text: str | None,
    links: Path | None,
    speeds_text: str | None,
    target: Target | None,
    minutes: float,
    most: int,
    steps: int | None,
    own_machines: bool,
    confirm: bool,
    json_file: Path | None,
    page_file: Path | None,
    script: Path,
    arguments: tuple[str, ...],
) -> None:
    """Recommend the recipe that reaches the loss first when SCRIPT trains on this network.

    Profiles a step on this machine and estimates it for every recipe on the network. The best recipes then train SCRIPT
    with all workers in this process, on a virtual clock that advances by these estimates. Arguments after SCRIPT are
    passed to it.
    """
    if confirm and network_text is None and links is not None:
        raise click.UsageError(f"--confirm emulates the network and needs its description: {CONFIRM_BY}")
    network, remarks = _network(network_text, links, workers)
    setting = Setting(
        script=str(script),
        arguments=arguments,
        workers=workers,
        network=network.text,
        target=target,
        speeds=() if speeds_text is None else read_speeds(speeds_text, workers),
        steps=steps,
    )
    advice, result = _advised(setting, network, minutes, most, 1 if own_machines else workers, remarks)
    _show(advice)
    _write(advice, json_file, page_file)
    if confirm:  # real runs may fail or be interrupted after the race
        confirmed = _confirm(result, setting, 60 * minutes / CONFIRMED)
        _write(replace(advice, confirmed=confirmed), json_file, page_file)


def _write(advice: Advice, json_file: Path | None, page_file: Path | None) -> None:
    if json_file is not None:
        write_advice(json_file, advice)
    if page_file is not None:
        write_advice_page(page_file, advice)


def _network(text: str | None, links: Path | None, workers: int) -> tuple[Network, Sequence[str]]:
    """The network to advise for, and remarks on it."""
    if text is None and links is None:
        raise click.UsageError(f"the advice depends on the network. Describe it: --network 100mbit,20ms; {HOW}")
    if text == HERE:
        raise click.UsageError(NOT_HERE)
    declared = read_network(text, workers) if text is not None else None
    if links is None:
        assert declared is not None  # refused above
        return declared, ()
    found, remarks = read_links(links, workers)
    return (found, remarks) if declared is None else (declared, (*remarks, *contradictions(declared, found)))


def _advised(
    setting: Setting, network: Network, minutes: float, most: int, copies: int, remarks: Sequence[str]
) -> tuple[Advice, RaceResult]:
    """Run every stage and print its result."""
    with progress("making a few steps", PLAIN_SECONDS) as print_text:
        advisor = Advisor(
            setting=setting,
            network=network,
            copies=copies,
            budget_seconds=60 * minutes,
            most=most,
            print_text=print_text,
        )
        facts = advisor.check()
        print_text("profiling a step without a network")
        measured = advisor.profile()
        echo(
            f"profile   {facts.model.parameters:,} parameters, {seconds_text(measured.compute_seconds)} computing a "
            f"step, {facts.optimizer_type.__name__}"
        )
        estimated = advisor.estimate_all()
        left = [each for each in estimated if each.excluded is None]
        best = min(left, key=lambda each: each.expected_seconds)
        echo(
            f"estimate  {len(estimated)} recipes for {setting.workers} workers on {setting.conditions}: {len(left)} "
            f"enter the race, fastest {best.recipe}, {seconds_text(best.step_seconds)} a step; {left[0].recipe} "
            f"{seconds_text(left[0].step_seconds)}"
        )
        result = advisor.race()
        steps = sum(each.steps for each in result.contenders)
        echo(
            f"race      {seconds_text(result.seconds)} of virtual time, {steps:,} steps of all workers: "
            + ", ".join(f"{len(rung.names) - 1}" for rung in result.rungs)
            + f" recipes per rung; {result.baseline.recipe} made {result.baseline.steps} steps"
        )
        print_text("estimating other networks")
        return advisor.advice(remarks), result


def _show(advice: Advice) -> None:
    width = columns(sys.stdout)
    for line in ("", advice.use, advice.gain, advice.cost, "", f"    {advice.command}", ""):
        echo(line if line.startswith(" ") else wrapped(line, width))
    if advice.would_change:
        echo("Expected best recipe on other networks:")
        for line in advice.would_change:
            echo(wrapped(f"  {line}", width))
    for line in advice.remarks:
        echo(wrapped(f"note: {line}", width))


def _confirm(result: RaceResult, setting: Setting, seconds: float) -> tuple[ConfirmedRow, ...]:
    """Run the best recipe and Dense() for `seconds` each. Print estimated and measured step times."""
    console: Console = wide_console(140)
    target = setting.target
    limits = {UNTIL: str(target) if target else "", SECONDS: f"{seconds:g}"}
    training = [setting.script, *setting.arguments]
    best = top(result, CONFIRMED)
    records = [
        train_for_record(each.recipe, setting.workers, setting.network, limits, training, console) for each in best
    ]
    found = compare(records, target=target)
    rows = []
    for contender, row in zip(best, found.rows, strict=True):
        declared = contender.seconds / contender.steps if contender.steps else None
        rows.append(
            ConfirmedRow(
                recipe=contender.recipe,
                estimated_step_seconds=declared,
                measured_step_seconds=row.step_seconds,
                steps=row.steps,
                loss=row.loss_at_equal_time.value if row.loss_at_equal_time else None,
                seconds_to_target=row.seconds_to_target,
            )
        )
        estimated = "nothing" if declared is None else seconds_text(declared)
        console.print(
            f"{contender.recipe}: estimated {estimated} a step, measured {seconds_text(row.step_seconds)}"
            + (
                ""
                if row.loss_at_equal_time is None
                else f", {found.metric} {row.loss_at_equal_time.value:.4g} at equal time"
            ),
            markup=False,
        )
    return tuple(rows)
