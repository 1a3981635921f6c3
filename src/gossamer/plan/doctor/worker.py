"""Doctor's worker, run as `gossamer run plan/doctor/worker.py REPORT.json --seconds S`."""

from __future__ import annotations

import argparse
import json
import os
import secrets
import time
from collections.abc import Sequence
from contextlib import closing
from dataclasses import asdict, replace
from pathlib import Path

from gossamer.comm import environment
from gossamer.comm.environment.store import RendezvousStore
from gossamer.errors import ConnectError
from gossamer.plan.doctor.host import describe
from gossamer.plan.doctor.link_statistics import direction_seconds, pairs
from gossamer.plan.doctor.pair_probe import Probe
from gossamer.plan.doctor.ping_link import PingListener
from gossamer.plan.doctor.report import DoctorReport, HostReport, PairReport, host_from, write_report

RENDEZVOUS_SECONDS = 30.0  # workers start within a few
TOKEN_BYTES = 16


def main(args: argparse.Namespace) -> None:
    began = time.monotonic()
    job = environment.detect(os.environ)
    store = _store(job)
    hosts, found = _probe(job, store, args.seconds)
    report = DoctorReport(hosts=_with_clocks(hosts, found), pairs=tuple(found), seconds=time.monotonic() - began)
    if report.healthy:
        report = _joined(job, report)
    if job.local_rank == 0:
        write_report(args.report, report)
    _leave(job, store)


def _store(job: environment.JobEnvironment) -> RendezvousStore:
    if job.master_address is None or job.master_port is None:
        raise ConnectError("A world of one has no pairs to measure. Start `gossamer doctor --workers 2`, or more.")
    launcher_serves = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    serves = job.rank == 0 and not launcher_serves
    port = job.master_port + (0 if launcher_serves else 1)  # at rank 0's own the workers meet that join
    return RendezvousStore("doctor", job.master_address, port, serves=serves, seconds=RENDEZVOUS_SECONDS)


def _probe(
    job: environment.JobEnvironment, store: RendezvousStore, seconds: float
) -> tuple[list[HostReport], list[PairReport]]:
    mine = describe(job)
    if job.rank == 0:
        store.pin("token", secrets.token_hex(TOKEN_BYTES))
    token = bytes.fromhex(store.read("token", RENDEZVOUS_SECONDS))
    with closing(PingListener(mine.address, token)) as listener:
        said = json.dumps({"host": asdict(mine), "port": listener.port})
        everyone = [json.loads(each) for each in store.everyone("host", job.rank, job.world, said, RENDEZVOUS_SECONDS)]
        probe = Probe(
            rank=job.rank,
            store=store,
            listener=listener,
            token=token,
            addresses=[(each["host"]["address"], each["port"]) for each in everyone],
            seconds=direction_seconds(seconds, job.world),
        )
        found = probe.measure(pairs(job.world))
    return [host_from(json.dumps(each["host"])) for each in everyone], found


def _joined(job: environment.JobEnvironment, report: DoctorReport) -> DoctorReport:
    """Join the process group that training would use, as it would be made."""
    began = time.monotonic()
    try:
        backend = environment.join(job, RENDEZVOUS_SECONDS)
    except ConnectError as error:
        return replace(report, join_problem=str(error))
    return replace(report, backend=backend, join_seconds=time.monotonic() - began)


def _leave(job: environment.JobEnvironment, store: RendezvousStore) -> None:
    """Rank 0 leaves last, since the store may be in its process."""
    store.pin(f"end/{job.rank}", "")
    if job.rank == 0:
        for rank in range(job.world):
            store.read(f"end/{rank}", RENDEZVOUS_SECONDS)


def _with_clocks(hosts: Sequence[HostReport], found: Sequence[PairReport]) -> tuple[HostReport, ...]:
    """Rank 0 was in a pair with each of the others, as the first."""
    offsets = {pair.ranks[1]: pair.clock_offset_seconds for pair in found if pair.ranks[0] == 0} | {0: 0.0}
    return tuple(replace(host, clock_offset_seconds=offsets[host.rank]) for host in hosts)


if __name__ == "__main__":
    options = argparse.ArgumentParser(description="One worker of the doctor.")
    options.add_argument("report", type=Path)
    options.add_argument("--seconds", type=float, required=True)
    main(options.parse_args())
