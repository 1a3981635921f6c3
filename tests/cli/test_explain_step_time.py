"""What `gossamer explain` says of a step's time: on a network, and what line hides it."""

import json

import pytest
from support.explaining import MILLION, TRAINING, explained, run, shown, untimed_script


@pytest.fixture
def script(tmp_path, monkeypatch):
    return untimed_script(tmp_path, monkeypatch)


def foretold_of(tmp_path, *args):
    file = tmp_path / "out.json"
    code, output = run("--parameters", "200000", "--step-seconds", "0.5", "--json", str(file), *args)
    assert code == 0, output
    return json.loads(file.read_text())["foretold"], output


def test_a_step_is_foretold_for_a_network(tmp_path):
    told, output = foretold_of(tmp_path, "--network", "10mbit,20ms", "Dense")
    line = 2 * 3 / 4 * 800_000 * 8 / 10e6
    assert line < told["wire_seconds"] < 1.1 * line + 0.24
    assert told["step_seconds"] == pytest.approx(0.5 + told["waiting_seconds"])
    assert f"{told['step_seconds']:.4f}" in output
    assert f"{told['waiting_share']:.1%} of the step" in output
    assert "foretold for 10mbit,20ms" in output
    assert ", 80 %: " in output
    assert "past forecasts" in output
    assert told["interval"]["low_seconds"] < told["step_seconds"] < told["interval"]["high_seconds"]
    assert "as given" in output


def test_a_slower_network_is_foretold_to_be_slower(tmp_path):
    slow, _ = foretold_of(tmp_path, "--network", "1mbit", "Dense")
    fast, _ = foretold_of(tmp_path, "--network", "1gbit", "Dense")
    saving, _ = foretold_of(tmp_path, "--network", "1mbit", "TopK(0.01)")
    assert fast["step_seconds"] < saving["step_seconds"] < slow["step_seconds"]


def test_without_a_network_nothing_is_foretold(tmp_path):
    file = tmp_path / "out.json"
    _, output = run("Dense", "--json", str(file))
    assert json.loads(file.read_text())["foretold"] is None
    assert "foretold" not in output


@pytest.mark.parametrize(
    ("args", "ops"),
    [
        (["Dense", "--network", "10mbit"], "--network 10mbit --step-seconds 0.2"),
        (["Dense", "--network", "10mbit", "--step-seconds", "0"], "--step-seconds"),
        (["Dense", "--network", "10apples", "--step-seconds", "1"], "10apples"),
        (["Dense", "--network", "missing.toml", "--step-seconds", "1"], "missing.toml"),
    ],
)
def test_a_network_needs_what_a_worker_computes(args, ops):
    code, output = run(*args)
    assert code != 0
    assert ops in output


def rates(output):
    """Of this recipe and of dense gradients, in megabits a second."""
    lines = output.partition("has to send at least:\n")[2].splitlines()[:2]
    return [float(line.split()[-2]) * {"Mbit/s": 1, "kbit/s": 1e-3}[line.split()[-1]] for line in lines]


def test_the_rate_that_hides_a_step_is_its_bits_over_its_seconds(tmp_path):
    output, record = explained(tmp_path, "TopK(0.01)", *MILLION, "--step-seconds", "0.2")
    assert "To hide behind the 200 ms that a step computes, each worker has to send at least:" in output
    needed = record["bits_per_second_to_hide"]
    assert needed["dense float32 ring"] == 8 * 2 * 3 / 4 * 4e6 / 0.2
    assert needed["this recipe"] == 8 * record["bytes_sent_per_step"] / 0.2
    assert rates(output) == pytest.approx([needed["this recipe"] / 1e6, 240.0], rel=0.05)


@pytest.mark.parametrize(("text", "waits"), [("DiLoCo(50)", True), ("DiLoCo(50, delay=2)", False)])
def test_a_period_hides_behind_all_its_steps_unless_workers_wait(tmp_path, text, waits):
    output, record = explained(tmp_path, text, *MILLION, "--step-seconds", "0.5")
    rate = record["bits_per_second_to_hide"]["this recipe"]
    assert rate == pytest.approx(8 * record["bytes_sent_per_period"] / 50 / 0.5)
    assert ("without a delay workers wait" in output) == waits


def test_without_a_steps_time_its_bits_are_told_and_what_to_say():
    _, output = run("Dense", *MILLION, "--workers", "2")
    assert f"{8 * shown(output, 'total'):,} bits" in output
    assert "name a SCRIPT, or say the time: --step-seconds 0.2" in output
    assert "To hide" not in run("Dense", *MILLION, "--workers", "1")[1], "nothing is sent"


def test_a_script_that_cannot_be_timed_is_explained_and_says_why(script):
    code, output = run("Dense", script, "--workers", "50")
    assert code == 0
    assert "--step-seconds 0.2\n(it made no step)" in output


def test_seconds_beside_a_script_stand_for_other_machines(script):
    """Shapes from the script, time from machines that are not here."""
    code, output = run("--network", "10mbit", "--step-seconds", "1", "Dense", script, "--workers", "50")
    assert code == 0, output
    assert "2,500 in 1 tensors" in output
    assert "To hide behind the 1 s" in output
    assert "as given" in output


@pytest.mark.processes
def test_a_script_is_timed_for_the_rate_it_needs(tmp_path):
    (tmp_path / "train.py").write_text(TRAINING)
    output, record = explained(tmp_path, "--workers", "3", "Dense", script=[str(tmp_path / "train.py")])
    assert 0.02 < record["compute_seconds"] < 10
    expected = 8 * record["dense_bytes_sent_per_step"] / record["compute_seconds"]
    assert record["bits_per_second_to_hide"]["dense float32 ring"] == expected
    assert rates(output) == pytest.approx([rate / 1e6 for rate in record["bits_per_second_to_hide"].values()], rel=0.05)


def test_talking_less_is_foretold_to_wait_less(tmp_path):
    network = ("--network", "10mbit,20ms")
    every, _ = foretold_of(tmp_path, *network, "Dense")
    local, output = foretold_of(tmp_path, *network, "LocalSGD(10)")
    assert "A step takes, on average over a period, in seconds, foretold for 10mbit,20ms:" in output
    assert local["waiting_seconds"] == pytest.approx(every["wire_seconds"] / 10, rel=0.2)
    hidden, _ = foretold_of(tmp_path, *network, "DiLoCo(10, delay=5)")
    assert 0.5 <= hidden["step_seconds"] < 0.55 < local["step_seconds"] < every["step_seconds"]
    sites, _ = foretold_of(tmp_path, *network, "LocalSGD(10, per_site=2)")
    assert local["step_seconds"] < sites["step_seconds"] < every["step_seconds"]
