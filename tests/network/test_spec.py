"""Networks as users write them."""

from __future__ import annotations

from pathlib import Path as File

import pytest

from gossamer.network import Host, Network, Path, read_network
from gossamer.network.spec import NetworkError

EXAMPLES = sorted((File(__file__).parents[2] / "examples" / "networks").glob("*.toml"))


def test_a_spec() -> None:
    network = read_network("20mbit, 80ms, loss=0.1%, jitter=2ms", 3)
    assert network.hosts == (Host(up_bits_per_second=20e6, down_bits_per_second=20e6),) * 3
    assert network.path(0, 2) == Path(round_trip_seconds=0.08, jitter_seconds=0.002, loss=0.001)
    assert network.is_uniform
    assert read_network("1gbit", 2).path(0, 1) == Path()


def test_a_file_of_unequal_hosts() -> None:
    network = read_network(str(File(EXAMPLES[0]).with_name("two-sites-80ms.toml")), 4)
    assert [host.site for host in network.hosts] == ["west", "west", "east", "east"]
    assert network.path(0, 1).round_trip_seconds == pytest.approx(2e-4)
    assert network.path(0, 3).round_trip_seconds == network.path(3, 0).round_trip_seconds == pytest.approx(0.08)
    assert not network.is_uniform
    slow = read_network(str(File(EXAMPLES[0]).with_name("office-1g.toml")), 4)
    assert slow.bits_per_second(0, 3) == slow.bits_per_second(3, 0) == 100e6


@pytest.mark.parametrize("file", EXAMPLES, ids=lambda file: file.stem)
def test_every_example_can_be_read(file: File) -> None:
    assert isinstance(read_network(str(file), 4), Network)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("0mbit", ["positive", "--fault"]),
        ("fast", ["'fast'", "100mbit"]),
        ("100mbit,20", ["'20'", "20ms"]),
        ("100mbit,loss=2", ["[0, 1)", "loss=0.1%"]),
        ("100mbit,colour=red", ["colour", "RATE[,ROUND_TRIP]"]),
        ("100 parsecs", ["'100 parsecs'", "mbit"]),
        ("missing.toml", ["missing.toml"]),
    ],
)
def test_what_cannot_be_read(text: str, words: list[str]) -> None:
    with pytest.raises(NetworkError) as refusal:
        read_network(text, 2)
    assert all(word in str(refusal.value) for word in words)


def test_more_workers_than_hosts(tmp_path: File) -> None:
    file = tmp_path / "two.toml"
    file.write_text('[[hosts]]\ncount = 2\nrate = "1gbit"\n')
    with pytest.raises(NetworkError, match=r"2 hosts and 5 workers.*--workers 2"):
        read_network(str(file), 5)
    file.write_text('[[hosts]]\nup = "1gbit"\n')
    with pytest.raises(NetworkError, match="rate"):
        read_network(str(file), 1)
