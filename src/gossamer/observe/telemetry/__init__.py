"""Telemetry: the numbers of a run's ranks, machines and launchers, kept in one SQLite file beside its logs.

store       the tables, open_store, and the merging of old rows
rows        new rows of all tables, before they are written
ingest      Ingest: reads what is new in a run's files, and makes rows of it
collector   the launcher's thread that does so during a run
stragglers  names the rank that all others wait for, and why
hangs       names the rank that others have waited for too long, and has all stacks dumped
uplink      what a launcher that joined a run on another machine sends to the first one
batches     rows on their way there; machines: how they are taken in
meeting     how machines of a fixed number find the first one
"""

from gossamer.observe.telemetry.collector import Collector
from gossamer.observe.telemetry.ingest import Ingest
from gossamer.observe.telemetry.machines import GlobalRanks, MachineDesk
from gossamer.observe.telemetry.meeting import FirstMachine, OtherMachine
from gossamer.observe.telemetry.store import STORE_FILE, insert, open_store
from gossamer.observe.telemetry.uplink import Uplink, to_coordinator

__all__ = [
    "STORE_FILE",
    "Collector",
    "FirstMachine",
    "GlobalRanks",
    "Ingest",
    "MachineDesk",
    "OtherMachine",
    "Uplink",
    "insert",
    "open_store",
    "to_coordinator",
]
