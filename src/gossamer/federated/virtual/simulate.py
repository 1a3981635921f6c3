"""Simulate: runs a federation of up to many thousand devices on this machine, in virtual time, with real training."""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn

from gossamer.algorithms.recipes.recipe import Recipe
from gossamer.algorithms.strategies.federated_rules import FederatedStrategy
from gossamer.base import rng
from gossamer.errors import require
from gossamer.federated.client.functions import ClientFunction
from gossamer.federated.client.script import ClientRecipe
from gossamer.federated.evaluation import Evaluator, StopCondition
from gossamer.federated.federation import recipe_terms
from gossamer.federated.model_state import ModelState
from gossamer.federated.population import DeviceProfile
from gossamer.federated.round_record import RoundRecord, record_of
from gossamer.federated.secure_aggregation.identities import SimulatedRoster
from gossamer.federated.server.from_strategy import RoundPlan, rounds_for
from gossamer.federated.server.global_model import GlobalModel
from gossamer.federated.server.rounds import Committed
from gossamer.federated.virtual.device_states import DeviceStates
from gossamer.federated.virtual.engine import VirtualFederation
from gossamer.federated.virtual.training import DeviceTraining, generators_kept, seed_everything
from gossamer.federated.virtual.vectorized_training import training_of


@dataclass(kw_only=True)
class FederatedRun:
    """A federation that has ended or is running.

    Attributes:
        recipe: the resolved recipe.
        clients: number of devices.
        model: has the parameters of the last version after the end.
        training: how devices were trained.
        rounds: record of each version.
        ended: "running", "finished", "reached" (`until`), "exhausted" (the privacy budget) or "interrupted".
        why: reason of an early end, unless it was interrupted.
        failures: by client, errors that ended a device permanently.
    """

    recipe: str
    clients: int
    model: nn.Module
    training: str = ""
    rounds: list[RoundRecord] = field(default_factory=list)
    ended: str = "running"
    why: str = ""
    failures: dict[int, str] = field(default_factory=dict)

    @property
    def seconds(self) -> float:
        """Real (wall-clock) seconds."""
        return sum(each.seconds for each in self.rounds)

    @property
    def virtual_seconds(self) -> float:
        return (self.rounds[-1].virtual_seconds or 0.0) if self.rounds else 0.0

    @property
    def up_bytes(self) -> int:
        return sum(each.up_bytes for each in self.rounds)

    @property
    def down_bytes(self) -> int:
        return sum(each.down_bytes for each in self.rounds)

    @property
    def metrics(self) -> dict[str, list[float | None]]:
        """Evaluation metrics by name, one value per round."""
        names = {name: None for each in self.rounds for name in each.metrics}
        return {name: [each.metrics.get(name) for each in self.rounds] for name in names}

    def bytes_by_client(self) -> dict[int, tuple[int, int]]:
        """Bytes up and down of every device that was chosen."""
        up: Counter[int] = Counter()
        down: Counter[int] = Counter()
        for each in self.rounds:
            up.update(each.up_bytes_by_client)
            down.update(each.down_bytes_by_client)
        return {client: (up[client], down[client]) for client in sorted(up | down)}

    def record(self) -> dict[str, Any]:
        """The record as JSON-compatible data."""
        return record_of(
            self.rounds,
            recipe=self.recipe,
            clients=self.clients,
            ended=self.ended,
            why=self.why,
            training=self.training,
            seconds_per_round=self.seconds / max(len(self.rounds), 1),
            virtual_seconds=self.virtual_seconds,
            by_client={
                str(client): {"up_bytes": up, "down_bytes": down}
                for client, (up, down) in self.bytes_by_client().items()
            },
            failures={str(client): why for client, why in self.failures.items()},
        )


Profiles = Sequence[DeviceProfile] | Callable[[int], DeviceProfile] | None
OnRound = Callable[[RoundRecord], object]


@dataclass(frozen=True, kw_only=True)
class SimulationSettings(RoundPlan):
    """Settings of a simulated federation.

    Attributes:
        clients: number of devices.
        rounds: versions to make.
        evaluate: the evaluation function; its metrics are added to the records.
        profiles: of the devices, or a function from a device's number to its profile; None: always available, without
            delays.
        seed: of the federation.
        until: a condition on a metric, such as "accuracy>0.95", that ends the rounds early.
        on_round: called with the record of each new version.
        states: an empty directory for the devices' state (such as residuals) between rounds; None: in memory.
        engine: "local", or "ray" for Ray tasks on a cluster, with the same bits.
        threads: threads of torch. More help large models and slow down small ones, and can change the last bits of
            sums.
        selection: policy that samples clients, such as LeastTrained(); None: uniform.
        admission: limits on contributions; None: the usual ones.
        config: configuration sent to devices, or a function from a round's index: lambda index: {"rate": 0.99**index}.
        round_seconds: deadline of a round, in virtual seconds; with FedBuff, of a device's task.
        gather_seconds: virtual seconds until a round begins with the present devices.
        over_selection: fraction of additional devices beyond the cohort.
        fewest: smallest number of devices to begin a round with, and of reports at its deadline.
        late: "drop" discards reports after their round; "count" adds them to the next version.
        late_versions: versions until such a report is discarded.
        phase_seconds: deadline of each exchange of a masked round; None: round_seconds.

    Example:
        >>> settings = gossamer.federated.SimulationSettings(clients=100, rounds=50, over_selection=0.3)
        >>> settings.rounds
        50
    """

    evaluate: ClientFunction | None = None
    profiles: Profiles = None
    seed: int = 0
    until: str | None = None
    on_round: OnRound | None = None
    states: str | os.PathLike[str] | None = None
    engine: str = "local"
    threads: int = 1


def simulate(
    train: ClientFunction,
    model: nn.Module | Callable[[], nn.Module],
    recipe: str | Recipe,
    settings: SimulationSettings | None = None,
    **given: Any,
) -> FederatedRun:
    """Simulate a federation in virtual time, with real training.

    It runs the same server and device scripts as `gossamer federate serve` and `join`. The same seed gives the same
    bits on the same machine. The global generators of torch, random and numpy are seeded for every device and round,
    and restored at the end. A KeyboardInterrupt ends the simulation and returns the rounds so far, with `ended`
    "interrupted".

    Args:
        train: the client function. One marked with `client(vectorized=True)` trains many devices in one call.
        model: the model, or a function that builds it.
        recipe: a federated recipe, such as "FedAvg(fraction=0.1)".
        settings: number of devices, rounds and more.
        given: settings by name, instead of `settings` or in place of some of them, such as clients=100, rounds=50,
            evaluate=function, profiles=devices, until="accuracy>0.95", selection=LeastTrained().

    Returns:
        The run, with its records and the trained model.

    Raises:
        RecipeError: the recipe is not federated, or a setting does not fit it.
        TypeError: there is no setting of this name.
        PeerLost: no further version can be made.
        Exception: `train` or `evaluate` raised it; a note has the device and round, or the version.

    >>> import torch
    >>> from gossamer import federated
    >>> data = [torch.full((4, 1), float(number)) for number in range(3)]
    >>> @federated.client
    ... def train(model, round):
    ...     optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    ...     for batch in round.batches([data[round.client]]):
    ...         optimizer.zero_grad()
    ...         (model(batch) - 2 * batch).square().mean().backward()
    ...         optimizer.step()
    ...     return federated.Update(samples=4)
    >>> run = federated.simulate(train, torch.nn.Linear(1, 1), "FedAvg(fraction=1.0)", clients=3, rounds=2)
    >>> len(run.rounds), run.ended
    (2, 'finished')
    """
    settings = SimulationSettings(**given) if settings is None else replace(settings, **given)
    return Simulation(train, model, recipe, settings).run()


class Simulation:
    """A federation that is ready to run, with estimates of its needs."""

    def __init__(
        self,
        train: ClientFunction,
        model: nn.Module | Callable[[], nn.Module],
        recipe: str | Recipe,
        settings: SimulationSettings,
    ) -> None:
        """Raises RecipeError, ValueError."""
        clients, rounds, threads, seed = settings.clients, settings.rounds, settings.threads, settings.seed
        require(clients >= 1 and rounds >= 1, f"clients and rounds must be 1 or more, got {clients}, {rounds}")
        require(threads >= 1, f"threads must be 1 or more, got {threads}")
        self._threads = threads
        self._until = None if settings.until is None else StopCondition.read(settings.until)
        self.on_round, self._seed = settings.on_round, seed
        profile = _profile_of(settings.profiles, clients)
        terms = recipe_terms(recipe)
        with generators_kept():
            seed_everything(rng.address(seed, "model"))
            made = model if isinstance(model, nn.Module) else model()
        self._model, self._terms = made, terms
        state, evaluate = ModelState.of(made), settings.evaluate
        self._evaluator = None
        if evaluate is not None:
            self._evaluator = Evaluator(evaluate, made, state, seed=seed, config=settings.config)
        self.cohort = terms.strategy.cohort(clients)
        self.training = _training(settings.engine, train, made, state, terms.strategy, threads)
        self.result = FederatedRun(recipe=repr(terms.recipe), clients=clients, model=made)
        self.result.training = self.training.description
        server = GlobalModel(terms.strategy, terms.compressor, terms.pull, state, state.read(made).flat, seed)
        roster = SimulatedRoster(seed=rng.address(seed, "roster")) if terms.strategy.secure is not None else None
        self._rounds = rounds_for(server, settings, on_commit=self._committed, identities=roster)
        device = ClientRecipe(
            strategy=terms.strategy, compressor=terms.compressor, pull=terms.pull, state=state, seed=seed, roster=roster
        )
        self.states = DeviceStates(settings.states)
        self.engine = VirtualFederation(self._rounds, device, self.training, self.states, profile)
        self._began = time.perf_counter()

    @property
    def parameters(self) -> int:
        return self._rounds.model.parameters.numel()

    @property
    def memory_bytes(self) -> int:
        """Estimated memory without the user's data: models of a cohort and the server, and 2 kB per device."""
        model = self._rounds.model.parameters.nbytes
        return model * (5 * self.cohort + 8) + 2000 * self._rounds.clients

    def run(self) -> FederatedRun:
        """Run until the end, or a KeyboardInterrupt. Call it once."""
        self._began = time.perf_counter()
        threads = torch.get_num_threads()
        torch.set_num_threads(self._threads)
        try:
            with generators_kept():
                self.engine.run()
            if self.result.ended == "running":
                self.result.ended = "finished" if len(self.result.rounds) == self._rounds.rounds else "exhausted"
                if self._until is not None:
                    self._until.notice_if_missing([each.all_metrics for each in self.result.rounds])
                self.result.why = self._rounds.why_exhausted if self.result.ended == "exhausted" else ""
        except KeyboardInterrupt:
            self.result.ended = "interrupted"
        finally:
            torch.set_num_threads(threads)
            self.engine.close()
            self._write()
            self.result.failures = {client: str(error) for client, error in self.engine.failures.items()}
        return self.result

    def _write(self) -> None:
        self._rounds.model.state.write(self._rounds.model.parameters, self._model)

    def _committed(self, committed: Committed) -> None:
        counted = self.engine.committed()
        metrics = self._evaluated(committed.version)
        now = time.perf_counter()
        record = RoundRecord.of(
            committed,
            virtual_seconds=committed.moment,
            seconds=now - self._began,
            up_bytes=sum(counted.up.values()),
            down_bytes=sum(counted.down.values()),
            up_bytes_by_client=counted.up,
            down_bytes_by_client=counted.down,
            metrics=metrics,
        )
        self._began = now
        self.result.rounds.append(record)
        if self._until is not None and self._until.reached(record.all_metrics):
            self.result.ended, self.result.why = "reached", f"{self._until} is reached"
            self.engine.stopping = True
        if self.on_round is not None:
            self.on_round(record)

    def _evaluated(self, version: int) -> dict[str, float]:
        if self._evaluator is None:
            return {}
        seed_everything(rng.address(self._seed, "evaluate", version))
        try:
            return self._evaluator.metrics(version, self._rounds.model.parameters)
        except Exception as error:
            error.add_note(f"It was the evaluation of version {version}, in virtual time.")
            raise


def _training(
    engine: str,
    function: ClientFunction,
    model: nn.Module,
    state: ModelState,
    strategy: FederatedStrategy,
    threads: int,
) -> DeviceTraining:
    require(engine in ("local", "ray"), f"engine must be 'local' or 'ray', got {engine!r}")
    if engine == "local":
        return training_of(function, model, state, strategy)
    from gossamer.federated.virtual.ray_training import RayTraining  # optional dependency

    return RayTraining(model, state, strategy, function, threads)


def _profile_of(profiles: Profiles, clients: int) -> Callable[[int], DeviceProfile]:
    if profiles is None:
        alike = DeviceProfile()
        return lambda client: alike
    if callable(profiles):
        return profiles
    require(
        len(profiles) >= clients,
        f"there are {len(profiles)} profiles for {clients} clients: give one profile per client",
    )
    return profiles.__getitem__
