"""Studies: the trainings that one part of docs/benchmarks/compressors.md is written from."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from itertools import chain
from typing import Any

from benchmarks.tasks import ADAMW_TASK, ADAMW_TASKS, BASE, SGD_TASK, TASKS, Task

from gossamer.algorithms.compressors import Compressor
from gossamer.algorithms.recipes.parser import parse
from gossamer.base.term import Term
from gossamer.plan.bench import case_texts

DENSE = "Dense()"
COMPRESSORS = {
    "Dense": [DENSE, "Dense(dtype='bfloat16')"],
    "TwoBit": ["TwoBit(adaptive=True)"],
    "TopK": ["TopK(density=0.01)"],
    "RandomK": ["RandomK(density=0.01)"],
    "ARCTopK": ["ARCTopK(density=0.01)"],
    # as many entries, and about as many bytes of four workers, as TopK(density=0.01) that gathers everyone's
    "SharedMask": ["SharedMask(density=0.01)", "SharedMask(density=0.0225)"],
    "Threshold": ["Threshold(value=0.01, capacity=0.02)"],
    "DGC": ["DGC(density=0.01, warmup=20)"],
    "Chain": ["Chain(TopK(density=0.01), Int8())"],
    "Warmup": ["Warmup(TopK(density=0.01), steps=10)"],
    "Adaptive": [],  # benchmarks/adaptive.py compares it with what it spreads
    "OneBitAdam": ["OneBitAdam(warmup=40)"],
    "DeMo": [],  # its learning rates are others
    "Feedback": [],
    "Rotated": ["Rotated(TopK(density=0.01))", "Rotated(TernGrad(), by='hadamard')"],
    "Route": [],
    "Sharded": [],  # resolving finds these where they pay
    # as many entries, and about as many bytes of four workers, as TopK(density=0.01) that gathers everyone's
    "SparseSum": ["SparseSum(TopK(density=0.01))", "SparseSum(TopK(density=0.02))"],
    "Hierarchical": [],  # for nodes
    "PerWorker": [],  # for workers with slower links
}
# against what a sparse choice loses under Adam, by what is changed; of 100 steps
DENSE_STEPS = 10, 25, 40
ADAMW_TRIED = {
    "feedback": ["TopK(density=0.01, feedback=False)"],
    "density": ["TopK(density=0.03)", "TopK(density=0.1)"],
    "values in fewer bits": ["Chain(TopK(density=0.01), Int8())", "Chain(TopK(density=0.03), Int8())"],
    "warm-up": [f"Warmup(TopK(density=0.01), steps={steps})" for steps in DENSE_STEPS],
    "momentum travels, variance is frozen": [
        *(f"OneBitAdam(warmup={steps}, inner=TopK(density=0.01))" for steps in DENSE_STEPS[1:]),
        "OneBitAdam(warmup=40)",
    ],
    "momentum travels, variance follows": ["CompressedAdam()", "CompressedAdam(variance='agreed')"],
    "moments of the last means": ["MicroAdam()"],
    "updates travel": [
        "AdamUpdate(TopK(density=0.01))",
        "AdamUpdate(Warmup(TopK(density=0.01), steps=10))",
        "AdamUpdate()",
    ],
    "every entry, in few bits": ["Int8()", "OneBit()"],
    "low rank instead": ["PowerSGD(rank=1)", "PowerSGD()"],
    "several together": [
        "Warmup(Chain(TopK(density=0.1), Int8()), steps=10)",
        "OneBitAdam(warmup=40, inner=Chain(TopK(density=0.1), Int8()))",
        "Warmup(PowerSGD(), steps=10)",
    ],
}
TOP_K = "TopK(density=0.01)"
BASE_RECIPES = ["Route(DGC(density=0.001), rest=Int8())", "Route(DGC(density=0.001, warmup=15), rest=Int8())", TOP_K]


@dataclass(frozen=True)
class Study:
    """compressors: by task; Dense() is trained beside them all. twins: whether those that forget are, too.

    pictured: whether the page has a picture of it.
    """

    tasks: Mapping[str, Task]
    compressors: Mapping[str, Sequence[str]]
    twins: bool
    pictured: bool

    def pairs(self, tasks: Sequence[str], compressors: Sequence[str]) -> Iterator[tuple[str, str]]:
        """(task, compressor) of these tasks, with these compressors or else its own; Dense() first."""
        for name in tasks or self.tasks:
            chosen = [text for text in compressors or self.compressors[name] if self.tasks[name].takes(text)]
            twins = filter(None, map(without_feedback, chosen)) if self.twins else ()
            yield from ((name, text) for text in dict.fromkeys([DENSE, *chosen, *twins]))


def without_feedback(text: str) -> str | None:
    """The twin that forgets, where the compressor would be wrapped in Feedback."""
    (term,) = parse(text).terms
    return repr(_forgetful(term)) if isinstance(term, Compressor) and term.wants_feedback else None


def _forgetful(term: Term) -> Term:
    inner = {item.name: getattr(term, item.name) for item in fields(term)}  # type: ignore[arg-type]
    changes: dict[str, Any] = {name: _forgetful(value) for name, value in inner.items() if isinstance(value, Term)}
    if "feedback" in inner:
        changes["feedback"] = False
    return replace(term, **changes)  # type: ignore[type-var]


STUDIES = {
    "loss": Study(TASKS, dict.fromkeys(TASKS, case_texts(COMPRESSORS)), twins=True, pictured=True),
    "adamw": Study(
        {ADAMW_TASK: TASKS[ADAMW_TASK], SGD_TASK: TASKS[SGD_TASK], **ADAMW_TASKS},
        {ADAMW_TASK: [TOP_K, *chain(*ADAMW_TRIED.values())], **{name: [TOP_K] for name in (SGD_TASK, *ADAMW_TASKS)}},
        twins=False,
        pictured=False,
    ),
    "base": Study(BASE, dict.fromkeys(BASE, BASE_RECIPES), twins=False, pictured=False),
}
EVERY = {name: task for study in STUDIES.values() for name, task in study.tasks.items()}
