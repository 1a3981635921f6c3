"""Tasks of benchmarks/ladder.py: one language model of bytes in four sizes and two batch sizes, and two other models.

A rung is a model size with a number of training bytes in proportion to it. No window of text is used twice. Held-out
files are split in two: learning rates are tuned on one half, results are reported on the other.
"""

import math
import sys
import sysconfig
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path

from torch import Tensor, nn
from torch.optim import AdamW, Muon, Optimizer

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from benchmarks.byte_models import ByteLSTM  # found only after the line above
from benchmarks.tasks import Adaptive, Momentum, Samples, Task, digits, surprise
from benchmarks.tasks import classify as cross_entropy_of
from examples.bytelm import CONTEXT, ByteLM, windows
from examples.digits import conv

WORKERS, MORE_WORKERS = 4, 16
BYTES_PER_PARAMETER = 20  # of training text, over all workers
FEWEST_STEPS = 1000
EXAM = 256  # held-out windows
RATES = tuple(round(digit * 10.0**power, 10) for power in range(-5, 2) for digit in (1, 3))  # half decades
WARMUP, LAST = 0.05, 0.1  # share of the steps; share of the learning rate
ADAMW, MUON, SGD = "AdamW", "Muon", "SGD"
SIZES = {
    "57k": (32, 3),
    "113k": (48, 3),
    "237k": (64, 4),
    "503k": (96, 4),
}  # width, blocks; a head for each 16 of the width
PREDICTED = "237k", "503k"  # sizes whose learning rates follow from those of the smaller models
BATCHES = 16, 2  # windows per worker and step


def schedule(made: float) -> float:
    """Factor of the learning rate after a share `made` of the steps: linear warm-up, then a cosine down to a tenth.

    A constant rate would favor methods that average parameters, because an average of workers reduces noise as a
    decaying rate does.
    """
    if made < WARMUP:
        return max(made, WARMUP / 10) / WARMUP
    return LAST + (1 - LAST) * (1 + math.cos(math.pi * (made - WARMUP) / (1 - WARMUP))) / 2


class MuonWithAdamW(Optimizer):
    """Muon for the matrices inside the blocks, AdamW for embeddings, head and vectors; one learning rate for both."""

    def __init__(self, parameters: Iterable[nn.Parameter], lr: float, embeddings: int = 2) -> None:
        every = list(parameters)
        inner = [parameter for parameter in every if parameter.ndim == 2][embeddings:-1]
        chosen = set(map(id, inner))
        self.parts: list[Optimizer] = [  # attach() finds wrapped optimizers here
            Muon(inner, lr=lr, adjust_lr_fn="match_rms_adamw", weight_decay=0.01),
            AdamW([parameter for parameter in every if id(parameter) not in chosen], lr=lr, betas=(0.9, 0.98)),
        ]
        super().__init__([group for part in self.parts for group in part.param_groups], {})

    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        for part in self.parts:
            part.step()


@dataclass(frozen=True, kw_only=True)
class Rung:
    """A task with everything that a study needs.

    first_rate: the learning rate that is tried first. tuning_exam and exam: disjoint held-out samples.
    bytes_per_parameter: training bytes over parameters; nan where samples repeat. family: rungs with the same family
    differ in model size alone. predicts: the learning rates follow from the family's smaller rungs, without a search.
    workers: of every arm that does not have its own number.
    """

    name: str
    about: str
    task: Task
    optimizer: str
    first_rate: float
    parameters: int
    tuning_exam: Callable[[], tuple[Tensor, ...]]
    exam: Callable[[], tuple[Tensor, ...]]
    bytes_per_parameter: float = math.nan
    family: str = ""
    predicts: bool = False
    workers: int = WORKERS


@cache
def library() -> tuple[Tensor, Tensor, Tensor]:
    """(training, tuning, exam): windows of the standard library's source text, from disjoint files.

    Test packages are left out. Every tenth file is held out for results, and the fifth after it for tuning.
    """
    root = Path(sysconfig.get_paths()["stdlib"])
    outside = {"test", "tests", "idlelib", "site-packages", "dist-packages", "__pycache__"}
    files = sorted(file for file in root.rglob("*.py") if not outside & set(file.relative_to(root).parts))
    parts: list[list[Path]] = [[], [], []]
    for place, file in enumerate(files):
        parts[{0: 2, 5: 1}.get(place % 10, 0)].append(file)
    learn, tune, exam = map(windows, parts)
    return learn, tune[:: len(tune) // EXAM], exam[:: len(exam) // EXAM]


def library_samples() -> Samples:
    learn, tune, exam = library()
    return (learn,), (tune,), (exam,)


def library_exam(place: int) -> tuple[Tensor, ...]:
    return (library()[place],)


def size(build: Callable[[], nn.Module]) -> int:
    return sum(parameter.numel() for parameter in build().parameters())


def byte_rung(
    name: str,
    build: Callable[[], nn.Module],
    optimizer: str,
    learner: Callable[[Iterable[nn.Parameter]], Optimizer],
    rate: float,
    batch: int,
    workers: int = WORKERS,
) -> Rung:
    count = size(build)
    most = 8_600_000 // CONTEXT  # windows that there are, less a margin for other versions of the library
    wanted = min(most, BYTES_PER_PARAMETER * count // CONTEXT)
    steps = max(FEWEST_STEPS, wanted // (workers * batch))
    used = steps * workers * batch * CONTEXT
    many = "" if workers == WORKERS else f"{workers} workers; "
    about = (
        f"{count:,} parameters; {optimizer}; {many}{batch} windows of {CONTEXT} bytes per worker and step; "
        f"{steps} steps; {used / count:.0f} bytes of text per parameter"
    )
    task = Task(
        about=about,
        steps=steps,
        seeds=3,
        dense_seeds=3,
        batch=batch,
        trained_by=AdamW,
        build=build,
        optimizer=learner,
        loss=surprise,
        samples=library_samples,
        pace=schedule,
    )
    return Rung(
        name=name,
        about=about,
        task=task,
        optimizer=optimizer,
        first_rate=rate,
        parameters=count,
        tuning_exam=partial(library_exam, 1),
        exam=partial(library_exam, 2),
        bytes_per_parameter=used / count,
        workers=workers,
    )


def digits_rung() -> Rung:
    """examples/digits.py: each of 1,437 images is seen 18 times in 400 steps."""

    def exam(half: int) -> tuple[Tensor, ...]:
        return tuple(tensor[half::2] for tensor in digits()[2])

    about = "examples/digits.py, conv; AdamW; 16 images per worker and step; 400 steps"
    task = Task(
        about=about,
        steps=400,
        seeds=3,
        dense_seeds=3,
        batch=16,
        trained_by=AdamW,
        build=conv,
        optimizer=Adaptive(lr=3e-3),
        loss=cross_entropy_of,
        samples=digits,
        pace=schedule,
    )
    return Rung(
        name="digits-conv",
        about=about,
        task=task,
        optimizer=ADAMW,
        first_rate=3e-3,
        parameters=size(conv),
        tuning_exam=partial(exam, 0),
        exam=partial(exam, 1),
    )


def muon(parameters: Iterable[nn.Parameter]) -> Optimizer:
    return MuonWithAdamW(parameters, lr=3e-3)


def rung_name(size_name: str, batch: int, optimizer: str = ADAMW) -> str:
    return f"bytelm-{size_name}-b{batch}" + ("" if optimizer == ADAMW else f"-{optimizer.lower()}")


@cache
def rungs() -> dict[str, Rung]:
    """By name; small models first."""
    adamw = Adaptive(lr=3e-3)
    found: dict[str, Rung] = {}
    for size_name, (width, blocks) in SIZES.items():
        for batch in BATCHES:
            for optimizer, learner, rate in ((ADAMW, adamw, 1e-2), (MUON, muon, 1e-2), (SGD, Momentum(lr=0.1), 1e-1)):
                name = rung_name(size_name, batch, optimizer)
                build = partial(ByteLM, width, blocks, width // 16)
                rung = byte_rung(name, build, optimizer, learner, rate, batch)
                family = f"bytelm-b{batch}-{optimizer}"
                found[name] = replace(rung, family=family, predicts=size_name in PREDICTED)
    small, name = partial(ByteLM, *SIZES["57k"], 2), f"{rung_name('57k', 2)}-w{MORE_WORKERS}"
    found[name] = replace(byte_rung(name, small, ADAMW, adamw, 1e-2, 2, MORE_WORKERS), family=name)
    found["lstm-b16"] = byte_rung("lstm-b16", ByteLSTM, ADAMW, adamw, 1e-2, 16)
    found["digits-conv"] = digits_rung()
    return found
