"""Ranks through NCCL, over a library of the tests that moves the host's memory."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tessera.engine.collectives.nccl import NcclCollectives, NcclGroup
from tessera.engine.collectives.nccl_library import MULTICAST, NcclCommunicator, NcclLibrary, UniqueId
from tessera.engine.collectives.rendezvous import Rendezvous
from tessera.engine.contract.errors import ConfigError, DeviceError, RankError
from tessera.engine.tensor import CpuDevice, bfloat16, empty, float32
from tests.support.paths import ROOT
from tests.support.processes.rank_threads import Ranks, check_columns_and_tokens, check_largest, check_sums

pytestmark = [
    pytest.mark.timeout(60, method="thread"),
    pytest.mark.skipif(
        sys.platform != "linux" or shutil.which("g++") is None, reason="the library is compiled by g++ on Linux"
    ),
]


class StreamDevice(CpuDevice):
    """The host's memory, and of CUDA what NCCL is given."""

    stream = 0
    device_name = "host"

    def activate(self) -> None:
        """Nothing to make current."""


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> NcclLibrary:
    path = tmp_path_factory.mktemp("nccl") / "libnccl.so.2"
    source = ROOT / "tests" / "support" / "fakes" / "nccl_stub.cc"
    subprocess.run(["g++", "-std=c++17", "-O1", "-shared", "-fPIC", str(source), "-o", str(path)], check=True)
    return NcclLibrary(path)


def ranks_of(count: int, library: NcclLibrary) -> Ranks:
    device: Any = StreamDevice()
    group = NcclGroup(Rendezvous(count, timeout=30.0), library)

    def join(index: int) -> NcclCollectives:
        made = NcclCollectives(index, group, device)
        made.prepare(float32)
        return made

    return Ranks([device] * count, join, group)


@pytest.fixture(scope="module", params=[2, 3])
def ranks(request: pytest.FixtureRequest, library: NcclLibrary) -> Iterator[Ranks]:
    with closing(ranks_of(request.param, library)) as made:
        yield made


@pytest.mark.parametrize("dtype", [float32, bfloat16], ids=str)
def test_sums(ranks: Ranks, dtype: np.dtype[Any]) -> None:
    check_sums(ranks, (3, 4100), dtype)


def test_columns_are_gathered_and_tokens_told(ranks: Ranks) -> None:
    for _ in range(2):  # the second time with the columns that are known
        check_columns_and_tokens(ranks)


def test_the_largest_of_all_ranks(ranks: Ranks) -> None:
    check_largest(ranks)


def test_a_rank_that_fails_ends_the_others(library: NcclLibrary) -> None:
    with closing(ranks_of(2, library)) as ranks:
        alone, other = ranks.collectives

        def call(collectives: Any, device: Any) -> None:
            if collectives is other:
                raise ValueError("broken")
            collectives.all_reduce(empty((1, 8), float32, device))

        with pytest.raises((ValueError, DeviceError), match=r"broken|ncclAllReduce failed: remote process exited"):
            ranks(call)
        with pytest.raises(RankError, match="rank 1 failed: ValueError: broken"):
            alone.wait_for_all()


def test_errors_are_in_the_words_of_nccl(library: NcclLibrary, tmp_path: Path) -> None:
    with pytest.raises(DeviceError, match=r"ncclCommInitRank failed: invalid argument"):
        NcclCommunicator(library, UniqueId(), 0, 1, 0)
    assert library.version == (2, 28, 9)
    assert os.environ[MULTICAST] == "0"
    with pytest.raises(ConfigError, match="NCCL was not found; install nvidia-nccl-cu13"):
        NcclLibrary(tmp_path / "libnccl.so.2")
