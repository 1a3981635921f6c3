"""Advice: which recipe reaches the loss first, for a script on a network.

loss_curve         a metric over steps and virtual seconds
target             when a curve reaches what --until asks for
batch_means        a confidence interval of a noisy mean
against_baseline   a contender's speedup over Dense, and its cost in loss
race               successive halving over simulated jobs
answer             what to say of it
advice_file        all of it as JSON
page               all of it as one HTML file
chart              a picture of curves or points, as SVG in the page's colors
"""
