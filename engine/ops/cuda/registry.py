"""All kernels of all groups, for the tests and for compiling them before they are needed."""

from __future__ import annotations

from engine.cuda.kernel import Instantiation, KernelSpec
from engine.ops.cuda import activation, attention, elementwise, encoder, linear, norm, random, sampling, softmax
from engine.ops.cuda import attention_prefill_hopper as prefill_hopper

GROUPS = (linear, attention, prefill_hopper, norm, activation, elementwise, softmax, random, sampling, encoder)
ENCODER_GROUPS = (linear, norm, activation, elementwise, encoder)  # all that a text encoder launches


def all_specs() -> tuple[KernelSpec, ...]:
    """The description of every kernel in `cuda_src/`."""
    return tuple(spec for group in GROUPS for spec in group.SPECS)


def all_instantiations(dtypes: tuple[str, ...], *, encoder_only: bool = False) -> list[Instantiation]:
    """Every kernel that the operations can launch for elements of these C types ('float', '__nv_bfloat16')."""
    groups = ENCODER_GROUPS if encoder_only else GROUPS
    return [pair for group in groups for pair in group.instantiations(dtypes)]
