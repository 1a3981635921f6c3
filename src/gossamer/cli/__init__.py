"""Command line: `gossamer` and its commands, one module each.

main.py               the entry point
run.py                gossamer run: a script on several workers, recorded; worker.py: the program of each worker
run_training.py       what it does, which needs torch; dry_run.py: what it would do
log_folder.py         the folder of a run's logs, which one run uses at a time
script_terms.py       compressors and strategies that the training script defines
run_end.py            the end of a run: its record, table and picture, and what to do after a failure
elastic.py            a run whose workers come and go; elastic_options.py: its options; resize.py: how many it may have
foretold.py           what a run is compared with: a forecast of gossamer explain
machine_links.py      what passes between the stores of a run's machines
watch.py              a page, or a terminal, that shows runs while they go on and after
trace.py              gossamer trace: what all ranks of a run did, on one clock; trace_options.py: runs that are traced
record.py             shows a run's record again, or makes it of what a killed run left
stacks.py             where every rank was, in Python, when last it was asked
checkpoint.py         lists a directory of checkpoints, and exports one
compare.py            the same training with several recipes
advise.py             gossamer advise: which recipe reaches the loss first, and what it costs
explain_federated.py  a round of a federation, for explain.py
explain.py, rehearse.py  predictions: of a recipe, of a model and machines that are elsewhere
simulate.py           gossamer simulate: all workers of a script in this process, in virtual time
simulated_costs.py    gossamer simulate --shapes: what thousands of workers would cost, calculated
federate.py           federations of devices that keep their data; federate_server.py: `serve`, `join` and `enroll`
federate_options.py   what simulated and served federations are told alike
doctor.py, bench.py   measurements: of hosts and links, of compressors
recipes.py            lists the parts of recipes
program.py            the script or module of a command, as one gives it to python
options.py            options that several commands share
console.py            text that breaks at words, progress lines and tables that several commands print
servers.py            dedicated parameter servers of a run
emulation.py          a run on an emulated network, with faults
resource_errors.py    too many open files, and a full disk, as a sentence
terminal_encoding.py  output where the terminal's encoding lacks a character
"""
