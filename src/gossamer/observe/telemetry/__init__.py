"""Telemetry: what a run's ranks, machines and launchers tell, kept in one SQLite file beside its logs.

schema  the tables, their columns and units; the schema's version
store   open_store: opens the file to read or to write, refuses what is newer
ingest  Ingest: reads what is new in a run's files, by tail; entries says what a line means, rows writes it;
        failures finds which end caused the others, thinning keeps the store small
clock_offset  what another machine's clock shows, with a bound of the error
uplink  what a launcher that joined a run on another machine sends to the first one; machines: how it is taken in there;
        batches: rows on their way; meeting: how machines of a fixed number find the first one
collector  the launcher's thread that does so while a run goes on
stragglers  names the rank that all others wait for, and why; findings reads what that takes, and writes it down
hangs   names the rank that others have waited for too long, and where: the root of their wait_for_graph; hang_watch
        looks for it in the store, tells it, and has all stacks dumped
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
