"""Records of rehearsed runs, written by hand."""

from typing import Any


def record(busy_seconds: float = 0.0, late_seconds: float = 0.0) -> dict[str, Any]:
    return {
        "workers": 4,
        "network": "1gbit,1ms",
        "emulation": "switch",
        "seconds_per_step": {"median": 0.2},
        "compute_seconds_per_step": 0.15,
        "waiting_seconds_per_step": 0.05,
        "communication_seconds_per_step": {"encode": 0.01, "wire": 0.02, "decode": 0.003},
        "bytes_sent_per_step": {"accounted": 1_200_000.0},
        "final": {
            "processor_seconds_per_step": busy_seconds,
            "late_seconds_per_step": late_seconds,
            "bytes_sent_per_step": 1_200_000.0,
        },
    }
