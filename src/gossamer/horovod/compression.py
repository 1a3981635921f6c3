"""Compression: casts of single tensors, by Horovod's names. Optimizers and tapes take recipes instead."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


class TensorCompressor:
    """Makes a tensor smaller for one call; this one leaves it as it is."""

    @staticmethod
    def compress(tensor: Any) -> tuple[Any, Any]:
        """The tensor to send, and the context for `decompress`."""
        return tensor, None

    @staticmethod
    def decompress(tensor: Any, ctx: Any) -> Any:
        """The result in its first dtype."""
        return tensor


@dataclass(frozen=True, kw_only=True)
class Compressors:
    """The compressors of a framework. DistributedOptimizer takes any recipe."""

    fp16: type[TensorCompressor]
    none: type[TensorCompressor] = TensorCompressor
