"""docs/how-to/pipeline.md: its script trains, as it stands."""

from pathlib import Path

import pytest
from support.page_commands import FENCE
from support.paths import ROOT
from support.processes import succeed


@pytest.mark.processes
def test_the_script_on_the_page_trains(tmp_path: Path) -> None:
    (script,) = [
        code
        for language, code in FENCE.findall((ROOT / "docs" / "how-to" / "pipeline.md").read_text())
        if language == "python"
    ]
    program = tmp_path / "train.py"
    program.write_text("import torch\n\ntorch.set_num_threads(1)\n" + script)
    quiet, said = succeed([str(program)], 2)
    first, second = (float(line.removeprefix("loss ")) for line in said.splitlines() if line.startswith("loss "))
    assert second < first
    assert "loss" not in quiet
