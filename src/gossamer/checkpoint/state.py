"""State that a checkpoint holds beside the model's: what can give and take its state, random generators, keys."""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any, Protocol

import torch

from gossamer.strategies import AGREED


class Stateful(Protocol):
    """What can be part of a checkpoint; the world, for one."""

    def state_dict(self) -> dict[str, Any]: ...
    def load_state_dict(self, state_dict: dict[str, Any], /) -> None: ...


def random_state() -> dict[str, Any]:
    """Where torch's and Python's global generators stand."""
    kind, numbers, gauss = random.getstate()
    return {
        "torch": torch.get_rng_state(),
        "cuda": list(torch.cuda.get_rng_state_all()) if torch.cuda.is_initialized() else [],
        "python": [kind, list(numbers), gauss],
    }


def set_random_state(state: Mapping[str, Any]) -> None:
    """Put them back there."""
    torch.set_rng_state(state["torch"])
    if state["cuda"]:
        torch.cuda.set_rng_state_all(state["cuda"])
    kind, numbers, gauss = state["python"]
    random.setstate((kind, tuple(numbers), gauss))


MERGING_PREFIX = "merging."  # before the keys of what a strategy remembers, beside what a compressor does


AGREED_KEY = MERGING_PREFIX + AGREED
