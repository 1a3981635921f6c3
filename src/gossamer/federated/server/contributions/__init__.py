"""Contributions: what devices send, from its first part until it is in a sum.

uploads           parts of contributions that are still being sent, within quotas
admission         refuses reports and numbers that no honest device sends
attempts          counts tasks without a contribution, and explains why no version is made
contribution_sum  sums contributions as they come, keeps them for a rule that must see all, or clips and adds noise
reports           those that are a part of a version, and the answers that their devices hear
"""
