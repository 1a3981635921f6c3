"""Explanations: recipes, schedules, bytes, step times."""

from __future__ import annotations

import json
import math

import pytest
from click.testing import CliRunner
from support.explaining import MILLION, TRAINING, explained, run, shown, untimed_script

from gossamer.base.kernels import coded_bytes
from gossamer.cli import explain as explain_module
from gossamer.cli.explain import explain
from gossamer.observe.telemetry.stragglers import RankPace, straggler
from gossamer.plan.profile.synthetic_shapes import assumed_shapes
from gossamer.train.auto.ladder import RUNGS, beginning


@pytest.fixture
def script(tmp_path, monkeypatch):
    return untimed_script(tmp_path, monkeypatch)


def test_prints_the_recipe_as_resolved_and_the_batch():
    code, output = run("TopK(0.01)", "--parameters", "200000", "--workers", "5")
    assert code == 0
    assert "recipe      EveryStep() + Route(Feedback(SparseSum(TopK(density=0.01)))) + Complete()" in output
    assert "5 workers x your loop's batch size on each" in output
    assert "200,000 in" in output
    assert "shapes assumed" in output


def test_numbers_follow_from_the_formula():
    shapes = assumed_shapes(200_000).values()
    matrices = [math.prod(shape) for shape in shapes if len(shape) == 2]
    rest = 200_000 - sum(matrices)
    _, output = run("Feedback(TopK(0.01))", "--parameters", "200000", "--workers", "8")
    kept = sum(max(1, round(0.01 * numel)) for numel in matrices)
    gather = 7 * (4 * kept + coded_bytes(kept, sum(matrices)))
    mean = 2 * 7 / 8 * rest * 4
    assert shown(output, "bucket 0          Gather") == gather
    assert shown(output, "bucket 0          Mean") == mean
    assert shown(output, "dense float32 ring") == 2 * 7 / 8 * 800_000
    assert shown(output, "total") == gather + mean + shown(output, "control           Gather")
    assert shown(output, "residuals") == 4 * sum(matrices)
    assert shown(output, "other state") == 0
    assert f"{shown(output, 'total') / shown(output, 'dense float32 ring'):.2%} of the ring's" in output


def test_the_recipe_is_chosen_for_the_number_of_workers():
    alone = "EveryStep() + Route(Feedback(Int8())) + Complete()"
    assert f"recipe      {alone}" in run("Int8", "--workers", "2")[1]
    _, output = run("Int8", "--workers", "8")
    assert "recipe      EveryStep() + Route(Feedback(Sharded(Int8()))) + Complete()" in output
    assert shown(output, "bucket 0          Exchange") == shown(output, "bucket 0          Gather")
    assert shown(output, "total") < shown(run(alone, "--workers", "8")[1], "total") / 3


def test_without_a_size_one_is_assumed():
    code, output = run("home")
    assert code == 0
    assert "workers     4" in output
    assert "10,000,000 in" in output


def test_buckets_that_send_the_same_share_a_line(tmp_path):
    file = tmp_path / "out.json"
    _, output = run("Dense", "--parameters", "400000000", "--json", str(file))
    alike = [op["bytes_sent"] for op in json.loads(file.read_text())["words"]]
    each = shown(output, "17 buckets, each  Mean")
    assert alike.count(each) == 17


def test_a_world_of_one_sends_nothing():
    code, output = run("home", "--workers", "1")
    assert code == 0
    assert "a single worker sends nothing" in output
    assert shown(output, "total") == 0


def test_a_script_is_priced_and_keeps_its_own_options(script):
    code, output = run("--workers", "2", "Dense", script, "--workers", "50")
    assert code == 0
    assert "workers     2" in output
    assert f"2,500 in 1 tensors ({script})" in output
    assert shown(output, "bucket 0          Mean") == 2 / 2 * 2500 * 4
    assert shown(output, "buffers           broadcast") == 200


def test_options_may_stand_on_both_sides_of_the_recipe(script, tmp_path):
    file = tmp_path / "out.json"
    code, output = run("--workers", "3", "Dense", "--json", str(file), script, "--workers", "50")
    assert code == 0
    assert "workers     3" in output
    assert file.exists()


def test_options_may_stand_between_recipe_and_script(script, tmp_path):
    code, output = run("Dense", "--workers=3", "--json", str(tmp_path / "out.json"), script, "--workers", "50")
    assert code == 0
    assert "workers     3" in output


def test_json_says_what_is_printed(tmp_path, script):
    file = tmp_path / "out.json"
    _, output = run("Feedback(TopK(0.1))", "--json", str(file), script, "--workers", "50")
    record = json.loads(file.read_text())
    assert record["recipe"] in output
    assert record["workers"] == 4
    assert record["parameters"] == 2500
    sent = 3 * (250 * 4 + coded_bytes(250, 2500))
    assert record["words"][0] == {"where": "bucket 0", "word": "Gather", "bytes_sent": sent}
    assert sum(op["bytes_sent"] for op in record["words"]) == record["bytes_sent_per_step"]
    assert record["bytes_sent_per_step"] == shown(output, "total")
    assert record["dense_bytes_sent_per_step"] == 2 * 3 / 4 * 10_000
    assert record["share_of_dense"] == record["bytes_sent_per_step"] / record["dense_bytes_sent_per_step"]
    assert record["memory_bytes"] == {"residuals": 10_000, "other_state": 0, "strategy": 0}
    assert (record["period"], record["schedule"]) == (1, [{"fragment": 0, "launch": 1, "landing": 1}])
    assert record["batch"] == {"times": 4, "learning_rate_times": {"sgd": 4, "adam": 2.0}}


@pytest.mark.parametrize(
    ("args", "ops"),
    [
        (["Topk(1)"], ["no Topk", "TopK(density, feedback=True"]),
        (["TopK(0.1) + Int8"], ["at most one compressor"]),
        (["home", "--workers", "0"], ["--workers", "0 is not in the range"]),
        (["home", "--parameters", "0"], ["--parameters", "0 is not in the range"]),
        (["home", "no-such-script.py"], ["no-such-script.py", "does not exist"]),
        (["train.py", "Int8()"], ["The recipe must precede the script", "explain 'Int8()' train.py"]),
        (["--workers", "2", "train.py"], ["The recipe must precede the script", "explain 'Int8()' train.py"]),
        (["home", "--workers"], ["--workers"]),
        ([], ["Missing argument 'RECIPE'"]),
    ],
)
def test_nonsense_is_refused(args, ops):
    code, output = run(*args)
    assert code != 0
    for op in ops:
        assert op in output


def test_a_flag_takes_no_value(script):
    code, output = run("--own-machines", "Dense", script, "--workers", "50")
    assert code == 0
    assert "2,500 in 1 tensors" in output


def test_a_size_next_to_a_script_is_refused(script):
    code, output = run("home", "--parameters", "5", script)
    assert code == 2
    assert "Leave out one of the two" in output


def test_a_script_that_rejects_an_option_of_explain_is_told_where_it_belongs(tmp_path):
    (tmp_path / "parses.py").write_text("import argparse\nargparse.ArgumentParser().parse_args()")
    code, output = run("home", str(tmp_path / "parses.py"), "--network", "100mbit")
    assert code == 1
    assert "--network, which is an option of" in output


def test_a_script_that_never_attaches_is_refused(tmp_path):
    (tmp_path / "idle.py").write_text("import sys; sys.exit(3)")
    code, output = run("home", str(tmp_path / "idle.py"))
    assert code == 1
    assert "ended before it called gossamer.attach" in output


def test_a_file_that_could_not_be_written_is_refused_first(script, tmp_path, monkeypatch):
    monkeypatch.setattr(explain_module, "attached_by", lambda *_: pytest.fail("the script was run"))
    code, output = run("--json", str(tmp_path / "missing" / "out.json"), "Dense()", script)
    assert code == 2
    assert "there is no directory" in output


def test_help_needs_no_recipe():
    code, output = run("--help")
    assert code == 0
    assert "RECIPE [SCRIPT] [ARGS]" in output


# -- strategies --------------------------------------------------------------------------------------------------------


def test_every_step_is_said_in_one_line():
    _, output = run("Dense", *MILLION)
    assert (
        output.count("schedule    gradients are sent during every backward pass, and are averaged when it returns") == 1
    )
    assert "per column" not in output
    assert "for the strategy" not in output


def test_what_is_averaged_between_sites_in_every_pass_is_reported():
    _, output = run("LocalSGD(1, per_site=2)", *MILLION, "--workers", "4")
    inside, between = (
        next(line for line in output.splitlines() if name in line) for name in ("by site", "parameters   ")
    )
    assert inside.count("◆") == between.count("◆") > 20, "parameters are averaged, too"


def test_a_schedule_is_drawn_from_the_table_that_runs(tmp_path):
    output, record = explained(tmp_path, "DiLoCo(12, fragments=2, delay=1)", *MILLION)
    assert (
        """
Backward passes, one per column:
              1       10        20
  fragment 0  ·····▲▼··········▲▼······
  fragment 1  ···········▲▼··········▲▼
  · trains apart   ▲ leaves   ▼ lands
"""
        in output
    )
    assert record["period"] == 12
    turns = [{"fragment": 0, "launch": 6, "landing": 7}, {"fragment": 1, "launch": 12, "landing": 13}]
    assert record["schedule"] == turns


def test_both_stages_are_shown(tmp_path):
    output, record = explained(tmp_path, "PostLocalSGD(200, start=3000)", *MILLION)
    assert "schedule    until backward pass 3,000 gradients are sent during every backward pass" in output
    assert "Backward passes after 3,000, 10 per column:" in output
    assert "with SGD" in output
    assert record["schedule"] == [{"fragment": 0, "launch": 3200, "landing": 3200}]


@pytest.mark.parametrize(
    "text",
    ["DiLoCo(5000, fragments=100, delay=30)", "PostLocalSGD(10000000, start=10000000)", "EveryStep(delay=50)"],
)
def test_drawings_fit_into_a_hundred_columns(text):
    _, output = run(text, "--parameters", "100000000")
    drawn = output.partition("Backward passes")[2].partition("sends, in bytes")[0]
    assert max(map(len, drawn.splitlines())) <= 100
    assert ("more in the same way" in output) == (text != "PostLocalSGD(10000000, start=10000000)")


def test_a_period_is_added_up_and_averaged(tmp_path):
    output, record = explained(tmp_path, "DiLoCo(50)", *MILLION)
    assert "One period of 50 steps sends, in bytes per worker:" in output
    total = 2 * 3 / 4 * 4_000_000 + 3 * 24 + 3 * 38
    assert shown(output, "total") == record["bytes_sent_per_period"] == total
    assert shown(output, "meetings          Gather") == 3 * 24
    assert shown(output, "per backward pass") == round(total / 50)
    assert record["bytes_sent_per_step"] == total / 50
    assert f"{record['share_of_dense']:.2%} of the ring's" in output
    assert shown(output, "for the strategy") == record["memory_bytes"]["strategy"] == 8_000_000
    assert sum(op["bytes_sent"] for op in record["words"]) == total


def test_passes_that_accumulate_make_one_exchange_and_a_larger_batch(tmp_path):
    output, record = explained(tmp_path, "EveryStep(accumulate=4)", *MILLION)
    assert "4 workers x 4 backward passes x your loop's batch size on each" in output
    assert "One exchange of 4 backward passes sends, in bytes per worker:" in output
    assert shown(output, "total") == record["bytes_sent_per_step"]
    assert shown(output, "per backward pass") == round(record["bytes_sent_per_step"] / 4)
    assert record["batch"] == {"times": 16, "learning_rate_times": {"sgd": 16, "adam": 4.0}}


def test_a_global_batch_is_shared_among_the_workers(tmp_path):
    output, record = explained(tmp_path, "EveryStep(global_batch=256, batch=16)", *MILLION)
    assert "16 backward passes x your loop's batch size on each, shared among 4 workers" in output
    _, same = explained(tmp_path, "EveryStep(accumulate=4)", *MILLION)
    assert {**record, "recipe": ""} == {**same, "recipe": ""}


@pytest.mark.parametrize(
    ("text", "batch", "times"),
    [
        ("EveryStep()", "6 workers x your loop's batch size on each\n", 6),
        ("EveryStep(delay=2)", "6 workers x your loop's batch size on each\n", 6),
        ("PostLocalSGD(8, start=5)", "6 workers x your loop's batch size on each\n", 6),
        ("DiLoCo(8)", "6 workers x your loop's batch size on each, apart\n", 1),
        ("LocalSGD(8, per_site=3)", "3 workers x your loop's batch size on each, in 2 sites apart\n", 3),
    ],
)
def test_advice_is_for_the_batch_of_a_step(text, batch, times):
    _, output = run(text, *MILLION, "--workers", "6")
    assert batch in output
    assert ("advice" in output) == (times > 1)
    if times > 1:
        assert f"for a batch {times}x as large as one worker's" in output
        assert f"{times} with SGD, warmed up over the first epochs (Goyal et al. 2017, arXiv:1706.02677)" in output
        assert f"{times**0.5:.3g} with Adam and its kin (Malladi et al. 2022, NeurIPS, arXiv:2205.10287)" in output


def test_alone_there_is_no_advice():
    assert "advice" not in run("EveryStep()", *MILLION, "--workers", "1")[1]
    assert run("LocalSGD(8, per_site=2)", *MILLION, "--workers", "1")[0] == 0


def test_sites_that_do_not_fit_are_refused():
    code, output = run("LocalSGD(8, per_site=3)", *MILLION, "--workers", "4")
    assert code == 1
    assert "4 workers cannot be divided into sites of 3" in output


def test_fragments_that_find_no_tensors_are_refused():
    code, output = run("DiLoCo(500, fragments=400)", *MILLION)
    assert code == 1
    assert "write fragments=26 at most" in output


def said(*arguments: str) -> str:
    result = CliRunner().invoke(explain, arguments)
    assert result.exit_code == 0, result.output
    return result.output


def test_a_recipe_that_is_chosen_shows_its_ladder_and_what_it_begins_with() -> None:
    shown = said("auto", "--parameters", "100000")
    assert all(rung.name in shown for rung in RUNGS)
    _, _, first = shown.partition("The first recipe:\n")
    assert first == said(beginning(RUNGS).name, "--parameters", "100000")
    _, _, first = said("Auto(local_steps=False)", "--parameters", "100000").partition("The first recipe:\n")
    assert first == said("Dense()", "--parameters", "100000")


def test_the_ladder_is_that_of_the_trainings_steps() -> None:
    assert "This one has 20,000." in said("auto", "--steps", "20000", "--parameters", "100000")
    assert "This one has 300." in said("Auto(steps=300)", "--steps", "20000", "--parameters", "100000")


def test_a_recipe_that_stays_shows_none() -> None:
    assert "chosen" not in said("Int8()", "--parameters", "100000")
    assert "one of these recipes at a time" not in said("Int8()", "--parameters", "100000")


def test_bounds_are_shown() -> None:
    assert "never" in said("Auto(most_steps=1.1)", "--parameters", "100000")


def estimate_of(tmp_path, *args):
    file = tmp_path / "out.json"
    code, output = run("--parameters", "200000", "--step-seconds", "0.5", "--json", str(file), *args)
    assert code == 0, output
    return json.loads(file.read_text())["estimate"], output


def test_a_step_is_estimated_for_a_network(tmp_path):
    told, output = estimate_of(tmp_path, "--network", "10mbit,20ms", "Dense")
    line = 2 * 3 / 4 * 800_000 * 8 / 10e6
    assert line < told["wire_seconds"] < 1.1 * line + 0.24
    assert told["step_seconds"] == pytest.approx(0.5 + told["waiting_seconds"])
    assert f"{told['step_seconds']:.4f}" in output
    assert f"{told['waiting_share']:.1%} of the step" in output
    assert "estimated for 10mbit,20ms" in output
    assert ", 80 %: " in output
    assert "earlier estimates" in output
    assert told["interval"]["low_seconds"] < told["step_seconds"] < told["interval"]["high_seconds"]
    assert "as given" in output


def test_a_slower_network_is_estimated_to_be_slower(tmp_path):
    slow, _ = estimate_of(tmp_path, "--network", "1mbit", "Dense")
    fast, _ = estimate_of(tmp_path, "--network", "1gbit", "Dense")
    saving, _ = estimate_of(tmp_path, "--network", "1mbit", "TopK(0.01)")
    assert fast["step_seconds"] < saving["step_seconds"] < slow["step_seconds"]


def test_without_a_network_nothing_is_estimated(tmp_path):
    file = tmp_path / "out.json"
    _, output = run("Dense", "--json", str(file))
    assert json.loads(file.read_text())["estimate"] is None
    assert "estimated" not in output


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
    lines = output.partition("must send at least:\n")[2].splitlines()[:2]
    return [float(line.split()[-2]) * {"Mbit/s": 1, "kbit/s": 1e-3}[line.split()[-1]] for line in lines]


def test_the_rate_that_hides_a_step_is_its_bits_over_its_seconds(tmp_path):
    output, record = explained(tmp_path, "TopK(0.01)", *MILLION, "--step-seconds", "0.2")
    assert "To hide communication behind the 200 ms of computation per step, each worker must send at least:" in output
    needed = record["bits_per_second_to_hide"]
    assert needed["dense float32 ring"] == 8 * 2 * 3 / 4 * 4e6 / 0.2
    assert needed["this recipe"] == 8 * record["bytes_sent_per_step"] / 0.2
    assert rates(output) == pytest.approx([needed["this recipe"] / 1e6, 240.0], rel=0.05)


@pytest.mark.parametrize(("text", "waits"), [("DiLoCo(50)", True), ("DiLoCo(50, delay=2)", False)])
def test_a_period_hides_behind_all_its_steps_unless_workers_wait(tmp_path, text, waits):
    output, record = explained(tmp_path, text, *MILLION, "--step-seconds", "0.5")
    rate = record["bits_per_second_to_hide"]["this recipe"]
    assert rate == pytest.approx(8 * record["bytes_sent_per_period"] / 50 / 0.5)
    assert ("Without a delay, workers wait" in output) == waits


def test_without_a_steps_time_its_bits_are_reported_and_what_to_say():
    _, output = run("Dense", *MILLION, "--workers", "2")
    assert f"{8 * shown(output, 'total'):,} bits" in output
    assert "name a SCRIPT or the compute time: --step-seconds 0.2" in output
    assert "To hide" not in run("Dense", *MILLION, "--workers", "1")[1], "nothing is sent"


def test_a_script_that_cannot_be_timed_is_explained_and_gives_the_reason(script):
    code, output = run("Dense", script, "--workers", "50")
    assert code == 0
    assert "--step-seconds 0.2\n(it made no step)" in output


def test_seconds_next_to_a_script_stand_for_other_machines(script):
    """Shapes from the script, time from machines that are not here."""
    code, output = run("--network", "10mbit", "--step-seconds", "1", "Dense", script, "--workers", "50")
    assert code == 0, output
    assert "2,500 in 1 tensors" in output
    assert "To hide communication behind the 1 s" in output
    assert "as given" in output


@pytest.mark.processes
def test_a_script_is_timed_for_the_rate_it_needs(tmp_path):
    (tmp_path / "train.py").write_text(TRAINING)
    output, record = explained(tmp_path, "--workers", "3", "Dense", script=[str(tmp_path / "train.py")])
    assert 0.02 < record["compute_seconds"] < 10
    expected = 8 * record["dense_bytes_sent_per_step"] / record["compute_seconds"]
    assert record["bits_per_second_to_hide"]["dense float32 ring"] == expected
    assert rates(output) == pytest.approx([rate / 1e6 for rate in record["bits_per_second_to_hide"].values()], rel=0.05)


def test_talking_less_is_estimated_to_wait_less(tmp_path):
    network = ("--network", "10mbit,20ms")
    every, _ = estimate_of(tmp_path, *network, "Dense")
    local, output = estimate_of(tmp_path, *network, "LocalSGD(10)")
    assert "A step takes, on average over a period, in seconds, estimated for 10mbit,20ms:" in output
    assert local["waiting_seconds"] == pytest.approx(every["wire_seconds"] / 10, rel=0.2)
    hidden, _ = estimate_of(tmp_path, *network, "DiLoCo(10, delay=5)")
    assert 0.5 <= hidden["step_seconds"] < 0.55 < local["step_seconds"] < every["step_seconds"]
    sites, _ = estimate_of(tmp_path, *network, "LocalSGD(10, per_site=2)")
    assert local["step_seconds"] < sites["step_seconds"] < every["step_seconds"]


# -- one codec per worker ----------------------------------------------------------------------------------------------


def test_bytes_are_shown_by_codec(tmp_path):
    there = tmp_path / "net.toml"
    there.write_text('[[hosts]]\ncount = 3\nrate = "1gbit"\n[[hosts]]\nup = "5mbit"\ndown = "100mbit"\n')
    sent = {text: explained(tmp_path, text, *MILLION)[1]["bytes_sent_per_step"] for text in ("Int8()", "OneBit()")}
    for text, options in (
        ("PerWorker(Int8(), ranks=3)", ()),
        ("PerWorker(Int8(), below='20mbit')", ("--network", str(there), "--step-seconds", "0.1")),
    ):
        said, found = explained(tmp_path, text, *MILLION, *options)
        assert found["bytes_sent_per_step_by_codec"] == sent
        assert found["bytes_sent_per_step"] == (3 * sent["Int8()"] + sent["OneBit()"]) / 4
        assert "ranks 0-2" in said
        assert "rank 3" in said


def test_an_unknown_selection_is_shown_for_both_codecs():
    said = run("PerWorker(Int8(), hosts='laptop')", *MILLION)[1]
    assert "a session selects the slow ones" in said
    assert shown(said, "OneBit()") < shown(said, "Int8()")


# -- unequal workers ---------------------------------------------------------------------------------------------------


def uses(output):
    """By name, the part of the speeds."""
    lines = output.splitlines()
    first = next(place for place, line in enumerate(lines) if "compute without communication" in line) + 1
    rows = [line.strip().rsplit("  on ", 1)[0].split("   ") for line in lines[first:] if line]
    return {row[0].strip(): float(next(cell for cell in row[1:] if cell)) for row in rows}


def test_speeds_show_the_use_of_the_recipe_and_of_forms_by_speed():
    code, output = run("Dense()", *MILLION, "--speeds", "1x3,0.2")
    assert code == 0
    assert uses(output) == {
        "this recipe": 0.25,
        "EveryStep(global_batch=256, batch=8, balance=True)": 1.0,
        "LocalSGD(period=20, balance=True)": 1.0,
        "AsyncDiLoCo(period=24)": 1.0,
        "Gossip(mixing='pairwise')": 1.0,
    }


def test_the_explanation_and_the_finding_of_a_straggler_agree():
    seconds = [1.0, 1 / 0.7, 2.0, 5.0]
    _, output = run("Dense()", *MILLION, "--speeds", "1,0.7,0.5,0.2")
    finding = straggler([RankPace(rank=n, step=9, seconds=5.0, waiting=5.0 - work) for n, work in enumerate(seconds)])
    shown = uses(output)
    assert f"use {shown['this recipe']:.2f} of what" in finding.evidence
    for name, use in list(shown.items())[1:]:
        assert name in finding.evidence
        assert f"{use:.2f}" in finding.evidence


def test_a_balanced_recipe_shows_its_shares_and_needs_no_proposal(tmp_path):
    _, output = run("LocalSGD(20, balance=True)", *MILLION, "--speeds", "1,1,1,0.2")
    assert "local steps 20, 20, 20, 4" in output
    assert "AsyncDiLoCo" not in output
    _, found = explained(tmp_path, "Dense()", *MILLION, "--speeds", "1,1,1,0.2")
    assert found["speeds"]["use"]["this recipe"] == pytest.approx(0.25)


def test_messages_reduce_the_use_of_the_speeds(tmp_path):
    args = (*MILLION, "--speeds", "1,1,1,0.2", "--network", "100mbit,20ms", "--step-seconds", "0.1")
    code, output = run("LocalSGD(20, balance=True)", *args)
    assert code == 0
    shown = uses(output.replace("   local steps 20, 20, 20, 4", ""))
    assert 0.5 < shown["with its messages"] < shown["this recipe"]
    _, record = explained(tmp_path, "LocalSGD(20, balance=True)", *args)
    found = record["estimate"]
    assert found["speed_use"] == pytest.approx((64 / 20) * 0.1 / found["step_seconds"] / 3.2)
    assert found["interval"] is None


def test_wrong_speeds_are_refused_in_one_line():
    for text, reason in (("1,1", "of 2 workers"), ("1,1,0,1", "not a speed"), ("fast", "not a speed")):
        code, output = run("Dense()", *MILLION, "--speeds", text)
        assert code != 0
        assert reason in output


def test_a_tensor_too_large_for_indices_is_an_error_of_the_recipe():
    code, output = run("TopK(0.01)", "--parameters", str(10**12))
    assert code == 1
    assert "cannot be sparsified: indices are 32-bit integers" in output
