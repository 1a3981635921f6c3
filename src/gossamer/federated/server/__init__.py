"""Federated server: chooses devices, checks and sums what they send, makes the model's next version of it.

script            serve: hands events to the rounds until the federation has ended
from_strategy     rounds_for: the rounds that a strategy asks for
rounds            Rounds: pushes, versions and tasks, over what the others keep
synchronous       SynchronousRounds: a cohort at a time, with a deadline
buffered          BufferedRounds: devices that do not wait for each other
roster            Roster: who is there, who waits, who has which task
reports           those that are a part of a version, and the answers that their devices hear
uploads           parts of contributions that are still being sent, within quotas
contribution_sum  sums contributions as they come, or keeps them for a rule that must see all
admission         refuses reports and numbers that no honest device sends
selection         who is chosen
journal           what a killed server goes on from
global_model      GlobalModel: the parameters, what is published of them, and their next version
"""
