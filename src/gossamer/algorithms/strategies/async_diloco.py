"""AsyncDiLoCo: local training; servers merge what has arrived by an outer optimizer, and wait for no worker."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import floor, isfinite

from gossamer.algorithms.compressors import Compressor
from gossamer.algorithms.strategies.base import LocalServerStage, ServerStage, ServerStrategy
from gossamer.algorithms.strategies.diloco import check_outer_step
from gossamer.algorithms.strategies.parameter_server import ASYNC, MATRIX, check_growth, check_pull, check_topology
from gossamer.algorithms.strategies.schedule import PeriodicSchedule, check_fragments
from gossamer.algorithms.topologies import Topology
from gossamer.errors import AttachError, RecipeError, require

SAMPLES, RATE = "samples", "rate"


@dataclass(frozen=True, repr=False)
class AsyncDiLoCo(ServerStrategy):
    """DiLoCo with an asynchronous outer optimizer: servers merge contributions as they arrive.

    Each worker makes `period` local steps, sends v_i = r - x_i, and continues; r are the parameters after its last
    message or answer. A server merges once `quorum` workers have sent, and `grace` is over:
    d = sum w_i a_i v_i / sum w_i;  share = merged / present workers;  D <- D + share d
    m <- outer_momentum m + D, D <- 0 each time the shares add up to 1, and m' = m in that merge, otherwise m' = 0
    agreed <- agreed - outer_learning_rate (share d + outer_momentum m');  each merged x_i <- agreed + (x_i - r)
    law:    a merge of all workers, with answers before their next step, is DiLoCo; merges of single workers, equally
            often, are delayed Nesterov; merged + waiting = sent samples, each once; merges do not wait for lost workers
    bytes:  per period the push compressor's message, dense N itemsize, and one answer per fragment: the fragments that
            changed since the last one, at equal speeds N itemsize together; or, compressed, one difference of the pull
            compressor for each merge since the last one, or all parameters where that is less
    memory: 3 N on a worker; on servers 2 N, with momentum 3 N, or 4 N if merges are of a part of the workers
    source: Liu et al. 2024, arXiv:2401.09135 (delayed Nesterov); Douillard et al. 2026, arXiv:2604.21428 (Decoupled
            DiLoCo: quorum, grace, weights; as third parties describe it)

    The weight w_i is the number of samples times the samples per step ("rate", as in Decoupled DiLoCo), or the number
    of samples. session.set_batch_weight(len(batch)) sets the samples of a step; without it, each pass counts as one.

    The factor a_i = (1 + age)^-1/2 reduces late contributions. The age is the number of complete rounds that a
    contribution missed: merges since its parameters, times share, rounded down. With equal speeds it is 0. A
    contribution that just missed a merge counts 0.71 times if the next merge is of all workers, and fully if it is of a
    part of them. Decoupled DiLoCo has no such factor, and Liu et al. find that it helps little.

    Local steps between sending and the answer are kept: they are added to the merged parameters, and sent next time.
    Decoupled DiLoCo overwrites them. A worker does not send to a server again before the answer to its last message.

    grace, in local steps of the fastest worker, limits the time from the first contribution of a merge to its end. It
    adapts to the measured speed: Decoupled DiLoCo uses moving averages of the seconds of a step, of a quorum and of a
    merge. In a run of dedicated servers, lost and restarted workers change neither the others nor their merges. In an
    elastic run (`--workers 2:8 --servers 1`) workers also join and leave at any time.

    Args:
        period: optimizer steps per round of a worker.
        quorum: smallest number of workers in a merge; bounded by the number of present workers.
        outer_learning_rate: learning rate of the outer step.
        outer_momentum: momentum of the outer step, in [0, 1).
        fragments: number of parts of the parameters, of about equal bytes, that are sent in turn.
        grace: number of local steps that a merge may wait for more workers after its first contribution.
        weighting: "rate" or "samples".
        shards: servers that share the parameters; None: one per worker, or all servers of a run with servers.
        pull: compressor of differences to parameters that all workers have; None: uncompressed parameters.

    Example:
        >>> gossamer.AsyncDiLoCo(period=24, quorum=2) + gossamer.Int8()
        AsyncDiLoCo(period=24, quorum=2) + Int8()
    """

    period: int
    quorum: int = 1
    outer_learning_rate: float = 0.7
    outer_momentum: float = 0.9
    fragments: int = 1
    grace: float = 0.0
    weighting: str = RATE
    shards: int | None = None
    pull: Compressor | None = None

    mode = ASYNC
    push = None  # the recipe's compressor

    def __post_init__(self) -> None:
        require(self.period >= 1, f"period must be a number of steps, 1 or more, got {self.period}")
        require(self.quorum >= 1, f"quorum must be a number of workers, 1 or more, got {self.quorum}")
        check_outer_step(self.outer_learning_rate, self.outer_momentum)
        check_fragments(self.period, self.fragments)
        require(
            self.grace >= 0 and isfinite(self.grace),
            f"grace must be a number of local steps, 0 or more, got {self.grace}. Write grace=2.0",
        )
        require(
            self.weighting in (RATE, SAMPLES),
            f'weighting must be "{RATE}" or "{SAMPLES}", got {self.weighting!r}. Write '
            f'AsyncDiLoCo(period={self.period}, weighting="{SAMPLES}").',
        )
        require(
            self.shards is None or self.shards >= 1,
            f"shards must be a number of servers, 1 or more, or None, got {self.shards}",
        )
        check_pull(self.pull)

    @property
    def stages(self) -> tuple[ServerStage, ...]:
        return (LocalServerStage(0, self),)

    @property
    def inelastic(self) -> None:
        return None

    @property
    def schedule(self) -> PeriodicSchedule:
        return PeriodicSchedule(self.period, self.fragments)

    def deltas_per_pull(self, workers: int) -> int:
        return -(-workers // self.quorum)

    def check(self, compressor: Compressor, topology: Topology) -> None:
        for each in (compressor, self.pull):
            if each is not None and each.owns_momentum(MATRIX) is not None:
                raise RecipeError(
                    f"{each!r} applies the optimizer's momentum to gradients, but {self!r} sends differences of "
                    "parameters, which contain it already. Write Float4() instead."
                )
        check_topology(self, topology)
        check_growth(self.pull)

    def check_workers(self, world: int) -> None:
        """Raise AttachError if there are fewer workers than the quorum."""
        if self.quorum > world:
            raise AttachError(
                f"no merge would have quorum={self.quorum} workers, since this run has {world}. Write "
                f"AsyncDiLoCo(period={self.period}, quorum={world})."
            )

    # -- rules of a merge

    def weight(self, samples: float, steps: int) -> float:
        """Return w_i of a contribution of `steps` local steps."""
        if not steps:
            return 0.0
        return samples * (samples / steps) if self.weighting == RATE else samples

    def needed(self, present: int) -> int:
        """Return the number of contributions that a merge needs, of `present` workers."""
        return max(1, min(self.quorum, present))

    def factor(self, staleness: int, share: float) -> float:
        """Return a_i of a contribution whose parameters are `staleness` merges old."""
        return float((1 + floor(staleness * share)) ** -0.5)

    def merge(self, weights: Sequence[float], staleness: Sequence[int], present: int) -> tuple[list[float], float]:
        """Return the relative weights w_i a_i of a mean, and the factor of that mean in the outer step.

        Their product is share d: the late contributions are reduced, and not replaced by more of the others.

        Args:
            weights: w_i, by contribution.
            staleness: merges since the parameters that each was computed from.
            present: number of present workers, at least that of contributions.
        """
        share = len(weights) / max(present, len(weights), 1)
        largest = max(weights, default=0.0) or 1.0  # equal weights become 1, so that their mean is a plain one
        relative = [weight / largest for weight in weights]
        reduced = [weight * self.factor(age, share) for weight, age in zip(relative, staleness, strict=True)]
        total = sum(relative)
        return reduced, share * sum(reduced) / total if total else 0.0
