"""Options of `gossamer federate` that simulated and served federations have alike, and what follows from them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields
from functools import wraps
from math import inf, isfinite
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from gossamer.cli.options import check_recipe, output_option

if TYPE_CHECKING:
    from torch import nn

    from gossamer.federated.messages import Scalar
    from gossamer.federated.server.selection import SelectionPolicy

Command = Callable[..., Any]
SELECTIONS = ("uniform", "least-trained", "power-of-choice", "within-deadline")  # without waiting for imports


@dataclass(frozen=True, kw_only=True)
class FederationPlan:
    """What a federation is to do, by the names of `simulate`'s arguments and of FederationSettings."""

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
        """All of it but what was left out. Raises ValueError for a selection that goes by what was."""
        found = {name: value for name, value in vars(self).items() if value is not None}
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
    """Values by name, of KEY=VALUE."""
    found: dict[str, Scalar] = {}
    for text in texts:
        key, equals, value = text.partition("=")
        if not key or not equals:
            raise click.BadParameter(f"{text!r} names no value: write KEY=VALUE, such as rate=0.1")
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


PLAN_OPTIONS = (
    click.option(
        "--recipe",
        required=True,
        callback=check_recipe,
        help="How devices train and talk; real ones learn it from the server.",
    ),
    click.option("--clients", type=click.IntRange(1), required=True, help="Devices of the whole federation."),
    click.option("--rounds", type=click.IntRange(1), required=True, help="Versions to make."),
    click.option(
        "--seed", type=click.IntRange(0), default=0, show_default=True, help="Of selection, rounding and devices."
    ),
    click.option("--until", callback=check_until, metavar='"accuracy>0.95"', help="End there, if not before."),
    click.option(
        "--config",
        multiple=True,
        callback=read_config,
        metavar="KEY=VALUE",
        help="A number, true, false or text that every device finds in round.config; may be given several times.",
    ),
    click.option(
        "--round-seconds",
        type=click.FloatRange(0, min_open=True),
        help="A round goes on then without those who have not reported; with FedBuff() a device's task ends.  "
        "[default: 600 where devices are real, none where they are simulated]",
    ),
    click.option(
        "--gather-seconds",
        type=click.FloatRange(0, min_open=True),
        help="A round begins then with those that are there, if these are --fewest.  [default: 600 where devices are "
        "real, none where they are simulated]",
    ),
    click.option(
        "--over-selection",
        type=click.FloatRange(0),
        default=0.0,
        show_default=True,
        help="Share of devices chosen beyond the cohort, of whom the slowest are not waited for.",
    ),
    click.option(
        "--fewest",
        type=click.IntRange(1),
        default=1,
        show_default=True,
        help="Devices with which a late round begins, and reports of which a version is made at its deadline.",
    ),
    click.option(
        "--late",
        type=click.Choice(["drop", "count"]),
        default="drop",
        show_default=True,
        help="What becomes of reports after their round: nothing, or a part of the next version, of less weight.",
    ),
    click.option(
        "--selection",
        type=click.Choice(SELECTIONS),
        default=SELECTIONS[0],
        show_default=True,
        help="Who trains next of those that wait: any; those that were counted least often; those with the largest of "
        "the last losses; or those that were done before --round-seconds the last time.",
    ),
)


def plan_options(command: Command) -> Command:
    """The options above, which the command takes as `plan`."""

    @wraps(command)
    def with_plan(**given: Any) -> Any:
        own = {item.name: given.pop(item.name) for item in fields(FederationPlan)}
        return command(plan=FederationPlan(**own), **given)

    for option in reversed(PLAN_OPTIONS):
        with_plan = option(with_plan)
    return with_plan


def script_with_arguments(command: Command) -> Command:
    command = click.argument("arguments", nargs=-1, type=click.UNPROCESSED, metavar="[-- ARGUMENTS]...")(command)
    return click.argument("script", type=click.Path(exists=True, dir_okay=False, path_type=Path))(command)


save_option = output_option("save", "Write the last version's state_dict there, also after Ctrl-C, for torch.load.")


def saved(model: nn.Module, file: Path) -> str:
    """Write a model; returns what to tell of it."""
    from gossamer.federated.model_state import save_model

    try:
        return f"the model is in {file}: {save_model(model, file)}"
    except OSError as error:
        raise click.ClickException(f"{file} cannot be written: {error.strerror}") from error
