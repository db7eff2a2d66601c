"""Weights from safetensors files, memory-mapped and with every bound checked.

Format: 8 bytes little-endian header length N, N bytes JSON (name -> dtype, shape, data_offsets
relative to the end of the header, and `__metadata__`), then the tensors' bytes
(https://github.com/huggingface/safetensors, "Format"). Read here rather than by the `safetensors`
package because its NumPy front end knows no bfloat16 views and copies every tensor.
"""

from __future__ import annotations

import itertools
import logging
import math
import mmap
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from tessera.engine.contract.errors import ModelError
from tessera.engine.contract.lfs import POINTER_ERROR, is_lfs_pointer
from tessera.engine.models.consolidated.params import CONSOLIDATED_FILE, CONSOLIDATED_INDEX, is_consolidated
from tessera.engine.models.fields import Fields, is_integer, parse_json_object, read_json_object, shown
from tessera.engine.models.weights.files import INDEX_FILE, SINGLE_FILE, why_no_weights

Array = np.ndarray[Any, Any]

MAX_HEADER_BYTES = 100 * 2**20  # the limit that the format's own library sets
MAX_DIMENSIONS = 8
MAX_FILES = 4096

logger = logging.getLogger("tessera.engine.models")

DTYPES: dict[str, np.dtype[Any]] = {
    "F64": np.dtype(np.float64),
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn),
    "F8_E5M2": np.dtype(ml_dtypes.float8_e5m2),
    "I64": np.dtype(np.int64),
    "I32": np.dtype(np.int32),
    "I16": np.dtype(np.int16),
    "I8": np.dtype(np.int8),
    "U64": np.dtype(np.uint64),
    "U32": np.dtype(np.uint32),
    "U16": np.dtype(np.uint16),
    "U8": np.dtype(np.uint8),
    "BOOL": np.dtype(np.bool_),
}


@dataclass(frozen=True)
class _Entry:
    """Where one tensor lies; `begin` counts from the start of the file."""

    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    begin: int
    nbytes: int


class SafetensorsFile:
    """One memory-mapped file; `tensor` gives views into it that copy nothing.

    Raises: ModelError naming the file, and the tensor where one is at fault.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            with path.open("rb") as file:
                self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except (OSError, ValueError) as error:
            raise ModelError(f"{path} cannot be read: {error}") from error
        if is_lfs_pointer(self._map[:64]):
            raise ModelError(f"{path} {POINTER_ERROR}")
        self._entries = _read_entries(path, self._map)

    @property
    def names(self) -> set[str]:
        return set(self._entries)

    def shape(self, name: str) -> tuple[int, ...]:
        return self._entries[name].shape

    def dtype(self, name: str) -> np.dtype[Any]:
        return self._entries[name].dtype

    def tensor(self, name: str) -> Array:
        entry = self._entries[name]
        count = math.prod(entry.shape)
        if not count:
            return np.empty(entry.shape, entry.dtype)
        return np.frombuffer(self._map, entry.dtype, count, entry.begin).reshape(entry.shape)


class Checkpoint:
    """All tensors of a model folder, in one file or several.

    Raises: ModelError naming what is missing, malformed or leads out of the folder.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        names = (CONSOLIDATED_FILE, CONSOLIDATED_INDEX) if is_consolidated(folder) else (SINGLE_FILE, INDEX_FILE)
        single, index = (folder / name for name in names)
        if single.is_file():
            file = SafetensorsFile(single)
            self._files = dict.fromkeys(file.names, file)
        elif index.is_file():
            self._files = _open_shards(folder, index)
        else:
            present = [file.name for file in folder.iterdir()]
            raise ModelError(why_no_weights(str(folder), present, names))

    @property
    def names(self) -> set[str]:
        return set(self._files)

    def spellings(self, module: str) -> tuple[str, ...]:
        """The names that a module goes by."""
        return (module,)

    def path(self, name: str) -> Path:
        return self._files[name].path

    def shape(self, name: str) -> tuple[int, ...]:
        return self._files[name].shape(name)

    def dtype(self, name: str) -> np.dtype[Any]:
        return self._files[name].dtype(name)

    def tensor(self, name: str) -> Array:
        """A read-only view of the file's bytes."""
        return self._files[name].tensor(name)


def _open_shards(folder: Path, index: Path) -> dict[str, SafetensorsFile]:
    fields = Fields(str(index), read_json_object(index))
    weight_map = fields.section("weight_map").values
    file_names = set()
    for name, file_name in weight_map.items():
        if not isinstance(file_name, str) or not _is_plain_file_name(file_name):
            raise ModelError(
                f"{index}: tensor {shown(name)} is said to be in {shown(file_name)}, "
                "but only *.safetensors files of the same folder are read"
            )
        file_names.add(file_name)
    if not file_names:
        raise ModelError(f"{index}: weight_map names no files")
    if len(file_names) > MAX_FILES:
        raise ModelError(f"{index}: weight_map names {len(file_names)} files, more than the {MAX_FILES} accepted")
    absent = sorted(name for name in file_names if not (folder / name).is_file())
    if absent:
        raise ModelError(f"{folder} lacks {', '.join(absent[:5])}, which {INDEX_FILE} names")
    files = {name: SafetensorsFile(folder / name) for name in sorted(file_names)}
    stale = sorted(name for name, file_name in weight_map.items() if name not in files[file_name].names)
    if stale:
        logger.warning("%s names %d tensors that its files lack, %s among them", index, len(stale), shown(stale[0]))
    return {name: files[file_name] for name, file_name in weight_map.items() if name in files[file_name].names}


def _is_plain_file_name(name: str) -> bool:
    plain = not any(character in name for character in "/\\\0") and not name.startswith(".")
    return plain and name.endswith(".safetensors")


def _read_entries(path: Path, data: mmap.mmap) -> dict[str, _Entry]:
    if len(data) < 8:
        raise ModelError(f"{path} is too short to be a safetensors file ({len(data)} bytes)")
    header_bytes = int.from_bytes(data[:8], "little")
    if header_bytes > MAX_HEADER_BYTES:
        raise ModelError(f"{path}: its header claims {header_bytes} bytes, more than the {MAX_HEADER_BYTES} accepted")
    start = 8 + header_bytes
    if start > len(data):
        raise ModelError(f"{path} is truncated: its header claims {header_bytes} bytes, the file has {len(data)}")
    header = parse_json_object(data[8:start], f"the header of {path}")
    header.pop("__metadata__", None)
    entries = {name: _read_entry(path, name, value, start, len(data)) for name, value in header.items()}
    _refuse_overlaps(path, entries)
    return entries


def _read_entry(path: Path, name: str, value: Any, start: int, end: int) -> _Entry:
    where = f"{path}: tensor {shown(name)}"
    if not isinstance(value, dict):
        raise ModelError(f"{where} must be described by an object, not {shown(value)}")
    dtype_name, shape, offsets = (value.get(key) for key in ("dtype", "shape", "data_offsets"))
    if not isinstance(dtype_name, str) or dtype_name not in DTYPES:
        raise ModelError(f"{where} has dtype {shown(dtype_name)}, but known are {', '.join(DTYPES)}")
    if not isinstance(shape, list) or len(shape) > MAX_DIMENSIONS or not all(is_integer(n) and n >= 0 for n in shape):
        raise ModelError(f"{where} has shape {shown(shape)}; it must be at most {MAX_DIMENSIONS} whole numbers")
    if not isinstance(offsets, list) or len(offsets) != 2 or not all(map(is_integer, offsets)):
        raise ModelError(f"{where} has data_offsets {shown(offsets)}; they must be two whole numbers")
    first, last = offsets
    if not 0 <= first <= last:
        raise ModelError(f"{where} has data_offsets {shown(offsets)}, which do not ascend from 0")
    if start + last > end:
        raise ModelError(f"{where} ends at byte {start + last}, but the file has {end}: it is truncated or malformed")
    dtype = DTYPES[dtype_name]
    if last - first != math.prod(shape) * dtype.itemsize:
        raise ModelError(f"{where}: {dtype_name} of shape {shown(shape)} does not fill its {last - first} bytes")
    return _Entry(dtype, tuple(shape), start + first, last - first)


def _refuse_overlaps(path: Path, entries: dict[str, _Entry]) -> None:
    placed = sorted((entry.begin, entry.begin + entry.nbytes, name) for name, entry in entries.items() if entry.nbytes)
    for (_, end, first), (begin, _, second) in itertools.pairwise(placed):
        if begin < end:
            raise ModelError(f"{path}: the tensors {shown(first)} and {shown(second)} overlap")
