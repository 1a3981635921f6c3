"""Telemetry: numbers of a run's ranks, machines and launchers, in one SQLite file next to its logs.

store       the tables, open_store, and the merging of old rows
rows        new rows of all tables, before they are written
ingest      Ingest: reads new lines of a run's files, and makes rows of them
collector   the launcher's thread that does so during a run
stragglers  names the rank that all others wait for, and the cause
hangs       names the rank that others have waited for too long, and requests all stacks
uplink      sends the rows of a launcher on another machine to the first one
batches     rows as bytes for this transfer; machines: their receiver
meeting     address exchange of a fixed number of machines

`uplink` and `meeting` are imported by launchers of runs on several machines only.
"""

from gossamer.observe.telemetry.collector import Collector
from gossamer.observe.telemetry.ingest import Ingest
from gossamer.observe.telemetry.machines import GlobalRanks, MachineDesk
from gossamer.observe.telemetry.store import STORE_FILE, insert, open_store

__all__ = [
    "STORE_FILE",
    "Collector",
    "GlobalRanks",
    "Ingest",
    "MachineDesk",
    "insert",
    "open_store",
]
