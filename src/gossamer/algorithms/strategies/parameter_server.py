"""ParameterServer: servers hold the parameters and the optimizer; workers push gradients and pull parameters."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from torch.optim import SGD

from gossamer.algorithms.compressors import Compressor, DeMo, Dense, Feedback
from gossamer.algorithms.compressors.distortion import relative_error
from gossamer.algorithms.compressors.ownership import Ownership, UpdateRule
from gossamer.algorithms.strategies.base import ServerStrategy
from gossamer.algorithms.topologies import Complete, Topology
from gossamer.base.layout import Slot
from gossamer.errors import RecipeError, require

SYNC, ASYNC, STALE = "sync", "async", "stale"
MATRIX = Slot("weight", (64, 64), 0, (64, 1))
# SGD's momentum, which servers can leave to the workers from the first step on
VELOCITY = Ownership(optimizers=(SGD,), rule=UpdateRule.VELOCITY)
MOST_LOST = 1.01  # largest relative squared error of a difference; above it, differences would grow


@dataclass(frozen=True, repr=False)
class ParameterServer(ServerStrategy):
    """Servers hold the parameters and the optimizer; workers push gradients and pull parameters.

    sync:  w <- optimizer(w, weighted mean of g_i), once all but `backup` workers have pushed
    async: w <- optimizer(w, g_i), whenever one arrives
    stale: as async, with g_i's share of the learning rate, its weight over all workers'. A worker reads its own g_i
           immediately and others' when they arrive, and starts step c when all have pushed step c - `staleness` - 1
    law:    sync is one process on the joined batch; stale with 0 is sync, bit for bit, and with plain SGD on given
            gradients it ends at the parameters of sync; applied + waiting + residuals = given, each (worker, step)
            once, also if messages are lost or duplicated
    bytes:  per step the push compressor's message and one difference of the pull compressor (stale: up to one for each
            worker, or all parameters where that is less), dense N itemsize each; a server of n workers transfers n
            times its share each way
    source: Li et al. 2014, OSDI (servers); Dean et al. 2012, NIPS (async); Ho et al. 2013, NIPS (stale); Chen et al.
            2016, arXiv:1604.00981 (backup); Zhang et al. 2016, IJCAI (damping)

    Ho et al. call the mode "stale synchronous parallel" (SSP) and the bound s.

    The optimizer given to attach is recreated on each shard: its rule must be elementwise. A missing gradient (None)
    counts as zero, since a server updates whole blocks: momentum and weight decay still move a parameter that was not
    used in a loss.

    Compressors process each server's rows of a tensor as a separate tensor. TopK(density) selects the largest entries
    of each piece, at least one, and scales and norms are per piece, so another number of servers sends other entries.

    push=DGC(...) leaves SGD's momentum to the workers: they push velocities, which servers apply without momentum;
    weight decay has its own momentum there. DGC's clip limits each worker's own gradient, since every push is encoded
    alone.

    Args:
        mode: "sync", "async" or "stale".
        staleness: largest lead of a worker over the slowest, in steps, for "stale" only; None: 4.
        backup: number of gradients per round that may arrive late and are dropped, for "sync" only.
        shards: servers that share the parameters; None: one per worker, or all servers of a run with servers.
        push: compressor of gradients; None: the recipe's compressor.
        pull: compressor of differences to parameters that all workers have; None: uncompressed parameters.
        damping: whether the learning rate is divided by a gradient's age in versions, for "async" only.

    Example:
        >>> gossamer.ParameterServer("sync", backup=1)
        ParameterServer(mode='sync', backup=1)
    """

    mode: str = ASYNC
    staleness: int | None = None
    backup: int = 0
    shards: int | None = None
    push: Compressor | None = None
    pull: Compressor | None = None
    damping: bool = False

    def __post_init__(self) -> None:
        require(
            self.mode in (SYNC, ASYNC, STALE),
            f'mode must be "{SYNC}", "{ASYNC}" or "{STALE}", got {self.mode!r}. Write ParameterServer(mode="{ASYNC}").',
        )
        self._check_rounds()
        require(
            self.shards is None or self.shards >= 1,
            f"shards must be a number of servers, 1 or more, or None, got {self.shards}",
        )
        require(
            not self.damping or self.mode == ASYNC,
            f"damping divides the learning rate by the age of a gradient, and in mode {self.mode!r} the gradients of "
            f'a round share one learning rate. Omit damping, or write mode="{ASYNC}".',
        )
        check_pull(self.pull)

    def _check_rounds(self) -> None:
        require(
            self.staleness is None or self.mode == STALE,
            f"staleness limits the lead of a worker, and mode {self.mode!r} has no such limit. Write "
            f'ParameterServer(mode="{STALE}", staleness={self.staleness}).',
        )
        require(
            self.staleness is None or self.staleness >= 0,
            f"staleness must be a number of steps, 0 or more, got {self.staleness}",
        )
        require(self.backup >= 0, f"backup must be a number of workers, 0 or more, got {self.backup}")
        require(
            not self.backup or self.mode == SYNC,
            f"backup is the number of workers that a synchronous round does not wait for, and mode {self.mode!r} has "
            f'no such rounds. Write ParameterServer(mode="{SYNC}", backup={self.backup}).',
        )

    def _check_momentum(self, compressor: Compressor) -> None:
        """Raise RecipeError for a compressor with a momentum that servers cannot leave to it."""
        pushed = None if self.push is None else self.push.owns_momentum(MATRIX)
        if compressor.owns_momentum(MATRIX) == VELOCITY:
            raise RecipeError(
                f"{compressor!r} applies the optimizer's momentum in the worker, which {self!r} supports for pushed "
                f"gradients only. Write {replace(self, push=compressor)!r}."
            )
        for each in (compressor, self.pull, self.push if pushed != VELOCITY else None):
            if each is not None and each.owns_momentum(MATRIX) is not None:
                raise RecipeError(
                    f"{each!r} applies the optimizer's momentum in the worker, and with {self!r} the optimizer runs "
                    "on the servers and applies its own. Write TopK(density=0.01) instead."
                )

    @property
    def rounds_ahead(self) -> int:
        """The staleness bound: the largest lead of a worker over the slowest, in steps."""
        return 4 if self.mode == STALE and self.staleness is None else self.staleness or 0

    def parts_at(self, seconds: Sequence[float]) -> tuple[int, ...] | None:
        if self.mode == ASYNC:
            return None
        awaited = max(1, len(seconds) - self.backup)  # a round needs a gradient
        unawaited = sorted(range(len(seconds)), key=seconds.__getitem__)[awaited:]
        return tuple(int(rank not in unawaited) for rank in range(len(seconds)))

    def check(self, compressor: Compressor, topology: Topology) -> None:
        self._check_momentum(compressor)
        if self.push is not None and compressor != Dense():
            raise RecipeError(
                f"gradients are sent by push={self.push!r}, so {compressor!r} next to {self!r} would have no effect. "
                "Write one of the two."
            )
        check_topology(self, topology)
        check_growth(self.pull)


def check_pull(pull: Compressor | None) -> None:
    """Raise RecipeError for a compressor of differences that sends its errors again."""
    require(
        not isinstance(pull, Feedback | DeMo),
        "pull sends differences to the workers' parameters, so the error of one is in the next; Feedback or DeMo "
        f"would send it twice. Write pull={getattr(pull, 'inner', None)!r}.",
    )


def check_growth(pull: Compressor | None) -> None:
    """Raise RecipeError for a compressor of differences that grow, since each contains the error of the last."""
    lost = 0.0 if pull is None else relative_error(pull, "lost")
    if not lost <= MOST_LOST:
        raise RecipeError(
            f"pull={pull!r} has a relative error of {lost:.1f} on random numbers, so differences that are sent again "
            "in each step would grow without limit. Write pull=Int8(), or pull=TopK(density=0.01)."
        )


def check_topology(strategy: ServerStrategy, topology: Topology) -> None:
    """Raise RecipeError for a topology next to servers."""
    if topology != Complete():
        raise RecipeError(
            f"with {strategy!r} workers exchange messages with servers only, so {topology!r} would have no effect. "
            "Omit it."
        )
