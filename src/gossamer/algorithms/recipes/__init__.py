"""Recipes: one strategy, one compressor and one topology, in Python and as text.

recipe              Recipe; `resolve` completes a user's recipe; `automatic` tests for one that is chosen while
                    training, and `meaning` compares any two
auto                Auto, in place of a recipe that is chosen while training
parser              text to terms, by Python's syntax tree; nothing is evaluated
catalog             all terms by name, the presets, an example of each
other_names         names of methods in other libraries and papers, and the equivalent recipes
registry            terms of scripts and of installed packages: register, entry points
fields              signatures and argument types, from a term's dataclass fields
validation          rejects invalid types, nesting and pairs
advice_reference    the recipe of @advice.json
retained_benefit    share of the benefit of communication that a recipe keeps, and the measured shares
wrapping            Feedback, Sharded, SparseSum and Route around a compressor that needs them or sends fewer bytes so;
                    Hierarchical for a topology of nodes
"""

from gossamer.algorithms.recipes.parser import parse
from gossamer.algorithms.recipes.recipe import resolve

__all__ = ["parse", "resolve"]
