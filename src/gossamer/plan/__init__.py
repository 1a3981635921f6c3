"""Planning: bytes, seconds and loss of a run before it begins.

cost/       bytes and seconds of a step that no worker has made
profile/    the work that a script does in a step, measured
advise/     candidates of the grammar, their prices, a race, an answer
simulate/   all workers of a script in this process, in virtual time
rehearse/   a model whose layers sleep instead of computing
emulation/  slow networks on this machine
doctor/     a check of this machine and its links
bench/      benchmarks of compressors

retained_benefit  share of the benefit of communication that a recipe keeps
"""
