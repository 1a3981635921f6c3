"""Watching a run: a page that shows what its store holds, its server, and the same in a terminal.

runs           which folders are watched; their stores, opened to read
grid           the steps of all ranks, added up per rank and cell of a stretch of time
curves         what the training loop logged: least, mean, greatest per cell
summary        what a run is, how far it is, how each rank does, and how ranks' environments differ
tables         links, collectives, tensors, failures, events, printed lines
app            the server's answers, and server-sent events with what is new
guard          who may ask, and what a browser may run
server         listens, serves, makes the link
ingestion      reads the logs of runs that nobody reads into their store
terminal_view  the essentials, in a terminal
static         the page: HTML, CSS, JavaScript modules, and uPlot (MIT) under vendor

The page never writes; where a run's launcher does not fill its store, `ingestion` has telemetry do it.
"""
