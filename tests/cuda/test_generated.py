"""Headers made from Python declarations."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest

from tessera.engine.contract.sampling_params import ROW_PARAMETERS, RowFlag
from tessera.engine.contract.sampling_row import PADDING_ROW, ROW_ALIGNMENT, SAMPLING_ROW
from tessera.engine.cuda.generated import HEADERS, c_enum, c_struct
from tessera.engine.ops.cuda.registry import all_specs

assert all_specs()  # which declares the headers
ROW_HEADER = HEADERS["generated/sampling_row.cuh"].text
needs_compiler = pytest.mark.skipif(shutil.which("g++") is None, reason="compiled with g++")


def output_of(source: str, folder: Path) -> str:
    (folder / "main.cc").write_text(source)
    subprocess.run(["g++", "-std=c++17", "-o", folder / "main", folder / "main.cc"], check=True)
    return subprocess.run([folder / "main"], capture_output=True, text=True, check=True).stdout


@needs_compiler
def test_c_reads_from_a_row_what_python_wrote(tmp_path: Path) -> None:
    row = PADDING_ROW.copy()
    values = {name: 3 + index for index, name in enumerate(SAMPLING_ROW.names or ())}
    for name, value in values.items():
        row[name] = value
    numbers = ", ".join(map(str, row.tobytes()))
    prints = "".join(f'std::printf("{name} %d\\n", static_cast<int>(row.{name}));\n' for name in values)
    source = f"""
        #include <cstdio>
        #include <cstring>
        {ROW_HEADER}
        int main() {{
          const unsigned char bytes[] = {{{numbers}}};
          SamplingRow row;
          static_assert(sizeof(row) == sizeof(bytes) && alignof(SamplingRow) == {ROW_ALIGNMENT}, "");
          std::memcpy(&row, bytes, sizeof(row));
          {prints}
          std::printf("flag %u\\n", RowFlag::FILTERED | RowFlag::LOGPROBS);
        }}"""
    printed = dict(line.split() for line in output_of(source, tmp_path).splitlines())
    assert printed == {
        **{name: str(value) for name, value in values.items()},
        "flag": str(RowFlag.FILTERED | RowFlag.LOGPROBS),
    }


@pytest.mark.parametrize(
    ("dtype", "alignment"),
    [
        (np.dtype([("a", "<i4"), ("b", "<u8")]), 4),  # not aligned
        (np.dtype([("a", "<i2")]), 2),  # no such type in kernels
        (np.dtype([("a", ">i4")]), 4),
        (np.dtype({"names": ["a", "b"], "formats": ["<i4", "<i4"], "offsets": [0, 8], "itemsize": 16}), 16),  # a gap
        (np.dtype([("a", "<i4")]), 16),  # the next in an array would not be aligned
    ],
)
def test_a_dtype_that_c_cannot_have_is_refused(dtype: np.dtype[np.void], alignment: int) -> None:
    with pytest.raises(ValueError, match="Name"):
        c_struct("Name", dtype, alignment)


def test_every_parameter_is_a_field_of_the_row_and_of_the_struct() -> None:
    fields = SAMPLING_ROW.fields
    assert fields is not None
    for name, parameter in ROW_PARAMETERS.items():
        assert fields[name][0] == np.dtype(parameter.type)
        assert f" {name};" in ROW_HEADER
    assert SAMPLING_ROW.itemsize % ROW_ALIGNMENT == 0


def test_an_enum_has_its_members() -> None:
    assert "FILTERED = 2u" in c_enum("RowFlag", RowFlag)
