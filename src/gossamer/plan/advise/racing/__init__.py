"""Racing: recipes train on the same batches in virtual time, until it shows which is ahead beyond noise.

contender         one recipe in a race, and its job
race              successive halving over simulated jobs, at equal virtual seconds
elimination       who goes out, by loss and by what a virtual second of it takes this machine
loss_curve        a metric over steps and virtual seconds
target            when a curve reaches what --until asks for
batch_means       a confidence interval of a noisy mean
against_baseline  a contender's speedup over Dense(), and its cost in loss
"""
