"""Advice: which recipe reaches the loss first, for a script on a network.

candidates         recipes of the whole grammar, and why some of them are left out
gradient_findings  what gradient statistics say of each family of recipes
foretell           seconds, bytes and memory of every candidate's step on a network
step_pricing       what candidates share: codecs timed once, models laid out once
pruning            which candidates are left to try, and why the others are not
expected_steps     how many more steps a recipe is expected to need than Dense(): a prior, from measured pages
thresholds         at which rates and delays another recipe would be the first
script_check       a few steps: whether a script logs a loss, and repeats itself
measured_links     a network from what gossamer doctor found
advisor            the stages, one after the other
contender          one recipe in a race, and its job
race               successive halving over simulated jobs, at equal virtual seconds
loss_curve         a metric over steps and virtual seconds
target             when a curve reaches what --until asks for
batch_means        a confidence interval of a noisy mean
against_baseline   a contender's speedup over Dense(), and its cost in loss
answer             what to say of it, in three lines
whole_advice       gathers what was foretold, raced and answered
advice_file        all of it as JSON, checked where it is read
page               all of it as one HTML file
charts             curves and points as SVG in the page's colors
"""
