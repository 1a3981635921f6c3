"""Federated learning: a server and devices that keep their data, over scripts without sockets.

messages      what both tell each other beside tensors: tasks, reports, fates
model_state   what of a model travels, as one flat tensor
upload        a contribution in parts of bounded size
client        a device: the user's function, its hooks, feedback, and the device's script
population    devices unlike each other: data, speed, link, hours
round_forecast  what a round costs, before anything runs
script_file   the functions that a user's script marks
round_config  what the user tells all devices of a round
round_record  what is known of a version that was made, simulated or served
evaluator     the user's evaluation function, called on versions
stop_condition  "accuracy>0.95": where rounds end before they are all made
model_file    a model's state on disk
privacy       clipping, noise, and what versions tell of a device
secure        masks that cancel in the sum: the server learns that, and nothing of a device
flower        Flower: its programs on devices of ours, our compression in its programs (extra `flower`)
server        rounds: selection, admission, sums, the next version
virtual       many thousand devices in virtual time, on one machine
recipe_terms  the strategy and the compressors of a recipe's text
deployment    a server and devices as processes that talk over TCP
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from gossamer.federated.client.functions import Round, Update, client, evaluate, model
from gossamer.federated.client.sgd_steps import SGDSteps
from gossamer.federated.population.partition import partition

if TYPE_CHECKING:
    from gossamer.federated.virtual.simulate import simulate as simulate

__all__ = ["Round", "SGDSteps", "Update", "client", "evaluate", "model", "partition", "simulate"]


def __getattr__(name: str) -> Any:
    if name != "simulate":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from gossamer.federated.virtual.simulate import simulate  # only who simulates waits for its imports

    return simulate
