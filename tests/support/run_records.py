"""Made-up records of runs, with what pictures of them show."""

from __future__ import annotations

from typing import Any


def record(recipe: str, sent: float = 40_000.0) -> dict[str, Any]:
    return {
        "recipe": recipe,
        "workers": 2,
        "steps": 200,
        "compute_seconds_per_step": 0.02,
        "waiting_seconds_per_step": 0.005,
        "communication_seconds_per_step": {"encode": 0.001, "wire": 0.01, "decode": 0.001},
        "bytes_sent_per_step": {"accounted": sent, "interface": None},
        "metrics": {"loss": [[step, step / 50, 1 / step] for step in range(1, 201)]},
    }
