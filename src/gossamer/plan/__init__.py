"""Planning: bytes, seconds and loss of a run before it begins.

estimate/   estimated bytes and seconds of a step
profile/    measured work of a script's step
advise/     recommendation of a recipe: candidates, prices, a race, an answer
simulate/   all workers of a script in this process, in virtual time
rehearse/   a model whose layers sleep instead of computing
emulation/  slow networks on this machine
doctor/     a check of this machine and its links
bench/      benchmarks of compressors

study       every recipe with every seed: stored runs, and estimates over the seeds
"""
