"""Federated server: chooses devices, checks and sums what they send, makes the model's next version of it.

script            serve: hands events to the rounds until the federation has ended
rounds            Rounds: who has which task, whose report came, when a version is made of them
synchronous       SynchronousRounds: a cohort at a time, with a deadline
contribution_sum  sums contributions as they come, or keeps them for a rule that must see all
admission         refuses reports and numbers that no honest device sends
selection         who is chosen
global_model      GlobalModel: the parameters, what is published of them, and their next version
"""
