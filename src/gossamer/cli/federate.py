"""`gossamer federate`: simulates a federation on this machine. `serve` and `join` run one over real connections."""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from difflib import get_close_matches
from importlib import import_module
from pathlib import Path
from typing import Any

import click
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

from gossamer.base import system
from gossamer.base.units import bytes_text, seconds_text, short
from gossamer.cli.console import print_text, progress, table, wide_console
from gossamer.cli.federate_options import FederationPlan, plan_options, save_option, saved, script_with_arguments
from gossamer.cli.options import output_option
from gossamer.cli.program import RunsScript, no_such_command
from gossamer.observe.control_sequences import SafeConsole
from gossamer.observe.record import write
from gossamer.plan.simulate.job import free_bytes
from gossamer.version import __version__

WIDTH = 140  # columns of a table in a file
REPORT_EVERY_SECONDS = 10.0  # without a terminal
INTERRUPTED = 130
TOO_LARGE = (
    "the devices would need about {needed} of memory and {free} are free, so the machine would swap or kill this "
    "process. Write fewer --clients, or a smaller share of them per round, such as FedAvg(fraction=0.001, ...)"
)
COLUMNS = ("rounds", "virtual time", "up a round", "down a round", "up in all", "down in all", "seconds a round")
SIMULATE = "simulate"
ELSEWHERE = {name: f"gossamer.cli.federate_server:{name}_command" for name in ("serve", "join", "enroll")}

OnProgress = Callable[[int, str], None]


class FederateGroup(click.Group):
    """A group with a default command: a script as the first argument is simulated."""

    def parse_args(self, context: click.Context, args: list[str]) -> list[str]:
        return super().parse_args(context, self.with_command(context, args))

    def with_command(self, context: click.Context, args: list[str]) -> list[str]:
        named = args and (args[0] in self.list_commands(context) or args[0] in ("-h", "--help"))
        if named or not args:
            return args
        commands = self.list_commands(context)
        if get_close_matches(args[0], commands, 1) and not args[0].endswith(".py") and not os.path.exists(args[0]):
            raise no_such_command(args[0], context, commands)
        return [SIMULATE, *args]

    def list_commands(self, context: click.Context) -> list[str]:
        return sorted({SIMULATE, *ELSEWHERE})

    def get_command(self, context: click.Context, name: str) -> click.Command | None:
        if name not in ELSEWHERE:
            return simulate_command if name == SIMULATE else None
        module, _, command = ELSEWHERE[name].partition(":")
        found: click.Command = getattr(import_module(module), command)
        return found


@click.group("federate", cls=FederateGroup)
def federate_command() -> None:
    """Train on devices that keep their data: `gossamer federate SCRIPT ...` simulates all of them on this machine.

    SCRIPT marks its functions with @gossamer.federated.model, @gossamer.federated.client and optionally
    @gossamer.federated.evaluate. On real devices, run the same script with `serve` and `join`.
    """


@click.command(SIMULATE, cls=RunsScript)
@script_with_arguments
@plan_options
@click.option(
    "--profiles",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    metavar="FILE.toml",
    help="Speed, link and hours of devices.  [default: always available, on an instant network]",
)
@click.option(
    "--states",
    type=click.Path(file_okay=False, path_type=Path),
    help="An empty folder for the devices' state between rounds.  [default: a temporary one]",
)
@click.option(
    "--engine",
    type=click.Choice(["local", "ray"]),
    default="local",
    show_default=True,
    help="Train in this process, or in tasks of Ray.",
)
@click.option(
    "--threads",
    type=click.IntRange(1),
    default=1,
    show_default=True,
    help="Threads of torch; more help large models only.",
)
@save_option
@output_option("json", "Write the record as JSON.")
def simulate_command(
    script: Path,
    arguments: tuple[str, ...],
    plan: FederationPlan,
    profiles: Path | None,
    states: Path | None,
    engine: str,
    threads: int,
    save_file: Path | None,
    json_file: Path | None,
) -> None:
    """Simulate a federation: training and bytes are real, time is virtual. SCRIPT receives the words after `--`."""
    from gossamer.federated.client.functions import load_script
    from gossamer.federated.population import read_profiles
    from gossamer.federated.virtual.simulate import Simulation, SimulationSettings

    file = load_script(script, arguments)
    devices = None if profiles is None else read_profiles(profiles, plan.clients)
    with tempfile.TemporaryDirectory(prefix="gossamer-devices-") as temporary:
        try:
            settings = SimulationSettings(
                evaluate=file.evaluate, profiles=devices, states=states or temporary, engine=engine, threads=threads,
                **plan.given,
            )  # fmt: skip
            simulation = Simulation(file.train, file.model, plan.recipe, settings)
        except ValueError as error:
            raise click.ClickException(str(error)) from error
        run, began = simulation.result, time.perf_counter()
        print_text(f"gossamer: {estimated(simulation, plan.clients, plan.rounds)}")
        if engine == "local" and simulation.memory_bytes > (free := free_bytes()):
            raise click.ClickException(
                TOO_LARGE.format(needed=bytes_text(simulation.memory_bytes), free=bytes_text(free))
            )
        try:
            with _bar(plan.rounds) as on_progress:
                simulation.on_round = lambda record: on_progress(record.version, _standing(run, plan.until))
                simulation.run()
        finally:  # also after a failure
            _show(run)
            if save_file is not None and run.rounds:
                print_text(f"gossamer: {saved(run.model, save_file)}")
            if json_file is not None:
                about: dict[str, Any] = {"gossamer": __version__, "script": str(script), "arguments": list(arguments)}
                about |= {
                    "seed": plan.seed,
                    "profiles": profiles and str(profiles),
                    "peak_memory_bytes": system.peak_resident_bytes(),
                }
                write(json_file, {**about, "real_seconds": time.perf_counter() - began, **run.record()})
    if run.ended == "interrupted":
        print_text(f"gossamer: interrupted after {len(run.rounds)} of {plan.rounds} rounds; their results are above")
        raise SystemExit(INTERRUPTED)


def estimated(simulation: Any, clients: int, rounds: int) -> str:
    """Size and cost of the simulation, before it starts."""
    return (
        f"{clients:,} devices, {simulation.cohort:,} per round, {rounds:,} rounds; {simulation.parameters:,} "
        f"parameters; devices train {simulation.training.description}; about "
        f"{bytes_text(simulation.memory_bytes)} of memory in addition to the script's own"
    )


@contextmanager
def _bar(rounds: int) -> Iterator[OnProgress]:
    """A progress bar of rounds with a sentence; without a terminal, a line now and then."""
    aside = SafeConsole(stderr=True, highlight=False)
    if not aside.is_terminal:
        with progress("", REPORT_EVERY_SECONDS) as show_progress:
            yield lambda done, sentence: show_progress(f"round {done} of {rounds}, {sentence}")
        return
    columns = (TextColumn("round"), MofNCompleteColumn(), BarColumn(), TextColumn("{task.description}"))
    with Progress(*columns, console=aside, transient=True) as bar:
        task = bar.add_task("the first round", total=rounds)
        yield lambda done, sentence: bar.update(task, completed=done, description=sentence)


def _standing(run: Any, until: str | None) -> str:
    last = run.rounds[-1]
    known = dict(last.metrics or last.train_metrics)
    metrics = ", ".join(f"{name} {short(value)}" for name, value in list(known.items())[:2])
    goal = f" (until {until})" if until else ""
    traveled = f"{bytes_text(run.up_bytes)} up, {bytes_text(run.down_bytes)} down"
    return ", ".join(filter(None, [metrics + goal, f"{run.virtual_seconds / 3600:.2f} virtual hours", traveled]))


def _show(run: Any) -> None:
    """The result: a table, then remarks."""
    count = max(len(run.rounds), 1)
    known: dict[str, float] = run.rounds[-1].all_metrics if run.rounds else {}
    shown = table((*COLUMNS, *known), left=())
    sizes = (run.up_bytes / count, run.down_bytes / count, run.up_bytes, run.down_bytes)
    shown.add_row(
        str(len(run.rounds)),
        seconds_text(run.virtual_seconds),
        *map(bytes_text, sizes),
        f"{run.seconds / count:.3g}",
        *(short(value) for value in known.values()),
    )
    wide_console(WIDTH).print(shown)
    for line in _remarks(run):
        print_text(f"gossamer: {line}")


def _remarks(run: Any) -> Sequence[str]:
    lines = []
    if run.why:
        lines.append(f"ended after {len(run.rounds)} rounds: {run.why}")
    if run.rounds and run.rounds[-1].epsilon is not None:
        lines.append(f"epsilon {run.rounds[-1].epsilon:.3g} was spent")
    refused = sum(each.refused_count for each in run.rounds)
    if refused:
        why = next(why for each in run.rounds for why in each.refused.values())
        lines.append(f"{refused} contributions were refused, such as: {why}")
    if run.failures:
        client, why = next(iter(run.failures.items()))
        lines.append(f"{len(run.failures)} devices failed permanently, such as client {client}: {why}")
    return lines
