"""Telemetry: what a run's ranks, machines and launchers tell, kept in one SQLite file beside its logs.

schema  the tables, their columns and units; the schema's version
store   open_store: opens the file to read or to write, refuses what is newer
stragglers  names the rank that all others wait for, and why
findings    reads what that takes out of a store, and writes it down
"""

from gossamer.telemetry.store import STORE_FILE, insert, open_store

__all__ = ["STORE_FILE", "insert", "open_store"]
