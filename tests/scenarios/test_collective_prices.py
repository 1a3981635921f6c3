"""Collective prices: the page shows what the program prints, and what the code says."""

import re

import pytest
from benchmarks.collective_prices import main, picture, rows
from support.paths import ROOT

from gossamer.algorithms.collectives import RingAllReduce

pytestmark = pytest.mark.nightly

PAGE = (ROOT / "docs" / "benchmarks" / "collective-prices.md").read_text(encoding="utf-8")
EXPLAINED = (ROOT / "docs" / "explanation" / "collectives.md").read_text(encoding="utf-8")


def check_page(specs, workers):
    for line in rows(specs, workers):
        assert line in PAGE, "write: python benchmarks/collective_prices.py, into docs/benchmarks/collective-prices.md"


def test_the_page_has_the_prices_as_they_are():
    check_page(["100mbit,20ms"], [4])
    check_page([str(ROOT / "examples/networks/two-sites-80ms.toml")], [8])


def test_other_prices_are_not_on_the_page():
    with pytest.raises(AssertionError):
        check_page(["100mbit,21ms"], [4])


def test_the_page_has_the_hops_as_they_are():
    hops = [(hop.round, hop.does.value, hop.peer, hop.first) for hop in RingAllReduce().hops(0, 3)]
    assert repr(hops) in re.sub(r"\n +", " ", EXPLAINED)


def test_a_network_with_too_few_hosts_is_left_out(capsys):
    main(["--workers", "16", "--network", str(ROOT / "examples/networks/two-sites-80ms.toml")])
    heard = capsys.readouterr()
    assert len(heard.out.splitlines()) == 2
    assert "left out: " in heard.err


def test_the_tables_are_drawn(tmp_path):
    picture(tmp_path / "hops.png", world=3)
    assert (tmp_path / "hops.png").read_bytes().startswith(b"\x89PNG")
