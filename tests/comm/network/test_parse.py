"""Network descriptions as users write them."""

from __future__ import annotations

from pathlib import Path as File

import pytest
from support.paths import EXAMPLES as ALL_EXAMPLES

from gossamer.comm.network import Host, Network, Path, read_network
from gossamer.comm.network.parse import NetworkError

EXAMPLES = sorted((ALL_EXAMPLES / "networks").glob("*.toml"))


def test_a_spec() -> None:
    network = read_network("20mbit, 80ms, loss=0.1%, jitter=2ms", 3)
    assert network.hosts == (Host(up_bits_per_second=20e6, down_bits_per_second=20e6),) * 3
    assert network.path(0, 2) == Path(round_trip_seconds=0.08, jitter_seconds=0.002, loss=0.001)
    assert network.is_uniform
    assert read_network("1gbit", 2).path(0, 1) == Path()


def test_a_spec_with_limits_of_one_direction() -> None:
    (host,) = read_network("100mbit,20ms,up=5mbit", 1).hosts
    assert host == Host(up_bits_per_second=5e6, down_bits_per_second=100e6)
    (host,) = read_network("unlimited,up=5mbit,down=20mbit", 1).hosts
    assert host == Host(up_bits_per_second=5e6, down_bits_per_second=20e6)
    (host,) = read_network("10mbit,up=50mbit,down=unlimited", 1).hosts
    assert host == Host(up_bits_per_second=10e6, down_bits_per_second=10e6)


def test_a_file_of_unequal_hosts() -> None:
    network = read_network(str(File(EXAMPLES[0]).with_name("two-sites-80ms.toml")), 4)
    assert [host.site for host in network.hosts] == ["west", "west", "east", "east"]
    assert network.path(0, 1).round_trip_seconds == pytest.approx(2e-4)
    assert network.path(0, 3).round_trip_seconds == network.path(3, 0).round_trip_seconds == pytest.approx(0.08)
    assert not network.is_uniform
    slow = read_network(str(File(EXAMPLES[0]).with_name("office-1g.toml")), 4)
    assert slow.bits_per_second(0, 3) == slow.bits_per_second(3, 0) == 100e6


OFFICES = """
[[hosts]]
count = 2
site = "north"
rate = "1gbit"
[[hosts]]
site = "south"
rate = "1gbit"
"""
BETWEEN = '[[paths]]\nbetween = ["north", "south"]\n'


def test_a_line_that_sites_share(tmp_path: File) -> None:
    file = tmp_path / "offices.toml"
    file.write_text(OFFICES + BETWEEN + 'rate = "100mbit"\nround_trip = "30ms"\n')
    network = read_network(str(file), 3)
    assert network.path(0, 2) == network.path(2, 0) == Path(round_trip_seconds=0.03, bits_per_second=100e6)
    assert network.path(0, 1) == Path()
    rates = [network.bits_per_second(*pair) for pair in ((0, 1), (0, 2), (2, 1))]
    assert rates == [1e9, 100e6, 100e6]
    file.write_text(OFFICES + BETWEEN + 'rate = "10gbit"\n')
    assert read_network(str(file), 3).bits_per_second(0, 2) == 1e9
    file.write_text(OFFICES + BETWEEN + 'rate = "unlimited"\n')
    assert read_network(str(file), 3).path(0, 2) == Path()


@pytest.mark.parametrize(
    ("more", "ops"),
    [
        ('[default]\nrate = "100mbit"', ["no two sites", "[[paths]]"]),
        (
            '[[paths]]\nbetween = ["north", "north"]\nrate = "1mbit"',
            ["['north']", "between two sites", "Give the hosts"],
        ),
        ('[[paths]]\nbetween = ["north"]\nrate = "1mbit"', ["['north']", "between two sites"]),
        ('[[paths]]\nbetween = ["north", "south", "west"]', ["a path must be between", "west"]),
        ("[[paths]]\nbetween = []", ["a path"]),
        ("[[paths]]\nbetween = 3", ["a path must be between", "got 3"]),
        ('[[paths]]\nbetween = "north"', ["a path must be between", "got 'north'"]),
        ('[[paths]]\nbetween = [["north"], ["south"]]', ["a path"]),
        (BETWEEN + 'rate = "1mbit"\n[[paths]]\nbetween = ["south", "north"]', ["two paths", "Remove one"]),
        ("[paths]\nbetween = []", ["list of tables", "[[paths]]"]),
        ("[[default]]", ["[default] must be a table"]),
        ('[[hosts]]\nrate = "1gbit"\ncount = "two"', ["from 1 to", "'two'"]),
        ('[[hosts]]\nrate = "1gbit"\ncount = 0', ["from 1 to", "got 0"]),
        ("[default]\nloss = 2", ["[0, 1)"]),
        (BETWEEN + 'rate = "0mbit"', ["positive number of bits", "omit it"]),
        (BETWEEN + 'rate = "fast"', ["'fast'", "100mbit"]),
        (BETWEEN + "rate = 100", ["100 is not a rate", "100mbit"]),
        (BETWEEN + 'bits = "1mbit"', ["bits", "rate"]),
        ('[default]\nroundtrip = "1ms"', ["[default]", "roundtrip", "round_trip"]),
        ('[default]\nbetween = ["north", "south"]', ["[default]", "between"]),
    ],
)
def test_lines_that_nobody_shares_are_refused(tmp_path: File, more: str, ops: list[str]) -> None:
    file = tmp_path / "offices.toml"
    file.write_text(OFFICES + more + "\n")
    with pytest.raises(NetworkError) as refusal:
        read_network(str(file), 3)
    assert all(op in str(refusal.value) for op in ops), refusal.value


def test_a_line_is_between_two_sites() -> None:
    with pytest.raises(ValueError, match="between two sites"):
        Network(hosts=(), paths={frozenset("a"): Path(bits_per_second=1e6)})
    with pytest.raises(ValueError, match="no two sites"):
        Network(hosts=(), default=Path(bits_per_second=1e6))
    with pytest.raises(ValueError, match="positive number"):
        Path(bits_per_second=float("nan"))


@pytest.mark.parametrize("file", EXAMPLES, ids=lambda file: file.stem)
def test_every_example_can_be_read(file: File) -> None:
    assert isinstance(read_network(str(file), 4), Network)


@pytest.mark.parametrize(
    ("text", "ops"),
    [
        ("0mbit", ["positive", "--fault"]),
        ("fast", ["'fast'", "100mbit"]),
        ("100mbit,20", ["'20'", "20ms"]),
        ("100mbit,loss=2", ["[0, 1)", "loss=0.1%"]),
        ("100mbit,colour=red", ["colour", "RATE[,ROUND_TRIP]"]),
        ("100 parsecs", ["'100 parsecs'", "mbit"]),
        ("missing.toml", ["missing.toml"]),
        pytest.param(f"1mbit,{'9' * 400}s", ["out of range"], id="endless"),
    ],
)
def test_what_cannot_be_read(text: str, ops: list[str]) -> None:
    with pytest.raises(NetworkError) as refusal:
        read_network(text, 2)
    assert all(op in str(refusal.value) for op in ops)


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (f"a={'[' * 5000}{']' * 5000}", "cannot be read as a network"),
        (f"a={'9' * 5000}", "cannot be read as a network"),
        (f"a{'.b' * 5000} = 1", "more than 200 dots"),
        ("#" * (2**22 + 1), "more than 4194304 bytes"),
        ('[[hosts]]\nrate="1mbit"\ncount=10000000000', "from 1 to"),
        ('[[hosts]]\nrate="1mbit"\ncount=true', "from 1 to"),
    ],
    ids=["deep", "long", "dotted", "large", "many", "true"],
)
def test_a_file_that_asks_too_much_of_its_reader_is_refused(tmp_path: File, content: str, reason: str) -> None:
    (tmp_path / "bad.toml").write_text(content)
    with pytest.raises(NetworkError, match=reason):
        read_network(str(tmp_path / "bad.toml"), 1)


@pytest.mark.parametrize("spec", ["1mbit,{}", "{}", "1mbit,loss={}", "1mbit,{}=1"])
def test_long_texts_are_shown_in_part(spec: str) -> None:
    with pytest.raises(NetworkError) as refusal:
        read_network(spec.format("(" * 10**5), 2)
    assert len(str(refusal.value)) < 400


def test_more_workers_than_hosts(tmp_path: File) -> None:
    file = tmp_path / "two.toml"
    file.write_text('[[hosts]]\ncount = 2\nrate = "1gbit"\n')
    with pytest.raises(NetworkError, match=r"2 hosts, but 5 workers.*--workers 2"):
        read_network(str(file), 5)
    file.write_text('[[hosts]]\nup = "1gbit"\n')
    with pytest.raises(NetworkError, match="rate"):
        read_network(str(file), 1)
