"""Process groups: real processes on Gloo give the same bits, beside DDP and with DDP's hook."""

from __future__ import annotations

import pytest
from support.nightly import nightly
from support.paths import SUPPORT
from support.processes import succeed

CHECKS = [
    "words_over_gloo",
    "parts_over_gloo",
    "sites_over_gloo",
    "turns_over_gloo",
    "compressors_over_gloo",
    "dense_equals_ddp",
    "dense_equals_ddp_on_integers",
    "dense_is_within_rounding_of_ddp",
    "hook_survives_rebuilding",
    "hook_skips_what_is_not_finite",
    "averages",
    "other_collectives_beside_the_lane",
]


@pytest.mark.processes
@pytest.mark.parametrize("world", [2, *nightly(4)])
def test_real_workers(world: int) -> None:
    said = succeed([str(SUPPORT / "worker_checks.py"), *CHECKS], world)
    for text in said:
        assert [line for line in text.splitlines() if line.startswith("passed")] == [f"passed {c}" for c in CHECKS]
