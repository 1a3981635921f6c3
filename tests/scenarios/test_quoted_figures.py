"""Figures that the README and guides quote are those of the benchmark pages that they come from."""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import cache
from typing import NamedTuple

import pytest
from benchmarks.ladder_arms import ONE_BIT
from benchmarks.markdown_tables import named_rows
from support.paths import ROOT

from gossamer.algorithms.recipes.retained_benefit import measured_bands

SHARE = re.compile(r"-?\d+ % \(-?\d+ to -?\d+\)")
SIZES = {"57,000": "bytelm-57k-b2", "113,000": "bytelm-113k-b2", "237,000": "bytelm-237k-b2"}  # parameters; rung
SMALLEST = SIZES["57,000"]
EIGHT_FRAGMENTS = (
    "DiLoCo(period=32, outer_learning_rate=2.0, outer_momentum=0.0, fragments=8, optimizer_state='align') + OneBit()"
)


def text(path: str) -> str:
    """A page, each run of spaces and line ends as one space, but for the lines of tables."""
    return re.sub(r"[ \t]+", " ", re.sub(r"(?<!\|)(?<!\n)\n(?!\||\n)", " ", raw(path)))


def raw(path: str) -> str:
    return (ROOT / path).read_text(encoding="utf-8")


def key(recipe: str) -> str:
    """A recipe as the ladder writes it: its one-bit recipes send vectors in four bits."""
    return re.sub(r"(?<= \+ )OneBit\(\)", ONE_BIT, recipe.replace('"', "'"))


class Measured(NamedTuple):
    times_fewer: float
    share: str


@cache
def ladder() -> dict[tuple[str, str], Measured]:
    """By rung and recipe."""
    found: dict[tuple[str, str], Measured] = {}
    for name, cells in named_rows(raw("docs/benchmarks/ladder.md")).items():
        share = SHARE.match(cells.get("retained", ""))
        if share and cells.get("times fewer"):
            rung, _, recipe = name.split(" | ")
            found[rung, recipe.strip("`")] = Measured(float(cells["times fewer"].replace(",", "")), share[0])
    return found


def wrong_shares(page: str) -> list[str]:
    """Shares with an interval that the ladder does not have."""
    measured = {each.share for each in ladder().values()}
    return [share for share in SHARE.findall(page) if share not in measured]


class Quote(NamedTuple):
    """A sentence about one recipe."""

    recipe: str
    fewer: str  # 1/N of the bytes
    shares: dict[str, str]  # retained benefit by rung


def wrong(quote: Quote) -> list[str]:
    """Figures of a quote that are not those of the ladder. 1/N may be that of any rung in the quote."""
    of = {rung: ladder()[rung, key(quote.recipe)] for rung in quote.shares}
    found = [f"{share} on {rung}: {of[rung].share}" for rung, share in quote.shares.items() if share != of[rung].share]
    factor = float(quote.fewer.replace(",", ""))
    if all(abs(factor - each.times_fewer) > 0.551 for each in of.values()):  # both are rounded
        found.append(f"1/{quote.fewer}: {[each.times_fewer for each in of.values()]}")
    return found


def shares_by_rung(cell: str) -> dict[str, str]:
    """Shares of a cell; "with N parameters" names another rung than the smallest."""
    found: dict[str, str] = {}
    for match in re.finditer(rf"({SHARE.pattern})(?:,[^,;]*)??(?:,? with ([\d,]+) parameters)?(?=;|$)", cell):
        found[SIZES[match[2]] if match[2] else SMALLEST] = match[1]
    return found


def how_to_choose(page: str) -> Iterator[Quote]:
    """Rows of the table of recipes that have a retained benefit with an interval."""
    for cells in named_rows(page).values():
        shares = shares_by_rung(cells.get("retained benefit", ""))
        if shares:
            yield Quote(cells["recipe"].split("`")[1], cells["bytes"].removeprefix("1/"), shares)


def which_recipe(page: str) -> Iterator[Quote]:
    """The README's table of recipes."""
    cells = {
        name.removeprefix("Which recipe | "): row["recipe"] for name, row in named_rows(page).items() if "recipe" in row
    }
    ten, hundred, thousand, home = (
        cells[name]
        for name in (
            "the network is ten times too slow",
            "a hundred times, with Adam or SGD",
            "a thousand times, with Adam or SGD",
            "home uplink",
        )
    )

    def fewer(cell: str) -> str:
        (found,) = re.findall(r"1/([\d,]+) of the bytes", cell)
        return str(found)

    small, twice = SHARE.findall(hundred)
    large, smallest = SHARE.findall(thousand)
    assert "with 237,000 parameters" in thousand
    assert "with a model twice as large" in hundred
    yield Quote(ten.split("`")[1], fewer(ten), {SMALLEST: SHARE.findall(ten)[0]})
    yield Quote(hundred.split("`")[1], fewer(hundred), {SMALLEST: small, SIZES["113,000"]: twice})
    yield Quote(EIGHT_FRAGMENTS, fewer(thousand), {SIZES["237,000"]: large, SMALLEST: smallest})
    yield Quote("LocalSGD(period=8) + OneBit()", fewer(home), {SMALLEST: SHARE.findall(home)[0]})


PAGES_OF_SHARES = {
    "README.md": 7,
    "docs/how-to/how-to-choose.md": 12,
    "docs/how-to/slow-line.md": 3,
    "docs/explanation/local-sgd.md": 5,
    "docs/benchmarks/compressors.md": 4,
}


@pytest.mark.parametrize("page", PAGES_OF_SHARES)
def test_retained_benefits_with_intervals_are_those_of_the_ladder(page: str) -> None:
    assert wrong_shares(text(page)) == []
    assert len(SHARE.findall(text(page))) >= PAGES_OF_SHARES[page]


def quoted_bands(page: str) -> set[tuple[str, str]]:
    """(number of rounds, retained benefit) in sentences such as "400 to 800 rounds retained 86 to 103 %"."""
    return set(re.findall(r"(\d+ to \d+) rounds[^.;%]*?(\d+ to \d+ %)", text(page)))


@pytest.mark.parametrize(
    ("page", "count"),
    [
        ("README.md", 2),
        ("docs/how-to/how-to-choose.md", 3),
        ("docs/explanation/local-sgd.md", 2),
        ("docs/benchmarks/ladder.md", 4),
    ],
)
def test_retained_benefits_by_rounds_are_those_of_the_ladder(page: str, count: int) -> None:
    assert quoted_bands(page) <= {(band.rounds, band.retained) for band in measured_bands()}
    assert len(quoted_bands(page)) >= count


@pytest.mark.parametrize(
    ("quotes", "page", "count"),
    [(how_to_choose, "docs/how-to/how-to-choose.md", 6), (which_recipe, "README.md", 4)],
    ids=["how to choose", "README"],
)
def test_bytes_and_retained_benefit_of_a_recipe_are_those_of_the_ladder(quotes, page: str, count: int) -> None:
    found = list(quotes(raw(page)))
    assert len(found) == count
    assert {quote.recipe: wrong(quote) for quote in found} == {quote.recipe: [] for quote in found}


def test_other_figures_are_noticed() -> None:
    page = raw("README.md")
    assert wrong_shares(text("README.md").replace("91 % (88 to 95)", "91 % (83 to 100)"))
    assert any(wrong(quote) for quote in which_recipe(page.replace("1/929", "1/931")))
    assert any(wrong(quote) for quote in which_recipe(page.replace("94 % (87 to 100)", "80 % (62 to 96)")))
    assert not any(wrong(quote) for quote in which_recipe(page))


# -- seconds -----------------------------------------------------------------------------------------------------------

DDP, FLOAT4 = "DDP", "4 bits | `Float4()`"
FASTEST = "every 4 steps, 1 bit, momentum aligned"


@cache
def time_to_loss(network: str, row: str) -> dict[str, str]:
    """Cells of a row that begins so, in the section of a network."""
    (found,) = (
        cells
        for name, cells in named_rows(raw("docs/benchmarks/time-to-loss.md")).items()
        if name == f"{network} | {row}" or name.startswith(f"{network} | {row} |")
    )
    return found


def sooner(network: str) -> str:
    return time_to_loss(network, FASTEST)["sooner than DDP"].strip("*").removesuffix(" times")


def test_readme_has_the_times_to_a_loss() -> None:
    table = {name: list(cells.values()) for name, cells in named_rows(raw("README.md")).items() if "network" in cells}
    assert len(table) == 3
    for told, *times in table.values():
        network = told.replace("bit/s", "bit").lower().replace(" ", "")
        expected = [time_to_loss(network, row)["time to the loss"] for row in (DDP, FLOAT4, FASTEST)]
        times[-1], _, factor = times[-1].partition(", ")
        assert (times, factor.removesuffix(" sooner")) == (expected, f"{sooner(network)}x")


def test_guides_have_the_steps_and_the_gain_of_the_page() -> None:
    network = "10mbit,100ms"
    steps = [time_to_loss(network, row)["steps"] for row in (FASTEST, DDP)]
    ratio = float(steps[0].replace(",", "")) / float(steps[1].replace(",", ""))
    share = time_to_loss(network, FASTEST)["retained after as many steps"]
    guide, readme = text("docs/how-to/how-to-choose.md"), text("README.md")
    assert f"[{sooner(network)} times sooner](../benchmarks/time-to-loss.md)" in guide
    assert f"makes as many steps as DDP ({steps[0]} and {steps[1]})" in readme
    assert 0.95 < ratio < 1.05, "the pages say: as many steps"
    assert "in as many steps" in guide
    assert f"[retains](docs/benchmarks/ladder.md) {share}" in readme
    (trained,) = re.findall(r"; (\d+) steps;", text("docs/benchmarks/time-to-loss.md").split("##")[0])
    assert f"trains for {int(trained):,} steps" in readme


def test_readme_has_the_seconds_per_step_of_a_larger_model() -> None:
    table = named_rows(raw("docs/benchmarks/network.md").split("The same, over plain DDP")[0])

    def seconds(row: str, network: str, digits: int = 1) -> str:
        cell = next(cells[network] for name, cells in table.items() if name.endswith(f"| {row}"))
        return f"{float(cell.removesuffix(' ms').replace(',', '')) / 1000:.{digits}f} s"

    slow = [seconds(row, "10mbit,100ms") for row in ("DDP", "DDP + PowerSGD hook", "PowerSGD(rank=4)")]
    free = [seconds(row, "no limit", digits=2) for row in ("DDP", "Int8()")]
    assert (
        f"DDP {slow[0]}, torch's PowerSGD hook {slow[1]}, `PowerSGD(rank=4)` {slow[2]}; without a network limit DDP "
        f"{free[0]}, `Int8()` {free[1]}"
    ) in text("README.md")


def test_readme_has_the_gain_of_the_demo() -> None:
    (cells,) = (cells for name, cells in named_rows(raw("docs/benchmarks/demo.md")).items() if "local steps" in name)
    middle, least, most = re.findall(r"[\d.]+", cells["speedup"])
    assert f"reaches the final loss of plain DDP {middle}x faster ({least} to {most}," in text("README.md")
    assert f"reaches DDP's final loss {middle}x faster" in text("docs/benchmarks/demo.md")


def test_federated_page_begins_with_the_figures_of_its_table() -> None:
    page = text("docs/benchmarks/federated-compression.md")
    table = named_rows(raw("docs/benchmarks/federated-compression.md"))
    sparse = "`Route(Chain(TopK(density=0.01), Int8()), rest=Chain(TopK(density=0.01), Int8()))`"
    dense, fewer = (table[f"Results | FedAvg | {name}"] for name in ("`Dense()`", sparse))
    rounds = [cells["rounds"].split(" ")[0] for cells in (fewer, dense)]
    assert (
        f"{float(fewer['times fewer']):.0f} times fewer bytes up than uncompressed, in {rounds[0]} instead of" in page
    )
    assert f"instead of {rounds[1]} rounds" in page
