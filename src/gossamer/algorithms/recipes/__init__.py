"""Recipes: one strategy, one compressor and one topology, in Python and as text.

recipe              Recipe; `resolve` completes what a user wrote; `automatic` says whether it is chosen while training
auto                Auto, in the place of a recipe that is chosen while training
parser              text to terms, by Python's syntax tree; nothing is evaluated
nodes               compression between nodes, written in the topology, becomes the compressor
catalog             every term there is by name, the presets, an example of each
other_names         what other libraries and papers call a method, and the recipe that it is here
registry            terms of scripts and of installed packages: register, entry points
fields              signatures and argument types, from a term's dataclass fields
validation          refuses types, nesting and pairs that mean nothing
advice_reference    the recipe that @advice.json means
wrapping            Feedback, Sharded, SparseSum and Route around a compressor, where it needs them or they save bytes
"""

from gossamer.algorithms.recipes.catalog import PRESETS, describe
from gossamer.algorithms.recipes.fields import signature
from gossamer.algorithms.recipes.parser import parse
from gossamer.algorithms.recipes.recipe import KINDS, Recipe, automatic, resolve
from gossamer.algorithms.recipes.validation import LONGEST_TEXT

__all__ = ["KINDS", "LONGEST_TEXT", "PRESETS", "Recipe", "automatic", "describe", "parse", "resolve", "signature"]
