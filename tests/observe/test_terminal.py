from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from gossamer.observe.event_log import live_path
from gossamer.observe.live import LiveView
from gossamer.observe.terminal import PLAIN_SECONDS, Terminal

RECORD: dict[str, Any] = {
    "recipe": "EveryStep() + " + "a very long recipe " * 10,
    "workers": 2,
    "parameters": 3_307_264,
    "steps": 300,
    "skipped_steps": 2,
    "seconds": 71.2,
    "seconds_per_step": {"median": 0.21, "p90": 0.24},
    "compute_seconds_per_step": 0.18,
    "waiting_seconds_per_step": 0.02,
    "bytes_sent_per_step": {"accounted": 40_123.0, "interface": None},
    "memory_bytes": {"residuals": 0, "buckets": 0, "peak_resident": 612_000_000},
    "final": {"loss": 0.5, "accuracy": None},
    "workers_agree": True,
}


class Shown:
    def __init__(self, directory: Path, is_terminal: bool) -> None:
        self.directory = directory
        self.out, self.err = io.StringIO(), io.StringIO()
        self.seconds = 0.0
        console = Console(
            file=self.out,
            force_terminal=is_terminal,
            color_system="standard" if is_terminal else None,
            width=60,
            highlight=False,
        )
        self.terminal = Terminal(
            LiveView(directory, [0]), console, Console(file=self.err, width=60), lambda: self.seconds
        )

    def tell(self, **line: Any) -> None:
        with live_path(self.directory, 0).open("a") as file:
            file.write(json.dumps(line) + "\n")


@pytest.fixture
def plain(tmp_path: Path) -> Shown:
    return Shown(tmp_path, is_terminal=False)


def test_lines_are_shown_as_they_are_regardless_of_their_length(plain: Shown) -> None:
    with plain.terminal.progress():
        plain.terminal.line(1, "[bold]no markup[/bold] " + "x" * 100)
        plain.terminal.line(0, "")
    assert plain.out.getvalue() == f"[rank 1] [bold]no markup[/bold] {'x' * 100}\n[rank 0] \n"


def test_without_a_terminal_a_line_every_few_seconds(plain: Shown) -> None:
    plain.terminal.tick()
    assert plain.err.getvalue() == ""
    for plain.seconds in (PLAIN_SECONDS, PLAIN_SECONDS + 0.1, 2 * PLAIN_SECONDS):
        plain.terminal.tick()
    assert plain.err.getvalue() == "gossamer: starting\n" * 2
    assert plain.out.getvalue() == ""


def test_without_a_terminal_lines_become_rarer_in_a_long_run(plain: Shown) -> None:
    def lines(until: int) -> int:
        before = plain.err.getvalue().count("\n")
        for moment in range(int(plain.seconds), until):
            plain.seconds = moment
            plain.terminal.tick()
        return plain.err.getvalue().count("\n") - before

    assert lines(100) == 19
    assert lines(3600) < 100
    assert lines(2 * 3600) == 60, "at least one a minute"


def test_nothing_that_a_worker_prints_steers_the_terminal(tmp_path: Path, plain: Shown) -> None:
    shown = Shown(tmp_path, is_terminal=True)
    for each in (shown, plain):
        each.terminal.line(0, "\x1b[31mred\x1b[0m\x1b[2J\x1b]0;title\x07\x08 text")
        each.terminal.note("server 0: \x1b[2Jcleared")
    assert "title" not in shown.out.getvalue() + plain.out.getvalue()
    assert "\x1b[2J" not in shown.out.getvalue() + plain.err.getvalue()
    assert "\x1b[31mred" in shown.out.getvalue()
    assert plain.out.getvalue() == "[rank 0] red text\n"
    assert plain.err.getvalue() == "gossamer: server 0: cleared\n"


@pytest.mark.parametrize("is_terminal", [True, False])
def test_names_of_metrics_neither_steer_the_terminal_nor_forge_lines(tmp_path: Path, is_terminal: bool) -> None:
    name = "loss\x1b[2J\nworkers agree  yes"
    shown = Shown(tmp_path, is_terminal)
    shown.terminal.table(RECORD | {"workers_agree": False, "final": {name: 0.5}, "recipe": "Dense()\x1b[2J"}, {})
    said = shown.out.getvalue() + shown.err.getvalue()
    assert "\x1b[2J" not in said
    assert not [line for line in said.splitlines() if line.startswith("workers agree  yes")]
    assert "loss workers agree  yes" in said


def test_a_bar_of_the_first_rank_moves_above_the_line_of_progress(tmp_path: Path) -> None:
    shown = Shown(tmp_path, is_terminal=True)
    with shown.terminal.progress():
        shown.terminal.line(1, " 30% of rank 1\r")
        shown.terminal.line(0, " 40% of rank 0\r")
    text = shown.out.getvalue()
    assert "[rank 0]" in text
    assert text.index("40% of rank 0") < text.index("starting")
    assert "30%" not in text
    shown.terminal.line(0, "100% of rank 0")
    with shown.terminal.progress():
        pass
    after = shown.out.getvalue().removeprefix(text)
    assert after.count("100% of rank 0") == 1
    assert "30% of rank 1" in after
    shown.terminal.line(1, "      \r")  # as a bar that leaves nothing behind
    assert shown.terminal._bar is None


def test_without_a_terminal_the_bar_stands_below_the_line_of_progress(plain: Shown) -> None:
    plain.terminal.line(0, " 40% of all\r")
    plain.seconds = PLAIN_SECONDS
    plain.terminal.tick()
    assert plain.out.getvalue() == ""
    assert plain.err.getvalue() == "gossamer: starting\n[rank 0]  40% of all\n"


def test_notes_stand_next_to_the_output(plain: Shown) -> None:
    plain.tell(kind="noticed", message="several workers [began] with the very same batch, " * 3)
    plain.terminal.tick()
    assert plain.err.getvalue() == "gossamer: " + "several workers [began] with the very same batch, " * 3 + "\n"


def test_the_closing_table_without_a_terminal_is_one_line_a_row(plain: Shown) -> None:
    plain.terminal.table(RECORD, {"record": "runs/x/record.json", "picture": "loss.png"})
    shown = dict(line.split("  ", 1) for line in plain.out.getvalue().strip().splitlines())
    values = {name: value.strip() for name, value in shown.items()}
    assert values["recipe"] == RECORD["recipe"].strip()
    assert values["steps"] == "300 (2 skipped) in 71.2 s"
    assert values["time per step"] == "median 210 ms, 90 % within 240 ms"
    assert values["waiting"] == "10 %"
    assert values["sent per step and worker"] == "40.1 kB"
    assert (values["final loss"], values["final accuracy"]) == ("0.500", "not a number")
    assert (values["workers agree"], values["record"]) == ("yes", "runs/x/record.json")
    assert values["picture"] == "loss.png"
    plain.terminal.table({**RECORD, "resumed_at": 200}, {})
    assert "300 (2 skipped), from 200 on, in 71.2 s" in plain.out.getvalue()


def test_on_a_terminal_long_values_stay_in_their_column(tmp_path: Path) -> None:
    shown = Shown(tmp_path, is_terminal=True)
    shown.terminal.table(RECORD | {"workers_agree": False}, {"record": "record.json"})
    lines = shown.out.getvalue().splitlines()
    assert max(map(len, lines)) < 100
    assert any("\x1b[1;31mno" in line for line in lines)


def test_agreement_on_a_merged_model_is_not_said_of_each_worker_s_own(plain: Shown) -> None:
    for agree, held in ((True, False), (True, True), (False, False), (None, False)):
        plain.terminal.table(RECORD | {"workers_agree": agree, "workers_hold_merged": held}, {})
    said = [line.split(maxsplit=2)[2] for line in plain.out.getvalue().splitlines() if "workers agree" in line]
    assert said[:3] == ["yes, on the merged model; each holds its own (session.averaged_parameters)", "yes", "no"]
    assert said[3].startswith("unknown: only")


def test_the_table_names_sessions_that_were_open_at_the_same_time(plain: Shown) -> None:
    plain.terminal.table(RECORD | {"sessions": 1}, {})
    assert "sessions" not in plain.out.getvalue()
    plain.terminal.table(RECORD | {"sessions": 2}, {})
    assert "sessions                  2 at the same time" in plain.out.getvalue()


def test_the_tensor_that_differs_is_named_with_the_ranks_that_hold_it(plain: Shown) -> None:
    hashes = {"0": "aaaaaaaabb", "1": "cccccccc", "2": "aaaaaaaabb", "3": None}
    differing = {"name": "1.running_mean", "hashes": hashes, "others": 2}
    plain.terminal.table(RECORD | {"workers_agree": False, "differing_tensor": differing}, {})
    held = "aaaaaaaa on ranks 0, 2; cccccccc on rank 1; absent on rank 3"
    assert f'workers agree             no: "1.running_mean" differs ({held}), and 2 more' in plain.out.getvalue()
    assert "gossamer.average_([b for b in model.buffers()" in plain.out.getvalue()
    assert "requires_grad=False" not in plain.out.getvalue()
    plain.terminal.table(RECORD | {"workers_agree": False, "differing_tensor": {**differing, "frozen": True}}, {})
    assert "The script changes this parameter, which has requires_grad=False" in plain.out.getvalue()
    assert plain.out.getvalue().count("BatchNorm's statistics") == 1


def test_one_machine_of_several_does_not_claim_to_know_the_others(plain: Shown) -> None:
    plain.terminal.table(RECORD | {"workers_agree": None}, {})
    assert "workers agree             unknown" in plain.out.getvalue()


def test_ranks_whose_numbers_a_full_disk_cut_off_are_named(plain: Shown) -> None:
    plain.terminal.table(RECORD | {"workers_agree": None, "truncated": [0, 2]}, {})
    assert "incomplete                ranks 0, 2: the disk was full" in plain.out.getvalue()
    assert "unknown: the disk was full, so the final parameters of ranks 0, 2" in plain.out.getvalue()


def test_of_a_run_that_did_not_finish_it_reports_it_and_nothing_of_agreement(plain: Shown) -> None:
    plain.terminal.table({**RECORD, "ended": "interrupted", "workers_agree": None}, {})
    said = plain.out.getvalue()
    assert "ended                     interrupted" in said
    assert "workers agree" not in said


def test_on_a_terminal_everything_goes_above_the_line_of_progress(tmp_path: Path) -> None:
    shown = Shown(tmp_path, is_terminal=True)
    with shown.terminal.progress():
        shown.terminal.line(0, "hello")
        shown.terminal.note("careful")
    text = shown.out.getvalue()
    assert text.index("hello") < text.index("careful")
    assert "starting" in text
    assert shown.err.getvalue() == ""
