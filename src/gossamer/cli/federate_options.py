"""Options that simulated and served federations of `gossamer federate` share, and their checks."""

from __future__ import annotations

from dataclasses import dataclass
from math import inf, isfinite
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from gossamer.cli.options import Command, FiniteRange, option_group, output_option
from gossamer.cli.program import ScriptPath
from gossamer.cli.recipe_options import check_recipe

if TYPE_CHECKING:
    from torch import nn

    from gossamer.federated.messages import Scalar
    from gossamer.federated.server.selection import SelectionPolicy

SELECTIONS = ("uniform", "least-trained", "power-of-choice", "within-deadline")  # a literal, to avoid slow imports


@dataclass(frozen=True, kw_only=True)
class FederationPlan:
    """Settings of a federation, named as those of SimulationSettings and FederationSettings."""

    recipe: str
    clients: int
    rounds: int
    seed: int
    until: str | None
    config: dict[str, Scalar]
    round_seconds: float | None
    gather_seconds: float | None
    over_selection: float
    fewest: int
    late: str
    selection: str

    @property
    def given(self) -> dict[str, Any]:
        """The settings that were given, besides the recipe. Raises ValueError for a selection that needs one that was
        not given."""
        found = {name: value for name, value in vars(self).items() if value is not None and name != "recipe"}
        return found | {"selection": self._policy()}

    def _policy(self) -> SelectionPolicy:
        from gossamer.federated.server.selection import NAMED

        return NAMED[self.selection](self.seed, inf if self.round_seconds is None else self.round_seconds)


def check_until(context: click.Context, option: click.Parameter, text: str | None) -> str | None:
    from gossamer.federated.evaluation import StopCondition

    try:
        return text if text is None else str(StopCondition.read(text))
    except ValueError as error:
        raise click.BadParameter(str(error)) from None


def read_config(context: click.Context, option: click.Parameter, texts: tuple[str, ...]) -> dict[str, Scalar]:
    """Read KEY=VALUE options into a dictionary."""
    found: dict[str, Scalar] = {}
    for text in texts:
        key, equals, value = text.partition("=")
        if not key or not equals:
            raise click.BadParameter(f"{text!r} has no value: write KEY=VALUE, such as rate=0.1")
        found[key] = _value(value)
    return found


def _value(text: str) -> Scalar:
    if text.lower() in ("true", "false"):
        return text.lower() == "true"
    for kind in (int, float):
        try:
            number = kind(text)
        except ValueError:
            continue
        if isfinite(number):
            return number
    return text


plan_options = option_group(
    "plan",
    FederationPlan,
    click.option(
        "--recipe",
        required=True,
        callback=check_recipe,
        help="Federated recipe; real devices receive it from the server.",
    ),
    click.option("--clients", type=click.IntRange(1), required=True, help="Number of devices in the federation."),
    click.option("--rounds", type=click.IntRange(1), required=True, help="Number of rounds."),
    click.option(
        "--seed", type=click.IntRange(0), default=0, show_default=True, help="Seed of selection, rounding and devices."
    ),
    click.option("--until", callback=check_until, metavar='"accuracy>0.95"', help="End at this target."),
    click.option(
        "--config",
        multiple=True,
        callback=read_config,
        metavar="KEY=VALUE",
        help="Entry of round.config on every device: a number, true, false or text; may be repeated.",
    ),
    click.option(
        "--round-seconds",
        type=FiniteRange(0, min_open=True),
        help="Deadline of a round, which continues without missing reports; with FedBuff() that of a device's task.  "
        "[default: 600 for real devices, none for simulated ones]",
    ),
    click.option(
        "--gather-seconds",
        type=FiniteRange(0, min_open=True),
        help="Time to wait for devices; then a round begins with --fewest devices or more.  [default: 600 for real "
        "devices, none for simulated ones]",
    ),
    click.option(
        "--over-selection",
        type=FiniteRange(0),
        default=0.0,
        show_default=True,
        help="Share of additional devices per round; the slowest reports are not waited for.",
    ),
    click.option(
        "--fewest",
        type=click.IntRange(1),
        default=1,
        show_default=True,
        help="Minimum of devices to begin a late round, and of reports to make a version at the deadline.",
    ),
    click.option(
        "--late",
        type=click.Choice(["drop", "count"]),
        default="drop",
        show_default=True,
        help="Reports after the end of their round: discard them, or count them in the next version with less weight.",
    ),
    click.option(
        "--selection",
        type=click.Choice(SELECTIONS),
        default=SELECTIONS[0],
        show_default=True,
        help="Order of the waiting devices: random; fewest counted reports first; largest recent loss first; or only "
        "devices that met --round-seconds the last time.",
    ),
)


def script_with_arguments(command: Command) -> Command:
    command = click.argument("arguments", nargs=-1, type=click.UNPROCESSED, metavar="[-- ARGUMENTS]...")(command)
    return click.argument("script", type=ScriptPath())(command)


save_option = output_option("save", "Write the state_dict of the last version for torch.load, also after Ctrl-C.")


def saved(model: nn.Module, file: Path) -> str:
    """Write a model. Return a sentence about it."""
    from gossamer.federated.model_state import save_model

    try:
        return f"the model is in {file}: {save_model(model, file)}"
    except OSError as error:
        raise click.ClickException(f"{file} cannot be written: {error.strerror}") from error
