"""ParameterServer: servers hold the parameters and the optimizer; workers push gradients and pull parameters."""

from __future__ import annotations

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
VELOCITY = Ownership(
    optimizers=(SGD,), rule=UpdateRule.VELOCITY
)  # a momentum that servers leave to the workers from the first step on
MOST_LOST = 1.01  # of a difference's square, or the next difference would be larger


@dataclass(frozen=True, repr=False)
class ParameterServer(ServerStrategy):
    """Servers hold the parameters and the optimizer; workers push gradients and pull parameters.

    sync:  w <- optimizer(w, weighted mean of g_i), once all but `backup` workers have pushed
    async: w <- optimizer(w, g_i), whenever one arrives
    stale: as async, with g_i's share of the learning rate, its weight over all workers'. A worker reads its own g_i at
           once and others' as soon as they are there, and begins step c when all have pushed step c - `staleness` - 1
    law:    sync is one process on the joined batch; stale with 0 is sync, bit for bit, and with plain SGD on given
            gradients it ends where sync does; applied + waiting + what is still owed = given, each (worker, step) once,
            whatever is lost or comes twice
    bytes:  per step the push compressor's message and one link of the pull's (stale: up to one for each
            worker, or all parameters where that is less), dense N itemsize each; a server of n workers moves n times
            its share each way
    source: Li et al. 2014, OSDI (servers); Dean et al. 2012, NIPS (async); Ho et al. 2013, NIPS (stale); Chen et al.
            2016, arXiv:1604.00981 (backup); Zhang et al. 2016, IJCAI (damping)

    The optimizer is the one given to attach, made again on each shard: its rule must be elementwise. A gradient that is
    None counts as zero, since a server steps whole blocks: a parameter that had no part in a loss is still moved by
    momentum and weight decay.

    Compressors see each server's rows of a tensor as a tensor of its own. TopK(density) takes the largest entries of
    each piece, at least one, and a scale or a norm is a piece's: another number of servers sends other entries.

    push=DGC(...) leaves SGD's momentum to the workers: they push velocities, which servers apply as they are, beside
    weight decay with its own momentum. Its clip= bounds each worker's own gradient, since every push is encoded alone.
    """

    mode: str = ASYNC
    staleness: int | None = None  # steps that workers may be apart, for "stale" only; None: 4
    backup: int = 0  # gradients of a round that may come too late, and are dropped; for "sync" only
    shards: int | None = None  # servers that share the parameters; None: one per worker beside them, else all servers
    push: Compressor | None = None  # of gradients; None: the recipe's compressor
    pull: Compressor | None = None  # of differences to parameters that all workers know; None: parameters as they are
    damping: bool = False  # the learning rate is divided by a gradient's age in versions; for "async" only

    def __post_init__(self) -> None:
        require(
            self.mode in (SYNC, ASYNC, STALE),
            f'mode is "{SYNC}", "{ASYNC}" or "{STALE}", not {self.mode!r}: write ParameterServer(mode="{ASYNC}")',
        )
        self._check_rounds()
        require(self.shards is None or self.shards >= 1, f"shards counts servers, 1 or more or None, not {self.shards}")
        require(
            not self.damping or self.mode == ASYNC,
            f"damping divides the learning rate by how old a gradient is, and in mode {self.mode!r} gradients of one "
            f'round share one learning rate: leave it out, or write mode="{ASYNC}"',
        )
        require(
            not isinstance(self.pull, Feedback | DeMo),
            "pulls are differences to what workers already have, so what one loses is in the next; Feedback or DeMo "
            f"would send it twice: write pull={getattr(self.pull, 'inner', None)!r}",
        )

    def _check_rounds(self) -> None:
        require(
            self.staleness is None or self.mode == STALE,
            f"staleness bounds how far workers run apart, and mode {self.mode!r} knows no such bound: write "
            f'ParameterServer(mode="{STALE}", staleness={self.staleness})',
        )
        require(
            self.staleness is None or self.staleness >= 0,
            f"staleness is a number of rounds, 0 or more, not {self.staleness}",
        )
        require(self.backup >= 0, f"backup is a number of workers, 0 or more, not {self.backup}")
        require(
            not self.backup or self.mode == SYNC,
            f"backup workers are those that a round does not wait for, and mode {self.mode!r} waits for nobody in that "
            f'way: write ParameterServer(mode="{SYNC}", backup={self.backup})',
        )

    def _check_momentum(self, compressor: Compressor) -> None:
        """Raise RecipeError for a compressor whose momentum servers would not leave to it."""
        pushed = None if self.push is None else self.push.owns_momentum(MATRIX)
        if compressor.owns_momentum(MATRIX) == VELOCITY:
            raise RecipeError(
                f"{compressor!r} applies the optimizer's momentum in the worker, and of {self!r} only what is pushed "
                f"goes through it. Write {replace(self, push=compressor)!r}."
            )
        for each in (compressor, self.pull, self.push if pushed != VELOCITY else None):
            if each is not None and each.owns_momentum(MATRIX) is not None:
                raise RecipeError(
                    f"{each!r} applies the optimizer's momentum in the worker, and with {self!r} the optimizer lives "
                    "on the servers and applies its own. Write TopK(density=0.01) in its place."
                )

    @property
    def rounds_ahead(self) -> int:
        """Staleness bound: how many steps a worker may be ahead of the slowest."""
        return 4 if self.mode == STALE and self.staleness is None else self.staleness or 0

    def check(self, compressor: Compressor, topology: Topology) -> None:
        self._check_momentum(compressor)
        if self.push is not None and compressor != Dense():
            raise RecipeError(
                f"gradients travel by push={self.push!r}, so {compressor!r} beside {self!r} would compress nothing. "
                "Write one of the two."
            )
        if topology != Complete():
            raise RecipeError(
                f"with {self!r} workers talk to servers only, so {topology!r} would change nothing. Leave it out."
            )
        lost = 0.0 if self.pull is None else relative_error(self.pull, "lost")
        if not lost <= MOST_LOST:
            raise RecipeError(
                f"pull={self.pull!r} loses {lost:.1f} times what it is given on random numbers, so differences that "
                "are sent again and again would grow without end. Write pull=Int8(), or pull=TopK(density=0.01)."
            )
