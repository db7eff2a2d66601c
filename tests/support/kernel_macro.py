"""KERNEL_MACRO: a macro that kernels are compiled with, for NVIDIA's sanitizers."""

from __future__ import annotations

import os

from tessera.engine.cuda import compiler


def define_kernel_macro() -> None:
    """Have later compilations define it, if the environment names one."""
    if macro := os.environ.get("KERNEL_MACRO"):
        compiler.OPTIONS += (f"-D{macro}",)
