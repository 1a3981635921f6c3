from click.testing import CliRunner

from gossamer.algorithms.recipes.catalog import NESTED, NOUNS, PRESETS
from gossamer.algorithms.recipes.recipe import resolve
from gossamer.cli.recipes import recipes


def listed():
    result = CliRunner(env={"COLUMNS": None}).invoke(recipes)
    assert result.exit_code == 0
    return result.output.splitlines()


def named(text):
    """The term that a line is about: the last one, or what a strategy holds to show it."""
    term = text.rpartition(" + ")[2]
    held = next((kind for kind in NESTED if term.startswith(f"FedAvg({kind}=")), None)
    return (term if held is None else term.removeprefix(f"FedAvg({held}=")).partition("(")[0]


def test_every_line_starts_with_something_that_can_be_pasted():
    names = []
    for line in listed():
        if line.startswith("  "):
            text = line.strip().partition("  ")[0]
            resolve(text)
            names.append(named(text))
    assert sorted(names) == sorted([*NOUNS, *PRESETS, "auto", "Auto"])


def test_lines_are_grouped_under_their_kind():
    titles = [line for line in listed() if not line.startswith(" ")]
    assert titles == [
        "strategy (default EveryStep())",
        "compressor (default Dense())",
        "topology (default Complete())",
        *(f"{kind} of a federated strategy (default {default!r})" for kind, default in NESTED.items()),
        "preset",
        "chosen while training",
    ]


def test_what_stands_within_a_strategy_is_listed_so():
    assert {"aggregator", "secure"} <= set(NESTED)
    shown = [line.strip() for line in listed()]
    assert any(line.startswith("FedAvg(aggregator=MultiKrum(outliers=0.2))  ") for line in shown)
    assert any(line.startswith("FedAvg(secure=SecureAggregation(") for line in shown)


def test_presets_show_what_they_resolve_to():
    lines = [line.split(maxsplit=1) for line in listed()]
    assert ["wan", "EveryStep() + Route(Feedback(Float4())) + Complete()"] in lines


def test_piped_output_is_plain():
    assert not any("\x1b" in line for line in listed())
