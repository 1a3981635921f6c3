"""hatchling as a build backend that answers pip's question for metadata without compiling.

hatchling omits these hooks if pip asks, because a project's own hooks could change the dependencies. pip then builds
the whole wheel behind "Preparing metadata". The hook of this project changes no metadata, so pip compiles behind
"Building wheel" and reads the dependencies within a second.
"""

import os

os.environ.pop("PIP_BUILD_TRACKER", None)

from hatchling.build import *  # noqa: F403
