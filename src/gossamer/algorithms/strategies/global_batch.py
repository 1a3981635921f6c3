"""Global batch: how many backward passes each worker makes for a step that has as many samples with any workers.

12 batches a step, 5 workers        passes of workers 0 to 4
step 0   batches  0 to 11           3 3 2 2 2
step 1   batches 12 to 23           2 2 3 3 2
step 2   batches 24 to 35           3 2 2 2 3
"""

from __future__ import annotations

from gossamer.errors import require


def batches_per_step(global_batch: int, batch: int) -> int:
    """How many batches of `batch` samples a step has. Raises ValueError where `global_batch` is not made of them."""
    require(batch >= 1, f"batch is a number of samples, 1 or more, not {batch}")
    require(
        global_batch >= batch and global_batch % batch == 0,
        f"global_batch={global_batch} is not made of whole batches of {batch} samples, so a step would have more or "
        f"fewer. Write global_batch={max(round(global_batch / batch), 1) * batch}, or a batch size that divides it.",
    )
    return global_batch // batch


def micro_batches(global_batch: int, batch: int, world: int, step: int = 0) -> tuple[int, ...]:
    """How many batches each of `world` workers contributes to a step, by rank, every one of `batch` samples.

    The batches of all steps are dealt out in turns: number j is that of rank j mod world
    law:    a step's sum is global_batch / batch; its counts differ by at most one, and so do their sums over any steps
            in a row, so that the workers' loops stay within one pass of each other, whenever they began
    source: the global batch kept by accumulation as in Varuna (Athlur et al. 2022, EuroSys)

    Raises ValueError where `batch` does not divide `global_batch`, or some worker would have no batch in a step: it
    would have nothing to contribute, and its loop no pass in which to take part.
    """
    count = batches_per_step(global_batch, batch)
    require(world >= 1 and step >= 0, f"world={world} is 1 or more, and step={step} is 0 or more")
    require(
        count >= world,
        f"global_batch={global_batch} is {count} batches of {batch} samples, too few for {world} workers: some would "
        f"have none in a step. Write batch={_largest(global_batch, world)} or smaller, "
        f"global_batch={world * batch} or more, or start at most {count} workers.",
    )
    return dealt(count, world, step)


def dealt(count: int, world: int, step: int) -> tuple[int, ...]:
    """How many of a step's `count` batches each of `world` workers makes, by rank; none where there are too few."""
    first, end = step * count, (step + 1) * count
    return tuple(len(range(rank, end, world)) - len(range(rank, first, world)) for rank in range(world))


def _largest(global_batch: int, world: int) -> int:
    """The largest batch of which a step has one for every worker."""
    return max((size for size in range(1, global_batch // world + 1) if global_batch % size == 0), default=1)
