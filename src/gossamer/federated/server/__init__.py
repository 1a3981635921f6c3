"""Federated server: chooses devices, checks and sums what they send, makes the model's next version of it.

script            serve: hands events to the rounds until the federation has ended
from_strategy     rounds_for: the rounds that a strategy asks for
rounds            Rounds: pushes, versions and tasks, over what the others keep
synchronous       SynchronousRounds: a cohort at a time, with a deadline
buffered          BufferedRounds: devices that do not wait for each other
roster            Roster: who is there, who waits, who has which task
contributions     what devices send, from its first part until it is in a sum
rounds_privacy    RoundsPrivacy: what a strategy's privacy makes of selection, limits and sums
selection         who is chosen; gathered: how many are here of what rounds wait for
journal           what a killed server goes on from
kept_rounds       KeptRounds: the part of rounds that a journal keeps
global_model      GlobalModel: the parameters, what is published of them, and their next version
"""
