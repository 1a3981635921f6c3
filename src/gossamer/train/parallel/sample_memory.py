"""Sample memory: each sample's activations as known to both sides of a boundary, to which differences are sent.

source: Wang et al. 2022, NeurIPS (AQ-SGD: "Fine-tuning Language Models over Slow Networks using Activation Quantization
with Guarantees")
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from gossamer.base.layout import accumulation_dtype
from gossamer.errors import CheckpointError, LoopError


class SampleMemory:
    """known: (samples, *shape) in host memory, zero until a sample's first visit; visits: (samples,) int64."""

    def __init__(self, samples: int, shape: Sequence[int], dtype: torch.dtype) -> None:
        self.known = torch.zeros((samples, *shape), dtype=dtype)
        self.visits = torch.zeros(samples, dtype=torch.int64)

    def checked(self, samples: Tensor, due: int) -> Tensor:
        """The ids of a microbatch's samples: (due,) int64 in host memory. Raises LoopError."""
        ids = samples.detach().to("cpu", torch.int64)
        lowest, highest = (int(ids.min()), int(ids.max())) if ids.numel() else (0, 0)
        if ids.shape != (due,):
            raise LoopError(
                f"a microbatch of {due} samples has ids of shape {tuple(ids.shape)}, but each sample's previous "
                "activations are found by its id. Pass schedule.step(..., samples=ids) one int64 id per sample."
            )
        if lowest < 0 or highest >= len(self.visits):
            raise LoopError(
                f"sample ids {lowest} to {highest} are outside of the boundary's memory of samples 0 to "
                f"{len(self.visits) - 1}. Write boundary(..., samples={max(highest, 0) + 1}), or number samples from 0."
            )
        if len(ids.unique()) < due:
            raise LoopError(
                "a sample occurs twice in a microbatch, but only one of its activations can be stored. Draw "
                "samples without replacement."
            )
        return ids

    def recall(self, ids: Tensor, device: torch.device) -> Tensor:
        """Known activations of these samples: (n,), at least in float32."""
        return self.known[ids].to(device, accumulation_dtype(self.known.dtype)).view(-1)

    def remember(self, ids: Tensor, values: Tensor) -> None:
        """Store values: (len(ids), *shape)."""
        self.known[ids] = values.to(self.known)
        self.visits[ids] += 1

    def fingerprint(self, ids: Tensor) -> int:
        """A hash of ids and visits, never 0; equal on both sides if they have processed the same messages."""
        text = torch.stack([ids, self.visits[ids]]).numpy().tobytes()
        return int.from_bytes(hashlib.blake2b(text, digest_size=7).digest(), "big") + 1

    def state_dict(self) -> dict[str, Tensor]:
        return {"known": self.known, "visits": self.visits}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Restore a state. Raises CheckpointError for other samples or shapes."""
        for name, own in self.state_dict().items():
            if name not in state or state[name].shape != own.shape:
                came = tuple(state[name].shape) if name in state else "nothing"
                raise CheckpointError(
                    f"this boundary's memory {name!r} is {tuple(own.shape)}, but that of the checkpoint is {came}: "
                    "data or model differ. Pass boundary(...) the shape and samples that it was saved with."
                )
            own.copy_(state[name])
