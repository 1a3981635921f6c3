"""Federated learning: a server and devices that keep their data, over scripts without sockets.

client              a device: the user's functions, local training, error feedback, and the device's script
server              rounds: sampling of clients, admission, aggregation, the next version
privacy             clipping, noise, accounting
secure_aggregation  masks that cancel in the sum, so that the server learns only the sum
population          heterogeneous devices: data, speed, link, availability
virtual             many thousand devices in virtual time, on one machine
deployment          a server and devices as processes over TCP
flower              Flower: its programs on Gossamer's devices, Gossamer's compression in its programs (extra `flower`)
messages            tasks, reports and receipts as JSON, contributions in parts of bounded size
model_state         the trained parameters and averaged buffers of a model as one flat tensor
federation          the strategy and the compressors of a recipe, and the user's configuration of each round
evaluation          metrics of versions by the user's function; "accuracy>0.95" ends a federation early
round_record        RoundRecord: statistics of a version, simulated or deployed
round_forecast      estimates the cost of a round before a run
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from gossamer.federated.client.functions import Round, SGDSteps, Update, client, evaluate, model
from gossamer.federated.population.partition import partition

if TYPE_CHECKING:
    from gossamer.federated.virtual.simulate import SimulationSettings as SimulationSettings
    from gossamer.federated.virtual.simulate import simulate as simulate

__all__ = [
    "Round",
    "SGDSteps",
    "SimulationSettings",
    "Update",
    "client",
    "evaluate",
    "model",
    "partition",
    "simulate",
]


def __getattr__(name: str) -> Any:
    if name not in ("simulate", "SimulationSettings"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from gossamer.federated.virtual import simulate  # imported on first use

    return getattr(simulate, name)
