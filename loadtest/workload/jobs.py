"""The requests of a run in one file, written before it starts, so that client processes only read and send."""

from __future__ import annotations

import mmap
from collections.abc import Iterable
from pathlib import Path

import msgspec


class Job(msgspec.Struct, array_like=True):
    """Requests that one client sends one after the other.

    Attributes:
        body: JSON of the first request.
        turns: what the user says afterwards, each sent with the conversation up to then.
    """

    body: bytes
    turns: list[str] = []


def write_jobs(path: Path, jobs: Iterable[Job]) -> list[int]:
    """-> offsets in the file: job i lies between offsets[i] and offsets[i + 1]."""
    encoder = msgspec.msgpack.Encoder()
    offsets = [0]
    with path.open("wb") as file:
        for job in jobs:
            offsets.append(offsets[-1] + file.write(encoder.encode(job)))
    return offsets


class JobFile:
    """The jobs that `write_jobs` wrote, memory-mapped."""

    def __init__(self, path: str, offsets: list[int]) -> None:
        with open(path, "rb") as file:
            self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        self._offsets = offsets
        self._decoder = msgspec.msgpack.Decoder(Job)

    def __len__(self) -> int:
        return len(self._offsets) - 1

    def __getitem__(self, index: int) -> Job:
        return self._decoder.decode(self._map[self._offsets[index] : self._offsets[index + 1]])
