"""SecureAggregation: the server learns the sum of a cohort's contributions, and nothing about a single one."""

from __future__ import annotations

from dataclasses import dataclass

from gossamer.algorithms.compressors import Chain, Codec, Compressor, Dense, Feedback, PowerSGD, Rotated, Route
from gossamer.algorithms.compressors.error_feedback import CLASSIC
from gossamer.algorithms.compressors.random_subspace import RandomSubspace
from gossamer.algorithms.compressors.topk import Sparse
from gossamer.base.term import Term
from gossamer.errors import require


@dataclass(frozen=True, repr=False)
class SecureAggregation(Term):
    """Secure aggregation by masks that cancel in the sum: the server learns the sum, and nothing about a single device.

    y_i = x_i + PRG(b_i) + sum over j > i of PRG(s_ij) - sum over j < i of PRG(s_ij)  mod 2^width
    law:    the sum over the devices that sent a vector is exact, also if others left before or after the key agreement
    bytes:  N width / 8, width = bits + ceil(log2(devices)), about 350 a neighbor, and 64 a device down
    source: Bonawitz et al. 2017, CCS; Bell et al. 2020, CCS (neighbors)

    x_i is the contribution times its weight, rounded at random to integers of `bits`, without bias. The weight is
    masked as well, so no device reveals its number of samples. The papers call b_i the self mask and s_ij the pairwise
    mask.

    Each round has a largest entry R and a largest weight W. Entries are clipped to R. A device with a larger weight
    counts with W, in the sum and in its divisor. R grows while more than a quarter of the devices exceed it. W grows
    while any device exceeds it, up to 512 times the weight that more than a quarter of the devices have. The masks also
    hide a device that violates these limits: one that runs other code can add any number to the sum.

    Secrets (the seed of a device's own mask, and the key of its pairwise masks) are recovered from shares of
    `threshold` of its neighbors. Each neighbor reveals a share of one of both, after as large a share of the whole
    cohort has signed the list of devices that sent a vector, so all reveal shares for the same sum. With a threshold of
    t shares among k holders, and of t devices among k in the cohort, the server needs 2 t - k or more colluding devices
    to remove a mask. With few neighbors it can claim that others left, and cut the ring of neighbors into pieces: of n
    neighbors, it learns sums of n / 2 + 1 devices or more.

    Args:
        threshold: fraction of the cohort that must remain until the sum is known, above 0.5; otherwise the round fails.
        neighbors: number of devices that a device shares masks with, 2 or more; None: the whole cohort.
        bits: bits of each summand, 2 to 32.
        clip: R, the largest entry of an update; None: adapted, from 1.

    Example:
        >>> gossamer.FedAvg(secure=gossamer.SecureAggregation(bits=12))
        FedAvg(secure=SecureAggregation(bits=12))
    """

    kind = "secure"

    threshold: float = 0.6
    neighbors: int | None = None
    bits: int = 16
    clip: float | None = None

    def __post_init__(self) -> None:
        require(0.5 < self.threshold <= 1, f"threshold must be above 0.5 and at most 1, got {self.threshold}")
        require(self.neighbors is None or self.neighbors >= 2, f"neighbors must be 2 or more, got {self.neighbors}")
        require(2 <= self.bits <= 32, f"bits must be from 2 to 32, got {self.bits}")
        require(
            self.clip is None or 0 < self.clip < 1e30,
            f"clip must be the largest entry of an update, above 0, got {self.clip}. Write "
            "SecureAggregation(clip=1.0), or omit clip.",
        )

    def refuses(self, compressor: Compressor) -> str | None:
        """Return the reason why such messages cannot be summed under masks, and the line to write; None if they can.

        Linear codes can: dense tensors, entries or directions that all devices draw equally (RandomK,
        RandomProjection), and all of them after a rotation.
        """
        match compressor:
            case Dense(dtype=None) | RandomSubspace():
                return None
            case Rotated(inner=inner) | Feedback(inner=inner, rule="classic", decay=1):
                return self.refuses(inner)
            case Route(inner=inner, rest=rest):
                return self.refuses(inner) or self.refuses(rest)
        term = f"{compressor!r} under {self!r}: masks cancel in a sum of integers only, and "
        match compressor:
            case Dense(dtype=dtype):
                return f"{term}{dtype} rounds each number with a separate exponent. Omit Dense(dtype={dtype!r})."
            case Feedback(rule="classic"):
                return f"{term}devices keep the whole residual. Omit decay={compressor.decay!r}."
            case Feedback():
                return f"{term}its messages are changes to those before. Omit rule={compressor.rule!r}: {CLASSIC}."
            case PowerSGD(rank=rank):
                return (
                    f"{term}its second factor depends on the sum of all first ones, which would need a second round "
                    f"of masks. Write RandomProjection(rank={rank}), with a factor that all devices draw equally."
                )
            case Sparse() | Chain():
                return (
                    f"{term}every device selects its own indices, which it would have to reveal. Write RandomK(0.01), "
                    "with indices that all devices draw equally."
                )
            case Codec():
                return (
                    f"{term}every device has its own scales. Write SecureAggregation(bits=8) without the compressor: "
                    "numbers then have 8 bits and one scale for all devices."
                )
        return (
            f"{term}the sum of its messages is not the message of the sum. Write RandomK(0.1), Rotated(RandomK(0.1), "
            'by="hadamard"), or no compressor.'
        )
