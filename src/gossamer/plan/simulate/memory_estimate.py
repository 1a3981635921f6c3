"""Memory estimate: foresees what all workers of a simulated job keep in this machine's memory."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from gossamer.algorithms.recipes.recipe import Recipe
from gossamer.base.layout import dtype_of
from gossamer.base.units import bytes_text
from gossamer.events import Attached
from gossamer.plan.simulate.script_guards import SimulationError
from gossamer.train.traffic.traffic import estimate_traffic

FLOAT_BYTES = 4
OPTIMIZER_COPIES = 2  # of the parameters, as Adam keeps; SGD with momentum keeps one, without it none
KEPT_BYTES = 0.1  # of what is free, for everything else


@dataclass(frozen=True, kw_only=True)
class MemoryEstimate:
    """Bytes of all workers together. What the script itself loads is not foreseen, nor are activations."""

    workers: int
    parts: Mapping[str, float]  # of one worker, by name

    @property
    def worker_bytes(self) -> float:
        return sum(self.parts.values())

    @property
    def total_bytes(self) -> float:
        return self.workers * self.worker_bytes

    def __str__(self) -> str:
        parts = ", ".join(f"{name} {bytes_text(nbytes)}" for name, nbytes in self.parts.items() if nbytes)
        return (
            f"{bytes_text(self.total_bytes)} for {self.workers} workers, each {bytes_text(self.worker_bytes)}: {parts}"
        )

    def refuse_beyond(self, free_bytes: float) -> None:
        """Raise SimulationError where the machine has not enough, with the line to write instead."""
        room = (1 - KEPT_BYTES) * free_bytes
        if self.total_bytes <= room:
            return
        fitting = int(room / self.worker_bytes)
        instead = f"Write --workers {fitting}" if fitting > 1 else "Take a smaller model"
        raise SimulationError(
            f"{self.workers} workers would need {self} and {bytes_text(free_bytes)} are free here, so the machine "
            f"would swap or kill this process. {instead}, or simulate on a larger machine."
        )


def estimate_memory(recipe: Recipe, model: Attached, workers: int) -> MemoryEstimate:
    """Of what the first worker's session told at attach."""
    trained = sum(layout.numel * dtype_of(dtype).itemsize for dtype, layout in model.layouts)
    frozen = FLOAT_BYTES * (model.parameters - sum(layout.numel for _, layout in model.layouts))
    traffic = estimate_traffic(recipe, model, workers=workers)
    parts = {
        "model": trained + frozen,
        "optimizer": OPTIMIZER_COPIES * trained,
        "gradients": trained,
        "buckets": trained,
        "residuals": traffic.residual_bytes,
        "other state": traffic.other_state_bytes + traffic.strategy_bytes,
    }
    return MemoryEstimate(workers=workers, parts=parts)


def free_bytes(root: Path = Path("/")) -> float:
    """Memory that this process may still take: the machine's, or what is left of its control group's."""
    machine = _machine_bytes(root / "proc/meminfo")
    group = root / "sys/fs/cgroup"
    limit, used = _number(group / "memory.max"), _number(group / "memory.current")
    return min(machine, limit - used) if limit is not None and used is not None else machine


def _machine_bytes(file: Path) -> float:
    lines = dict(line.split(":", 1) for line in file.read_text().splitlines()) if file.exists() else {}
    return 1024 * float(lines["MemAvailable"].split()[0]) if "MemAvailable" in lines else float("inf")


def _number(file: Path) -> float | None:
    text = file.read_text().strip() if file.exists() else ""
    return float(text) if text.isdigit() else None
