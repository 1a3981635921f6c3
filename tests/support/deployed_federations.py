"""Federations over real sockets: a server and devices in threads of this process, or as processes on loopback."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from support.federations import model_of, one_pass
from support.processes import free_port, of_this_checkout
from torch import Tensor, nn

from gossamer.errors import GossamerError
from gossamer.federated.client.functions import Round, ScriptFile, Update
from gossamer.federated.deployment.device import DeviceOptions, FederationDevice
from gossamer.federated.deployment.reception import Patience
from gossamer.federated.deployment.server import FederationServer, FederationSettings

TOKEN = bytes(range(32))
QUICK = DeviceOptions(heartbeat_seconds=0.5, silent_seconds=30.0, longest_backoff_seconds=0.2)
SECONDS = 150.0  # of a busy machine


def evaluated(model: nn.Module, told: Round) -> Update:
    return Update(samples=1, metrics={"weight": float(sum(each.sum() for each in model.parameters()))})


SCRIPT = ScriptFile(train=one_pass, model=model_of, evaluate=evaluated)


def server(
    recipe: str = "FedAvg(fraction=1.0)", *, clients: int = 3, rounds: int = 3, **options: Any
) -> FederationServer:
    named = FederationSettings.__dataclass_fields__
    settings = {key: options.pop(key) for key in list(options) if key in named}
    patience = Patience(absent_seconds=options.pop("absent_seconds", 30.0), farewell_seconds=5.0)
    return FederationServer(
        options.pop("script", SCRIPT),
        FederationSettings(recipe=recipe, clients=clients, rounds=rounds, patience=patience, **settings),
        **{"token": TOKEN, **options},
    )


@dataclass
class Joined:
    """A device that runs in a thread."""

    device: FederationDevice
    thread: threading.Thread = field(init=False)
    result: list[Any] = field(default_factory=list)
    said: list[str] = field(default_factory=list)

    def start(self) -> Joined:
        self.thread = threading.Thread(target=self._run, daemon=True)
        self.thread.start()
        return self

    def _run(self) -> None:
        try:
            self.result.append(self.device.run())
        except GossamerError as error:
            self.result.append(error)

    def ended(self) -> Any:
        self.thread.join(SECONDS)
        assert self.result, f"a device goes on after {SECONDS} s: {self.said}"
        return self.result[0]


def join(address: tuple[str, int], number: int | None = None, **options: Any) -> Joined:
    said: list[str] = []
    device = FederationDevice(
        options.pop("script", SCRIPT),
        address,
        number=number,
        **{"token": TOKEN, "options": QUICK, "print_text": said.append, **options},
    )
    return Joined(device, said=said).start()


def alone(recipe: str, clients: int, rounds: int) -> Tensor:
    """What a federation without a network comes to."""
    from support.federations import federate

    return federate(recipe, clients=clients, rounds=rounds).parameters


# -- processes ---------------------------------------------------------------------------------------------

PROGRAM = '''
import sys, torch
from pathlib import Path
from torch import nn
from gossamer import federated

@federated.model
def make():
    model = nn.Linear({size}, 1, dtype=torch.float64)
    nn.init.zeros_(model.weight); nn.init.zeros_(model.bias)
    return model

@federated.client
def train(model, round):
    """Adds one to every parameter: after so many rounds, each counted once, the sum says how many there were."""
    with torch.no_grad():
        for each in model.parameters():
            each += 1
    return federated.Update(samples=1, metrics={{"client": round.client}})

@federated.evaluate
def evaluate(model, round):
    return federated.Update(samples=1, metrics={{"bias": model.bias.item(), "least": model.weight.min().item()}})
'''


def program(folder: Path, size: int = 4, name: str = "program.py") -> Path:
    path = folder / name
    path.write_text(PROGRAM.format(size=size))
    return path


class Command:
    """A `gossamer federate` that runs."""

    def __init__(self, arguments: Sequence[object], log: Path) -> None:
        self.log = log
        with log.open("a") as output:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "gossamer", "federate", *map(str, arguments)],
                stdout=output, stderr=subprocess.STDOUT, env={**of_this_checkout(), "OMP_NUM_THREADS": "1"},
            )  # fmt: skip

    @property
    def text(self) -> str:
        return self.log.read_text()

    def wait(self, seconds: float = SECONDS) -> int:
        try:
            return self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            said = "\n".join(f"{each.name}:\n{each.read_text()}" for each in sorted(self.log.parent.glob("log-*")))
            raise AssertionError(f"{self.process.args} goes on after {seconds} s; all logs:\n{said}") from None

    def until(self, wanted: Callable[[str], bool], seconds: float = SECONDS) -> None:
        """Wait until it has said something."""
        for _ in range(int(seconds / 0.02)):
            if wanted(self.text):
                return
            assert self.process.poll() is None or wanted(self.text), self.text
            threading.Event().wait(0.02)
        raise AssertionError(self.text)


@contextmanager
def commands(folder: Path) -> Iterator[Callable[..., Command]]:
    """Starts commands; none outlives the block."""
    started: list[Command] = []

    def start(*arguments: object, log: str | None = None) -> Command:
        started.append(Command(arguments, folder / (log or f"log-{len(started)}")))
        return started[-1]

    try:
        yield start
    finally:
        for each in started:
            with suppress(OSError):
                each.process.kill()
            each.process.wait()


def port() -> int:
    return free_port()


def flat(model: nn.Module) -> Tensor:
    return torch.cat([each.detach().reshape(-1) for each in model.parameters()])
