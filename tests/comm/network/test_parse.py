"""Network descriptions as users write them."""

from __future__ import annotations

from pathlib import Path as File

import pytest
from support.paths import EXAMPLES as ALL_EXAMPLES

from gossamer.comm.network import Host, Network, Path, read_network
from gossamer.comm.network.cost.message_simulator import SharedLines
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
        (BETWEEN + 'rate = "fast"', ["'fast'", "20mbit"]),
        (BETWEEN + "rate = 100", ["100 is not a rate", "20mbit"]),
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


HOMES = """
[default]
round_trip = "40ms"
[[hosts]]
site = "office"
rate = "1gbit"
[[hosts]]
count = 3
site = "home"
up = "20mbit"
down = "100mbit"
[[hosts]]
site = "cabin"
rate = "10mbit"
"""


def homes(folder: File, relays: str, workers: int = 5) -> Network:
    file = folder / "homes.toml"
    file.write_text(HOMES + relays)
    return read_network(str(file), workers)


def test_a_site_relays_by_its_first_host(tmp_path: File) -> None:
    network = homes(tmp_path, '[[relays]]\nbetween = ["home", "cabin"]\nthrough = "office"\n')
    assert network.relayed == {frozenset((home, 4)): 0 for home in (1, 2, 3)}
    assert (network.relays, network.hubs) == ((), (0,))
    assert network.path(1, 4).round_trip_seconds == pytest.approx(0.08)  # to the office, and from there
    assert network.path(0, 1).round_trip_seconds == network.path(1, 2).round_trip_seconds == pytest.approx(0.04)


@pytest.mark.parametrize(
    ("between", "pairs"),
    [
        ('["home"]', [(1, 2), (1, 3), (2, 3)]),
        ('["home", "home"]', [(1, 2), (1, 3), (2, 3)]),
        ('["home", "cabin", "home"]', [(1, 2), (1, 3), (2, 3), (1, 4), (2, 4), (3, 4)]),
    ],
)
def test_a_site_that_is_listed_alone_or_twice_stands_for_pairs_of_its_own_hosts(
    tmp_path: File, between: str, pairs: list[tuple[int, int]]
) -> None:
    network = homes(tmp_path, f'[[relays]]\nbetween = {between}\nthrough = "office"\n')
    assert network.relayed == dict.fromkeys(map(frozenset, pairs), 0)


def test_a_relay_without_a_worker_has_a_line_of_its_own(tmp_path: File) -> None:
    network = homes(tmp_path, '[[relays]]\nbetween = ["home"]\nup = "5mbit"\ndown = "50mbit"\n')
    assert network.relays == (Host(up_bits_per_second=5e6, down_bits_per_second=50e6),)
    assert set(network.relayed.values()) == {5}
    assert (network.hubs, network.bits_per_second(1, 2)) == ((), 5e6)
    assert network.path(1, 2).round_trip_seconds == pytest.approx(0.04)  # the relay is on this path


def test_a_relay_stays_if_there_are_fewer_workers_than_hosts(tmp_path: File) -> None:
    """The relay is the host after the workers."""
    file = tmp_path / "homes.toml"
    hosts = HOMES.split("[[hosts]]")
    relay = '[[relays]]\nbetween = ["home"]\nthrough = "office"\n'
    file.write_text("[[hosts]]".join([hosts[0], hosts[2], hosts[1]]) + relay)
    whole, fewer = read_network(str(file), 4), read_network(str(file), 3)
    assert (whole.relays, whole.hubs) == ((), (3,))
    assert (fewer.relays, fewer.hubs) == ((whole.hosts[3],), ())
    assert set(fewer.relayed.values()) == {3}
    assert fewer.path(0, 1) == whole.path(0, 1)


def test_relayed_bytes_share_the_lines_of_both_legs(tmp_path: File) -> None:
    """Of the lines between sites, they pass those to the relay and from it."""
    relay = '[[relays]]\nbetween = ["home", "cabin"]\nthrough = "office"\n'
    rates = {("home", "office"): "3mbit", ("office", "cabin"): "2mbit", ("home", "cabin"): "1mbit"}
    paths = [f'[[paths]]\nbetween = ["{a}", "{b}"]\nrate = "{rate}"\n' for (a, b), rate in rates.items()]
    network = homes(tmp_path, relay + "".join(paths))
    assert network.path(1, 4).bits_per_second == network.bits_per_second(1, 4) == 2e6
    lines = SharedLines(network)
    both = lines.between(1, 4)
    assert both == (lines.between(1, 0) + lines.between(0, 4))
    assert [line.bits_per_second for line in both] == [3e6, 2e6]
    assert lines.between(1, 0)[0] is both[0]  # the same line, not an equal one
    assert lines.between(0, 4)[0] is both[1]


RELAY = '[[relays]]\nbetween = ["home"]\n'


@pytest.mark.parametrize(
    ("relays", "parts"),
    [
        (RELAY, ["a relay without `through` needs", "1gbit"]),
        (RELAY + 'through = "of"', ["through one of the sites", "'of'", "office"]),
        (RELAY + "through = 3", ["through one of the sites", "got 3"]),
        (RELAY + 'through = "office"\nrate = "1gbit"', ["the line of that host", "['rate']"]),
        (RELAY + 'through = "office"\nhost = 1', ["unknown keys ['host']", "through"]),
        (RELAY + 'through = "home"', ["without 'home', which relays", "between = "]),
        ('[[relays]]\nthrough = "office"', ["a relay must be between", "got None"]),
        ('[[relays]]\nbetween = []\nthrough = "office"', ["a relay must be between", "got []"]),
        ('[[relays]]\nbetween = ["hoem"]\nthrough = "office"', ["a relay must be between", "hoem"]),
        (RELAY + 'through = "office"\n' + RELAY + 'rate = "1gbit"', ["['home'] have two relays", "Remove one"]),
        ('[relays]\nbetween = ["home"]', ["list of tables", "[[relays]]"]),
        (RELAY + 'rate = "0mbit"', ["positive number"]),
        (f'[[hosts]]\nrate = "1gbit"\ncount = 512\n{RELAY}through = "office"', ["at most 512 hosts, got 517"]),
    ],
)
def test_invalid_relays_are_rejected_with_the_line_to_write(tmp_path: File, relays: str, parts: list[str]) -> None:
    with pytest.raises(NetworkError) as refusal:
        homes(tmp_path, relays)
    assert all(part in str(refusal.value) for part in parts), refusal.value


@pytest.mark.parametrize("file", EXAMPLES, ids=lambda file: file.stem)
def test_every_example_can_be_read(file: File) -> None:
    assert isinstance(read_network(str(file), 4), Network)


@pytest.mark.parametrize(
    ("text", "ops"),
    [
        ("0mbit", ["positive", "--fault"]),
        ("fast", ["'fast'", "20mbit"]),
        ("100mbit,20", ["'20'", "20ms"]),
        ("100mbit,20ms,2ms", ["two values of 'round_trip'", "jitter=2ms"]),
        ("100mbit,loss=1%,loss=2%", ["two values of 'loss'"]),
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
