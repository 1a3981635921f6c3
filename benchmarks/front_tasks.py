"""Tasks of benchmarks/front.py: models, their optimizers, and the learning rates that are tried first."""

import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path

from torch import Tensor, nn
from torch.optim import Optimizer

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from benchmarks.byte_models import ByteLSTM  # found only after the line above
from benchmarks.ladder_tasks import ADAMW, LAST, MUON, WARMUP, MuonWithAdamW, schedule
from benchmarks.local import exam
from benchmarks.tasks import BASE, TASKS, Adaptive, Learner, Momentum, Task, digits, surprise

SGD = "SGD"
# a ladder, so that every task's rates are numbers of the same few
RATES = (1e-4, 3e-4, 1e-3, 3e-3, 1e-2, 3e-2, 1e-1, 3e-1, 1.0, 3.0)


@dataclass(frozen=True, kw_only=True)
class Orthogonal:
    lr: float = 3e-3

    def __call__(self, parameters: Iterable[nn.Parameter]) -> Optimizer:
        return MuonWithAdamW(parameters, self.lr)

    def __str__(self) -> str:
        return f"Muon with momentum 0.95 for matrices within the model, AdamW for the others, lr {self.lr:g}"


@dataclass(frozen=True, kw_only=True)
class Setting:
    """A task of this study. exam: samples held out, whose loss is what counts; rate: the one tried first."""

    task: Task
    optimizer: str
    rate: float
    exam: Callable[[], tuple[Tensor, ...]]

    @property
    def about(self) -> str:
        return (
            f"{self.task.about}; the learning rate rises for {WARMUP:.0%} of the steps and falls along a cosine to "
            f"{LAST:.0%} of it"
        )


def images() -> tuple[Tensor, ...]:
    return digits()[2]


def setting(
    task: Task,
    learner: Callable[[Iterable[nn.Parameter]], Optimizer],
    optimizer: str,
    rate: float,
    steps: int,
    held_out: Callable[[], tuple[Tensor, ...]] = exam,
) -> Setting:
    model, _, batch = task.about.split("; ")
    about = f"{model}; {learner}; {batch}".replace(f", lr {rate:g}", "")
    changed = replace(task, about=about, optimizer=learner, steps=steps, pace=schedule)
    return Setting(task=changed, optimizer=optimizer, rate=rate, exam=held_out)


SMALL = TASKS["bytelm"]
LSTM = replace(
    SMALL,
    about=f"an LSTM with an embedding over bytes, 0.26 million parameters; -; {SMALL.about.split('; ')[2]}",
    build=ByteLSTM,
    loss=surprise,
)


def _settings() -> dict[str, Setting]:
    """The most telling first."""
    adamw: Learner = Adaptive(lr=3e-3)
    return {
        "bytelm": setting(SMALL, adamw, ADAMW, 3e-3, 1000),
        "digits-conv": setting(TASKS["digits-conv"], adamw, ADAMW, 3e-3, 400, images),
        "lstm": setting(LSTM, adamw, ADAMW, 3e-3, 1000),
        "bytelm-sgd": setting(SMALL, Momentum(lr=1e-1), SGD, 1e-1, 1000),
        "bytelm-muon": setting(SMALL, Orthogonal(lr=3e-3), MUON, 3e-3, 1000),
        "digits-resnet": setting(TASKS["digits-resnet"], Momentum(lr=3e-2), SGD, 3e-2, 400, images),
        "bytelm-base": setting(BASE["bytelm-base"], Adaptive(lr=1e-3), ADAMW, 1e-3, 400),
    }


SETTINGS = _settings()
