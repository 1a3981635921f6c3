"""Pricing: what every recipe of the grammar would cost on a network, and which are worth a trial.

candidates         recipes of the whole grammar, and why some of them are left out
gradient_findings  what gradient statistics say of each family of recipes
foretell           seconds, bytes and memory of every candidate's step on a network
step_pricing       what candidates share: codecs timed once, models laid out once
pruning            which candidates are left to try, and why the others are not
expected_steps     how many more backward passes a recipe is expected to need than Dense(): a prior, from measured pages
thresholds         at which rates and delays another recipe would be the first
"""
