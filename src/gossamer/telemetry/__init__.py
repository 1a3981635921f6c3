"""Telemetry: what a run's ranks, machines and launchers tell, kept in one SQLite file beside its logs.

schema  the tables, their columns and units; the schema's version
store   open_store: opens the file to read or to write, refuses what is newer
ingest  Ingest: reads what is new in a run's files, by tail; entries says what a line means, rows writes it;
        failures finds which end caused the others, thinning keeps the store small
collector  the launcher's thread that does so while a run goes on
"""

from gossamer.telemetry.collector import Collector
from gossamer.telemetry.ingest import Ingest
from gossamer.telemetry.store import STORE_FILE, insert, open_store

__all__ = ["STORE_FILE", "Collector", "Ingest", "insert", "open_store"]
