"""Checkpoint state: the protocol of parts that have one, global random generators, and keys."""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any, Protocol

import torch

from gossamer.strategies import AGREED


class Stateful(Protocol):
    """A part of a checkpoint: model, optimizer, scaler, world."""

    def state_dict(self) -> dict[str, Any]: ...
    def load_state_dict(self, state_dict: dict[str, Any], /) -> None: ...


def random_state() -> dict[str, Any]:
    """The state of torch's and Python's global generators."""
    kind, numbers, gauss = random.getstate()
    return {
        "torch": torch.get_rng_state(),
        "cuda": list(torch.cuda.get_rng_state_all()) if torch.cuda.is_initialized() else [],
        "python": [kind, list(numbers), gauss],
    }


def set_random_state(state: Mapping[str, Any]) -> None:
    """Restore the generators."""
    torch.set_rng_state(state["torch"])
    if state["cuda"]:
        torch.cuda.set_rng_state_all(state["cuda"])
    kind, numbers, gauss = state["python"]
    random.setstate((kind, tuple(numbers), gauss))


MERGING_PREFIX = "merging."  # of the keys of a strategy's state, beside the compressor's
AGREED_KEY = MERGING_PREFIX + AGREED
