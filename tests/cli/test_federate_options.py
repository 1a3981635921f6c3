"""Options of federations: what values of a round's config are read as, and what was left out is left to defaults."""

from __future__ import annotations

from dataclasses import replace

import click
import pytest

from gossamer.cli.federate import simulate_command
from gossamer.cli.federate_options import SELECTIONS, FederationPlan, read_config
from gossamer.cli.federate_server import serve_command
from gossamer.federated.server.selection import NAMED, LeastTrained, WithinDeadline

NOTHING = click.Context(serve_command), click.Option(["--config"])


def test_values_are_numbers_booleans_and_texts() -> None:
    texts = ("rate=0.1", "steps=3", "warm=True", "cold=false", "name=a=b", "empty=", "limit=inf")
    found = {"rate": 0.1, "steps": 3, "warm": True, "cold": False, "name": "a=b", "empty": "", "limit": "inf"}
    assert read_config(*NOTHING, texts) == found
    assert type(found["steps"]) is int
    for text in ("rate", "=3"):
        with pytest.raises(click.BadParameter, match="write KEY=VALUE"):
            read_config(*NOTHING, (text,))


def test_both_commands_take_the_same_plan() -> None:
    names = {command: {parameter.name for parameter in command.params} for command in (simulate_command, serve_command)}
    plan = set(FederationPlan.__dataclass_fields__)
    assert all(plan <= each for each in names.values())


def test_what_was_left_out_is_not_given() -> None:
    plan = FederationPlan(
        recipe="FedAvg()", clients=2, rounds=1, seed=0, until=None, config={}, round_seconds=None,
        gather_seconds=3.0, over_selection=0.0, fewest=1, late="drop", selection="least-trained",
    )  # fmt: skip
    assert plan.given.keys() == {
        "recipe", "clients", "rounds", "seed", "config", "gather_seconds", "over_selection", "fewest", "late",
        "selection",
    }  # fmt: skip
    assert plan.given["selection"] == LeastTrained()
    with pytest.raises(ValueError, match="add --round-seconds 600"):
        _ = replace(plan, selection="within-deadline").given
    assert replace(plan, selection="within-deadline", round_seconds=9.0).given["selection"] == WithinDeadline(9.0)


def test_every_policy_is_an_option() -> None:
    assert tuple(NAMED) == SELECTIONS
