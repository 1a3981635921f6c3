from __future__ import annotations

import gzip
import json
import resource
import time
from pathlib import Path

import click
import pytest
from support.command_line import output_of, refusal
from support.processes import succeed
from support.trace_reader import ReadTrace, check_read_back, read_back
from support.virtual_traces import CLOCKS, Rounds, SkewedClock

from gossamer.base.spans import active
from gossamer.base.spans.record_format import SpanKind, Untraced
from gossamer.base.spans.recorder import SpanRecorder
from gossamer.base.spans.step_range import StepRange
from gossamer.cli.options import Tracing
from gossamer.cli.trace import trace_command, write
from gossamer.errors import GossamerError
from gossamer.observe.trace.span_files import read_run
from gossamer.observe.trace.timeline import build
from gossamer.train.session.step_spans import PROFILED


@pytest.fixture
def run(tmp_path: Path) -> Path:
    Rounds(count=10).record(tmp_path / "run", CLOCKS)
    return tmp_path / "run"


@pytest.mark.parametrize("name", ["t.json", "t.json.gz", "t.png"])
def test_the_format_follows_the_files_name(run: Path, tmp_path: Path, name: str) -> None:
    if name.endswith("png"):
        pytest.importorskip("matplotlib")
    code, said = output_of(trace_command, str(run), "-o", str(tmp_path / name), "--steps", "3:5")
    assert code == 0, said
    assert "4 processes" in said
    assert "ranks 1: within" in said
    content = (tmp_path / name).read_bytes()
    beginnings = {"t.json": b"{", "t.json.gz": b"\x1f\x8b", "t.png": b"\x89PNG"}
    assert content.startswith(beginnings[name])
    if name == "t.json.gz":
        steps = {each["name"] for each in json.loads(gzip.decompress(content))["traceEvents"]}
        assert {"ProfilerStep#3", "ProfilerStep#5"} <= steps
        assert "ProfilerStep#6" not in steps


def test_what_cannot_be_written_is_refused_before_anything_is_read(run: Path, tmp_path: Path) -> None:
    (tmp_path / "there.json").write_text("mine")
    assert "exists and is not overwritten" in refusal("trace", str(run), "-o", str(tmp_path / "there.json"))
    assert (tmp_path / "there.json").read_text() == "mine"
    assert "end it with .json" in refusal("trace", str(run), "-o", str(tmp_path / "trace.txt"))
    assert "end it with .json" in refusal("trace", str(run), "-o", str(tmp_path / ".json"))
    assert "Write -o trace.json.gz" in refusal("trace", str(run), "-o", str(tmp_path / "trace.pftrace"))
    assert "no directory" in refusal("trace", str(run), "-o", str(tmp_path / "no" / "t.json"))
    assert "Missing option" in refusal("trace", str(run))


def test_an_unreadable_text_is_refused(run: Path, tmp_path: Path) -> None:
    out = str(tmp_path / "t.json")
    assert "gossamer run --trace all" in refusal("trace", str(tmp_path), "-o", out)
    assert "the trace has 1 to 10" in refusal("trace", str(run), "-o", out, "--steps", "11:12")
    assert "names no steps" in refusal("trace", str(run), "-o", out, "--steps", "eleven")
    assert not Path(out).exists()


def test_torn_files_and_missing_ranks_are_reported(run: Path, tmp_path: Path) -> None:
    torn = next(run.glob("trace-1-*"))
    torn.write_bytes(torn.read_bytes()[:-5])
    next(run.glob("trace-3-*")).unlink()
    code, said = output_of(trace_command, str(run), "-o", str(tmp_path / "t.json"))
    assert code == 0
    assert "missing: ranks 3" in said
    assert f"{torn.name} is truncated" in said


def test_files_of_an_earlier_run_are_left_out_and_reported(tmp_path: Path) -> None:
    clocks = [SkewedClock(time.perf_counter() - 1000.0 + place) for place in range(2)]
    for seed in range(2):
        Rounds(count=10).record(tmp_path / "run", clocks, seed)
    code, said = output_of(trace_command, str(tmp_path / "run"), "-o", str(tmp_path / "t.json"))
    assert code == 0
    assert "2 processes" in said
    assert "10 arrows" in said
    assert "left out: 2 files of earlier runs" in said


def test_what_is_not_traced_is_told_in_one_line(run: Path, tmp_path: Path) -> None:
    code, before = output_of(trace_command, str(run), "-o", str(tmp_path / "before.json"))
    recorder = SpanRecorder(run, 4, 5, StepRange(7, 7))  # records no step, and tells it all the same
    recorder.lacks(Untraced.SERVERS)
    recorder.lacks(Untraced.PAIRS)
    recorder.close()
    code, said = output_of(trace_command, str(run), "-o", str(tmp_path / "t.json"))
    assert code == 0
    assert "not traced" not in before
    assert "not traced: server processes" in said
    assert "not traced: exchanges of two workers" in said
    assert "4 processes" in said  # metadata events of a process are not slices


def test_a_file_that_could_not_be_written_whole_is_not_left(tmp_path: Path) -> None:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, before[1]))
    try:
        with pytest.raises(GossamerError, match="could not be written"):
            write(tmp_path / "t.json", bytes(5000))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert list(tmp_path.iterdir()) == []


def test_workers_are_told_where_and_which_steps(tmp_path: Path) -> None:
    assert Tracing().settings(tmp_path) == {}
    told = {active.TRACE: str(tmp_path), active.STEPS: "3:5"}
    assert Tracing(StepRange(3, 5)).settings(tmp_path) == told
    assert Tracing(StepRange(3, 5), "0,2").settings(tmp_path) == told | {PROFILED: "0,2"}


def test_run_refuses_steps_that_are_none(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.touch()
    assert "100:110" in refusal("run", "--trace", "often", str(script))
    assert "such as 0,2" in refusal("run", "--trace", "all", "--torch-profiler", "some", str(script))


def test_operators_that_there_will_not_be_are_refused_before_anything_is_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No folder of logs is left by a run that never was."""
    monkeypatch.chdir(tmp_path)
    script = tmp_path / "train.py"
    script.touch()

    def refused(*options: str) -> str:
        said = " ".join(refusal("run", *options, str(script)).split())
        assert list(tmp_path.iterdir()) == [script]
        return said

    assert "add --trace 100:102" in refused("--torch-profiler", "0")
    assert "such as 0,2" in refused("--trace", "all", "--torch-profiler", "0;1")
    two = ("--workers", "2", "--trace", "all", "--torch-profiler")
    assert "does not have (2, 7): ranks are 0 to 1. Write --torch-profiler 1, or all" in refused(*two, "1,7,2")
    assert "Write --torch-profiler 0,1, or all" in refused(*two, "2")
    monkeypatch.setattr("gossamer.cli.run_training.run_job", lambda *about: 0)
    with pytest.raises(AssertionError):  # ranks that there are lead to a run
        refusal("run", *two, "0,1", str(script))


def test_profiled_ranks_must_be_ranks_of_the_run() -> None:
    Tracing(StepRange(), "all").check_ranks(2)
    Tracing().check_ranks(2)
    with pytest.raises(click.UsageError, match="does not have"):
        Tracing(StepRange(), "5").check_ranks(5)


TRAINING = """
import torch, gossamer
world = gossamer.init()
model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
with gossamer.attach(model, optimizer, RECIPE):
    for _ in range(6):
        model(torch.randn(4, 8)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
"""


def recorded(folder: Path, recipe: str, **more: str) -> Path:
    """The folder, with what two real workers recorded of their steps 2 to 4."""
    settings = {active.TRACE: str(folder), active.STEPS: "2:4"} | more
    succeed(["-c", TRAINING.replace("RECIPE", repr(recipe))], 2, extra=settings)
    return folder


@pytest.fixture(scope="module")
def real(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With operators of rank 1."""
    return recorded(tmp_path_factory.mktemp("real"), "TopK(density=0.5)", **{PROFILED: "1"})


@pytest.mark.processes
def test_two_real_workers_leave_a_trace(real: Path, tmp_path: Path) -> None:
    processes = read_run(real)
    assert [each.rank for each in processes] == [0, 1]
    for each in processes:
        assert list(each.of(SpanKind.STEP)["number"]) == [2, 3, 4]
        for kind in (SpanKind.FORWARD, SpanKind.BACKWARD, SpanKind.WAITING):
            assert len(each.of(kind)) == 3
        assert len(each.of(SpanKind.OPTIMIZER)) in (3, 4)  # the last one is of a step that ends later
        for forward, backward, waiting in zip(
            *(each.of(kind) for kind in (SpanKind.FORWARD, SpanKind.BACKWARD, SpanKind.WAITING)), strict=True
        ):
            assert forward["end"] <= backward["begin"] < backward["end"] <= waiting["begin"]
    assert processes[0].operations.keys() == processes[1].operations.keys() != set()
    code, said = output_of(trace_command, str(real), "-o", str(tmp_path / "t.json.gz"))
    assert code == 0
    assert "2 processes" in said


@pytest.mark.processes
def test_servers_within_workers_have_a_track(tmp_path: Path) -> None:
    processes = read_run(recorded(tmp_path, "Dense() + ParameterServer('sync')"))
    served = {int(number) for each in processes for number in each.of(SpanKind.SERVE)["number"]}
    assert served == {0, 1}
    names = {track.name for process in build(processes).processes for track in process.tracks}
    assert {"server", "communication"} <= names


def check_others_read_it(folder: Path, out: Path) -> ReadTrace:
    """torch's validator, and our reader: what the latter read."""
    code, said = output_of(trace_command, str(folder), "-o", str(out / "t.json"))
    assert code == 0, said
    validator = pytest.importorskip("torch.profiler._trace_validator", reason="torch's validator of traces")
    assert validator.validate_trace(str(out / "t.json")) == (True, [])
    told = read_back((out / "t.json").read_bytes())
    assert set(told.processes.values()) == {"rank 0", "rank 1"}
    tracks = {(told.processes[parent], name) for parent, name in told.tracks.values()}
    usual = {"steps", "training", "communication", "wire", "bytes in flight"}
    assert {("rank 0", name) for name in usual} <= tracks
    assert not {name for process, name in tracks if process == "rank 0" and name.startswith("operators")}
    check_read_back(told)
    assert {"ProfilerStep#4", "forward", "backward", "optimizer", "encode", "decode"} <= {
        each.name for each in told.slices
    }
    return told


@pytest.mark.processes
def test_others_read_a_trace_of_outer_steps(tmp_path: Path) -> None:
    check_others_read_it(recorded(tmp_path, "Dense() + DiLoCo(period=2)"), tmp_path)


@pytest.mark.processes
def test_operators_of_a_real_worker_lie_within_its_steps(real: Path, tmp_path: Path) -> None:
    told = check_others_read_it(real, tmp_path)
    (operators,) = (track for track, (_, name) in told.tracks.items() if name == "operators")
    assert told.processes[told.tracks[operators][0]] == "rank 1"
    assert "aten::addmm" in {each.name for each in told.slices if each.track == operators}
    steps = [each for each in told.slices if each.name.startswith("ProfilerStep#") and told.of(each) == "rank 1"]
    forwards = [each for each in told.slices if each.name == "forward" and told.of(each) == "rank 1"]
    assert len(steps) == len(forwards) == 3
    for forward in forwards:  # two linear layers, on the clock of the spans
        within = [
            each
            for each in told.slices
            if each.track == operators
            and each.name == "aten::linear"
            and forward.begin - 200_000 <= each.begin < each.end <= forward.end + 200_000
        ]
        assert len(within) == 2
