"""Command line: `gossamer` and its commands, one module each.

main.py               the entry point; a command is registered by its line in COMMANDS
run.py                gossamer run: a script on several workers, recorded; worker.py: the program of each worker
run_training.py       the run itself, which needs torch, until its record; dry_run.py: its plan
launch.py             gossamer.launch: a function on several workers, from a notebook or a script
launchers.py          launchers of a run: a fixed number of workers, with servers, elastic
log_folder.py         the folder of a run's logs, locked by one run
script_terms.py       compressors and strategies that the training script defines
join.py, invite.py    a machine joins a run by one link; links are made and revoked
resize.py, limit.py    maximum number of workers of an elastic run; bandwidth limits of a run
`forecast_file.py`    an estimate of gossamer explain, compared with the run
watch.py              a page, or a terminal view, of runs during and after training
trace.py              gossamer trace: operations of all ranks of a run, on one clock
record.py             shows a run's record, or makes it from the logs of a killed run
stacks.py             Python stacks of all ranks at their latest dump
checkpoint.py         lists a directory of checkpoints, and exports one
compare.py            the same training with several recipes; study.py: also with several seeds, stored
advise.py             gossamer advise: the recipe that reaches the loss first, and its cost
explain_federated.py  a round of a federation, for explain.py
explain.py, rehearse.py  estimates for a recipe, and for a model and machines that are not available
simulate.py           gossamer simulate: all workers in this process, in virtual time; or thousands, calculated
federate.py           federations of devices that keep their data; federate_server.py: `serve`, `join` and `enroll`
federate_options.py   options of simulated and served federations
doctor.py, bench.py   measurements: of hosts and links, of compressors; doctor_link.py: how a link's run is reached
recipes.py            lists the terms of recipes
program.py            the script or module of a command, with its arguments
options.py            options that several commands share; recipe_options.py: checks of recipes
console.py            wrapped text, progress lines and tables that several commands print
emulation.py          a run on an emulated network, with faults
"""
