"""Frozen parameters: detects those that the training script changes itself, such as a momentum encoder.

A parameter with requires_grad=False has no gradient, so no compressor sends it. BYOL, MoCo and DINO update such
parameters by an exponential moving average. If workers train separately, these copies diverge unless they are averaged.
"""

from __future__ import annotations

from collections.abc import Collection, Generator
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import Parameter

from gossamer.base.ops import AllGather
from gossamer.events import notice
from gossamer.train.engine.parameter_check import listed
from gossamer.train.engine.parameter_views import state_places
from gossamer.train.engine.step_decision import Flags

ENTRIES = 64  # entries of each parameter that are compared with those at attach
FLAGS_PER_NUMBER = 48  # float64 represents integers below 2^53 exactly


class FrozenParameters:
    """The frozen parameters of a model, and those that are averaged because the script changes them.

    A few entries of each are compared with those at attach, before sync rounds 0, 1, 2, 4, 8 and so on, since a
    comparison reads from the device, and most models have no such parameters. A parameter that has changed on one rank
    is averaged on all ranks from then on.
    """

    def __init__(self, model: nn.Module | None = None) -> None:
        self._model = model
        self._averaged: tuple[str, ...] = ()
        self._changed_before: frozenset[str] = frozenset()  # in the run that a checkpoint continues
        self._noted: Tensor | None = None
        self.see_model()

    def see_model(self) -> None:
        """Find the current frozen parameters of the model, and use their values as the reference."""
        places = () if self._model is None else state_places(self._model).items()
        self._holders = {name: place for name, place in places if _can_be_averaged(place[0][place[1]])}
        self._places = {name: _places(parameter) for name, parameter in self._now().items()}
        self._averaged = tuple(name for name in self._averaged if name in self._holders)
        self.note()

    def note(self) -> None:
        """Use the current values, equal on all ranks, as the reference."""
        self._noted = self._sampled()

    def __len__(self) -> int:
        return len(self._holders)

    @property
    def averaged(self) -> dict[str, Tensor]:
        """The averaged parameters by name, in the current model; the same names on every rank."""
        now = self._now()
        return {name: now[name] for name in self._averaged}

    def looked_at(self, number: int) -> bool:
        """Whether they are compared before sync round `number`; equal on all ranks."""
        return len(self) > 0 and number & (number - 1) == 0

    @property
    def none_moved(self) -> Flags:
        return np.zeros(len(self), dtype=bool)

    def moved(self) -> Flags:
        """Whether each differs from the reference, or did so in a checkpoint. Synchronizes with the device."""
        now = self._sampled()
        if now is None:
            return self.none_moved
        if self._noted is None:
            self._noted = now
        differs: Flags = (now.view(torch.int64) != self._noted.view(torch.int64)).any(1).cpu().numpy()
        differs |= np.array([name in self._changed_before for name in self._holders])
        return differs

    @property
    def changed(self) -> list[str]:
        """Names of those that differ from the reference. Synchronizes with the device."""
        return [name for name, has_moved in zip(self._holders, self.moved(), strict=True) if has_moved]

    def average(self, moved: Flags, *, gives_notice: bool) -> None:
        """Average those that have changed on any rank, from now on. gives_notice: whether this rank prints it."""
        names = [name for name, has_moved in zip(self._holders, moved, strict=True) if has_moved]
        new = [name for name in names if name not in self._averaged]
        if not new:
            return
        self._averaged = tuple(name for name in self._holders if name in {*self._averaged, *new})
        if gives_notice:
            notice(_notice_text(new, sum(tensor.numel() for tensor in self.averaged.values())))

    @property
    def names(self) -> list[str]:
        """Names of the averaged parameters, for a checkpoint."""
        return list(self._averaged)

    def loading(self, changed: Collection[str], averaged: Collection[str]) -> None:
        """A checkpoint is being loaded, in which these had changed, and these were averaged. The next comparison, or
        `note`, sets the reference."""
        self._changed_before = frozenset(changed)
        self.resume(averaged)

    def resume(self, names: Collection[str]) -> None:
        """Average the parameters that a checkpoint names. The next comparison sets the reference, since a checkpoint
        is being loaded."""
        self._averaged = tuple(name for name in self._holders if name in names)
        self._noted = None

    def _now(self) -> dict[str, Tensor]:
        return {name: holder[leaf] for name, (holder, leaf) in self._holders.items()}

    @torch.no_grad()
    def _sampled(self) -> Tensor | None:
        """(parameters, ENTRIES), in float64."""
        rows = [tensor.take(self._places[name]).to(torch.float64) for name, tensor in self._now().items()]
        return torch.stack([row.to(rows[0].device) for row in rows]) if rows else None


def _can_be_averaged(parameter: Tensor) -> bool:
    whole = not parameter.is_meta and not hasattr(parameter, "to_local")  # a DTensor has shards on other ranks
    frozen = isinstance(parameter, Parameter) and not parameter.requires_grad
    return frozen and whole and parameter.is_floating_point() and parameter.numel() > 0


def _places(tensor: Tensor) -> Tensor:
    return torch.arange(ENTRIES, device=tensor.device) * (tensor.numel() - 1) // (ENTRIES - 1)


def _notice_text(names: list[str], numel: int) -> str:
    return (
        f"the script changes parameters that have requires_grad=False: {listed(names)}. Workers train separately with "
        f"this recipe, so these are averaged from now on, uncompressed: {numel:,} numbers per round. If they were only "
        "loaded after gossamer.attach, load them before it; then they are not averaged."
    )


def pack_flags(flags: Flags) -> list[float]:
    """Pack flags into numbers that float64 represents exactly."""
    parts = [flags[start : start + FLAGS_PER_NUMBER] for start in range(0, len(flags), FLAGS_PER_NUMBER)]
    return [float(sum(1 << place for place in np.flatnonzero(part).tolist())) for part in parts]


def unpack_flags(numbers: Collection[float], count: int) -> Flags:
    """The inverse of `pack_flags`."""
    bits = [bool(int(number) >> place & 1) for number in numbers for place in range(FLAGS_PER_NUMBER)]
    return np.array(bits[:count], dtype=bool)


def flags_bytes(count: int) -> int:
    """Bytes of `count` flags in a poll."""
    return 8 * -(-count // FLAGS_PER_NUMBER)


def gather_moved(moved: Flags) -> Generator[AllGather, Any, Flags]:
    """All-gather flags. Returns those that are set on any rank."""
    received = yield AllGather((torch.tensor(pack_flags(moved), dtype=torch.float64, device="cpu"),))
    union: Flags = np.any([unpack_flags(remote.tolist(), len(moved)) for (remote,) in received], axis=0)
    return union
