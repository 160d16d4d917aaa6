"""The ``compile`` config group."""

from __future__ import annotations

import os
import shutil
import sys
import sysconfig
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from mantissa.formats import Format
from trainer.errors import UserError, check_choice, no_effect

MODES = ("off", "default", "max-autotune")


@dataclass
class Compile:
    """Whether torch.compile compiles the model's forward and backward."""

    mode: str = "off"
    """off, default, or max-autotune (slower to compile; tries kernels out)."""

    def __post_init__(self) -> None:
        check_choice("compile.mode", self.mode, MODES)

    def check(self, format: Format) -> None:
        """Check that a model in this format can be compiled.

        Raises:
            UserError: casts to narrower formats would come back, which eager code leaves out.
        """
        if self.mode != "off" and format.wide:
            why = f"torch runs eagerly in precision={format.name}, where casts to narrower formats are left out"
            raise no_effect(f"compile={self.mode}", why, "compile=off", "precision=fp32")

    def apply(
        self, modules: list[nn.Module], device: torch.device, mixed: bool = False, round_as_eager: bool = False
    ) -> None:
        """Compile the modules in place, so that their parameters keep their names.

        Args:
            modules: of the model.
            device: where they are.
            mixed: see ``compile_in_place``.
            round_as_eager: likewise.

        Raises:
            UserError: without a C++ compiler on a CPU, or a C compiler and Python's headers on CUDA.
        """
        if self.mode == "off":
            return
        if lacking := missing(device):
            on = "CPU" if device.type == "cpu" else "GPU"
            raise UserError(f"compile={self.mode} on a {on} needs {lacking}", "compile=off")
        from torch._dynamo import config

        from mantissa.step.compile import compile_in_place

        # Modules of one class share code, of which torch compiles so many graphs: without gradients,
        # with them, and with their statistics.
        config.recompile_limit = max(config.recompile_limit, 3 * len(modules))
        # Without CUDA graphs: a replay reuses their memory, which with gradient accumulation still holds the gradients
        # of the first microbatch (pytorch issue 169545).
        for module in modules:
            mode = None if self.mode == "default" else f"{self.mode}-no-cudagraphs"
            compile_in_place(module, mode=mode, mixed=mixed, round_as_eager=round_as_eager)

    def graphs_kept(self) -> AbstractContextManager[Any]:
        """Return a context in which nothing is compiled: what has no graph yet runs eagerly.

        For batches of other sizes than training has: torch would compile a second graph, for any size.
        """
        return nullcontext() if self.mode == "off" else torch.compiler.set_stance("eager_on_recompile")


def missing(device: torch.device) -> str:
    """Return what torch.compile needs on a device and this machine lacks, with the package that has it; empty: nothing.

    On CUDA and ROCm that is what Triton builds its part that calls the driver with (its runtime/build.py).
    """
    if device.type == "cpu":
        return "" if any(map(shutil.which, ("c++", "g++", "clang++"))) else "a C++ compiler (apt install g++)"
    if device.type != "cuda":
        return ""
    lacking = []
    named = os.environ.get("CC")
    if not any(map(shutil.which, [named] if named else ["gcc", "clang"])):
        lacking.append(f"the C compiler that CC={named} names" if named else "a C compiler (apt install gcc)")
    scheme = sysconfig.get_default_scheme().replace("posix_local", "posix_prefix")  # Debian's own, as Triton has it
    headers = sysconfig.get_paths(scheme)["include"]
    if not os.path.exists(os.path.join(headers, "Python.h")):
        package = "python{}.{}-dev".format(*sys.version_info)
        lacking.append(f"Python.h in {headers} (apt install {package})")
    return " and ".join(lacking)
