"""Compile the C++ sources into the wheel. Without a compiler a warning names the part that is missing.

GOSSAMER_WHEEL chooses the wheel: `any` compiles nothing, a platform such as `manylinux_2_28_x86_64` compiles for it or
fails, and without the variable the wheel is for this machine.
"""

from __future__ import annotations

import os
import runpy
import sysconfig
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface


class NativeHook(BuildHookInterface):  # type: ignore[type-arg]
    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        root = Path(self.root)
        wanted = os.environ.get("GOSSAMER_WHEEL", "")
        if wanted == "any":
            return
        build = runpy.run_path(str(root / "kernels-src" / "build.py"))
        toolchain = build["Toolchain"].release(wanted, root / "build" / wanted) if wanted else None
        platform = wanted or sysconfig.get_platform().replace("-", "_").replace(".", "_")
        for product, compile_it in (
            (build["KERNELS"], build["compile_kernels"]),
            (build["SWITCH"], build["compile_switch"]),
        ):
            try:
                built = compile_it(root, toolchain)
            except build["BuildError"] as error:
                if wanted:
                    raise
                self.app.display_warning(f"{Path(product).name} is left out: {error}")
                continue
            build_data |= {"pure_python": False, "tag": f"py3-none-{platform}"}
            if version == "standard":  # an editable installation finds it in the sources
                build_data["force_include"][str(built)] = product
