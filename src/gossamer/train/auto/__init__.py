"""Automatic recipe choice: numbers of all ranks in, a decision out; knows no session, no clock and no transport.

measurement  what one rank measured since the last look, as text that travels
slowdown     when steps wait so long that all should look at once
ladder       the rungs: recipes from weak to strong compression, and how many steps each needs to a loss
rung_cost    bytes, messages and computing of a rung for a model, over meta tensors
network_fit  rate and latency of the network from all ranks' steps, unmoved by a slow worker
pricing      seconds of a step on every rung, and seconds to a loss
loss_guard   when stronger compression is not allowed: warm-up, moving gradients, large residuals
rule         its numbers, and what it remembers from look to look
decision     state and measurements in, state and perhaps another rung out
explanation  what `gossamer explain auto` tells
"""
