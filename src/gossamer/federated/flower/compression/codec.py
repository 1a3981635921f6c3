"""Contribution codec: the difference that a node learned as the bytes of one Array, with feedback, and back."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from gossamer.algorithms.compressors import Compressor
from gossamer.algorithms.recipes.recipe import resolve
from gossamer.base.layout import FlatTensors
from gossamer.errors import MalformedError, RecipeError
from gossamer.federated.client import contribution
from gossamer.federated.client.store import ClientState
from gossamer.federated.flower.compression.array_layout import ArrayLayout
from gossamer.federated.flower.compression.framing import PayloadHeader, codec_noun, frame, stype_of, unframe
from gossamer.federated.flower.compression.node_state import Residuals
from gossamer.train.parameter_server import shard_message


@dataclass(frozen=True)
class ContributionCodec:
    """Encodes on nodes and decodes on the server, alike on both: compressor and seed."""

    compressor: Compressor  # complete: with feedback, and a way for every shape
    seed: int = 0

    @classmethod
    def of(cls, recipe: str, seed: int = 0) -> ContributionCodec:
        """Of a compressor's text. Raises RecipeError for what devices cannot send."""
        return cls(_compressor(recipe), seed)

    @property
    def text(self) -> str:
        return repr(self.compressor)

    @property
    def stype(self) -> str:
        return stype_of(codec_noun(self.compressor))

    def encode(
        self, difference: Tensor, layout: ArrayLayout, residuals: Residuals, node: int, step: int
    ) -> tuple[bytes, Residuals]:
        """The bytes for (n,), with what feedback owes, and what it owes once they count. Raises NotFinite."""
        at = contribution.contribution_context(self.seed, node, step)
        made = contribution.encode(self.compressor, layout.layout, [difference], ClientState(residuals=residuals), at)
        header = PayloadHeader(recipe=self.text, layout=layout.fingerprint(), step=step, counts=made.counts)
        return frame(header, made.payload), made.counted.residuals

    def decode(self, data: bytes, layout: ArrayLayout, node: int, step: int) -> Tensor:
        """The difference, (n,), fresh and finite. Raises MalformedError.

        All memory is of this server's own layout: what a node claims of sizes is only compared.
        """
        header, payload = unframe(data)
        due = PayloadHeader(recipe=self.text, layout=layout.fingerprint(), step=step)
        for name in ("recipe", "layout", "step"):
            came, wanted = getattr(header, name), getattr(due, name)
            if came != wanted:
                raise MalformedError(
                    f"node {node} sent a contribution of {name} {str(came)[:200]!r} and {str(wanted)[:200]!r} was due; "
                    "nothing of it was used. Give the mod and the strategy's wrapper the same recipe"
                )
        like = FlatTensors.zeros(layout.layout, dtype=layout.dtype, device=torch.device("cpu"))
        at = contribution.contribution_context(self.seed, node, step)
        (found,) = shard_message.decode(self.compressor, payload, header.counts, [like], at)
        return found


@lru_cache(maxsize=64)
def _compressor(recipe: str) -> Compressor:
    """The same object for the same text: it is asked for with every message."""
    compressor = resolve(f"FedAvg() + {recipe}").compressor
    if compressor.incremental or compressor.adapts:
        raise RecipeError(
            f"{recipe} sends changes to what it sent before, and a node's reply may be lost or left out: the next "
            'one would mean nothing. Write a compressor whose messages stand alone, such as "TopK(0.01)".'
        )
    return compressor
