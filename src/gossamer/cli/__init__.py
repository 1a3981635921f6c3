"""Command line: `gossamer` and its commands, one module each.

main.py               the entry point
run.py                gossamer run: a script on several workers, recorded; worker.py: the program of each worker
compare.py            the same training with several recipes
explain.py, rehearse.py  predictions: of a recipe, of a model and machines that are elsewhere
doctor.py, bench.py   measurements: of hosts and links, of compressors
recipes.py            lists the parts of recipes
options.py            options that several commands share
console.py            progress lines and tables that several commands print
servers.py            dedicated parameter servers of a run
emulation.py          a run on an emulated network, with faults
terminal_encoding.py  output where the terminal's encoding lacks a character
"""
