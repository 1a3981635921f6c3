"""Gradient statistics: properties of a model's gradients that predict which compressors and strategies suit them.

Meaning of each number:

- energy in the largest entries: sparsification (TopK and similar) loses 1 - share of the energy in one message
  (Stich et al. 2018, arXiv:1809.07599: its contraction is at least the density, and equals this share);
- energy in the first singular directions: low-rank compression (PowerSGD) loses 1 - share at best (Eckart and Young
  1936; Vogels et al. 2019, arXiv:1905.13727);
- agreement of signs between batches: 0.5 is noise; sign compression needs agreement (Bernstein et al. 2018,
  arXiv:1802.04434);
- gradient noise scale: approximate batch size up to which a larger batch reduces the steps (McCandlish et al. 2018,
  arXiv:1812.06162, appendix A.1, here from successive batches of one worker while its parameters move a little; an
  order of magnitude only).

They change during training, mostly towards more noise.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from math import ceil, inf, isfinite, sqrt
from typing import Any

import torch
from torch import Tensor

from gossamer.base import rng

RANKS = (1, 2, 4, 8)  # of the singular shares
SMALLEST = 256  # minimum entries of a compressed tensor; smaller ones, and vectors, are sent dense
OVERSAMPLING, POWER_ITERATIONS = 8, 2  # of the randomized range finder
MOST_FACTORED = 2**24  # maximum entries of all matrices to factor
NOISE_LARGEST_HUNDREDTH = 0.0845  # of the energy of Gaussian noise: 2 (z phi(z) + Q(z)) where 2 Q(z) = 0.01


@dataclass(frozen=True, kw_only=True)
class GradientStatistics:
    """Statistics of a worker's gradients over some successive batches: means over tensors, weighted by their energy.

    They cover compressed tensors, with at least two dimensions and 256 entries; all tensors if no tensor qualifies.
    """

    batches: int  # number of observed batches with finite gradients
    skipped_batches: int = 0  # with NaN or infinity in their gradients; left out of all other numbers
    steps_before: int = 0  # of the script; the first steps of a training are not typical
    entries: int  # of the observed tensors
    largest_hundredth: float  # share of a batch's energy in the largest 1 % of each tensor's entries
    largest_thousandth: float  # the same for 0.1 %
    singular_shares: tuple[float, ...] | None  # of the mean gradient's energy in its first 1, 2, 4, 8 directions
    noise_singular_shares: tuple[float, ...] | None  # upper bounds for noise of the same shapes
    sign_agreement: float | None  # share of entries with the sign of the previous batch; None for one batch
    signal_energy: float | None  # estimated |G|^2 of the true gradient; below 0 if noise hides it
    noise_energy: float | None  # estimated tr(Sigma) of one batch's gradient

    @property
    def noise_scale_batches(self) -> float | None:
        """Gradient noise scale tr(Sigma) / |G|^2 in batches of one worker; inf without a measurable signal."""
        if self.signal_energy is None or self.noise_energy is None:
            return None
        if self.noise_energy <= 0:
            return 0.0
        return self.noise_energy / self.signal_energy if self.signal_energy > 0 else inf

    def steps_ratio(self, batches: int, than: int) -> float:
        """Steps to a loss with `batches` per step, relative to `than`: (1 + B_noise / B) / (1 + B_noise / B').

        source: McCandlish et al. 2018, equation 2.11. 1 if the noise scale is unknown.
        """
        noise = self.noise_scale_batches
        if noise is None:
            return 1.0
        if noise == inf:
            return than / batches
        return (1 + noise / batches) / (1 + noise / than)

    @classmethod
    def from_json(cls, fields: Mapping[str, Any]) -> GradientStatistics:
        shares = {
            key: None if fields[key] is None else tuple(fields[key])
            for key in ("singular_shares", "noise_singular_shares")
        }
        return cls(**{**fields, **shares})

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


# -- of one tensor -----------------------------------------------------------------------------------------------------


def energy(x: Tensor) -> float:
    """Sum of squares."""
    return float(torch.linalg.vector_norm(x, dtype=torch.float64) ** 2)


def energy_of_largest(x: Tensor, density: float) -> float:
    """Sum of the squares of the k = ceil(density n) entries of largest magnitude. x: any shape."""
    flat = x.detach().flatten().float()
    largest = flat.abs().topk(ceil(density * flat.numel()), sorted=False).values
    return energy(largest)


def singular_energies(matrix: Tensor, ranks: Sequence[int] = RANKS) -> list[float]:
    """Energy in the first r singular directions, for each r. matrix: (rows, cols).

    By a randomized range finder with power iterations: a lower bound, and close to the true value if singular values
    decay. It costs six matrix products with max(ranks) + 8 columns.
    source: Halko, Martinsson and Tropp 2011, SIAM Review 53, algorithm 4.4
    """
    a = matrix.detach().float()
    columns = min(max(ranks) + OVERSAMPLING, *a.shape)
    draws = rng.generator("singular energies", *a.shape)
    test = torch.randn(a.shape[1], columns, generator=draws).to(a.device)
    basis = torch.linalg.qr(a @ test).Q
    for _ in range(POWER_ITERATIONS):
        basis = torch.linalg.qr(a @ torch.linalg.qr(a.T @ basis).Q).Q
    squares = torch.linalg.svdvals(basis.T @ a).double().square()
    return [float(squares[:rank].sum()) for rank in ranks]


def noise_singular_share(rows: int, cols: int, rank: int) -> float:
    """Upper bound of the share of a large Gaussian matrix's energy in its first `rank` directions.

    Its largest singular value is sqrt(rows) + sqrt(cols) (Bai and Yin 1993), and its energy rows cols.
    """
    return min(1.0, rank * (sqrt(rows) + sqrt(cols)) ** 2 / (rows * cols))


def sign_agreement(x: Tensor, y: Tensor) -> float:
    """Share of equal signs among the entries that are nonzero in both; 0.5 if there are no such entries."""
    product = torch.sign(x) * torch.sign(y)
    alike, unlike = int((product > 0).sum()), int((product < 0).sum())
    return alike / (alike + unlike) if alike + unlike else 0.5


def signal_and_noise(small: float, big: float, batches: int) -> tuple[float, float]:
    """(|G|^2, tr(Sigma)) from the mean |g|^2 of one batch's gradient and |g|^2 of the mean of `batches`.

    Both are unbiased: |G|^2 = (B big - small) / (B - 1), tr(Sigma) = (small - big) / (1 - 1 / B)
    source: McCandlish et al. 2018, arXiv:1812.06162, appendix A.1
    """
    return (batches * big - small) / (batches - 1), (small - big) / (1 - 1 / batches)


# -- of a model --------------------------------------------------------------------------------------------------------


@dataclass
class _Sums:
    """Sums of energies over tensors and batches."""

    whole: float = 0.0  # of all tensors, including small ones
    seen: float = 0.0  # of compressed tensors
    hundredth: float = 0.0
    thousandth: float = 0.0
    compared: float = 0.0  # of entries compared with the previous batch
    agreeing: float = 0.0  # weighted by the share of equal signs


@dataclass
class GradientObserver:
    """Observes gradients batch by batch; keeps their sum and the last ones, 2 N in float32."""

    steps_before: int = 0  # of the script
    batches: int = 0
    skipped_batches: int = 0  # not finite
    _sums: _Sums = field(default_factory=_Sums)
    _total: dict[str, Tensor] = field(default_factory=dict)
    _before: dict[str, Tensor] = field(default_factory=dict)

    @property
    def seen_batches(self) -> int:
        """All batches, with finite gradients or not."""
        return self.batches + self.skipped_batches

    def observe(self, gradients: Mapping[str, Tensor]) -> None:
        """Add one batch's unscaled gradients by name; shapes must not change. They are copied.

        A batch with NaN or infinity in its gradients is counted and left out, since one of them would hide all others.
        """
        fresh = {name: gradient.detach().float() for name, gradient in gradients.items()}
        whole = sum(energy(each) for each in fresh.values())
        if not isfinite(whole):
            self.skipped_batches += 1
            return
        self._sums.whole += whole
        for name, gradient in visible(fresh).items():
            self._look_at(gradient, self._before.get(name))
        for name, gradient in fresh.items():
            self._total[name] = self._total[name].add_(gradient) if name in self._total else gradient.clone()
            self._before[name] = gradient.clone()
        self.batches += 1

    def _look_at(self, gradient: Tensor, before: Tensor | None) -> None:
        own = energy(gradient)
        self._sums.seen += own
        self._sums.hundredth += energy_of_largest(gradient, 0.01)
        self._sums.thousandth += energy_of_largest(gradient, 0.001)
        if before is not None:
            self._sums.compared += own
            self._sums.agreeing += own * sign_agreement(gradient, before)

    def statistics(self) -> GradientStatistics:
        """Statistics of all batches so far; at least one with finite gradients is required."""
        mean = {name: total / self.batches for name, total in self._total.items()}
        matrices = _factored(visible(mean))
        signal = noise = None
        if self.batches > 1:
            big = sum(energy(each) for each in mean.values())
            signal, noise = signal_and_noise(self._sums.whole / self.batches, big, self.batches)
        return GradientStatistics(
            batches=self.batches,
            skipped_batches=self.skipped_batches,
            steps_before=self.steps_before,
            entries=sum(each.numel() for each in visible(mean).values()),
            largest_hundredth=_share(self._sums.hundredth, self._sums.seen),
            largest_thousandth=_share(self._sums.thousandth, self._sums.seen),
            singular_shares=_singular_shares(matrices) if matrices else None,
            noise_singular_shares=_noise_shares(matrices) if matrices else None,
            sign_agreement=self._sums.agreeing / self._sums.compared if self._sums.compared else None,
            signal_energy=signal,
            noise_energy=noise,
        )


def visible(tensors: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
    """Compressed tensors; all tensors if no tensor qualifies."""
    seen = {name: each for name, each in tensors.items() if each.dim() >= 2 and each.numel() >= SMALLEST}
    return seen or tensors


def _factored(tensors: Mapping[str, Tensor]) -> list[Tensor]:
    """Matrices as PowerSGD forms them, (first, everything else): the largest, up to a total number of entries."""
    matrices = [each.reshape(each.shape[0], -1) for each in tensors.values() if each.dim() >= 2]
    kept: list[Tensor] = []
    for matrix in sorted(matrices, key=torch.numel, reverse=True):
        if kept and sum(map(torch.numel, kept)) + matrix.numel() > MOST_FACTORED:
            continue
        kept.append(matrix)
    return kept


def _singular_shares(matrices: Sequence[Tensor]) -> tuple[float, ...]:
    found = [singular_energies(matrix) for matrix in matrices]
    whole = sum(energy(matrix) for matrix in matrices)
    return tuple(_share(sum(each), whole) for each in zip(*found, strict=True))


def _noise_shares(matrices: Sequence[Tensor]) -> tuple[float, ...]:
    """Weighted by the energies of the matrices, as the singular shares."""
    weights = [energy(matrix) for matrix in matrices]
    shares = [[noise_singular_share(matrix.shape[0], matrix.shape[1], rank) for matrix in matrices] for rank in RANKS]
    return tuple(_share(sum(w * s for w, s in zip(weights, each, strict=True)), sum(weights)) for each in shares)


def _share(part: float, whole: float) -> float:
    return min(1.0, part / whole) if whole else 0.0
