"""Schema of a run's store: its tables, with units, and its version.

Moments are unix seconds on the first machine's clock, durations are seconds, sizes are bytes. A column that a rank or a
machine cannot know is NULL.
"""

from __future__ import annotations

SCHEMA_VERSION = 1

TABLES = """
-- What holds for the whole run, each value as JSON: recipe, workers, script, started, ended, how, machine, versions,
-- network, parameters, foretold_seconds_per_step, foretold_for (recipe, workers, network) and foretold_interval
-- (low_seconds, high_seconds, coverage)
CREATE TABLE run(key TEXT PRIMARY KEY, value TEXT) WITHOUT ROWID;

-- A rank and its latest attempt. state: starting, joined, training, waiting, saving, lost, left, finished, failed.
-- clock_offset: what was added to its machine's clock; clock_error: its bound. environment: JSON of versions and
-- settings. activity: JSON of the operation that has lasted for seconds, or was the last before `since`, else NULL
CREATE TABLE rank(
    rank INTEGER PRIMARY KEY, attempt INTEGER, machine TEXT, pid INTEGER, began REAL, ended REAL, state TEXT,
    waits_for TEXT, clock_offset REAL, clock_error REAL, environment TEXT,
    activity TEXT
);

-- The sum over `steps` steps that end with `step`. seconds = what passed; waiting: the training thread's, for others;
-- data: from a step's end to the next forward pass; compute: the rest; encode, wire, decode: of the communication
-- thread, hidden behind computing or not
CREATE TABLE step(
    rank INTEGER, step INTEGER, at REAL, steps INTEGER, seconds REAL, compute REAL, encode REAL, wire REAL, decode REAL,
    waiting REAL, data REAL, bytes_sent REAL, bytes_pulled REAL, skipped INTEGER, PRIMARY KEY(rank, step)
) WITHOUT ROWID;

-- What the training loop logged. value NULL: not finite
CREATE TABLE metric(
    name TEXT, step INTEGER, at REAL, rank INTEGER, value REAL, PRIMARY KEY(name, rank, step)
) WITHOUT ROWID;

-- Samples of a machine (rank NULL) or of a rank's process. Shares are fractions, sizes bytes, rates of a second
CREATE TABLE vital(machine TEXT, rank INTEGER, at REAL, name TEXT, value REAL);
CREATE INDEX vital_series ON vital(name, rank, at);

-- What one tensor costs and what of it is left unsent
CREATE TABLE tensor(
    rank INTEGER, step INTEGER, name TEXT, numel INTEGER, bytes REAL, residual_norm REAL, gradient_norm REAL,
    energy_share REAL
);
CREATE INDEX tensor_series ON tensor(name, rank, step);

-- The connection from rank `source` to rank `target`, as the source's kernel saw it. round_trip: smoothed, with
-- queues; bytes_per_second: while bytes were under way, NULL where too few were; used_bytes (acknowledged) and
-- retransmits (segments); these three since the row before. A first row is what was measured as the group began
CREATE TABLE link(
    source INTEGER, target INTEGER, at REAL, round_trip REAL, bytes_per_second REAL, used_bytes REAL, retransmits REAL
);
CREATE INDEX link_series ON link(source, target, at);

-- Lines that were printed. stream: stdout (a worker's two streams, in order), stderr (before it joins them), launcher.
-- level: info, warning, error. at: when the line was read
CREATE TABLE log(id INTEGER PRIMARY KEY, at REAL, rank INTEGER, attempt INTEGER, stream TEXT, level TEXT, text TEXT);

-- Ends that were no success, and errors that nothing caught. kind: killed, raised, ended, echo, stopped, uncaught;
-- caused_by: the rank whose end came first, where that is another
CREATE TABLE failure(
    at REAL, rank INTEGER, attempt INTEGER, kind TEXT, message TEXT, traceback TEXT, caused_by INTEGER
);

-- What happens rarely: attached, noticed, warning, saved, switched (the recipe), group changed, collective, skipped,
-- servers, left, closed, dropped, stacks, parted (ranks whose parameters differ), caught up (the rank of the latest
-- finding, which is over), went on (those who had hung). content: JSON
CREATE TABLE event(id INTEGER PRIMARY KEY, at REAL, rank INTEGER, kind TEXT, content TEXT);

-- Stragglers, and who hangs. cause: computing, data loading, link, stopped, garbage collection, loaded machine, hang;
-- evidence: a sentence
CREATE TABLE finding(at REAL, step INTEGER, rank INTEGER, cause TEXT, evidence TEXT);

-- How far each file of the run has been read, and what its next lines need to be understood (JSON)
CREATE TABLE source(path TEXT PRIMARY KEY, offset INTEGER, memory TEXT) WITHOUT ROWID;
"""
