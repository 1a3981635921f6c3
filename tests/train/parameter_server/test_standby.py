from __future__ import annotations

import io
import json
import subprocess
import sys

import pytest

from gossamer.train.parameter_server.standby import wait_for_role


def test_a_spare_takes_over_the_environment_that_it_is_given() -> None:
    environ = {"HOME": "here", "GOSSAMER_SERVER": "old"}
    assert wait_for_role(
        io.StringIO(json.dumps({"GOSSAMER_SERVER": "3", "GOSSAMER_JOURNAL": "$x"}) + "\nmore"), environ
    )
    assert environ == {"HOME": "here", "GOSSAMER_SERVER": "3", "GOSSAMER_JOURNAL": "$x"}


def test_it_comes_by_the_standard_input_that_is_there_when_it_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO('{"GOSSAMER_SERVER": "3"}\n'))
    environ: dict[str, str] = {}
    assert wait_for_role(environ=environ)
    assert environ == {"GOSSAMER_SERVER": "3"}


@pytest.mark.parametrize("orders", ["", '{"GOSSAMER_SERVER": "3"}', '{"GOSS'])
def test_a_spare_whose_launcher_is_gone_becomes_nothing(orders: str) -> None:
    environ: dict[str, str] = {}
    assert not wait_for_role(io.StringIO(orders), environ)
    assert environ == {}


MODULES = """
import sys
import torch
from gossamer.train.parameter_server.standby import warm_up
counts = [len(sys.modules)]
warm_up()
counts.append(len(sys.modules))
optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(2))], lr=0.1, momentum=0.9)
optimizer.param_groups[0]["params"][0].grad = torch.ones(2)
optimizer.step()
print(*counts, len(sys.modules))
"""


@pytest.mark.processes
@pytest.mark.new_programs
def test_a_warmed_up_spare_has_imported_what_torch_imports_late() -> None:
    done = subprocess.run([sys.executable, "-c", MODULES], capture_output=True, text=True, timeout=200, check=True)
    imported, warmed_up, served = map(int, done.stdout.split())
    assert warmed_up == served
    with pytest.raises(AssertionError):
        assert imported == served
