"""Command line: `gossamer` and its commands, one module each.

main.py               the entry point; a command is registered by its line in COMMANDS
run.py                gossamer run: a script on several workers, recorded; worker.py: the program of each worker
run_training.py       what it does, which needs torch, until the record; dry_run.py: what it would do
launchers.py          how a run's workers are started: a fixed number, with servers, elastic
log_folder.py         the folder of a run's logs, which one run uses at a time
script_terms.py       compressors and strategies that the training script defines
resize.py             how many workers an elastic run may have
foretold.py           a forecast of gossamer explain, compared with the run
watch.py              a page, or a terminal, that shows runs while they train and after
trace.py              gossamer trace: what all ranks of a run did, on one clock
record.py             shows a run's record again, or makes it of what a killed run left
stacks.py             where every rank was, in Python, when last it was asked
checkpoint.py         lists a directory of checkpoints, and exports one
compare.py            the same training with several recipes
advise.py             gossamer advise: which recipe reaches the loss first, and what it costs
explain_federated.py  a round of a federation, for explain.py
explain.py, rehearse.py  predictions: of a recipe, of a model and machines that are elsewhere
simulate.py           gossamer simulate: all workers in this process, in virtual time; or thousands, calculated
federate.py           federations of devices that keep their data; federate_server.py: `serve`, `join` and `enroll`
federate_options.py   options of simulated and served federations
doctor.py, bench.py   measurements: of hosts and links, of compressors
recipes.py            lists the parts of recipes
program.py            the script or module of a command, as one gives it to python
options.py            options that several commands share
console.py            text that breaks at words, progress lines and tables that several commands print
emulation.py          a run on an emulated network, with faults
"""
