"""Federated examples: their scripts mark what a federation needs, and a device of theirs learns from its own data."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from support.paths import ROOT

from gossamer.federated import Round
from gossamer.federated.client.functions import load_script
from gossamer.federated.population import read_profiles

EXAMPLES = ["federated_digits.py", "federated_authors.py"]


@pytest.mark.parametrize("name", EXAMPLES)
def test_a_device_learns_from_its_own_data(name: str) -> None:
    if name == "federated_digits.py":
        pytest.importorskip("sklearn")
    script = load_script(ROOT / "examples" / name)
    model, other = script.model(), script.model()
    assert all(map(torch.equal, model.state_dict().values(), other.state_dict().values()))
    told = Round(index=0, client=3, seed=5, local_steps=8)
    first, again = script.train(model, told), script.train(other, told)
    assert first == again
    assert all(map(torch.equal, model.state_dict().values(), other.state_dict().values()))
    assert first.samples > 0
    later = script.train(model, told)
    assert later.metrics["loss"] < first.metrics["loss"]


@pytest.mark.parametrize("name", EXAMPLES)
def test_the_server_evaluates_what_no_device_has(name: str) -> None:
    if name == "federated_digits.py":
        pytest.importorskip("sklearn")
    script = load_script(ROOT / "examples" / name)
    assert script.evaluate is not None
    update = script.evaluate(script.model(), Round(index=1, client=None))
    assert update.samples > 300
    assert update.metrics["loss"] > 2


def test_devices_differ_in_labels() -> None:
    pytest.importorskip("sklearn")
    script = load_script(ROOT / "examples" / "federated_digits.py")
    sizes = {script.train(script.model(), Round(index=0, client=client, local_steps=1)).samples for client in range(30)}
    assert len(sizes) > 10


@pytest.mark.nightly
@pytest.mark.processes
def test_who_has_what_is_drawn(tmp_path: Path) -> None:
    pytest.importorskip("sklearn")
    pytest.importorskip("matplotlib")
    picture = tmp_path / "who.png"
    command = [sys.executable, str(ROOT / "examples" / "federated_digits.py"), "--picture", str(picture)]
    subprocess.run(command, check=True, capture_output=True, text=True, timeout=120)
    assert picture.stat().st_size > 10_000


def test_the_profiles_next_to_the_examples_can_be_read() -> None:
    phones = read_profiles(ROOT / "examples" / "devices" / "phones.toml", 10)
    assert sum(not each.is_always_present for each in phones) == 8
