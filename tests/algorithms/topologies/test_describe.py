import runpy
import subprocess
import sys
from pathlib import Path

import pytest

from gossamer.algorithms import topologies
from gossamer.algorithms.topologies import Complete, Exponential, Hierarchy, RandomPeers, Ring, describe
from gossamer.algorithms.topologies.describe import edges, picture, table
from gossamer.errors import GossamerError

PNG = b"\x89PNG\r\n\x1a\n"


def test_a_table_has_a_line_for_every_world():
    assert table(Ring(), (2, 4, 8)).splitlines() == [
        "workers  receivers  |lambda_2|       gap  rounds to halve the distance",
        "      2          1    0.000000  1.000000                 exact after 1",
        "      4          2    0.333333  0.666667                           0.6",
        "      8          2    0.804738  0.195262                           3.2",
    ]


@pytest.mark.parametrize(
    ("topology", "world", "told", "rounds"),
    [
        (Exponential(one_peer=True), 8, "1", "exact after 3"),
        (RandomPeers(), 2, "1", "exact after 1"),
        (RandomPeers(), 5, "0 to 1", "2.0"),
        (Hierarchy(per_node=3), 4, "1 to 3", "2.4"),
        (Complete(), 1, "0", "exact after 1"),
    ],
    ids=str,
)
def test_a_line_says_how_many_are_told_and_how_long_it_takes(topology, world, told, rounds):
    line = table(topology, (world,)).splitlines()[1]
    assert line.split()[0] == str(world)
    assert f" {told} " in line
    assert line.endswith(f" {rounds}")


def test_mutual_edges_are_drawn_once_and_others_each_way():
    assert list(edges(Ring(), 3)) == [(0, 1, 0), (0, 2, 0), (1, 2, 0)]
    directed = list(edges(Exponential(one_peer=True), 4))
    assert directed[:4] == [(0, 1, 0), (1, 2, 0), (2, 3, 0), (3, 0, 0)]
    assert directed[4:] == [(0, 2, 1), (1, 3, 1), (2, 0, 1), (3, 1, 1)]


def test_a_picture_is_a_png(tmp_path):
    picture([Hierarchy(per_node=3), Exponential(one_peer=True)], tmp_path / "nets.png", worlds=(1, 7))
    assert (tmp_path / "nets.png").read_bytes().startswith(PNG)


def test_without_matplotlib_the_line_to_write_is_reported(tmp_path, monkeypatch):
    monkeypatch.setattr("gossamer.base.figures.find_spec", lambda name: None)
    with pytest.raises(GossamerError, match=r'pip install "gossamer\[plot\]"'):
        picture([Ring()], tmp_path / "ring.png")


@pytest.mark.parametrize("name", ["complete", "exponential", "hierarchy", "random_peers", "ring", "torus"])
def test_every_module_draws_itself(name, tmp_path, monkeypatch, capsys):
    drawn = []
    monkeypatch.setattr(describe, "picture", lambda shown, path: drawn.append((shown, path)))
    monkeypatch.setattr(sys, "argv", [name, str(tmp_path / "out.png")])
    module = Path(topologies.__file__).with_name(f"{name}.py")
    runpy.run_path(str(module), run_name="__main__")
    (shown, path), *others = drawn
    assert not others
    assert path == tmp_path / "out.png"
    assert {type(each).__name__.lower() for each in shown} == {name.replace("_", "")}
    printed = capsys.readouterr().out
    assert all(f"{each!r}\nworkers" in printed for each in shown)


@pytest.mark.processes
def test_a_module_runs_from_the_command_line_without_a_warning(tmp_path):
    command = [sys.executable, "-m", "gossamer.algorithms.topologies.ring", str(tmp_path / "ring.png")]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=200, check=True)
    assert ran.stderr == ""
    assert (tmp_path / "ring.png").read_bytes().startswith(PNG)


def test_without_a_path_the_picture_lies_here(monkeypatch, tmp_path, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["ring"])
    describe.draw(Ring())
    assert (tmp_path / "topology-ring.png").read_bytes().startswith(PNG)
    assert capsys.readouterr().out.endswith("Saved topology-ring.png\n")


def test_a_place_that_is_not_there_is_no_traceback(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(sys, "argv", ["ring", str(tmp_path / "nowhere" / "ring.png")])
    with pytest.raises(SystemExit) as leaving:
        describe.draw(Ring())
    assert leaving.value.code == 1
    assert "nowhere" in capsys.readouterr().err
