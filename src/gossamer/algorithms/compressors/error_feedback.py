"""Error feedback: the compression error of a step is added to the next input."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from gossamer.algorithms.compressors.base import Compressor, Decoder
from gossamer.algorithms.compressors.dense import DTYPES, Dense
from gossamer.algorithms.compressors.feedback_rules import RESIDUAL as RESIDUAL
from gossamer.algorithms.compressors.feedback_rules import Differences, FeedbackRule, Losses
from gossamer.algorithms.compressors.wrapper import Wrapper
from gossamer.base.aggregation import Aggregation, AggregationContext, State
from gossamer.base.layout import FlatTensors, Layout
from gossamer.errors import require

CLASSIC, EF21 = "classic", "ef21"
NARROW = "bfloat16"


@dataclass(frozen=True, repr=False)
class Feedback(Wrapper):
    """Error feedback: keep the compression error of `inner` as a residual and add it to the next input.

    wanted = x + decay residual, residual' = wanted - own, answer = mean own
    ef21:  v = (1 - momentum) v + momentum x, g' = g + C(v - g), answer = mean g'
    law:    classic: sum of own + mean residual = sum of x - (1 - decay) sum of mean residuals before each step, sums
            over the steps, x and own averaged over the workers; ef21: the answer is mean g', and g' converges to a
            gradient that stays constant
    bytes:  the inner compressor's; memory: 2 N of at least float32, double-buffered (ef21: 4 N, with momentum 6 N;
            dtype="bfloat16": N)
    source: Seide et al. 2014, Interspeech; Karimireddy et al. 2019, ICML; decay: Sarfi et al. 2025, arXiv:2508.15706
            (SparseLoCo: 0.95 per round); ef21: Richtarik et al. 2021, NeurIPS, with momentum Fatkhullin et al. 2023,
            NeurIPS

    Karimireddy et al. call the residual the error e_t, wanted p_t and own Delta_t. Richtarik et al. call g the
    gradient estimate g_i^t; Fatkhullin et al. call momentum eta.

    The residual is local to a rank and in gradient units, so a decaying learning rate also scales the late part of an
    update. A decay below 1 discounts old errors. A residual that spans many rounds of local steps refers to outdated
    parameters; SparseLoCo decays it and uses no outer momentum.

    With rule "ef21" there is no residual: entries that are not sent keep their last known value in the answer. The
    answer is updated incrementally, so only strategies that average the gradients of all workers accept it. momentum is
    an exponential moving average, starts with the first gradient, and is applied before compression: use SGD(lr,
    momentum=0) with it, and for momentum=0.1 ten times the lr of SGD with its own momentum of 0.9. Adam smooths the
    result again.

    dtype="bfloat16" keeps the residual in half its memory: N instead of 2 N in units of float32. Codecs and Sharded
    widen it part by part while they encode; other compressors hold a float32 buffer for each bucket that is being sent.
    Sharded keeps its own residual in bfloat16 as well. The residual is rounded once per step to 8 significant bits, and
    the rounding error is lost: in the law above, sums are equal up to 2^-8 of each residual, and an input below 2^-9 of
    its residual can be lost entirely. If `inner` sends its whole input, nothing is lost. docs/benchmarks/memory.md has
    the effect on the loss of one task.

    Measured under AdamW (examples/digits.py, conv; 200 steps, four workers, two seeds), the final loss is higher with
    "ef21" than with classic feedback, also with a momentum of 0.1 or 0.3:

        TopK(0.01)    classic 0.014, ef21 0.068
        PowerSGD(1)   classic 0.022, ef21 0.116
        Dense()       0.003

    Args:
        inner: the compressor whose error is kept.
        rule: "classic" or "ef21".
        momentum: weight of the newest gradient in the moving average, in (0, 1], for "ef21" only; None means 1.
        decay: factor of the residual per step, in [0, 1], for "classic" only.
        dtype: "bfloat16" for the residual's memory, for "classic" only. None for float32. A residual of float64 tensors
            stays float64.

    Example:
        >>> gossamer.Feedback(gossamer.TopK(density=0.01), decay=0.95)
        Feedback(TopK(density=0.01), decay=0.95)
    """

    inner: Compressor
    rule: str = CLASSIC
    momentum: float | None = None
    decay: float = 1.0
    dtype: str | None = None

    def __post_init__(self) -> None:
        require(
            self.rule in (CLASSIC, EF21),
            f'rule must be "{CLASSIC}" or "{EF21}", got {self.rule!r}. Write Feedback({self.inner!r}, rule="{EF21}").',
        )
        require(
            self.momentum is None or 0 < self.momentum <= 1,
            f"momentum must be the weight of the newest gradient, in (0, 1], got {self.momentum}; 1 means no "
            f'smoothing. Write Feedback({self.inner!r}, rule="{EF21}", momentum=0.1).',
        )
        require(
            self.rule == EF21 or self.momentum is None,
            f"momentum={self.momentum} has no effect with classic feedback: momentum smooths the gradients of "
            f'rule="{EF21}". Write Feedback({self.inner!r}, rule="{EF21}", '
            f"momentum={self.momentum}), or omit momentum.",
        )
        require(
            0 <= self.decay <= 1,
            f"decay must be in [0, 1], got {self.decay}: it is the factor of the residual per step. "
            f"Write Feedback({self.inner!r}, decay=0.95).",
        )
        require(
            self.rule == CLASSIC or self.decay == 1,
            f'decay={self.decay} shrinks a residual, and rule="{EF21}" has none. Write Feedback({self.inner!r}, '
            f'decay={self.decay}) or Feedback({self.inner!r}, rule="{EF21}").',
        )
        require(
            self.dtype in (None, NARROW),
            f"dtype must be {NARROW!r} or None, got {self.dtype!r}. Write Feedback({self.inner!r}, dtype={NARROW!r}).",
        )
        require(
            self.rule == CLASSIC or self.dtype is None,
            f'dtype={self.dtype!r} is for a residual, and rule="{EF21}" has none: rounding its estimates would '
            f"accumulate. Write Feedback({self.inner!r}, dtype={self.dtype!r}) or Feedback({self.inner!r}, "
            f'rule="{EF21}").',
        )
        held = self.inner.held() if self.rule == EF21 and isinstance(self.inner, Compressor) else ()
        halves = [term for term in held if isinstance(term, Dense) and term.dtype is not None]
        require(
            not halves,
            f"the mean that {halves and halves[0]!r} sends is rounded again, which no worker can observe, so the "
            f'incremental answers of rule="{EF21}" would accumulate these errors. Write Feedback(Int8(), '
            f'rule="{EF21}"), or omit rule="{EF21}".',
        )

    @property
    def _rule(self) -> FeedbackRule:
        if self.rule == CLASSIC:
            return Losses(self.decay, None if self.dtype is None else DTYPES[self.dtype])
        return Differences(1.0 if self.momentum is None else self.momentum)

    @property
    def incremental(self) -> bool:
        return self._rule.incremental

    @property
    def decodes_without_input(self) -> bool:
        return self.inner.decodes_without_input and not self.incremental

    def decoders(self, layout: Layout) -> Sequence[tuple[Decoder, Layout]] | None:
        return None if self.incremental else self.inner.decoders(layout)

    def init(self, like: FlatTensors, at: AggregationContext) -> State:
        return self._rule.init(self.inner, like, at)

    def aggregate(self, x: FlatTensors, state: State, at: AggregationContext, out: Tensor | None = None) -> Aggregation:
        return self._rule.aggregate(self.inner, x, state, at, out)
