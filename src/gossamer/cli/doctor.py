"""`gossamer doctor`: describes the machines and measures the links between them, before a run."""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.table import Table
from rich.text import Text

from gossamer.base.units import bytes_text, ranks_text, seconds_text
from gossamer.cli import doctor_link
from gossamer.cli.console import ShowText, progress, table
from gossamer.cli.emulation import Emulation, emulate, enter
from gossamer.cli.join import read_link
from gossamer.cli.options import (
    FiniteRange,
    Machines,
    check_certificates,
    emulation_option,
    machine_options,
    output_option,
)
from gossamer.comm.tls_contexts import tls_contexts
from gossamer.launcher.fixed_run import launch
from gossamer.launcher.job import MOST_WORKERS, Job
from gossamer.observe.control_sequences import SafeConsole
from gossamer.plan import doctor as package
from gossamer.plan.doctor import (
    VERSIONS,
    DoctorReport,
    HostReport,
    PairReport,
    differing,
    rate_text,
    read_report,
    round_trip_text,
    verdict,
)
from gossamer.version import __version__

WORKER = Path(package.__file__).with_name("worker.py")
ONLY_PACED = (
    "{network} cannot be emulated on this machine, so it cannot be measured: {reason}. Leave out --network to measure "
    "this machine without emulation; `gossamer explain --network` needs no emulation."
)


@click.command("doctor")
@click.argument("link", required=False, metavar="[LINK|@FILE|-]")
@click.option(
    "--workers", type=click.IntRange(1, MOST_WORKERS), help="Workers on this machine.  [default: 2; 1 with --nnodes]"
)
@emulation_option
@machine_options
@click.option(
    "--seconds",
    type=FiniteRange(0, 3600, min_open=True),
    default=5.0,
    show_default=True,
    help="Total time of sending; at least 0.4 per pair.",
)
@output_option("json", "Also write the report as JSON.")
@click.option(
    "--tls",
    type=click.Path(path_type=Path),
    callback=check_certificates,
    help="The certificates of LINK's run.",
)
def doctor(
    link: str | None,
    workers: int | None,
    network_text: str | None,
    machines: Machines,
    seconds: float,
    json_file: Path | None,
    tls: Path | None,
) -> None:
    """Measure round trip and bandwidth between every pair of workers, and show the machine of each.

    The measurements use TCP on the interface that training would use. Exit code 1: a pair of workers cannot connect.

    With the LINK of a run, show instead how this machine would reach the run and each of its workers. Nothing joins,
    and the link is not used up. Exit code 1: workers of this machine could not join.
    """
    if link is not None:
        sys.exit(_examine_link(link, tls, json_file))
    workers = workers or (2 if machines.nodes == 1 else 1)
    if workers * machines.nodes < 2:
        raise click.UsageError("One worker has no peer to measure: write --workers 2, or more.")
    network = machines.emulated(network_text, workers)
    planned = enter(network, ())
    if network is not None and planned is not None and planned.emulation == "paced":
        raise click.ClickException(ONLY_PACED.format(network=network.text, reason=planned.reason))
    with tempfile.TemporaryDirectory(prefix="gossamer-doctor-") as folder, progress("starting workers") as print_text:
        job = Job(
            script=WORKER,
            arguments=(str(Path(folder, "report.json")), f"--seconds={seconds}"),
            workers=workers,
            **vars(machines),
            logs=Path(folder, "logs"),
        )
        with emulate(network, planned, print_text) as emulation:
            report = _examine(emulation.place(job), Path(folder), print_text)
    _show(report, SafeConsole(highlight=False))
    if json_file is not None:
        json_file.write_text(json.dumps(_record(report, emulation), indent=1) + "\n", encoding="utf-8")
    sys.exit(0 if report.healthy else 1)


def _examine_link(link: str, tls_folder: Path | None, json_file: Path | None) -> int:
    """Show how this machine would reach the run of a link. Returns the exit code."""
    report = doctor_link.examine(read_link(link), tls_contexts(tls_folder))
    doctor_link.show(report, json_file)
    return 0 if report.healthy else 1


def _examine(job: Job, folder: Path, print_text: ShowText) -> DoctorReport:
    def show(rank: int, line: str) -> None:
        if line.startswith("pair "):  # other lines are torch's; they are in the logs only
            print_text(line)

    directory = folder / "run"
    directory.mkdir()
    outcome = launch(job, directory, show=show, note=print_text, tick=lambda: None)
    if outcome.failure is not None:
        raise click.ClickException(f"no measurement: {outcome.failure}")
    if outcome.exit_code:
        sys.exit(outcome.exit_code)
    return read_report(folder / "report.json")


def _show(report: DoctorReport, console: Console) -> None:
    console.print(_pairs(report.pairs))
    console.print()
    console.print(_hosts(report.hosts))
    console.print(f"\nAll run {_alike(report.hosts)}.", style="dim", soft_wrap=True)
    for sentence, ranks in _missing_kernels(report.hosts).items():
        console.print(Text(f"{ranks_text(ranks)}: {sentence}", style="yellow"), soft_wrap=True)
    for pair in report.pairs:
        for problem in pair.problems:
            console.print(Text(problem, style="red"), soft_wrap=True)
    if report.join_problem is not None:
        console.print(Text(report.join_problem, style="red"), soft_wrap=True)
    if report.join_seconds is not None:
        console.print(
            f"A process group of all workers ({report.backend}) was created in {seconds_text(report.join_seconds)}."
        )
    style = "bold" if report.healthy else "bold red"
    console.print(Text(verdict(report), style=style), soft_wrap=True)


def _pairs(pairs: Sequence[PairReport]) -> Table:
    shown = table(("ranks", "round trip", "median", "forth", "back"))
    for pair in pairs:
        cells = (
            _text(pair.minimum_round_trip_seconds, round_trip_text),
            _text(pair.median_round_trip_seconds, round_trip_text),
            _text(pair.forth_bits_per_second, rate_text),
            _text(pair.back_bits_per_second, rate_text),
        )
        shown.add_row("{}-{}".format(*pair.ranks), *cells, style="red" if pair.problems else None)
    return shown


def _text(value: float | None, text: Callable[[float], str]) -> str:
    return "-" if value is None else text(value)


def _hosts(hosts: Sequence[HostReport]) -> Table:
    """Table of the hosts. Versions are shown only if they differ, highlighted; empty columns are left out."""
    different = differing(hosts)
    cells = [{name: getattr(host, name) or "none" for name in different} | _cells(host) for host in hosts]
    columns = ["rank", *(name for name in cells[0] if name != "rank" and any(each[name] for each in cells))]
    shown = table(columns, no_wrap=("interface", "address", "clock"))
    for each in cells:
        shown.add_row(*(Text(each[name] or "-", style="bold yellow" if name in different else "") for name in columns))
    return shown


def _cells(host: HostReport) -> dict[str, str]:
    clock = host.clock_offset_seconds
    return {
        "rank": str(host.rank),
        "host": host.name,
        "interface": host.interface or "",
        "address": host.address,
        "cores": str(host.cores),
        "load": f"{host.load_average:.1f}",
        "memory": bytes_text(host.memory_bytes),
        "gpus": ", ".join(host.gpus),
        "clock": "" if clock is None or host.rank == 0 else f"{1000 * clock:+.2f} ms",
    }


def _missing_kernels(hosts: Sequence[HostReport]) -> dict[str, list[int]]:
    """Reasons of missing kernels, each with its ranks."""
    found: dict[str, list[int]] = {}
    for host in hosts:
        if host.missing_kernels:
            found.setdefault(host.missing_kernels, []).append(host.rank)
    return found


def _alike(hosts: Sequence[HostReport]) -> str:
    """The versions that are the same on all hosts."""
    alike = [name for name in VERSIONS if name not in differing(hosts) and getattr(hosts[0], name)]
    return ", ".join(f"{name} {getattr(hosts[0], name)}" for name in alike)


def _record(report: DoctorReport, emulation: Emulation) -> dict[str, Any]:
    network = emulation.network
    return {
        "gossamer": __version__,
        "workers": len(report.hosts),
        "network": network.text if network is not None else None,
        "emulation": emulation.name,
        "verdict": verdict(report),
        **asdict(report),
    }
