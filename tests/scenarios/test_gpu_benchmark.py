"""The program of `make bench-gpu` runs on a processor, as a whole; what it tells of a GPU, only a GPU can say."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from benchmarks import gpu, gpu_network, page, provenance
from benchmarks.gpu_device import refuse_missing
from benchmarks.gpu_encoders import FEW
from benchmarks.gpu_step import LanguageModel, Shape
from support.paths import BENCHMARKS, ROOT
from support.processes import of_this_checkout

pytestmark = pytest.mark.nightly

QUICK = provenance.QUICK / "gpu.md"


def ran(*options: str) -> str:
    paths = os.pathsep.join([of_this_checkout()["PYTHONPATH"], str(ROOT)])
    done = subprocess.run(
        [sys.executable, str(BENCHMARKS / "gpu.py"), "--device", "cpu", "--small", "--rounds", "2", *options],
        env={**os.environ, "PYTHONPATH": paths},
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=250,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


@pytest.mark.processes
def test_encoders_and_the_step_are_measured_on_a_processor() -> None:
    said = ran("--only", "encoders", "step")
    assert "These are no figures of a GPU." in said
    for subject in ("tensor.copy_", "torch.topk", "torch's PowerSGD hook", "GRACE's TopK", *FEW, "Distributed"):
        assert subject in said
    assert "| `Dense()` |" in page.between(QUICK, "step")
    assert "To be written" in page.between(gpu.PAGE, "encoders") or "CUDA" in page.between(gpu.PAGE, "encoders")


@pytest.mark.namespaces
def test_two_workers_are_measured_over_a_network() -> None:
    said = ran("--only", "network")
    assert "| `TopK(density=0.01)` |" in said
    assert "Error" not in said
    last = page.between(QUICK, "network").rstrip().splitlines()[-1]
    assert last.startswith("| `TopK")
    assert " to " in last, "no ratio of a run with and one without a network"


def test_a_run_that_failed_shows_why() -> None:
    line = gpu_network._line("Dense()", [(0.1, "ConnectError: no way"), (0.1, 0.2)])
    assert line["no network"] == "ConnectError: no way"
    assert gpu_network._line("Dense()", [(0.1, 0.2), (0.1, 0.4)])["ratio"] == "3.00 (2.00 to 4.00)"


def test_the_model_has_the_size_it_says() -> None:
    with torch.device("meta"):
        model = LanguageModel(Shape())
    assert round(sum(parameter.numel() for parameter in model.parameters()) / 1e6) == 124


def test_a_gpu_that_is_not_there_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit, match=r"torch finds no GPU here.*--device cpu --small"):
        refuse_missing(torch.device("cuda", 0))
    refuse_missing(torch.device("cpu"))


def test_the_target_exists() -> None:
    makefile = Path(ROOT, "Makefile").read_text()
    assert "\tenv -u TRITON_INTERPRET $(BIN)/pytest -m gpu\n" in makefile
    assert "bench-gpu: $(READY)" in makefile
