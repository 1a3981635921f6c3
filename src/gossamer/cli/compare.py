"""`gossamer compare`: runs the same training with several recipes one after the other, and compares their records."""

from __future__ import annotations

import csv
import io
import json
import os
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from math import isfinite
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.text import Text

from gossamer.algorithms.recipes import retained_benefit
from gossamer.algorithms.recipes.parser import UnknownTerm
from gossamer.algorithms.recipes.recipe import meaning, resolve
from gossamer.base import bounded_file
from gossamer.base.figures import check_matplotlib
from gossamer.base.intervals import ConfidenceInterval
from gossamer.base.units import bytes_text, rate_text, seconds_text, share_text, short
from gossamer.cli.console import table, wide_console
from gossamer.cli.options import Command, FiniteRange, option_group, output_option
from gossamer.cli.program import ScriptCommand, ScriptPath
from gossamer.cli.recipe_options import session_recipe
from gossamer.cli.script_terms import register_terms
from gossamer.cli.worker import SECONDS, UNTIL
from gossamer.comm.network import read_network
from gossamer.errors import GossamerError
from gossamer.launcher.job import MOST_WORKERS
from gossamer.observe.comparison import (
    HELD_OUT,
    Comparison,
    ComparisonRow,
    LossEstimate,
    Prices,
    compare,
    final_loss,
    loss_at,
)
from gossamer.observe.pages.page import write_page
from gossamer.observe.plot import plot
from gossamer.observe.record import MOST_RECORD_BYTES, Record, network_text, write
from gossamer.observe.target import Target, read_target
from gossamer.plan.estimate.step_time import NOT_PREDICTABLE, StepTimeEstimate, estimate_step_time, is_predictable
from gossamer.plan.profile.profile_runs import profile_script

WIDTH = 140  # columns of a table in a file
PROGRESS = ("gossamer: starting", "gossamer: step ")  # lines that are not errors
CAUSES = ("rank ", "server ", "Error: ")  # beginnings of lines that state a cause
SEED, RATE = "{seed}", "{learning_rate}"  # in the script's arguments, replaced in every run
RETAINED = "share of the gain of Dense() over Silent() at equal steps; intervals of 95 % need --seeds of 3 or more"
NO_LOSS = "The script logged no loss, so columns about it are empty. Add session.log(loss=loss.item()) to its loop."


def _target(context: click.Context, option: click.Parameter, text: str | None) -> Target | None:
    try:
        return read_target(text) if text is not None else None
    except ValueError as error:
        raise click.BadParameter(str(error)) from None


def _learning_rates(context: click.Context, option: click.Parameter, text: str | None) -> tuple[str, ...]:
    """The rates as written, in ascending order."""
    try:
        return tuple(sorted(text.split(","), key=float)) if text else ()
    except ValueError:
        raise click.BadParameter(f"{text!r} is not a list of numbers, such as 0.01,0.03,0.1") from None


def target_option(help_text: str, name: str = "--until") -> Callable[[Command], Command]:
    """The option --until, passed to the command as `target`."""
    return click.option(name, "target", metavar="TARGET", callback=_target, help=help_text)


def different_recipes(context: click.Context, option: click.Parameter, recipes: tuple[str, ...]) -> tuple[str, ...]:
    """Read the recipes. Refuse two that resolve to the same recipe."""
    seen: dict[str, str] = {}
    recipes = tuple(map(session_recipe, recipes))
    for text in recipes:
        try:
            resolved = repr(meaning(text))
        except UnknownTerm:  # a term of the script
            resolved = text
        if resolved in seen:
            raise click.BadParameter(
                f"{text!r} and {seen[resolved]!r} are the same recipe, {resolved}. Leave out one of them."
            )
        seen[resolved] = text
    return recipes


@dataclass(frozen=True)
class ComparisonFiles:
    """Files that a comparison writes; None for none."""

    json_file: Path | None
    plot_file: Path | None
    page_file: Path | None
    csv_file: Path | None
    latex_file: Path | None


@dataclass(frozen=True)
class RecipeRuns:
    """Finished runs of a recipe. learning_rate: of --rates, "" for the script's own. records: by seed."""

    recipe: str
    learning_rate: str
    estimate: StepTimeEstimate | None
    records: list[Record]


@click.command(
    "compare",
    cls=ScriptCommand,
    context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False},
)
@click.option(
    "--recipe",
    "recipes",
    multiple=True,
    required=True,
    callback=different_recipes,
    help="Repeat it for each recipe.",
)
@click.option("--workers", type=click.IntRange(2, MOST_WORKERS), default=2, show_default=True)
@click.option("--network", metavar="SPEC", help="RATE[,ROUND_TRIP][,loss=P] per host, or a TOML file.")
@target_option('End a run at this target: "validation_loss<2.2".')
@click.option("--seconds", type=FiniteRange(0, min_open=True), help="End a run after this time.")
@click.option("--seeds", type=click.IntRange(1), default=1, help=f"Runs per recipe; {SEED} in ARGUMENTS is 0, 1, ...")
@click.option("--rates", callback=_learning_rates, help=f"Learning rates to try, as {RATE} in ARGUMENTS: 0.01,0.03.")
@click.option("--retained", "scale", is_flag=True, help="Also train Silent() and Dense(), the ends of the scale.")
@click.option("--unlimited/--no-unlimited", default=True, help="Also run Dense() without a network limit.")
@click.option("--estimate/--no-estimate", "estimating", default=True, help="Estimate the step time before each run.")
@option_group(
    "prices",
    Prices,
    click.option("--price-per-hour", "per_hour", type=FiniteRange(0), help="Price of one worker."),
    click.option("--egress-price-per-gb", "per_gigabyte", type=FiniteRange(0), help="Price of a sent gigabyte."),
)
@option_group(
    "files",
    ComparisonFiles,
    output_option("json", "Write the comparison as JSON."),
    output_option("plot", "Draw the curves (PNG)."),
    output_option("page", "Write an HTML page."),
    output_option("csv", "Write a row for each recipe, as CSV."),
    output_option("latex", "Write the table for LaTeX, with booktabs."),
)
@click.argument("script", type=ScriptPath())
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def compare_command(
    recipes: tuple[str, ...],
    workers: int,
    network: str | None,
    target: Target | None,
    seconds: float | None,
    seeds: int,
    rates: tuple[str, ...],
    scale: bool,
    unlimited: bool,
    estimating: bool,
    prices: Prices,
    files: ComparisonFiles,
    script: Path,
    arguments: tuple[str, ...],
) -> None:
    """Train SCRIPT with every --recipe in turn, on the same network and from the same seed. Arguments after SCRIPT are
    passed to it. All ranks of a run end after the same step."""
    if files.plot_file is not None:
        check_plot(f"; or use --page {files.plot_file.with_suffix('.html')}")
    if network is not None:
        read_network(network, workers)  # refused before the script is profiled
    check_placeholders(arguments, seeds, rates)
    first = filled_in(arguments, seed=0, rate=rates[0] if rates else "")
    register_terms(script, first, recipes)
    recipes = _with_ends(recipes, workers) if scale else recipes
    console = wide_console(WIDTH)
    limits = {UNTIL: str(target) if target else "", SECONDS: str(seconds or "")}
    done: list[RecipeRuns] = []
    floor = None
    try:
        for recipe in recipes:
            forecast = _estimate(recipe, workers, network, script, first, console) if estimating else None

            def train(seed: int, rate: str, recipe: str = recipe) -> Record:
                training = [str(script), *filled_in(arguments, seed=seed, rate=rate)]
                record = train_for_record(recipe, workers, network, limits, training, console)
                if rates or seeds > 1:
                    about = f"learning rate {rate}, " if rate else ""
                    console.print(f"  {about}seed {seed}: loss {short(final_loss(record))}", markup=False)
                return record

            rate, record = best_rate(train, rates)
            done.append(RecipeRuns(recipe, rate, forecast, [record]))
            for seed in range(1, seeds):
                done[-1].records.append(train(seed, rate))
        if unlimited and network is not None:
            floor = train_for_record("Dense()", workers, None, limits, [str(script), *first], console)
    finally:
        if done:  # also after a failure
            found = compare(
                [each.records[0] for each in done],
                repeats=[each.records[1:] for each in done],
                unlimited=floor,
                target=target,
                prices=prices,
                estimates=[each.estimate.step_seconds if each.estimate else None for each in done],
            )
            _report(done, found, floor, workers=workers, seeds=seeds, rates=rates, files=files, console=console)


def _report(
    done: Sequence[RecipeRuns],
    found: Comparison,
    floor: Record | None,
    *,
    workers: int,
    seeds: int,
    rates: Sequence[str],
    files: ComparisonFiles,
    console: Console,
) -> None:
    """Show the comparison of the finished runs, and write its files. floor: record without a network limit."""
    recipes, chosen = [each.recipe for each in done], [each.learning_rate for each in done]
    rows = [each.records for each in done]
    records = [row[0] for row in rows]
    shares = retained_shares(found, rows, workers)
    columns: dict[str, Sequence[str | None]] = {
        "learning rate": chosen,
        "retained": [None if each is None else retained_benefit.text(each) for each in shares],
    }
    header, lines = table_text(found, recipes, columns)
    _show(found, header, lines, max(map(len, rows)), console)
    emulated = network_text(records[0])
    if emulated is not None:
        console.print(f"network: {emulated}", markup=False)
    for each, row in zip(recipes, rows, strict=True):
        if len(row) < seeds:
            console.print(f"{each}: {len(row)} of {seeds} seeds finished; its row has only these.", markup=False)
    for each, rate in zip(recipes, chosen, strict=True):
        if len(rates) > 1 and rate in (rates[0], rates[-1]):
            console.print(
                f"{each}: its best learning rate, {rate}, is an end of --rates. Try further ones.", markup=False
            )
    if files.json_file:
        content = {
            "comparison": asdict(found),
            "estimates": [asdict(each.estimate) if each.estimate else None for each in done],
            "retained": [asdict(each) if each else None for each in shares],
            "learning_rates": chosen,
            "records": records,
            "other_seeds": [row[1:] for row in rows],
            "unlimited": floor,
        }
        write(files.json_file, content)
    if files.csv_file:
        files.csv_file.write_text(csv_text(found, recipes, columns), encoding="utf-8")
    if files.latex_file:
        files.latex_file.write_text(latex_text(header, lines), encoding="utf-8")
    _draw(header, lines, recipes, records, workers, emulated, files)


def _with_ends(recipes: Sequence[str], workers: int) -> tuple[str, ...]:
    """The recipes with Dense() and Silent(), the ends of the scale of the retained benefit."""
    known = [resolve(each, workers) for each in recipes]
    return (*recipes, *(each for each in ("Dense()", "Silent()") if resolve(each, workers) not in known))


def check_placeholders(arguments: Sequence[str], seeds: int, rates: Sequence[str]) -> None:
    for wanted, placeholder, option in ((seeds > 1, SEED, "--seed"), (bool(rates), RATE, "--learning-rate")):
        if wanted and not any(placeholder in each for each in arguments):
            raise click.UsageError(
                f"all runs of a recipe would be the same: {placeholder} is not in the script's arguments. Write "
                f"it in place of that number, such as train.py {option} {placeholder}"
            )


def filled_in(arguments: Sequence[str], *, seed: int, rate: str = "") -> list[str]:
    """The script's arguments of one run."""
    return [each.replace(SEED, str(seed)).replace(RATE, rate) for each in arguments]


def best_rate(train: Callable[[int, str], Record], rates: Sequence[str]) -> tuple[str, Record]:
    """Train with seed 0 at each learning rate.

    Args:
        train: One run, from its seed and learning rate.
        rates: Learning rates to try; empty: the script's own.

    Returns:
        The learning rate whose run ended with the lowest loss, "" for the script's own, and its record.
    """
    tries = {rate: train(0, rate) for rate in rates or [""]}
    best = min(tries, key=lambda rate: final_loss(tries[rate]))
    return best, tries[best]


def retained_shares(
    found: Comparison, rows: Sequence[Sequence[Record]], workers: int
) -> list[ConfidenceInterval | None]:
    """The retained benefit of each row at equal steps. None for all rows if Silent() or Dense() is missing or has no
    loss, or if Dense() is not better than Silent(). rows: records of a recipe by seed."""
    losses = [
        {seed: loss_at(run, found.metric, found.equal_steps, found.last_share) for seed, run in enumerate(row)}
        for row in rows
    ]
    return retained_benefit.shares_of_benefit([resolve(row[0]["recipe"], workers) for row in rows], losses)


def _estimate(
    recipe: str, workers: int, network: str | None, script: Path, arguments: Sequence[str], console: Console
) -> StepTimeEstimate | None:
    """Estimate of a step on this network, from a few profiled steps without it; None if it cannot be estimated."""
    if network is None:
        return None
    if not is_predictable(resolve(recipe, workers)):
        console.print(f"{recipe}: {NOT_PREDICTABLE}", markup=False)
        return None
    with console.status(Text(f"{recipe}: profiling a few steps to estimate the step time")):
        try:
            resolved = resolve(recipe, workers)
            measured = profile_script(script, arguments, resolved, workers, copies=workers)
            found = estimate_step_time(resolved, measured, read_network(network, workers), workers)
        except GossamerError as error:
            console.print(f"{recipe}: no estimate: {error}", markup=False)
            return None
    unsure = f" ({found.caution})" if found.caution else ""
    console.print(f"{recipe} over {network}: estimated {found} a step{unsure}", markup=False)
    return found


def train_for_record(
    recipe: str, workers: int, network: str | None, limits: Mapping[str, str], training: Sequence[str], console: Console
) -> Record:
    """The record of one run; shows its latest line of progress meanwhile."""
    where = f" over {network}" if network else " without a network limit"
    words = ["run", "--workers", str(workers), "--recipe", recipe, *(["--network", network] if network else [])]
    with console.status(Text(f"{recipe}{where}")) as status:

        def on_line(line: str) -> None:
            status.update(Text.assemble(f"{recipe}{where}  ", (line, "dim")))

        ended = run_for_json([*words, *training], limits, on_line)
    if ended.code or ended.content is None:
        by_hand = ["gossamer", "run", "--workers", str(workers), "--recipe", recipe, *training]
        raise click.ClickException(failure_text(recipe, by_hand, ended.output))
    record: Record = ended.content
    step = record["seconds_per_step"]["median"]
    console.print(f"{recipe}{where}: {record['steps']} steps, {seconds_text(step)} each", markup=False)
    return record


@dataclass(frozen=True)
class CommandEnd:
    """End of a `gossamer` command. content: of its JSON file, None without one. output: its last lines."""

    code: int
    content: Any
    output: Sequence[str]


def run_for_json(
    words: Sequence[str],
    environment: Mapping[str, str],
    show: Callable[[str], None],
    started: Callable[[subprocess.Popen[str]], None] = lambda process: None,
) -> CommandEnd:
    """Run `gossamer WORDS` with --json in a process of its own.

    Args:
        words: A command that has --json, with its arguments. Logs of `run` are removed at its end.
        environment: Additional variables.
        show: Receives each line of output.
        started: Receives the process.
    """
    with tempfile.TemporaryDirectory() as folder:
        file, (name, *rest) = Path(folder) / "record.json", words
        logs = ["--logs", folder] if name == "run" else []
        command = [sys.executable, "-m", "gossamer", name, "--json", str(file), *logs, *rest]
        tail: list[str] = []
        with subprocess.Popen(
            command,
            env={**os.environ, **environment},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
        ) as run:
            started(run)
            for line in run.stdout or ():
                tail = [*tail[-40:], line]
                show(line.strip()[:100])
        content = json.loads(bounded_file.read_text(file, MOST_RECORD_BYTES)) if file.exists() else None
        return CommandEnd(run.returncode, content, [line.rstrip() for line in tail if folder not in line])


def failure_text(recipe: str, command: Sequence[str], output: Sequence[str]) -> str:
    """Error message of a failed run: cause, command to reproduce it, output. `output`: lines of output."""
    lines = [line for line in output if line.strip() and not line.startswith(PROGRESS)]
    causes = [line for line in lines if line.startswith(CAUSES)] or lines[-1:] or ["it printed nothing"]
    sentence = f"the run with {recipe} has no record, so it cannot be compared: {causes[0].removeprefix('Error: ')}"
    rest = [line for line in lines if line != causes[0]]
    return "\n".join([sentence, f"To reproduce it: {shlex.join(command)}", *(["", *rest] if rest else [])])


def loss_text(loss: LossEstimate) -> str:
    """For a table: "2.41 ± 0.0123", with the half width of the interval; "2.41" without one, or "diverged"."""
    if not isfinite(loss.value):
        return "diverged"
    half = None if loss.low is None or loss.high is None else (loss.high - loss.low) / 2
    return short(loss.value) if half is None else f"{short(loss.value)} ± {short(half)}"


def loss_note(found: Comparison, seeds: int) -> str:
    """The meaning of the loss columns: metric, averaged values and interval."""
    rows = [each for row in found.rows for each in (row.loss_at_equal_time, row.loss_at_equal_steps) if each]
    if found.metric is None or not rows:
        return NO_LOSS
    counts = sorted({each.points for each in rows})
    values = str(counts[0]) if len(counts) == 1 else f"{counts[0]} to {counts[-1]}"
    mean = f"mean of the logged values of the last {share_text(found.last_share)} of each run's steps ({values} values)"
    note = f"loss: {found.metric}, {'last value' if found.metric in HELD_OUT else mean}"
    if not any(each.low is not None for each in rows):
        return f"{note}. For an interval, add --seeds 3 and {SEED} to the script's arguments."
    return f"{note}; ±: 95 % interval over " + (f"{seeds} seeds" if seeds > 1 else "these values, of one run")


def _cells(row: ComparisonRow, recipe: str, found: Comparison) -> dict[str, str | None]:
    """A row of the table by column; columns without a value in any row are left out."""

    def text(value: Any, show: Any) -> str | None:
        return None if value is None else show(value)

    return {
        "recipe": recipe,
        "step": seconds_text(row.step_seconds),
        "estimate": text(row.estimated_step_seconds, seconds_text),
        "waiting": share_text(row.waiting_share),
        "sent a step": bytes_text(row.bytes_per_step),
        "rate to hide": text(row.bits_per_second_to_hide, rate_text),
        "steps": str(row.steps),
        f"loss at {seconds_text(found.equal_seconds)}": text(row.loss_at_equal_time, loss_text),
        f"loss at {found.equal_steps} steps": text(row.loss_at_equal_steps, loss_text),
        f"to {found.target}": text(row.seconds_to_target, seconds_text),
        "over first": f"{row.step_ratio:.2f}",
        "over unlimited": text(row.unlimited_ratio, lambda ratio: f"{ratio:.2f}"),
        "money": text(row.money, lambda money: f"{money:.4f}"),
    }


def table_text(
    found: Comparison, recipes: Sequence[str], columns: Mapping[str, Sequence[str | None]]
) -> tuple[list[str], list[list[str]]]:
    """Header and rows, as text. columns: additional columns, with a cell for each recipe."""
    lines = [
        {**_cells(row, recipe, found), **{name: cells[place] or None for name, cells in columns.items()}}
        for place, (row, recipe) in enumerate(zip(found.rows, recipes, strict=True))
    ]
    header = [name for name in lines[0] if any(line[name] is not None for line in lines)]
    return header, [[line[name] or "-" for name in header] for line in lines]


def csv_text(found: Comparison, recipes: Sequence[str], columns: Mapping[str, Sequence[str | None]]) -> str:
    """CSV with a row for each recipe: the fields of ComparisonRow, in SI units, and the additional columns. A missing
    value is empty."""
    target = io.StringIO()
    lines = [
        {
            "recipe": recipe,
            "loss_metric": found.metric,
            **{name: value for each in ROW_FIELDS for name, value in _flat(each, getattr(row, each)).items()},
            **{name.replace(" ", "_"): cells[place] for name, cells in columns.items()},
        }
        for place, (row, recipe) in enumerate(zip(found.rows, recipes, strict=True))
    ]
    writer = csv.DictWriter(target, list(lines[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(lines)
    return target.getvalue()


def _flat(name: str, value: Any) -> dict[str, Any]:
    """The columns of a field: a loss has its value, the bounds of its interval and the number of its points."""
    if not name.startswith("loss_at"):
        return {name: value}
    parts = asdict(value) if value else dict.fromkeys(LossEstimate.__dataclass_fields__)
    return {name: parts.pop("value"), **{f"{name}_{part}": each for part, each in parts.items()}}


ROW_FIELDS = [name for name in ComparisonRow.__dataclass_fields__ if name != "recipe"]
LATEX = {**{sign: f"\\{sign}" for sign in "&%$#_{}"}, "\\": r"\textbackslash{}", "~": r"\textasciitilde{}"}
LATEX |= {"±": r"\textpm{}", "^": r"\textasciicircum{}", "µ": r"\textmu{}", "<": r"\textless{}", ">": r"\textgreater{}"}


def latex_text(header: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    """A LaTeX tabular of the table, which needs \\usepackage{booktabs}."""

    def row(cells: Sequence[str]) -> str:
        return " & ".join("".join(LATEX.get(sign, sign) for sign in cell) for cell in cells) + r" \\"

    return "\n".join(
        [
            rf"\begin{{tabular}}{{l{'r' * (len(header) - 1)}}}",
            r"\toprule",
            row(header),
            r"\midrule",
            *map(row, lines),
            r"\bottomrule",
            r"\end{tabular}",
            "",
        ]
    )


def print_table(header: Sequence[str], lines: Sequence[Sequence[str]], console: Console) -> None:
    """Print a table with a line per recipe, after an empty line."""
    shown = table(header, left=("recipe",), no_wrap=("recipe", "retained"))
    for line in lines:
        shown.add_row(*line)
    console.print()
    console.print(shown)


def _show(
    found: Comparison, header: Sequence[str], lines: Sequence[Sequence[str]], seeds: int, console: Console
) -> None:
    print_table(header, lines, console)
    console.print(
        "\nrate to hide: minimum rate of a worker's link at which a step's bytes are sent while the step computes"
    )
    if found.unlimited_step_seconds is not None:
        floor = seconds_text(found.unlimited_step_seconds)
        console.print(f"over unlimited: ratio to Dense() without a network limit, {floor} a step in this comparison")
    if "retained" in header:
        console.print(f"retained: {RETAINED}")
    console.print(loss_note(found, seeds), markup=False)


def _draw(
    header: Sequence[str],
    lines: Sequence[Sequence[str]],
    recipes: Sequence[str],
    records: Sequence[Record],
    workers: int,
    network: str | None,
    files: ComparisonFiles,
) -> None:
    named = [{**record, "recipe": recipe} for record, recipe in zip(records, recipes, strict=True)]
    if files.plot_file is not None:
        plot(named, files.plot_file)
    if files.page_file is not None:
        where = f"on {network}" if network else "without a network limit"
        write_page(
            files.page_file,
            title=f"{len(recipes)} recipes, {workers} workers, {where}",
            about="The same training from the same seed, one run after the other. Losses at equal time and equal "
            "steps are taken at the end of the shortest run.",
            header=header,
            rows=lines,
            records=named,
            command=shlex.join(["gossamer", *sys.argv[1:]]),
        )


def check_plot(hint: str = "") -> None:
    """Refuse a picture without matplotlib before a run. hint: the part that works without it."""
    try:
        check_matplotlib()
    except GossamerError as error:
        raise click.ClickException(f"{error}{hint}") from None
