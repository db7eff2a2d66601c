"""Where the emulated wgmma looks for operands, against the canonical layouts of the PTX ISA.

"Shared Memory Matrix Layout", "Strides" and "Canonical Layouts" of wgmma: with T elements of 16 bytes and layouts as in
CuTe, K-major ((8, m), (T, 2)) : ((8 T, SBO), (1, T)), MN-major ((T, 8, m), (8, k)) : ((1, T, LBO), (8 T, SBO)), of
128-byte swizzle; of others with 4 or 2 in the place of the 8 of a line. The swizzle XORs bits of the address from bit 4
on with those from bit 7 on.
"""

from __future__ import annotations

import ctypes
import shutil
import subprocess
import sys
from collections.abc import Callable

import numpy as np
import pytest

from tests.emulation.device import COMPILER, HERE

pytestmark = pytest.mark.skipif(
    sys.platform != "linux" or shutil.which(COMPILER) is None, reason=f"compiled by {COMPILER} on Linux"
)

SOURCE = """
#include "product.cc"
extern "C" unsigned place(unsigned start, unsigned lead, unsigned stride, unsigned line_bytes, int transposed,
                          unsigned outer, unsigned k) {
  return emulated::MatrixLayout{start, lead, stride, line_bytes, transposed != 0}.at(outer, k);
}
"""
T = 8  # elements of 16 bytes
Place = Callable[[int, int, int, int, int, int, int], int]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Place:
    folder = tmp_path_factory.mktemp("layouts")
    (folder / "layouts.cc").write_text(SOURCE)
    library = folder / "layouts.so"
    options = ("-std=c++20", "-w", "-fPIC", "-shared", f"-I{HERE}")
    subprocess.run([COMPILER, *options, str(folder / "layouts.cc"), "-o", str(library)], check=True)
    found = ctypes.CDLL(str(library)).place
    found.argtypes, found.restype = [ctypes.c_uint] * 7, ctypes.c_uint
    return found


def swizzled(address: int, segments: int) -> int:
    """Of lines of so many segments of 16 bytes."""
    return address ^ ((address >> 7 & (segments - 1)) << 4)


@pytest.mark.parametrize("segments", [2, 4, 8])
@pytest.mark.parametrize("transposed", [False, True], ids=["K-major", "MN-major"])
def test_operands_lie_where_the_specification_says(transposed: bool, segments: int, place: Place) -> None:
    line_bytes = segments * 16
    rng = np.random.default_rng(segments)
    for _ in range(20):
        start, lead, stride = (int(number) * 1024 for number in rng.integers(1, 32, 3))
        for outer in range(256):
            for k in range(16):
                if transposed:
                    element, row, block = outer % T, outer // T % segments, outer // T // segments
                    offset = (element + row * T) * 2 + block * lead + k % 8 * segments * T * 2 + k // 8 * stride
                else:
                    offset = outer % 8 * segments * T * 2 + outer // 8 * stride + k * 2
                expected = swizzled(start + offset, segments)
                assert place(start, lead, stride, line_bytes, transposed, outer, k) == expected
