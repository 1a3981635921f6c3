"""Scalars: checks numbers that a training loop passes to its session: metrics, and weights of batches."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from functools import partial

from torch import Tensor

from gossamer import events
from gossamer.comm.runtime.comm_thread import CommThread, Work
from gossamer.errors import LoopError, require

LARGEST_WEIGHT = 1e15  # samples: sums over all workers, and numbers times their weights, are finite


def logged_numbers(metrics: Mapping[str, float | Tensor]) -> dict[str, float]:
    """Logged metrics as numbers by name. Raises TypeError for anything else."""
    numbers = {name: number_in(value) for name, value in metrics.items()}
    for name, number in numbers.items():
        if number is None:
            raise TypeError(
                f"session.log({name}=...) got {_shown(metrics[name])}, but records contain numbers. Pass a number "
                f"or a tensor of one entry, such as session.log({name}=loss.mean())."
            )
    return {name: number for name, number in numbers.items() if number is not None}


def named_metrics(
    metrics: Mapping[str, float | Tensor] | None, more: Mapping[str, float | Tensor]
) -> dict[str, float | Tensor]:
    """Both mappings together. Raises TypeError for metrics without names."""
    if metrics is None:
        return dict(more)
    if not isinstance(metrics, Mapping) or not all(isinstance(name, str) for name in metrics):
        raise TypeError(
            f"session.log() got {_shown(metrics)}, but each number of a record needs a name, which is a string. "
            'Write session.log(loss=loss) or session.log({"loss": loss}).'
        )
    return {**metrics, **more}


def sample_weight(weight: float | Tensor) -> float:
    """A batch's weight, in samples. Raises ValueError for anything but a number from 0 to LARGEST_WEIGHT."""
    number = number_in(weight)
    require(
        number is not None and 0 <= number <= LARGEST_WEIGHT,
        f"a batch weight must be a number of samples from 0 to {LARGEST_WEIGHT:.0e}, got {_shown(weight)}. Write "
        "session.set_batch_weight(len(batch)).",
    )
    return number or 0.0


def number_in(value: object) -> float | None:
    """The number that `value` is, or has as its only entry; None for other values."""
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


# -- numbers on a GPU, which are logged once they are copied -----------------------------------------------------------


class DeferredMetrics:
    """Emits events.Logged: at once if all numbers are on the CPU, otherwise on the communication thread."""

    def __init__(self, comm_thread: CommThread) -> None:
        self._comm_thread = comm_thread
        self._last: Work[None] | None = None

    def log(self, step: int, metrics: Mapping[str, float | Tensor]) -> None:
        """Log numbers. A tensor may be modified as soon as this returns. Raises TypeError for other values."""
        if not any(map(_is_on_other_device, metrics.values())):
            _emit(step, metrics)
            return
        # Refused here: an error on the communication thread would end the session
        logged_numbers({name: each for name, each in metrics.items() if not _is_on_other_device(each)})
        kept = {name: each.detach().clone() if isinstance(each, Tensor) else each for name, each in metrics.items()}
        try:
            self._last = self._comm_thread.submit(partial(_emit, step, kept))
        except LoopError:  # the session is closed
            _emit(step, metrics)

    def finish(self) -> None:
        """Wait until all numbers are logged, unless the communication thread has failed."""
        if self._last is not None:
            with suppress(Exception):
                self._last.wait()


def _is_on_other_device(value: float | Tensor) -> bool:
    """Whether reading it would block the host; invalid values are refused at once."""
    return isinstance(value, Tensor) and value.numel() == 1 and not value.is_cpu and not value.is_complex()


def _emit(step: int, metrics: Mapping[str, float | Tensor]) -> None:
    events.emit(events.Logged(step=step, values=logged_numbers(metrics)))
