"""Watching a run: a page that shows its store, the page's server, and a terminal view.

runs           the watched folders, and their stores opened to read
grid           steps of all ranks, summed per rank and cell of a time window
curves         metrics of the training loop: minimum, mean and maximum per cell
summary        a run's facts and progress, the state of each rank, and differences between ranks' environments
tables         links, collectives, tensors, failures, events, printed lines
guard          authorization of requests, and restrictions for the browser
server         the application (answers, and server-sent events with news); listens, serves, makes the link
ingestion      fills the stores of runs without a launcher
terminal_view  a summary in a terminal
static         the page: HTML, CSS, JavaScript modules, and uPlot (MIT) under vendor

The page never writes; if no launcher fills a run's store, `ingestion` has telemetry do it.
"""
