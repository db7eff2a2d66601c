"""Ranks on several GPUs through NCCL. Needs two GPUs and NCCL."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import closing
from typing import Any

import numpy as np
import pytest

from tessera.engine.collectives.nccl import NcclCollectives, NcclGroup
from tessera.engine.collectives.nccl_library import NcclLibrary
from tessera.engine.collectives.rendezvous import Rendezvous
from tessera.engine.contract.errors import ConfigError
from tessera.engine.cuda.driver import find_device
from tessera.engine.tensor import bfloat16, float16, float32
from tests.support.processes.rank_threads import (
    Ranks,
    check_columns_and_tokens,
    check_graphs,
    check_largest,
    check_own_ids,
    check_sums,
)

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(60, method="thread")]


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    if os.environ.get("TESSERA_EMULATED") == "1":
        pytest.skip("the emulation has no NCCL")
    found = find_device(1)
    if not found.usable:
        pytest.skip(f"two GPUs are needed: {found.reason}")
    try:
        library = NcclLibrary()
    except ConfigError as error:
        pytest.skip(str(error))
    from tessera.engine.cuda.device import CudaDevice

    devices = [CudaDevice(index) for index in range(2)]
    group = NcclGroup(Rendezvous(2, timeout=30.0), library)

    def join(index: int) -> NcclCollectives:
        made = NcclCollectives(index, group, devices[index])
        made.prepare(bfloat16)
        return made

    with closing(Ranks(devices, join, group)) as made:
        yield made


@pytest.mark.parametrize("shape", [(1, 12), (65, 4096)], ids=str)
@pytest.mark.parametrize("dtype", [float32, bfloat16, float16], ids=str)
def test_sums_of_two_are_those_of_the_cpu_bit_for_bit(
    ranks: Ranks, shape: tuple[int, int], dtype: np.dtype[Any]
) -> None:
    check_sums(ranks, shape, dtype)


def test_columns_are_gathered_and_tokens_told(ranks: Ranks) -> None:
    check_columns_and_tokens(ranks)


def test_the_largest_of_all_ranks(ranks: Ranks) -> None:
    check_largest(ranks)


def test_ids_are_rows_of_a_part(ranks: Ranks) -> None:
    check_own_ids(ranks)


def test_graphs_are_replayed_in_step(ranks: Ranks) -> None:
    check_graphs(ranks)
