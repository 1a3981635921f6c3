"""Global batch: the backward passes of each worker per step, so that a step has as many samples with any number of
workers.

12 batches a step, 5 workers        passes of workers 0 to 4
step 0   batches  0 to 11           3 3 2 2 2
step 1   batches 12 to 23           2 2 3 3 2
step 2   batches 24 to 35           3 2 2 2 3
"""

from __future__ import annotations

from gossamer.errors import require


def batches_per_step(global_batch: int, batch: int) -> int:
    """Return global_batch / batch. Raises ValueError if `batch` does not divide `global_batch`."""
    require(batch >= 1, f"batch must be a number of samples, 1 or more, got {batch}")
    require(
        global_batch >= batch and global_batch % batch == 0,
        f"global_batch={global_batch} is not a multiple of batch={batch} samples, so a step would have more or "
        f"fewer. Write global_batch={max(round(global_batch / batch), 1) * batch}, or a batch size that divides it.",
    )
    return global_batch // batch


def micro_batches(global_batch: int, batch: int, world: int, step: int = 0) -> tuple[int, ...]:
    """Return the number of batches, of `batch` samples, that each of `world` workers contributes to a step, by rank.

    The batches of all steps are dealt out round-robin: batch j belongs to rank j mod world
    law:    a step's sum is global_batch / batch; its counts differ by at most one, and so do their sums over any
            consecutive steps, so that the workers' loops stay within one pass of each other, from any start
    source: the global batch kept by accumulation as in Varuna (Athlur et al. 2022, EuroSys)

    Args:
        global_batch: samples per step, of all workers together.
        batch: samples per backward pass.
        world: number of workers.
        step: number of the step, from 0.

    Raises:
        ValueError: `batch` does not divide `global_batch`, or a worker would have no batch in a step: its loop would
            have no backward pass in which to communicate.
    """
    count = batches_per_step(global_batch, batch)
    require(world >= 1 and step >= 0, f"world must be 1 or more and step 0 or more, got world={world}, step={step}")
    require(
        count >= world,
        f"global_batch={global_batch} is {count} batches of {batch} samples, too few for {world} workers: some would "
        f"have none in a step. Write batch={_largest(global_batch, world)} or smaller, "
        f"global_batch={world * batch} or more, or start at most {count} workers.",
    )
    return dealt(count, world, step)


def dealt(count: int, world: int, step: int) -> tuple[int, ...]:
    """Return the number of a step's `count` batches per worker, by rank; 0 for workers without a batch."""
    first, end = step * count, (step + 1) * count
    return tuple(len(range(rank, end, world)) - len(range(rank, first, world)) for rank in range(world))


def _largest(global_batch: int, world: int) -> int:
    """Return the largest batch size with at least one batch per worker in a step."""
    return max((size for size in range(1, global_batch // world + 1) if global_batch % size == 0), default=1)
