"""Scalars: checks the numbers that a training loop tells its session: metrics, and weights of batches."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from gossamer.errors import require

LARGEST_WEIGHT = 1e15  # samples: sums over all workers, and numbers times their weights, are finite


def logged_numbers(metrics: Mapping[str, float | Tensor]) -> dict[str, float]:
    """Logged metrics as numbers by name. Raises TypeError for anything else."""
    numbers = {name: number_in(value) for name, value in metrics.items()}
    for name, number in numbers.items():
        if number is None:
            raise TypeError(
                f"session.log({name}=...) was given {_shown(metrics[name])}, and records hold numbers. Write a number "
                f"or a tensor of one entry, such as session.log({name}=loss.mean())."
            )
    return {name: number for name, number in numbers.items() if number is not None}


def named_metrics(
    metrics: Mapping[str, float | Tensor] | None, more: Mapping[str, float | Tensor]
) -> dict[str, float | Tensor]:
    """Both together, where both were given. Raises TypeError for metrics without names."""
    if metrics is None:
        return dict(more)
    if not isinstance(metrics, Mapping) or not all(isinstance(name, str) for name in metrics):
        raise TypeError(
            f"session.log() was given {_shown(metrics)}, and each number of a record has a name, which is a string. "
            'Write session.log(loss=loss) or session.log({"loss": loss}).'
        )
    return {**metrics, **more}


def sample_weight(weight: float | Tensor) -> float:
    """A batch's weight, in samples. Raises ValueError for anything but a number from 0 to LARGEST_WEIGHT."""
    number = number_in(weight)
    require(
        number is not None and 0 <= number <= LARGEST_WEIGHT,
        f"a weight is a finite number of samples, not {_shown(weight)}, and at most {LARGEST_WEIGHT:.0e}. Write "
        "session.set_batch_weight(len(batch)).",
    )
    return number or 0.0


def number_in(value: object) -> float | None:
    """The number that `value` is, or holds as its one entry; None where it is no number."""
    if isinstance(value, str | bytes):
        return None
    try:
        return float(value.detach() if isinstance(value, Tensor) else value)  # type: ignore[arg-type]
    except (TypeError, ValueError, RuntimeError, OverflowError):
        return None


def _shown(value: object) -> str:
    if isinstance(value, Tensor) and value.numel() != 1:
        return f"a tensor of shape {tuple(value.shape)}"
    return repr(value)
