"""What a strategy is: when workers talk, what they offer, what they do with the answer."""

from __future__ import annotations

from gossamer.terms import Term


class Strategy(Term):
    """When the workers talk. Subclasses are plain hyperparameters; the session acts on them."""

    kind = "strategy"
