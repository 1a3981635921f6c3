"""Compile what is written in C++ beside the modules that use it; without a compiler they do without, or say so."""

from __future__ import annotations

import runpy
import sysconfig
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface


class NativeHook(BuildHookInterface):  # type: ignore[type-arg]
    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        root = Path(self.root)
        build = runpy.run_path(str(root / "kernels-src" / "build.py"))
        for product, compile_it in (
            (build["KERNELS"], build["compile_kernels"]),
            (build["SWITCH"], build["compile_switch"]),
        ):
            try:
                built = compile_it(root)
            except build["BuildError"] as error:
                self.app.display_warning(f"{Path(product).name} is left out: {error}")
                continue
            platform = sysconfig.get_platform().replace("-", "_").replace(".", "_")
            build_data |= {"pure_python": False, "tag": f"py3-none-{platform}"}
            if version == "standard":  # an editable installation finds it in the sources
                build_data["force_include"][str(built)] = product
