"""Laws of federated strategies, over whole federations of simulated peers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from support.command_line import refusal
from support.federations import RATE, Federation, data_of, federate, model_of
from support.quadratics import RATE as QUADRATIC_RATE
from support.quadratics import fedavg_fixed_point, joined_minimum, quadratic
from support.virtual_workers import Worker, agree, cluster, parameters
from torch import Tensor, nn

import gossamer
from gossamer.algorithms.recipes.recipe import resolve
from gossamer.algorithms.strategies.federated_rules import (
    SCAFFOLD,
    CohortSummary,
    FedAvg,
    FederatedStrategy,
    FedNova,
    LocalWork,
)
from gossamer.algorithms.strategies.federated_rules.base import Memory
from gossamer.algorithms.strategies.federated_rules.scaffold import VARIATE
from gossamer.comm.simulation.faulty_network import VirtualNetwork
from gossamer.errors import AttachError
from gossamer.federated.client.functions import Round, Update
from gossamer.federated.model_state import ModelState
from gossamer.federated.server.global_model import GlobalModel
from gossamer.plan.profile.synthetic_shapes import assumed
from gossamer.train.traffic.traffic import estimate_traffic

SHARP, FLAT = (4.0, 1.0), (-1.0, 3.0)  # curvatures and minima of two devices


def run(recipe: Any, **options: Any) -> Tensor:
    return federate(recipe, **options).parameters


# -- FedAvg --------------------------------------------------------------------------------------------------------


def every_step(rounds: int, world: int) -> Tensor:
    """Parameters of real sessions whose workers average gradients of the same data in every step."""

    def work(worker: Worker) -> Tensor:
        rule = lambda model: torch.optim.SGD(model.parameters(), lr=RATE)  # noqa: E731
        model, optimizer, _ = worker.start(model_of(), rule, "EveryStep()")
        inputs, targets = data_of(worker.rank)
        for _ in range(rounds):
            optimizer.zero_grad()
            ((model(inputs) - targets) ** 2).mean().backward()
            optimizer.step()
        return parameters(model)

    return agree(cluster(work, world))


def test_one_local_step_of_all_clients_is_every_step() -> None:
    found = run("FedAvg(fraction=1.0, local_steps=1)", clients=4, rounds=5)
    assert torch.allclose(found, every_step(5, 4), rtol=0, atol=1e-12)


def test_two_local_steps_are_not_every_step() -> None:
    found = run("FedAvg(fraction=1.0, local_steps=2)", clients=4, rounds=5)
    assert not torch.allclose(found, every_step(5, 4), rtol=0, atol=1e-3)
    assert not torch.allclose(found, every_step(10, 4), rtol=0, atol=1e-3)


def test_clients_weigh_by_their_samples_among_those_that_answered() -> None:
    train = quadratic((1.0, 1.0), (0.0, 4.0), samples=(1, 3))
    start = model_of().weight.detach().flatten()
    found = run("FedAvg(fraction=1.0, local_steps=1)", clients=2, rounds=1, function=train)[:4]
    assert torch.equal(found, start - QUADRATIC_RATE * (start - 3.0))


# -- what is FedAvg where it should be -----------------------------------------------------------------------------


def unlike(model: nn.Module, told: Round) -> Update:
    """As often as the recipe says, from unlike numbers of samples."""
    assert told.client is not None
    inputs, targets = data_of(told.client, samples=3 + 2 * told.client)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.03)
    for batch, wanted in told.batches([(inputs, targets)]):
        optimizer.zero_grad()
        ((model(batch) - wanted) ** 2).mean().backward()
        optimizer.step()
    return Update(samples=len(inputs))


@pytest.mark.parametrize(
    "recipe",
    [
        "FedProx(mu=0.0, fraction=0.5, local_steps=3)",
        "FedNova(fraction=0.5, local_steps=3)",
        "FedOpt('torch.SGD', learning_rate=1.0, beta1=0.0, fraction=0.5, local_steps=3)",
        "FedAvg(fraction=0.5, local_steps=3, aggregator=WeightedMean())",
    ],
)
def test_it_is_fedavg_to_the_bit(recipe: str) -> None:
    options = {"clients": 6, "rounds": 4, "function": unlike}
    assert torch.equal(run(recipe, **options), run("FedAvg(fraction=0.5, local_steps=3)", **options))


@pytest.mark.parametrize(
    "recipe",
    [
        "FedProx(mu=1e-6, fraction=0.5, local_steps=3)",
        "FedOpt('torch.SGD', learning_rate=0.999, beta1=0.0, fraction=0.5, local_steps=3)",
        "FedAvg(fraction=0.5, local_steps=3, aggregator=Median())",
    ],
)
def test_a_little_else_is_seen_in_the_bits(recipe: str) -> None:
    options = {"clients": 6, "rounds": 4, "function": unlike}
    assert not torch.equal(run(recipe, **options), run("FedAvg(fraction=0.5, local_steps=3)", **options))


@pytest.mark.parametrize("aggregator", ["TrimmedMean(share=0.0)", "MultiKrum(outliers=0.0)"])
def test_robust_means_that_leave_nobody_out_are_the_mean(aggregator: str) -> None:
    found = run(f"FedAvg(fraction=1.0, aggregator={aggregator})", clients=4)
    assert torch.allclose(found, run("FedAvg(fraction=1.0)", clients=4), rtol=0, atol=1e-12)


def test_fedbuff_of_what_is_not_old_is_fedavg_of_equal_clients() -> None:
    found = run("FedBuff(buffer=4, fraction=1.0)", clients=4)
    assert torch.allclose(found, run("FedAvg(fraction=1.0)", clients=4), rtol=0, atol=1e-12)


# -- FedProx -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mu", [0.5, 2.0])
def test_fedprox_ends_where_the_spring_and_the_loss_are_even(mu: float) -> None:
    start = model_of().weight.detach().flatten()
    train = quadratic((1.5,), (3.0,))
    found = run(f"FedProx({mu}, fraction=1.0, local_steps=200)", clients=1, rounds=1, function=train)[:4]
    assert torch.allclose(found, (1.5 * 3.0 + mu * start) / (1.5 + mu), rtol=0, atol=1e-12)
    without = run("FedAvg(fraction=1.0, local_steps=200)", clients=1, rounds=1, function=train)[:4]
    assert torch.allclose(without, torch.full((4,), 3.0, dtype=torch.float64), rtol=0, atol=1e-9)


# -- SCAFFOLD ------------------------------------------------------------------------------------------------------


def variates(found: Federation) -> tuple[Tensor, Tensor]:
    """(mean over all clients of theirs, the server's)."""
    server = found.rounds.model.memory[VARIATE]
    own = [each.load().memory.get(VARIATE, torch.zeros_like(server)) for each in found.stores]
    return torch.stack(own).mean(dim=0), server


@dataclass(frozen=True, repr=False)
class DividesByTheCohort(SCAFFOLD):
    """The twin: as many implementations have it."""

    def apply(self, parameters: Tensor, memory: Memory, means: Sequence[Tensor], cohort: CohortSummary) -> None:
        super().apply(parameters, memory, means, replace(cohort, clients=cohort.contributions))


NETS = [
    VirtualNetwork(),
    VirtualNetwork(round_trip_seconds=0.1, jitter_seconds=0.2, loss=0.2, duplicate=0.2, dead_after_seconds=1e9),
]


@pytest.mark.parametrize("net", NETS, ids=["good", "bad"])
def test_variates_of_all_clients_sum_to_the_servers(net: VirtualNetwork) -> None:
    found = federate(SCAFFOLD(fraction=0.5, local_steps=2), clients=6, rounds=7, net=net)  # type: ignore[arg-type]
    clients, server = variates(found)
    assert torch.allclose(clients, server, rtol=0, atol=1e-12)
    assert server.abs().max() > 0.1


def test_a_server_that_divides_by_the_cohort_is_seen() -> None:
    found = federate(DividesByTheCohort(fraction=0.5, local_steps=2), clients=6, rounds=7)  # type: ignore[arg-type]
    clients, server = variates(found)
    assert not torch.allclose(clients, server, rtol=0, atol=0.1)


def test_scaffold_finds_the_joined_minimum_and_fedavg_does_not() -> None:
    options: dict[str, Any] = {"clients": 2, "rounds": 60, "function": quadratic(SHARP, FLAT)}
    best, biased = joined_minimum(SHARP, FLAT), fedavg_fixed_point(SHARP, FLAT, steps=4)
    assert abs(best - biased) > 0.3
    plain = run("FedAvg(fraction=1.0, local_steps=4)", **options)
    assert torch.allclose(plain, torch.full_like(plain, biased), rtol=0, atol=1e-9)
    corrected = run("SCAFFOLD(fraction=1.0, local_steps=4)", **options)
    assert torch.allclose(corrected, torch.full_like(corrected, best), rtol=0, atol=1e-6)


def test_a_scaffold_that_forgets_its_variates_is_fedavg() -> None:
    @dataclass(frozen=True, repr=False)
    class Forgets(SCAFFOLD):
        def correct(self, gradient: Tensor, parameters: Tensor, anchor: Tensor, shared: Memory, memory: Memory) -> None:
            """The twin: nothing is corrected."""

    options: dict[str, Any] = {"clients": 2, "rounds": 60, "function": quadratic(SHARP, FLAT)}
    found = run(Forgets(fraction=1.0, local_steps=4), **options)
    biased = fedavg_fixed_point(SHARP, FLAT, steps=4)
    assert torch.allclose(found, torch.full_like(found, biased), rtol=0, atol=1e-6)


# -- FedNova -------------------------------------------------------------------------------------------------------


def test_fednova_goes_as_the_paper_says() -> None:
    """w - t sum p_k (w - w_k) / t_k, from what each device comes to by itself."""
    steps, samples, curvatures, minima = (1, 2, 5), (4, 1, 3), (1.0, 2.0, 0.5), (0.0, 4.0, -2.0)
    start = model_of().weight.detach().flatten()
    shares = [each / sum(samples) for each in samples]
    ways = [
        (1 - (1 - QUADRATIC_RATE * a) ** t) * (start - b) for a, b, t in zip(curvatures, minima, steps, strict=True)
    ]
    effective = sum(p * t for p, t in zip(shares, steps, strict=True))
    wanted = start - effective * sum(p * way / t for p, way, t in zip(shares, ways, steps, strict=True))
    train = quadratic(curvatures, minima, steps=steps, samples=samples)
    options: dict[str, Any] = {"clients": 3, "rounds": 1, "function": train}
    for recipe in ("FedNova(fraction=1.0)", "FedNova(fraction=1.0, local_steps=5)"):
        assert torch.allclose(run(recipe, **options)[:4], wanted, rtol=0, atol=1e-12)
    assert not torch.allclose(run("FedAvg(fraction=1.0)", **options)[:4], wanted, rtol=0, atol=0.1)


def test_who_makes_more_steps_pulls_fednova_no_harder() -> None:
    """Gradients of small curvature hardly change: then only samples count."""
    tiny, far = (1e-7, 1e-7), (1e7, -1e7)  # gradients of about -1 and 1
    options: dict[str, Any] = {"clients": 2, "rounds": 1, "function": quadratic(tiny, far, steps=(1, 9))}
    start = model_of().weight.detach().flatten()
    assert (run("FedNova(fraction=1.0)", **options)[:4] - start).abs().max() < 1e-4
    assert (run("FedAvg(fraction=1.0)", **options)[:4] - start).abs().min() > 0.3


# -- buffers -------------------------------------------------------------------------------------------------------


class Jumps(FedAvg):
    """A strategy that makes of parameters what it likes."""

    def apply(self, parameters: Tensor, memory: Memory, means: Sequence[Tensor], cohort: CohortSummary) -> None:
        parameters.fill_(-7.0)


def test_averaged_buffers_are_averaged_whatever_becomes_of_parameters() -> None:
    network = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3))
    state = ModelState.of(network)
    resolved = resolve("FedAvg()")
    server = GlobalModel(Jumps(), resolved.compressor, None, state, state.read(network).flat)
    mean = torch.full_like(server.parameters, 0.25)
    server.apply((mean,), CohortSummary(contributions=1, clients=1, steps=1.0))
    network = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3))
    state.write(server.parameters, network)
    assert all((each == -7.0).all() for each in network.parameters())
    norm = network[1]
    assert isinstance(norm, nn.BatchNorm1d)
    assert norm.running_mean is not None
    assert norm.running_var is not None
    assert (norm.running_mean == -0.25).all()
    assert (norm.running_var == 0.75).all()


# -- every strategy ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "recipe",
    [
        "FedProx(0.1, fraction=0.5) + TopK(0.5)",
        "SCAFFOLD(fraction=0.5, pull=Int8()) + Int8()",
        "FedNova(fraction=0.5, local_steps=2) + Chain(TopK(0.5), Int8())",
        "FedOpt('adam', learning_rate=0.1, fraction=0.5, pull=Int8())",
        "FedOpt('yogi', learning_rate=0.1, fraction=0.5) + Int8()",
        "FedOpt('adagrad', learning_rate=0.1, fraction=0.5)",
        "FedOpt('torch.NAdam', learning_rate=0.1, fraction=0.5)",
        "FedAvg(fraction=0.5, aggregator=Median()) + Int8()",
        "FedAvg(fraction=0.5, aggregator=TrimmedMean(share=0.3))",
        "FedAvg(fraction=0.5, aggregator=MultiKrum()) + TopK(0.5)",
    ],
)
def test_rounds_of_every_strategy_continue_over_a_bad_network(recipe: str) -> None:
    bad = VirtualNetwork(round_trip_seconds=0.1, jitter_seconds=0.2, loss=0.2, duplicate=0.2, dead_after_seconds=1e9)
    found = federate(recipe, clients=4, rounds=3, net=bad)
    assert [len(each.reports) for each in found.commits] == [2, 2, 2]
    assert found.parameters.isfinite().all()
    assert not torch.equal(found.parameters, found.rounds.model.state.read(model_of()).flat)


def test_a_weight_is_never_zero() -> None:
    for strategy in (FedNova(), FedAvg(), SCAFFOLD()):
        assert isinstance(strategy, FederatedStrategy)
        assert strategy.weight(LocalWork(samples=1, steps=0), staleness=1000) > 0


# -- Whatever is for workers that stay says so of a federated recipe, in one line, and starts nothing ------------------

RECIPE = "FedAvg(fraction=0.5) + TopK(0.01)"
SAID = "FedAvg(fraction=0.5) is a federated strategy"
INSTEAD = "Run `gossamer federate --recipe ... SCRIPT`, or write LocalSGD(period=8) here."


@pytest.fixture
def script(tmp_path: Path) -> str:
    path = tmp_path / "train.py"
    path.write_text("raise AssertionError('it was started')")
    return str(path)


COMMANDS = [
    ("run", "--workers", "2", "--recipe", RECIPE, "SCRIPT"),
    ("compare", "--recipe", "Dense()", "--recipe", RECIPE, "SCRIPT"),
    ("rehearse", "--shapes", "resnet50", "--step-seconds", "0.1", "--recipe", RECIPE),
    ("simulate", "--workers", "4", "--network", "100mbit,20ms", "--recipe", RECIPE, "SCRIPT"),
    ("simulate", "--workers", "4", "--network", "100mbit,20ms", "--recipe", RECIPE, "--parameters", "1000"),
]


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: command[0])
def test_commands_refuse_it_before_anything_starts(command: tuple[str, ...], script: str) -> None:
    said = " ".join(refusal(*(script if each == "SCRIPT" else each for each in command)).split())
    assert SAID in said
    assert INSTEAD in said
    assert "it was started" not in said


@pytest.mark.parametrize(
    "strategy", ["FedAvg()", "SCAFFOLD()", "FedBuff()", "FedOpt('yogi')", "FedProx(0.1)", "FedNova()"]
)
def test_sessions_and_estimates_refuse_it(strategy: str) -> None:
    model = nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(AttachError, match="is a federated strategy"):
        gossamer.attach(model, optimizer, recipe=strategy)
    dense = assumed(1000, resolve("Dense()"))
    with pytest.raises(AttachError, match="Run `gossamer federate"):
        estimate_traffic(resolve(strategy), dense, workers=4)
    gossamer.attach(model, optimizer, recipe="Dense()").close()  # nothing is left of what was refused
