"""Automatic recipe choice: from measurements of all ranks to a decision; independent of session, clock and transport.

measurement  measurements of one rank since the last look, as text; detects steps that wait so long that all ranks
             should measure at once
ladder       the rungs: recipes from weak to strong compression, with the steps that each needs to a loss
rung_cost    bytes, messages and computing time of a rung for a model, over meta tensors
network_fit  rate and latency of the network from all ranks' steps, robust against a slow worker
pricing      estimated seconds of a step on every rung, and seconds to a loss
loss_guard   limits on stronger compression: warm-up, changing gradients, large residuals
rule         parameters and state of the rule
decision     from state and measurements to the new state and possibly another rung; output of `gossamer explain auto`
"""
