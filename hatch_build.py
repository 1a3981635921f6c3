"""Compile `gossamer-switch` beside the lab's modules, where there is a C++ compiler; without one the lab says so."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

SOURCE = "kernels-src/switch.cpp"
PROGRAM = "gossamer/lab/gossamer-switch"
COMPILERS = (os.environ.get("CXX", ""), "c++", "g++", "clang++")


class SwitchHook(BuildHookInterface):  # type: ignore[type-arg]
    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        compiler = next(filter(None, map(shutil.which, filter(None, COMPILERS))), None)
        if not sys.platform.startswith("linux") or compiler is None:
            self.app.display_warning("gossamer-switch is left out: it needs Linux and a C++ compiler (g++ or clang++)")
            return
        program = Path(self.root, "src", PROGRAM)
        draft = program.with_name(f".{program.name}-{os.getpid()}")
        command = [compiler, "-O2", "-std=c++17", "-o", str(draft), str(Path(self.root, SOURCE))]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            self.app.display_warning(f"gossamer-switch is left out: {compiler} failed\n{done.stderr}")
            return
        os.replace(draft, program)  # one that runs keeps its own file
        platform = sysconfig.get_platform().replace("-", "_").replace(".", "_")
        build_data |= {"pure_python": False, "tag": f"py3-none-{platform}"}
        if version == "standard":  # an editable installation finds it in the sources
            build_data["force_include"][str(program)] = PROGRAM
