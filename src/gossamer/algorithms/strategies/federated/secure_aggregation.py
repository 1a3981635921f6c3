"""SecureAggregation: the server learns the sum of a cohort's contributions, and of each of them nothing."""

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
    """Masks that cancel in the sum: the server learns what all sent together, and of each device nothing.

    y_i = x_i + PRG(b_i) + sum over j > i of PRG(s_ij) - sum over j < i of PRG(s_ij)  mod 2^width
    law:    of whoever sent, the sum is exact, also where others left before or after they had agreed on masks
    bytes:  N width / 8, width = bits + ceil(log2(devices)), about 350 a neighbor, and 64 a device down
    source: Bonawitz et al. 2017, CCS; Bell et al. 2020, CCS (neighbors)

    x_i is the contribution times its weight, in whole numbers of `bits`, rounded up or down by chance so that it is
    right on average. The weight itself is under the mask, too, so that no device tells how much data it has.

    Each round has a largest entry R and a largest weight W. Entries are clipped to R. A device with a larger weight
    counts with W, in the sum and in what the sum is divided by. R grows while more than a quarter of the devices do not
    fit. W grows while any device does not, up to 512 times what more than a quarter of the devices have. The masks hide
    a device that does not keep to this: one that runs other code can put any number into the sum.

    A secret of a device, the seed of its own mask or the key of those that it shares, comes back from `threshold` of
    its neighbors, and each of them tells a share of one of both, once as large a share of the whole cohort has signed
    who sent a vector: so all tell of the same sum. With a threshold of t shares among k holders, and of t devices among
    k in the cohort, the server needs 2 t - k or more colluding devices to see behind a mask. With few neighbors it may
    pretend that others left, and cut the ring that they sit on into pieces: of n neighbors, it learns sums of n / 2 + 1
    devices or more.
    """

    kind = "secure"

    threshold: float = 0.6  # share of the cohort that has to stay until the sum is known, or the round is given up
    neighbors: int | None = None  # with whom a device shares masks; None: the whole cohort
    bits: int = 16  # of a number that is summed, before the sum
    clip: float | None = None  # R, the largest entry of an update; None: from 1 on, what the cohort needs

    def __post_init__(self) -> None:
        require(0.5 < self.threshold <= 1, f"threshold is a share above a half and at most 1, not {self.threshold}")
        require(self.neighbors is None or self.neighbors >= 2, f"neighbors is 2 or more, not {self.neighbors}")
        require(2 <= self.bits <= 32, f"bits is 2 to 32, not {self.bits}")
        require(
            self.clip is None or 0 < self.clip < 1e30,
            f"clip is the largest entry of an update, above 0, not {self.clip}: write "
            "SecureAggregation(clip=1.0), or leave it out",
        )

    def refuses(self, compressor: Compressor) -> str | None:
        """Why such messages cannot be added under masks, and what to write instead; None where they can.

        Linear codes can: every entry, places or directions that all draw alike (RandomK, RandomProjection), and all of
        them after a rotation.
        """
        match compressor:
            case Dense(dtype=None) | RandomSubspace():
                return None
            case Rotated(inner=inner) | Feedback(inner=inner, rule="classic", decay=1):
                return self.refuses(inner)
            case Route(inner=inner, rest=rest):
                return self.refuses(inner) or self.refuses(rest)
        term = f"{compressor!r} under {self!r}: masks cancel in a sum of whole numbers only, and "
        match compressor:
            case Dense(dtype=dtype):
                return f"{term}{dtype} rounds each number on its own scale. Leave Dense(dtype={dtype!r}) out."
            case Feedback(rule="classic"):
                return f"{term}devices keep the whole residual. Leave decay={compressor.decay!r} out."
            case Feedback():
                return f"{term}its messages are changes to those before. Leave rule={compressor.rule!r} out: {CLASSIC}."
            case PowerSGD(rank=rank):
                return (
                    f"{term}its second factor follows from the sum of all first ones, which would take a second round "
                    f"of masks. Write RandomProjection(rank={rank}), one factor, times one that all devices draw alike."
                )
            case Sparse() | Chain():
                return (
                    f"{term}every device chooses places of its own, which would have to be told. Write RandomK(0.01), "
                    "whose places all devices draw alike."
                )
            case Codec():
                return (
                    f"{term}every device has scales of its own. Write SecureAggregation(bits=8) and leave it out: "
                    "numbers then have 8 bits and one scale for all devices."
                )
        return (
            f"{term}its messages do not add up to the message of the sum. Write RandomK(0.1), Rotated(RandomK(0.1), "
            'by="hadamard"), or no compressor.'
        )
