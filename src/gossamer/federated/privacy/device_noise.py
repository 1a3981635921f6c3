"""Device noise: what a device does to its contribution and its report before anything of them leaves it."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from gossamer.algorithms.strategies.federated import LocalPrivacy, Privacy
from gossamer.errors import MismatchError
from gossamer.federated.messages import Report
from gossamer.federated.privacy.clipping import clipped
from gossamer.federated.privacy.gaussian_noise import gaussian
from gossamer.federated.privacy.random_bits import RandomBits, SystemBits


def noised(blocks: Sequence[Tensor], privacy: LocalPrivacy, bits: RandomBits | None = None) -> tuple[Tensor, ...]:
    """Clipped together and with Gaussian noise, each in its dtype. blocks: (n,) each, only read. Raises NotFinite."""
    bits = bits or SystemBits()
    deviation = privacy.noise * privacy.clip
    return tuple(
        (part + gaussian(part.numel(), deviation, bits)).to(block.dtype)
        for part, block in zip(clipped(blocks, privacy.clip), blocks, strict=True)
    )


def check_budget(privacy: LocalPrivacy, told: int) -> None:
    """Raise MismatchError where so many contributions of one device tell more than the budget."""
    epsilon = privacy.epsilon_after(told, 1, 1)
    if privacy.budget is not None and epsilon > privacy.budget:
        raise MismatchError(
            f"The server asks this device for contribution {told}, after which epsilon is {epsilon:.4g}, above the "
            f"budget of {privacy.budget:g}: it has forgotten what it was told. Nothing was sent. Start the server with "
            "the journal that it had."
        )


def private_report(report: Report, privacy: Privacy | None) -> Report:
    """What a device tells of its work: nothing of its own where the server is not trusted."""
    if privacy is None or not privacy.on_device:
        return report
    return Report(samples=1, steps=1, counts=report.counts, layout=report.layout)
