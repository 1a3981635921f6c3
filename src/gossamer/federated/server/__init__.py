"""Federated server: samples clients, checks and sums their contributions, makes the next version of the model.

rounds         Rounds: how tasks, reports and versions follow from events; serve: its script
synchronous    SynchronousRounds: a cohort at a time, with a deadline
buffered       BufferedRounds: devices that do not wait for each other, within a staleness bound
from_strategy  rounds_for: the rounds that a strategy needs; RoundPlan: how they are made
selection      sampling of clients: uniform, least trained, power of choice, within a deadline
roster         Roster: devices that are present, waiting, training, or have reported
admission      refuses contributions that no honest device sends; counts refusals
aggregation    FedAvg's weighted mean, or all contributions kept for a robust aggregator
global_model   GlobalModel: the parameters, their published form, and the step to the next version
journal        the state and log that a killed server continues from
"""
