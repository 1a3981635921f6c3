"""Watching a run: a page that shows what its store holds, its server, and the same in a terminal.

runs           which folders are watched; their stores, opened to read
window         a stretch of time, cut into cells
grid           the steps of all ranks, added up per rank and cell
grid_cache     grids that several pictures show are read once
curves         what the training loop logged: least, mean, greatest per cell
pictures       grids as what the page draws
summary        what a run is, how far it is, how each rank does
environments   what ranks do not have in common, of versions, platforms and settings
tables         links, tensors, failures, events
hops           a collective as pictures of who sends to whom
log_lines      what was printed, merged and filtered
news           server-sent events: what is new since
guard          who may ask, and what a browser may run
app            the server's answers
server         listens, serves, makes the link
ingestion      reads the logs of runs that nobody reads into their store
terminal_view  the essentials, in a terminal
static         the page: HTML, CSS, JavaScript modules, and uPlot (MIT) under vendor

The page never writes; where a run's launcher does not fill its store, `ingestion` has telemetry do it.
"""
