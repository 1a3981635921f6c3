"""The inner loops, as pure functions over raw buffers."""

from gossamer.kernels.reference import all_finite, orthonormal, within_range

__all__ = ["all_finite", "orthonormal", "within_range"]
