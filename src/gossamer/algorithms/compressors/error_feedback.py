"""Error feedback: what a compressor did not send is not lost."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from gossamer.algorithms.compressors.base import Compressor, Decoder
from gossamer.algorithms.compressors.dense import Dense
from gossamer.algorithms.compressors.feedback_rules import RESIDUAL as RESIDUAL
from gossamer.algorithms.compressors.feedback_rules import Differences, FeedbackRule, Losses
from gossamer.algorithms.compressors.wrapper import Wrapper
from gossamer.base.aggregation import Aggregation, AggregationContext, State
from gossamer.base.layout import FlatTensors, Layout
from gossamer.errors import require

CLASSIC, EF21 = "classic", "ef21"


@dataclass(frozen=True, repr=False)
class Feedback(Wrapper):
    """Remember what the inner compressor lost and offer it again next time.

    wanted = x + decay residual, residual' = wanted - own, answer = mean own
    ef21:  told = (1 - momentum) told + momentum x, known' = known + C(told - known), answer = mean known'
    law:    classic: sum of what was sent + mean residual = sum of what was given - (1 - decay) sum of mean residuals
            before each step; ef21: the answer is the mean of what is known, and a gradient that stays as it is becomes
            known exactly
    bytes:  the inner compressor's; memory: 2 N of at least float32, which take turns (ef21: 4 N, with momentum 6 N)
    source: Seide et al. 2014, Interspeech; Karimireddy et al. 2019, ICML; decay: Sarfi et al. 2025, arXiv:2508.15706
            (SparseLoCo: 0.95 per round); ef21: Richtarik et al. 2021, NeurIPS, with momentum Fatkhullin et al. 2023,
            NeurIPS

    The residual is local and in gradient units: a learning rate that falls also shrinks what is still owed.

    A decay below 1 forgets old losses. A residual of many rounds of local steps points to parameters that training has
    left since. SparseLoCo decays it instead of an outer momentum.

    With rule "ef21" nothing is owed: entries that do not travel are answered as they were last told. An answer goes on
    from the last one, so only strategies that average all workers' gradients take it. momentum is that of SGD in its
    averaging form, begins with the first gradient, and stands before the wire: write SGD(lr, momentum=0) with it, and
    for momentum=0.1 ten times the lr that goes with SGD's own momentum of 0.9. Adam smooths what comes once more.

    Measured under AdamW (examples/digits.py, conv; 200 steps, four workers, two seeds): TopK(0.01) ends at a loss of
    0.068 with "ef21" and 0.014 classic, PowerSGD(1) at 0.116 and 0.022, Dense() at 0.003; with a momentum of 0.1 or 0.3
    neither comes down to classic feedback.
    """

    inner: Compressor
    rule: str = CLASSIC
    momentum: float | None = None  # the newest gradient's share of what is told, for "ef21" only; None: all of it
    decay: float = 1.0  # share of the residual that is offered again, for "classic" only

    def __post_init__(self) -> None:
        require(
            self.rule in (CLASSIC, EF21),
            f'rule is "{CLASSIC}" or "{EF21}", not {self.rule!r}. Write Feedback({self.inner!r}, rule="{EF21}").',
        )
        require(
            self.momentum is None or 0 < self.momentum <= 1,
            f"momentum is the newest gradient's share of what is told, in (0, 1], not {self.momentum}: 1 smooths "
            f'nothing. Write Feedback({self.inner!r}, rule="{EF21}", momentum=0.1).',
        )
        require(
            self.rule == EF21 or self.momentum is None,
            f"momentum={self.momentum} smooths what is told, and classic feedback sends every gradient in full, late "
            f'or not, so it would change nothing. Write Feedback({self.inner!r}, rule="{EF21}", '
            f"momentum={self.momentum}), or leave it out.",
        )
        require(
            0 <= self.decay <= 1,
            f"decay must be in [0, 1], got {self.decay}: it is the share of the residual that is offered again. "
            f"Write Feedback({self.inner!r}, decay=0.95).",
        )
        require(
            self.rule == CLASSIC or self.decay == 1,
            f'decay={self.decay} shrinks a residual, and rule="{EF21}" has none. Write Feedback({self.inner!r}, '
            f'decay={self.decay}) or Feedback({self.inner!r}, rule="{EF21}").',
        )
        held = self.inner.held() if self.rule == EF21 and isinstance(self.inner, Compressor) else ()
        halves = [term for term in held if isinstance(term, Dense) and term.dtype is not None]
        require(
            not halves,
            f"the mean of what {halves and halves[0]!r} sends is rounded once more, which no worker sees, and answers "
            f'that go on from the last one would add these errors up. Write Feedback(Int8(), rule="{EF21}"), or '
            f'leave rule="{EF21}" out.',
        )

    @property
    def _rule(self) -> FeedbackRule:
        if self.rule == CLASSIC:
            return Losses(self.decay)
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
