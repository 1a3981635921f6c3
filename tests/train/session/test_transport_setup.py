"""Transport setup: what a run that encrypts comes to, in real processes."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.certificates import certificates
from support.paths import TESTS
from support.processes import findings, succeed

from gossamer.base.kernels.library import are_built

pytestmark = [
    pytest.mark.processes,
    pytest.mark.skipif(not are_built(), reason="the compiled loops are not there"),
]

TRAINING = TESTS / "support" / "encrypted_training.py"


def trained(folder: Path, extra: dict[str, str]) -> tuple[str, bool]:
    """What two workers came to, alike, and whether what they said was sealed."""
    first, second = (findings(text)[0] for text in succeed([str(TRAINING), str(folder)], 2, extra=extra))
    assert first == second
    return first["digest"], first["sealed"]


def test_a_run_that_encrypts_trains_to_the_same_bits(tmp_path: Path) -> None:
    folder = certificates(tmp_path / "tls")
    without = {"GOSSAMER_SHARED_MEMORY": "0"}
    plain, plain_sealed = trained(tmp_path / "plain", without)
    over_tls = trained(tmp_path / "tls-run", {**without, "GOSSAMER_TLS": str(folder)})
    sealed = trained(tmp_path / "sealed", {**without, "GOSSAMER_SEAL": "1"})
    assert not plain_sealed
    assert over_tls == sealed == (plain, True)
