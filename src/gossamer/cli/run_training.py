"""Training by `gossamer run`: what its options mean together, the launch, and the record at the end."""

from __future__ import annotations

import platform
import socket
from dataclasses import dataclass
from pathlib import Path

from gossamer.base.figures import check_matplotlib
from gossamer.base.run_files import RunFiles
from gossamer.base.tracing.step_range import StepRange
from gossamer.cli.console import say
from gossamer.cli.dry_run import show_plan
from gossamer.cli.elastic import check_emulation, elastic_starter, read_elasticity
from gossamer.cli.elastic_options import first_workers, most_workers
from gossamer.cli.emulation import Emulation, emulate, enter, schedule
from gossamer.cli.foretold import Forecast, read_forecast, verdict
from gossamer.cli.log_folder import new_logs, next_logs, private_directory
from gossamer.cli.machine_links import machine_links
from gossamer.cli.options import Machines, check_installed
from gossamer.cli.program import TrainingProgram
from gossamer.cli.run_end import explain_end, report, say_how_to_go_on
from gossamer.cli.script_terms import refuse_unknown_terms
from gossamer.cli.servers import Start, read_serving, starter
from gossamer.cli.trace_options import check_profiled, trace_settings
from gossamer.cli.watch import page_beside
from gossamer.comm.network import Network
from gossamer.comm.runtime.signal_handlers import handling
from gossamer.errors import PeerLost
from gossamer.events import Ended
from gossamer.launch.failure import Outcome
from gossamer.launch.job import Elasticity, Job, Serving, WorkerRange
from gossamer.launch.signal_forwarding import FORWARDED, SignalForwarder
from gossamer.launch.stack_dumps import StackRequests
from gossamer.launch.startup import Startup
from gossamer.observe import record as records
from gossamer.observe.control_sequences import SafeConsole
from gossamer.observe.live import LiveView
from gossamer.observe.telemetry import Collector
from gossamer.observe.terminal import Terminal
from gossamer.plan.emulation import EmulationPlan, Fault, Schedule, read_fault
from gossamer.version import __version__

WORKERS_NEED = ("msgspec", "safetensors")  # and this process does not


def run_training(
    *,
    workers: int | WorkerRange,
    servers: int,
    recipe: str | None,
    collective: str | None,
    json_file: Path | None,
    plot_file: Path | None,
    log_to: str | None,
    logs: Path | None,
    max_restarts: int,
    grace_seconds: float,
    token_file: Path | None,
    tls: Path | None,
    watch: bool,
    foretold: Path | None,
    network_text: str | None,
    fault_texts: tuple[str, ...],
    join: tuple[str, int] | None,
    listen: tuple[str, int] | None,
    trace: StepRange | None,
    torch_profiler: str | None,
    dry_run: bool,
    machines: Machines,
    program: TrainingProgram,
) -> int:
    """Run a script as the options of `gossamer run` say, by their names; the exit code.

    Raises click.ClickException for options that contradict each other, and GossamerError.
    """
    elasticity = read_elasticity(
        workers,
        machines,
        join=join,
        listen=listen,
        token_file=token_file,
        servers=servers,
        network_text=network_text,
    )
    refuse_unknown_terms(recipe, program.script, program.as_module, servers=servers)
    fixed = isinstance(workers, int) and elasticity is None
    check_profiled(trace, torch_profiler, first_workers(workers) * machines.nodes if fixed else None)
    forecast, serving = read_forecast(foretold), read_serving(servers, machines)
    faults = tuple(read_fault(text, most_workers(workers) + servers) for text in fault_texts)
    network = machines.emulated(network_text, most_workers(workers) + servers)
    check_installed(*WORKERS_NEED)
    if plot_file is not None:
        check_matplotlib()
    planned = None if dry_run else enter(network, faults)
    check_emulation(elasticity, planned)
    logs = logs or (next_logs() if dry_run else new_logs())
    job = Job(
        **vars(program),
        workers=first_workers(workers),
        **vars(machines),
        recipe=recipe,
        token_file=token_file,
        max_restarts=max_restarts,
        grace_seconds=grace_seconds,
        logs=logs,
        worker_module="gossamer.cli.worker",
        settings=_settings(GOSSAMER_COLLECTIVE=collective, GOSSAMER_TLS=tls, GOSSAMER_LOG_TO=log_to)
        | trace_settings(trace, torch_profiler, logs),
    )
    if dry_run:
        show_plan(job, serving, elasticity, network, fault_texts, [file for file in (json_file, plot_file) if file])
        return 0
    with page_beside(job.logs, watch):
        return _run(job, Surroundings(network, planned, faults, serving, elasticity, forecast), json_file, plot_file)


def _settings(**told: object) -> dict[str, str]:
    """Variables for the workers, of the options that were given."""
    return {name: str(value) for name, value in told.items() if value}


@dataclass(frozen=True)
class Surroundings:
    """Network, faults, servers and elasticity of a run."""

    network: Network | None  # to emulate, if any
    planned: EmulationPlan | None  # how
    faults: tuple[Fault, ...]
    serving: Serving | None  # dedicated servers, if any
    elasticity: Elasticity | None  # how workers come and go, if they do
    forecast: Forecast  # empty where none was given


def _run(job: Job, around: Surroundings, json_file: Path | None, plot_file: Path | None) -> int:
    console, aside = SafeConsole(highlight=False), SafeConsole(stderr=True, highlight=False)
    with private_directory(job.logs) as directory:
        live = LiveView(directory, job.local_ranks, Startup(job, RunFiles(directory)))
        terminal = Terminal(live, console, aside)
        facts = _facts(job, around)
        stacks = StackRequests(RunFiles(directory), job.logs, terminal.note)
        forwarder = SignalForwarder(RunFiles(directory), stacks, terminal.note)
        with handling(forwarder, *FORWARDED):
            try:
                with (
                    machine_links(job, around.elasticity, terminal.note) as links,
                    Collector(job.logs, directory, facts, terminal.note, links.others, links.uplink) as collector,
                    emulate(around.network, around.planned, terminal.note) as emulation,
                ):
                    faults = schedule(around.faults, emulation, directory, terminal.note)
                    start = (
                        elastic_starter(job, around.elasticity, emulation, live, links.others)
                        if around.elasticity is not None
                        else starter(job, around.serving, emulation, links.met)
                    )
                    outcome = _launch(start, directory, terminal, collector, live, emulation, faults, forwarder)
                    stacks.keep()
                    network = emulation.record()
                    collector.ended(_ended(outcome))
            except PeerLost as lost:  # a server that no restart brings back
                report(job, directory, records.NO_NETWORK, "failed", terminal, json_file, plot_file)
                say(f"\n{lost}", error=True)
                say_how_to_go_on(live.progress.checkpoint)
                return 1
            record = report(job, directory, network, _ended(outcome), terminal, json_file, plot_file)
            if record is not None and (told := verdict(around.forecast, record)):
                terminal.note(told)
            if outcome.exit_code:
                explain_end(job, outcome, live.progress.checkpoint)
    return outcome.exit_code


def _launch(
    start: Start,
    directory: Path,
    terminal: Terminal,
    collector: Collector,
    live: LiveView,
    emulation: Emulation,
    faults: Schedule,
    forwarder: SignalForwarder,
) -> Outcome:
    def tick() -> None:
        terminal.tick()
        forwarder.tick()
        seconds = emulation.training_seconds(live.progress.attached is not None)
        if seconds is not None:
            faults.tick(seconds)

    with terminal.progress():
        outcome = start(directory, show=terminal.line, note=collector.heard(terminal.note), tick=tick)
    for text in faults.not_begun:
        terminal.note(f"{text} never happened: training was over before.")
    return outcome


def _facts(job: Job, around: Surroundings) -> dict[str, object]:
    """What is known of a run before it begins."""
    return {
        "workers": job.workers * job.nodes,
        "servers": 0 if around.serving is None else around.serving.servers,
        "script": job.command,
        "machine": socket.gethostname(),
        "network": None if around.network is None else around.network.text,
        "versions": {"gossamer": __version__, "python": platform.python_version()},
        **around.forecast,
    }


def _ended(outcome: Outcome) -> Ended:
    if outcome.signal is not None or outcome.resumable:
        return "interrupted"
    return "failed" if outcome.exit_code else "finished"
