import json

import pytest
from click.testing import CliRunner

from gossamer.cli.bench import bench


def run(*arguments):
    return CliRunner().invoke(bench, ["compressors", "--elements", "100000", "--repeat", "1", *arguments])


def test_a_table_for_people_and_every_time_for_programs(tmp_path):
    file = tmp_path / "found.json"
    result = run("--compressor", "TopK", "--json", str(file))
    assert result.exit_code == 0, result.output
    assert "Feedback(TopK(density=0.01))" in result.output
    assert "copy_ of" in result.output
    assert "\x1b" not in result.output
    found = json.loads(file.read_text())
    assert found["machine"]["cores"] >= 1
    assert found["command"].startswith("gossamer")
    assert all(len(one["seconds"]) == 1 for one in found["measured"])
    assert {one["subject"] for one in found["measured"]} >= {"copy_", "add", "Feedback(TopK(density=0.001))"}


def test_an_unknown_compressor_is_refused_with_the_known_ones():
    result = run("--compressor", "TopQ")
    assert result.exit_code == 2
    assert "'TopQ' is not in this benchmark. " in result.output
    assert "TopK" in result.output


@pytest.mark.processes
def test_two_processes_at_once(tmp_path):
    file = tmp_path / "found.json"
    result = run("--compressor", "RandomK", "--processes", "2", "--json", str(file))
    assert result.exit_code == 0, result.output
    assert "two over one" in result.output
    (one,) = json.loads(file.read_text())["measured"]
    assert one["gain"] == pytest.approx(one["together"][0] / one["alone"][0])


def test_a_bucket_that_exceeds_the_memory_is_refused():
    result = run("--compressor", "Int8", "--elements", str(10**12))
    assert result.exit_code == 2
    assert "elements need about" in result.output
    assert "Write --elements" in result.output
