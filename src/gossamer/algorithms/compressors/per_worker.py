"""PerWorker: another codec for workers with slow lines."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from functools import lru_cache, partial

import torch
from torch import Tensor

from gossamer.algorithms.compressors.base import Codec, GatheredCompressor, mean_buffer_like, with_mean_in
from gossamer.algorithms.compressors.decoding import decode_mean
from gossamer.algorithms.compressors.onebit import OneBit
from gossamer.base.aggregation import Aggregation, AggregationContext, AggregationResult
from gossamer.base.kernels import Residual, widened
from gossamer.base.layout import FlatTensors, Itself, Layout
from gossamer.base.ops import AllGather, Form, Payload, payload_form
from gossamer.base.term import Inelastic
from gossamer.base.units import parse_rate
from gossamer.errors import RecipeError, require


@dataclass(frozen=True, repr=False)
class PerWorker(GatheredCompressor):
    """Workers with slow lines send by the codec `slow`, all others by `usual`, in one exact mean.

    mean = 1/workers (sum over i of decode_i(encode_i(x_i))), encode_i = slow's if i is a slow worker, else usual's
    law:    the mean of own is the mean, with the same bits on every rank; with slow = usual it is usual's
    bytes:  of each worker: those of its codec
    source: compressing only the slow replicas: arXiv 2601.02360 (Het. SparseLoCo), by its abstract: the paper was not
            read, and compresses activations in addition

    Every rank decodes each message by the codec of its sender. A table of ranks, equal on all of them, determines it.
    Sessions fill in `ranks` from `hosts` or `below` when they begin, and the recipe in the record shows the result; the
    table does not change until the session ends. With Feedback each worker keeps the error of its own codec. With
    Sharded, which recipes add, the owner of a part sends the mean of the part by its own codec, so the part of a slow
    worker has the errors of `slow` on all workers.

    Only uploads shrink: a slow worker still receives the messages of all others. Both codecs must be an encoder and a
    decoder of all-gathered messages. Compressors that sum in the network (Dense, PowerSGD) or need one mask on all
    ranks (RandomK, ARCTopK) are rejected.

    Args:
        usual: codec of the other workers; a PerWorker for three and more codecs.
        slow: codec of the slow workers.
        ranks: the slow workers by rank: 3, "3,5" or "4-7"; "" for none.
        hosts: the slow workers by host name, such as "laptop" or "laptop,home-*".
        below: workers with a measured upload bandwidth below this rate are slow, such as "20mbit".

    Example:
        >>> gossamer.PerWorker(gossamer.Int8(), slow=gossamer.OneBit(), ranks=3)
        PerWorker(Int8(), ranks=3)
    """

    usual: Codec | PerWorker
    slow: Codec = OneBit()
    ranks: int | str | None = None
    hosts: str | None = None
    below: str | None = None

    needs_arguments = "below='20mbit'"

    def __post_init__(self) -> None:
        for name, codec in (("usual", self.usual), ("slow", self.slow)):
            _require_codec(codec, name, nests=name == "usual")
        given = [name for name in ("ranks", "hosts", "below") if getattr(self, name) is not None]
        require(
            len(given) == 1,
            f"PerWorker needs one of ranks, hosts and below, which select the slow workers, got "
            f"{' and '.join(given) or 'none'}. Write PerWorker(Int8(), slow=OneBit(), ranks=3), hosts='laptop' or "
            "below='20mbit'.",
        )
        _ranks(self.ranks)  # raises for an invalid text
        require(
            self.hosts is None or all(_patterns(self.hosts)),
            f"hosts must be host names separated by commas, got {self.hosts!r}. Write PerWorker(Int8(), "
            "hosts='laptop,home-*').",
        )
        if self.below is not None:
            parse_rate(self.below)

    @property
    def inelastic(self) -> Inelastic:
        return Inelastic(
            "ranks change with every worker that joins or leaves, and a table of codecs by rank does not follow them",
            f"Write one codec for all, such as {self.slow!r}",
        )

    @property
    def wants_feedback(self) -> bool:
        return self.usual.wants_feedback or self.slow.wants_feedback

    @property
    def decodes_without_input(self) -> bool:
        return True

    @property
    def widens_residuals(self) -> bool:
        return True

    @property
    def reencodable(self) -> bool:
        """As of a codec: whether a recipe may wrap it in Sharded."""
        return self.usual.reencodable and self.slow.reencodable

    def suits(self, shape: Sequence[int]) -> bool:
        return self.usual.suits(shape) and self.slow.suits(shape)

    @property
    def is_placed(self) -> bool:
        """Whether the ranks of all slow workers are known."""
        return self.ranks is not None and (not isinstance(self.usual, PerWorker) or self.usual.is_placed)

    @property
    def needs_hosts(self) -> bool:
        """Whether the slow workers depend on host names."""
        return self.hosts is not None or (isinstance(self.usual, PerWorker) and self.usual.needs_hosts)

    def placed(self, hosts: Sequence[str], uplinks: Sequence[float]) -> PerWorker:
        """Return the same term with `ranks` in place of `hosts` and `below`.

        Args:
            hosts: host names by rank; empty if unknown.
            uplinks: measured upload bandwidths by rank, in bits per second; empty if unknown.

        Raises:
            RecipeError: what `hosts` or `below` needs is unknown.
        """
        usual = self.usual.placed(hosts, uplinks) if isinstance(self.usual, PerWorker) else self.usual
        if self.ranks is not None:
            return replace(self, usual=usual)
        known: Sequence[object] = hosts if self.below is None else uplinks
        if not known:
            raise RecipeError(
                f"{self!r} needs the {'host names' if self.below is None else 'upload bandwidths'} of all workers, and "
                "they were not measured here. Name the slow workers by rank: "
                f"{replace(self, ranks=3, hosts=None, below=None)!r}."
            )
        slow = [rank for rank in range(len(known)) if self._selects(rank, hosts, uplinks)]
        return replace(self, usual=usual, ranks=",".join(map(str, slow)), hosts=None, below=None)

    def _selects(self, rank: int, hosts: Sequence[str], uplinks: Sequence[float]) -> bool:
        if self.below is not None:
            return uplinks[rank] < parse_rate(self.below)
        assert self.hosts is not None  # by __post_init__
        host = hosts[rank].lower()  # names of hosts have no case
        names = host, host.split(".")[0]
        return any(fnmatchcase(name, pattern) for pattern in _patterns(self.hosts) for name in names)

    def check(self, world: int) -> None:
        """Raise RecipeError if a rank of the table is not in a group of `world` workers."""
        if isinstance(self.usual, PerWorker):
            self.usual.check(world)
        if world > 1 and (beyond := [rank for rank in _ranks(self.ranks) if rank >= world]):
            raise RecipeError(
                f"{self!r} names rank {beyond[0]}, and {world} workers have the ranks 0 to {world - 1}. Write "
                f"ranks={world - 1}, or more workers."
            )

    @property
    def codecs(self) -> tuple[Codec, ...]:
        """All codecs, the usual one first."""
        return (*(self.usual.codecs if isinstance(self.usual, PerWorker) else (self.usual,)), self.slow)

    def of(self, rank: int) -> Codec:
        """Return the codec of a rank's messages."""
        return self.slow if rank in _ranks(self.ranks) else self.usual.of(rank)

    def senders(self, world: int) -> Sequence[tuple[Codec, Sequence[int]]]:
        """Return the different codecs, each with its ranks in ascending order; equal on every rank."""
        return _senders(self, world)

    def _gathered(
        self, x: FlatTensors, at: AggregationContext, out: Tensor | None, residual: Residual | None
    ) -> Aggregation:
        codec, senders = self.of(at.rank), self.senders(at.world)
        with widened(residual) as wide:
            payload = codec.encode(x, at, wide)
        del wide
        forms = None if len(senders) == 1 else _forms(self, Itself(x.layout), x.flat.dtype, at.world)
        received = yield AllGather(payload, forms)
        mean = mean_buffer_like(x.flat, out)
        decoders = [(partial(_decode, each, x.layout), ranks) for each, ranks in senders]
        finite = decode_mean(decoders, received, x.layout, mean, at)
        own = partial(codec.decoded, payload, x.layout, x.flat.new_empty(0))
        return with_mean_in(AggregationResult(mean=mean, own_contribution=own, finite=finite), out)


def _patterns(hosts: str) -> list[str]:
    """Return the patterns of a text such as "laptop, home-*"."""
    return [pattern.strip().lower() for pattern in hosts.split(",")]


def _decode(codec: Codec, layout: Layout, payloads: Sequence[Payload], out: Tensor, divisor: int = 1) -> None:
    codec.decode(payloads, layout, out, divisor)


def by_rank(senders: Sequence[tuple[Codec, Sequence[int]]], of: Callable[[Codec], Form]) -> tuple[Form, ...]:
    """Return the form of each rank's message, given the form by codec."""
    found = {rank: form for codec, ranks in senders for form in (of(codec),) for rank in ranks}
    return tuple(found[rank] for rank in range(len(found)))


@lru_cache(maxsize=256)
def _forms(codecs: PerWorker, layout: Itself[Layout], dtype: torch.dtype, world: int) -> tuple[Form, ...]:
    """The form of each rank's message; cached, since layouts are the same at every step."""
    x = FlatTensors.zeros(layout.item, dtype=dtype, device=torch.device("meta"))
    return by_rank(codecs.senders(world), lambda codec: payload_form(codec.encode(x, AggregationContext())))


@lru_cache(maxsize=64)
def _senders(codecs: PerWorker, world: int) -> tuple[tuple[Codec, tuple[int, ...]], ...]:
    found: dict[Codec, list[int]] = {}
    for rank in range(world):
        found.setdefault(codecs.of(rank), []).append(rank)
    return tuple((codec, tuple(ranks)) for codec, ranks in found.items())


@lru_cache(maxsize=256)
def _ranks(text: int | str | None) -> frozenset[int]:
    """Return the ranks of a text such as "3,5-7"."""
    found: set[int] = set()
    for part in () if text in (None, "") else str(text).split(","):
        first, dash, last = part.strip().partition("-")
        require(
            first.isdecimal() and (not dash or last.isdecimal()) and int(first) <= int(last or first) < MOST_RANKS,
            f"ranks must be ranks from 0 to {MOST_RANKS - 1}, separated by commas, got {text!r}. Write "
            "PerWorker(Int8(), ranks='3,5') or ranks='4-7'.",
        )
        found.update(range(int(first), int(last or first) + 1))
    return frozenset(found)


MOST_RANKS = 2**20  # a text of a few letters must not fill the memory


def _require_codec(codec: object, name: str, *, nests: bool) -> None:
    if nests and isinstance(codec, PerWorker):
        return
    require(
        isinstance(codec, Codec),
        f"{name} must be an encoder and a decoder of messages (a Codec), got {codec!r}: with it, ranks compute a sum "
        "or a selection together, so that all of them need the same compressor, or it wraps another one. Write "
        "PerWorker(Int8(), slow=OneBit(), ranks=3), and wrappers such as Feedback around it.",
    )
    require(
        isinstance(codec, Codec) and type(codec).aggregate is Codec.aggregate,
        f"{name} must send one message per worker in every case, and {codec!r} replaces it by an all-reduce where that "
        "is cheaper, which all ranks must do together. Write PerWorker(TopK(density=0.01), ranks=3).",
    )
