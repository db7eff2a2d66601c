"""A device that says it is an H200."""

from __future__ import annotations

from typing import Any

from tessera.engine.cuda.kernel import KernelSpec, LaunchConfig
from tests.cuda.launches.written import WritingDevice

H200 = (132, 66, 39, 30, 22, 17, 15, 15)  # clusters of 1, 2, ... blocks that run at a time
SHARED_BYTES = 227 << 10


class Sm90Device(WritingDevice):
    def __init__(self, clusters: tuple[int, ...] = H200) -> None:
        super().__init__(clusters[0], "90a", clusters=True)
        self.max_shared_bytes = SHARED_BYTES
        self.clusters = clusters

    def clusters_at_once(self, spec: KernelSpec[Any], template: tuple[str, ...], config: LaunchConfig) -> int:
        return self.clusters[config.cluster - 1]
