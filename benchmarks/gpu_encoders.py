"""Encoders on a GPU: every compressor's encoding and decoding over a copy of the same bytes, in one interleaved run.

Beside them torch.topk, torch's PowerSGD hook over a group of one, and GRACE's TopK where that package is installed.
"""

from __future__ import annotations

import importlib
import statistics
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from benchmarks.gpu_device import settled, timed
from benchmarks.report import markdown
from torch import Tensor
from torch.distributed import HashStore  # type: ignore[attr-defined]
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook

from gossamer.plan.bench import KERNELS, case_texts, with_feedback
from gossamer.plan.bench.interleave import Timer, interleave, spread
from gossamer.plan.bench.replay import gradient, prepare
from gossamer.plan.bench.workloads import bucket

COPY, WORKERS, DENSITY = "tensor.copy_", 2, 0.01
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
FEW = (
    "Dense(dtype='bfloat16')",
    "Int8()",
    "Float4()",
    "TopK(density=0.01)",
    "PowerSGD(rank=2)",
    "RandomK(density=0.01)",
)
Row = tuple[str, str]  # a subject and a dtype


class OneBucket:
    """As much of a bucket of DDP as torch's hooks ask for."""

    def __init__(self, flat: Tensor, matrices: Sequence[Tensor]) -> None:
        self._flat, self._matrices = flat, list(matrices)

    def buffer(self) -> Tensor:
        return self._flat

    def gradients(self) -> list[Tensor]:
        return self._matrices

    def parameters(self) -> list[Tensor]:
        return self._matrices

    def index(self) -> int:
        return 0

    def is_last(self) -> bool:
        return True


def torchs_powersgd(flat: Tensor, matrices: Sequence[Tensor]) -> Callable[[], object]:
    """A step of torch's hook, encoding, exchange in a group of one, and decoding."""
    state = powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=2, start_powerSGD_iter=2)
    one: Any = OneBucket(flat, matrices)

    def step() -> None:
        powerSGD_hook.powerSGD_hook(state, one).wait()

    for _ in range(3):  # those before the hook compresses
        step()
    return step


def _largest(flat: Tensor) -> object:
    return flat.abs().topk(max(1, int(DENSITY * flat.numel())))


def graces_topk(flat: Tensor) -> Callable[[], object] | None:
    """GRACE's TopK, encoding and decoding; None where it is not installed."""
    try:
        found: Any = importlib.import_module("grace_dl.torch.compressor.topk")
    except ImportError:
        return None
    compressor = found.TopKCompressor(DENSITY)

    def both() -> None:
        payload, context = compressor.compress(flat, "flat")
        compressor.decompress(payload, context)

    return both


def rows(elements: int, device: torch.device, few: bool) -> tuple[dict[Row, Timer], dict[Row, str]]:
    """Timers, and why others could not be made."""
    settle, layout = settled(device), bucket(elements)
    timers: dict[Row, Timer] = {}
    problems: dict[Row, str] = {}
    for name, dtype in DTYPES.items():
        x = gradient(layout, device, dtype)
        matrices, out = [slot.view(x.flat) for slot in layout], torch.empty_like(x.flat)
        timers[COPY, name] = timed(partial(out.copy_, x.flat), settle)
        timers[f"torch.topk, {DENSITY:.0%}", name] = timed(partial(_largest, x.flat), settle)
        timers["torch's PowerSGD hook, rank 2", name] = timed(torchs_powersgd(x.flat.clone(), matrices), settle)
        grace = graces_topk(x.flat)
        if grace is None:
            problems["GRACE's TopK", name] = "not installed"
        else:
            timers["GRACE's TopK", name] = timed(grace, settle)
        for text in FEW if few else case_texts(KERNELS):
            try:
                (exchange,) = prepare(with_feedback(text), layout, (WORKERS,), device, dtype)
            except (RuntimeError, ValueError, TypeError) as problem:
                problems[text, name] = str(problem).splitlines()[0][:80]
                continue
            exchange.settle = settle
            timers[text, name] = exchange.run
    return timers, problems


def measure(elements: int, rounds: int, device: torch.device, *, few: bool) -> str:
    """The page's part: milliseconds by subject and dtype, and how often a copy would fit in."""
    with_group = not dist.is_initialized()
    if with_group:
        store = HashStore()
        dist.init_process_group("nccl" if device.type == "cuda" else "gloo", store=store, rank=0, world_size=1)
    try:
        timers, problems = rows(elements, device, few)
        found = interleave(timers, rounds)
    finally:
        if with_group:
            dist.destroy_process_group()
    seconds = {row: [sum(parts) for parts in by_round] for row, by_round in found.items()}
    return table(seconds, found, problems)


def table(
    seconds: Mapping[Row, Sequence[float]], parts: Mapping[Row, list[Sequence[float]]], problems: Mapping[Row, str]
) -> str:
    subjects = list(dict.fromkeys(subject for subject, _ in (*seconds, *problems)))
    lines = []
    for subject in subjects:
        line = {"": subject if subject in (COPY,) or "'s " in subject or "torch" in subject[:5] else f"`{subject}`"}
        for dtype in DTYPES:
            line |= _cells(dtype, (subject, dtype), seconds, parts, problems)
        lines.append(line)
    return markdown(lines)


def _cells(
    dtype: str,
    row: Row,
    seconds: Mapping[Row, Sequence[float]],
    parts: Mapping[Row, list[Sequence[float]]],
    problems: Mapping[Row, str],
) -> dict[str, str]:
    names = (f"{dtype}: encode", f"{dtype}: decode", f"{dtype}: over a copy", f"{dtype}: spread")
    if row in problems:
        return dict(zip(names, (problems[row], "", "", ""), strict=True))
    encode, *decode = [statistics.median(part) for part in zip(*parts[row], strict=True)]
    copies = statistics.median(seconds[row]) / statistics.median(seconds[COPY, dtype])
    shown = (_ms(encode), _ms(decode[0]) if decode else "", f"{copies:.1f}", f"{spread(seconds[row]):.0%}")
    return dict(zip(names, shown, strict=True))


def _ms(seconds: float) -> str:
    return f"{1000 * seconds:.3g} ms"
