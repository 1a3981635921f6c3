"""`gossamer federate`: a simulated federation from a script, what it says, writes and refuses."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace
from pathlib import Path
from textwrap import dedent
from typing import Any

import click
import pytest
import torch
from click.testing import CliRunner
from support.command_line import refusal

from gossamer.cli import federate
from gossamer.cli.federate import simulate_command
from gossamer.cli.federate_options import SELECTIONS, FederationPlan, read_config
from gossamer.cli.federate_server import serve_command
from gossamer.cli.main import gossamer
from gossamer.federated.server.selection import NAMED, LeastTrained, WithinDeadline
from gossamer.federated.virtual.simulate import Simulation

SCRIPT = """
    import sys
    import torch
    from torch import nn
    import gossamer.federated
    from gossamer.federated import SGDSteps, Update

    rate = float(sys.argv[1])

    @gossamer.federated.model
    def make_model():
        torch.manual_seed(0)
        return nn.Linear(3, 1)

    def loss(model, inputs, targets):
        return (model(inputs) - targets).square().mean()

    @gossamer.federated.client(vectorized=True)
    def train(model, told):
        inputs = torch.randn(8, 3)
        batches = told.batches([(inputs, inputs.sum(1, keepdim=True))])
        return SGDSteps(loss=loss, batches=batches, learning_rate=rate, samples=8)

    @gossamer.federated.evaluate
    def evaluate(model, told):
        error = (model.weight - 1).abs().max().item()
        return Update(samples=1, metrics={"error": error, **told.config})
"""
PHONES = """
    [[devices]]
    step = "1s"
    up = "1kbit"
"""


@pytest.fixture
def script(tmp_path: Path) -> Path:
    file = tmp_path / "tiny.py"
    file.write_text(dedent(SCRIPT))
    (tmp_path / "phones.toml").write_text(dedent(PHONES))
    return file


def federated(script: Path, *options: str, recipe: str = "FedAvg(fraction=0.5, local_steps=2)") -> tuple[int, str, str]:
    """The exit code, and what stands on standard output and errors."""
    plan = ["--recipe", recipe, "--clients", "6", "--rounds", "4"]
    found = CliRunner().invoke(gossamer, ["federate", str(script), *plan, *options, "--", "0.1"])
    return found.exit_code, found.stdout, found.stderr


def test_a_script_is_simulated_and_recorded(script: Path) -> None:
    record = script.with_name("record.json")
    code, shown, aside = federated(script, "--json", str(record), "--profiles", str(script.with_name("phones.toml")))
    assert code == 0, aside
    assert "6 devices, 3 per round, 4 rounds; 4 parameters; devices train up to 64 in one call" in " ".join(
        aside.split()
    )
    header, row = shown.strip().splitlines()
    assert header.split()[-1] == "error"
    assert row.split()[0] == "4"
    found = json.loads(record.read_text())
    assert (found["rounds"], found["clients"], found["ended"]) == (4, 6, "finished")
    up = [each["up_bytes"] for each in found["history"]]
    assert up == [3 * 4 * 4] * 4  # three devices, four numbers, four bytes each
    assert found["up_bytes"] == sum(each["up_bytes"] for each in found["by_client"].values()) == sum(up)
    seconds = [each["virtual_seconds"] for each in found["history"]]
    assert seconds == pytest.approx([2.128 * count for count in range(1, 5)])
    assert found["history"][-1]["metrics"]["error"] < found["history"][0]["metrics"]["error"]
    assert found["peak_memory_bytes"] > 1e6


def test_it_ends_once_it_is_good_enough(script: Path) -> None:
    aside = federated(script, "--seed", "1", "--until", "error<1000")[2]
    assert aside.count("ended after 1 rounds: error<1000 is reached") == 1


def test_an_interrupt_ends_it_with_what_there_is(script: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    record, run = script.with_name("record.json"), Simulation.run

    def interrupted(simulation: Simulation) -> object:
        def press(record: object) -> None:
            told(record)
            if len(simulation.result.rounds) == 2:
                raise KeyboardInterrupt

        told, simulation.on_round = simulation.on_round, press
        return run(simulation)

    monkeypatch.setattr(Simulation, "run", interrupted)
    code, shown, aside = federated(script, "--json", str(record), "--save", str(script.with_name("model.pt")))
    assert code == federate.INTERRUPTED
    assert "interrupted after 2 of 4 rounds; their results are above" in aside
    assert shown.strip().splitlines()[-1].split()[0] == "2"
    assert json.loads(record.read_text())["ended"] == "interrupted"
    assert "weights_only=True" in aside
    assert torch.load(script.with_name("model.pt"), weights_only=True).keys() == {"weight", "bias"}


@pytest.mark.parametrize(
    ("options", "why"),
    [
        (["--recipe", "EveryStep()"], "trains all workers in lockstep"),
        (["--until", "accuracy"], "is not a metric compared with a number"),
        (["--profiles", "tiny.py"], "cannot be read as device profiles"),
        (["--clients", "0"], "Invalid value for '--clients'"),
        (["--clients", "1000000000000"], "Write fewer --clients, or a smaller share"),
        (["--config", "rate"], "write KEY=VALUE, such as rate=0.1"),
        (["--fewest", "9"], "fewest must be 1 to the cohort's"),
        (["--recipe", "FedBuff(buffer=2)", "--over-selection", "0.5"], "over_selection means nothing"),
        (["--recipe", "FedBuff(buffer=2)", "--late", "count"], "late means nothing"),
        (["--recipe", "SCAFFOLD()", "--late", "count"], "Write late="),
        (["--late", "sometimes"], "Invalid value for '--late'"),
        (["--selection", "within-deadline"], "add --round-seconds 600"),
        (
            ["--recipe", "FedAvg(fraction=1.0, privacy=LocalPrivacy(noise=1.0))", "--selection", "least-trained"],
            "Choose by Uniform()",
        ),
        (
            ["--recipe", "FedAvg(fraction=1.0, secure=SecureAggregation())", "--selection", "power-of-choice"],
            "PowerOfChoice chooses by the losses",
        ),
    ],
)
def test_what_cannot_be_run_is_refused(
    script: Path, options: list[str], why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(script.parent)
    plan = ["federate", "tiny.py", "--recipe", "FedAvg()", "--clients", "3", "--rounds", "2", *options, "--", "0.1"]
    assert why in " ".join(refusal(*plan).split())


def test_the_config_is_told_and_the_model_is_saved(script: Path) -> None:
    model = script.with_name("model.pt")
    code, shown, aside = federated(script, "--config", "rate=0.5", "--config", "warm=true", "--save", str(model))
    assert code == 0, aside
    assert shown.splitlines()[0].split()[-3:] == ["error", "rate", "warm"]
    assert shown.splitlines()[1].split()[-2:] == ["0.500", "1.00"]
    assert f"model.load_state_dict(torch.load('{model}', weights_only=True))" in " ".join(aside.split())
    assert torch.load(model, weights_only=True)["weight"].shape == (1, 3)


def test_a_deadline_goes_with_every_kind_of_rounds(script: Path) -> None:
    code, _, aside = federated(script, "--round-seconds", "5", recipe="FedBuff(buffer=2, fraction=0.5, local_steps=2)")
    assert code == 0, aside


def test_a_spent_budget_is_reported(script: Path) -> None:
    private = "CentralPrivacy(noise=4.0, clip=1.0, delta=0.01, budget=0.7)"
    code, _, aside = federated(script, recipe=f"FedAvg(fraction=1.0, local_steps=2, privacy={private})")
    assert code == 0, aside
    assert "rounds: the privacy budget is spent: epsilon is" in " ".join(aside.split())


def test_the_first_argument_may_name_a_command() -> None:
    said = CliRunner().invoke(gossamer, ["federate", "--help"]).stdout
    assert "simulate" in said
    assert all(name in said for name in ("serve", "join", "enroll"))
    assert "--recipe" in CliRunner().invoke(gossamer, ["federate", "simulate", "--help"]).stdout
    assert "does not exist" in refusal("federate", "nothing.py", "--recipe", "FedAvg()")
    assert "Did you mean serve?" in refusal("federate", "serv", "train.py", "--recipe", "FedAvg()")
    assert "join.py does not exist" in refusal("federate", "join.py", "--recipe", "FedAvg()")


SLOW = """
    [[devices]]
    count = 4
    step = "1s"

    [[devices]]
    count = 2
    step = "7s"
"""


def history(script: Path, *options: str, recipe: str = "FedAvg(fraction=0.5, local_steps=2)") -> list[dict[str, Any]]:
    record = script.with_name("record.json")
    code, _, aside = federated(script, "--json", str(record), *options, recipe=recipe)
    assert code == 0, aside
    found: list[dict[str, Any]] = json.loads(record.read_text())["history"]
    return found


def test_late_reports_are_dropped_or_count(script: Path) -> None:
    """Two of six devices take 14 s, and the first round goes on without them after 6; those after it, after 2."""
    slow = script.with_name("slow.toml")
    slow.write_text(dedent(SLOW))
    options = ["--round-seconds", "6", "--rounds", "8", "--profiles", str(slow)]
    counted = {
        late: [each["counted"] for each in history(script, *options, *chosen, recipe="FedAvg(fraction=1.0)")]
        for late, chosen in {"": [], "drop": ["--late", "drop"], "count": ["--late", "count"]}.items()
    }
    assert counted[""] == counted["drop"]
    assert max(counted["drop"]) == 4
    assert max(counted["count"]) == 6


def test_selection_is_by_name(script: Path) -> None:
    plan = ["--rounds", "6", "--seed", "1"]
    least, even = (
        Counter(
            client
            for each in history(script, *plan, "--selection", name, recipe="FedAvg(fraction=0.1)")
            for client in each["clients"]
        )
        for name in ("least-trained", "uniform")
    )
    assert set(least.values()) == {1}, "one of six, six times"
    assert len(even) < 6
    assert history(script, "--selection", "power-of-choice")
    assert history(script, "--selection", "within-deadline", "--round-seconds", "9")


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
        "clients", "rounds", "seed", "config", "gather_seconds", "over_selection", "fewest", "late", "selection",
    }  # fmt: skip
    assert plan.given["selection"] == LeastTrained()
    with pytest.raises(ValueError, match="add --round-seconds 600"):
        _ = replace(plan, selection="within-deadline").given
    assert replace(plan, selection="within-deadline", round_seconds=9.0).given["selection"] == WithinDeadline(9.0)


def test_every_policy_is_an_option() -> None:
    assert tuple(NAMED) == SELECTIONS
