"""Limits of a federation's server: largest frames, concurrent requests and handshakes, open files."""

from __future__ import annotations

from gossamer.algorithms.strategies.federated_rules import FederatedStrategy
from gossamer.base import system
from gossamer.errors import RecipeError
from gossamer.federated.model_state import ModelState

MOST_BLOCKS = 4  # blocks of a version: the parameters, and other tensors that a strategy publishes
CONTROL_BYTES = 1 << 20  # of a frame, in addition to its tensors
TENSOR_CONTROL_BYTES = 256  # more for each tensor of the model, since a report has shapes
MOST_ASKS = 8  # of one device at a time; an honest one has one, and resends it after its connection broke
MOST_HANDSHAKES = 1024
HANDSHAKE_SECONDS = 15.0  # for mobile networks and busy machines
OTHER_FILES = 64
FILES_PER_DEVICE = 2  # while a new connection replaces one that is not yet known to be broken


def largest_frame_bytes(state: ModelState) -> int:
    """Largest frame for this model, in either direction; both ends can compute it before they connect."""
    return MOST_BLOCKS * _dense_bytes(state) + _control_bytes(state)


def accepted_frame_bytes(state: ModelState, part_bytes: int) -> int:
    """Largest frame from a device: a part of a contribution, or a report."""
    return part_bytes + _control_bytes(state)


def check_blocks(strategy: FederatedStrategy) -> None:
    """Raises RecipeError if the strategy's versions do not fit into a frame."""
    blocks = 1 + len(strategy.shared_keys)
    if blocks > MOST_BLOCKS:
        raise RecipeError(
            f"{strategy!r} publishes {blocks} tensors of the model's size with each version, but a federation's "
            f"frames hold {MOST_BLOCKS}. Use a strategy that publishes less."
        )


def allow_open_files(devices: int) -> int:
    """Raise this process's limit of open files for `devices`, as far as the system allows. Returns the number of
    devices that fit into the limit."""
    wanted = FILES_PER_DEVICE * devices + OTHER_FILES
    limit = system.raise_open_file_limit(wanted)
    return int(max(min(devices, limit - OTHER_FILES), 0))


def _dense_bytes(state: ModelState) -> int:
    return state.layout.numel * state.dtype.itemsize


def _control_bytes(state: ModelState) -> int:
    return CONTROL_BYTES + TENSOR_CONTROL_BYTES * len(state.layout)
