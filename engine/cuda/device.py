"""A CUDA device: one primary context, one stream for all work, memory, and kernels by their description."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
from cuda.bindings import driver

from tessera.engine.contract.errors import DeviceError
from tessera.engine.cuda.cache import CubinCache, default_cache_dir
from tessera.engine.cuda.compiler import Compiler, Program, group_programs
from tessera.engine.cuda.driver import (
    check,
    compute_capability,
    device_attribute,
    device_name,
    driver_error,
    find_device,
)
from tessera.engine.cuda.events import Event, Graph
from tessera.engine.cuda.kernel import Instantiation, Kernel, KernelSpec, LaunchConfig, P
from tessera.engine.cuda.memory import MemoryPool, PinnedBuffer, PoolStatistics, Returns, Transfers
from tessera.engine.cuda.small_copies import COPY_BYTES, PIECE_TYPES, CopyBytesParams, copy_config, piece_bytes
from tessera.engine.cuda.virtual_memory import VirtualMemory
from tessera.engine.tensor import Buffer, Device

ALL_SHARED_PERCENT = 100  # of the L1 that a kernel may have as shared memory
FIRST_ARCH_WITH_SUFFIX = 90  # from here on full instruction sets are named sm_90a, sm_100a, ...


CURRENT = threading.local()  # the context that is current in each thread, of whichever device


class CudaDevice(Device):
    """CUDA device `index`; methods may be called from any thread, work runs in the order of the calls.

    Attributes:
        name: `cuda:<index>`.
        device_name: such as `NVIDIA H200`.
        compute_capability: (major, minor).
        arch: what kernels are compiled for: `80`, `89`, `90a`, `120a`.
        multiprocessors: their number.
        max_shared_bytes: of shared memory a block may use, static and dynamic together.
        total_memory: bytes.
        transfers: every copy between host and device so far.
        stream: the driver's handle of the one stream.
        returns: what finalisers give back to the driver.
        virtual_memory: set by `make_releasable`.
    """

    def __init__(self, index: int = 0, cache_dir: Path | None = None) -> None:
        """Kernels are cached in `cache_dir`, by default where `default_cache_dir` says.

        Raises: DeviceError with `find_device`'s reason if the device cannot be used.
        """
        found = find_device(index)
        if not found.usable:
            raise DeviceError(found.reason)
        self._handle = handle = check(driver.cuDeviceGet, index)
        self.name = f"cuda:{index}"
        self.asynchronous = True
        self.device_name = device_name(handle)
        self.compute_capability = compute_capability(handle)
        number = self.compute_capability[0] * 10 + self.compute_capability[1]
        self.arch = f"{number}a" if number >= FIRST_ARCH_WITH_SUFFIX else str(number)
        self.multiprocessors = device_attribute(handle, "MULTIPROCESSOR_COUNT")
        self.max_shared_bytes = device_attribute(handle, "MAX_SHARED_MEMORY_PER_BLOCK_OPTIN")
        self.total_memory = int(check(driver.cuDeviceTotalMem, handle))
        self.transfers = Transfers()

        self._context: Any = check(driver.cuDevicePrimaryCtxRetain, handle)
        self.activate()
        self.stream: Any = check(driver.cuStreamCreate, driver.CUstream_flags.CU_STREAM_NON_BLOCKING)
        self._index = index
        self.returns = Returns(self.passing)
        self._pool = MemoryPool(self.activate, self.returns)
        self.virtual_memory: VirtualMemory | None = None
        self._captured: list[object] | None = None
        self._overlaps = False  # kernels that are recorded
        self._compiler = Compiler(self.arch, CubinCache(cache_dir or default_cache_dir()))
        self._kernels: dict[Instantiation, Kernel] = {}
        self._modules: list[Any] = []
        self._lock = threading.Lock()  # over the memory of kernels' parameters
        self._weights_written = False  # by the last kernel
        self._compile_lock = threading.Lock()

    def activate(self) -> Any:
        """Make the context current in the calling thread, unless it is; returns the context."""
        # No threading.local with a constructor: a collection of garbage during it frees buffers, which comes back here.
        try:
            if CURRENT.context is self._context:
                return self._context
        except AttributeError:
            pass
        check(driver.cuCtxSetCurrent, self._context)
        CURRENT.context = self._context
        return self._context

    @contextmanager
    def passing(self) -> Iterator[None]:
        """The context is current within the `with`, and then again whichever was before: for what a collection of
        garbage calls, in any thread and between any two calls of the driver."""
        check(driver.cuCtxPushCurrent, self._context)
        try:
            yield
        finally:
            check(driver.cuCtxPopCurrent)

    def see_memory_of(self, other: CudaDevice) -> None:
        """Let kernels of this device read and write the other's memory.

        Raises: DeviceError, also where `driver.sees_memory` says that they cannot.
        """
        self.activate()
        (status,) = driver.cuCtxEnablePeerAccess(other._context, 0)
        if status and status != driver.CUresult.CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED:
            raise driver_error(status, "cuCtxEnablePeerAccess", (other.name,))

    # -- memory ---------------------------------------------------------------------------------

    @property
    def pool_statistics(self) -> PoolStatistics:
        return self._pool.statistics

    def free_memory(self) -> int:
        """Bytes that the driver could still hand out; what the pool keeps is not among them."""
        self.activate()
        return int(check(driver.cuMemGetInfo)[0])

    def empty_cache(self) -> None:
        """Give freed memory that the pool keeps back to the driver."""
        self._pool.empty_cache()

    def hold_garbage(self) -> None:
        self.returns.held = True

    def release_garbage(self) -> None:
        self.returns.held = False
        self.returns.flush()

    def keep_large_memory(self) -> None:
        self._pool.keeps_large = True

    def make_releasable(self) -> None:
        """Have large pieces that are allocated from now on in `virtual_memory`."""
        self._pool.source = self.virtual_memory = VirtualMemory(self._index, self.activate)

    def allocate(self, nbytes: int) -> Buffer:
        allocation = self._pool.allocate(nbytes)
        if self._captured is not None:
            self._captured.append(allocation)
        return Buffer(self, allocation.pointer, nbytes, allocation)

    def pinned(self, nbytes: int) -> PinnedBuffer:
        """Page-locked host memory for `upload_async` and `download_async`."""
        return PinnedBuffer(nbytes, self.activate, self.returns)

    # -- copies ---------------------------------------------------------------------------------

    def upload(self, pointer: int, array: np.ndarray[Any, Any]) -> None:
        self.upload_async(pointer, array)
        self.synchronize()

    def download(self, array: np.ndarray[Any, Any], pointer: int) -> None:
        self.download_async(array, pointer)
        self.synchronize()

    def upload_async(self, pointer: int, array: np.ndarray[Any, Any]) -> None:
        """Submit a copy from contiguous page-locked memory, which must stay unchanged until it is done."""
        self.activate()
        self.transfers.uploads += 1
        self.transfers.upload_bytes += array.nbytes
        check(driver.cuMemcpyHtoDAsync, pointer, _address(array), array.nbytes, self.stream)

    def download_async(self, array: np.ndarray[Any, Any], pointer: int) -> None:
        """Submit a copy into contiguous page-locked memory, which holds it once a later event is passed."""
        self.activate()
        self.transfers.downloads += 1
        self.transfers.download_bytes += array.nbytes
        check(driver.cuMemcpyDtoHAsync, _address(array), pointer, array.nbytes, self.stream)

    def upload_small(self, pointer: int, array: np.ndarray[Any, Any]) -> None:
        """As `upload_async`, past the copies of other streams; see `cuda.small_copies`."""
        self.transfers.uploads += 1
        self.transfers.upload_bytes += array.nbytes
        self.copy_small(pointer, _address(array), array.nbytes)

    def download_small(self, array: np.ndarray[Any, Any], pointer: int) -> None:
        """As `download_async`, likewise."""
        self.transfers.downloads += 1
        self.transfers.download_bytes += array.nbytes
        self.copy_small(_address(array), pointer, array.nbytes)

    def prepared_upload(self, pointer: int, array: np.ndarray[Any, Any]) -> Callable[[], None]:
        source, nbytes = _address(array), array.nbytes
        piece = piece_bytes(pointer, source)
        kernel = Kernel(COPY_BYTES, self._kernel(COPY_BYTES, (PIECE_TYPES[piece],)).function)  # parameters of its own
        kernel.set_params(CopyBytesParams(source=source, target=pointer, size=nbytes))
        config = copy_config(nbytes, piece)
        sizes = (*config.grid, *config.block, config.shared_bytes)

        def upload() -> None:
            self.activate()
            transfers = self.transfers
            transfers.uploads += 1
            transfers.upload_bytes += nbytes
            self._weights_written = False
            check(driver.cuLaunchKernel, kernel.function, *sizes, self.stream, kernel.arguments_address, 0)

        return upload

    def copy_small(self, destination: int, source: int, nbytes: int) -> None:
        """As `copy`, likewise."""
        piece = piece_bytes(destination, source)
        params = CopyBytesParams(source=source, target=destination, size=nbytes)
        self.launch(COPY_BYTES, (PIECE_TYPES[piece],), copy_config(nbytes, piece), params)

    def copy(self, destination: int, source: int, nbytes: int) -> None:
        self.activate()
        check(driver.cuMemcpyDtoDAsync, destination, source, nbytes, self.stream)

    def fill_bytes(self, pointer: int, value: int, nbytes: int) -> None:
        self.activate()
        check(driver.cuMemsetD8Async, pointer, value, nbytes, self.stream)

    # -- order ----------------------------------------------------------------------------------

    def synchronize(self) -> None:
        self.activate()
        check(driver.cuStreamSynchronize, self.stream)

    def event(self, *, timing: bool = False) -> Event:
        return Event(self, timing=timing)

    def wait_for_weights(self, written: Event) -> None:
        """Have what is submitted from now on begin once `written`, of another stream, is passed."""
        self.activate()
        check(driver.cuStreamWaitEvent, self.stream, written.handle, 0)
        with self._lock:
            self._weights_written = True  # a kernel that overlaps the one before it reads its weights at once

    @property
    def is_capturing(self) -> bool:
        """Whether what is submitted is being recorded."""
        return self._captured is not None

    @contextmanager
    def capture(self, *, overlaps: bool = True) -> Iterator[Callable[[], Graph]]:
        """Record what is submitted inside the `with` instead of running it.

        Yields a function that, called after the `with`, returns the recorded `Graph`. Kernels used
        inside must be compiled beforehand, and nothing inside may wait for the device. Kernels whose
        description says `overlaps` read their weights before those in front of them have ended:
        False where products take for a weight what is computed inside.
        """
        self.activate()
        graphs: list[Graph] = []
        check(driver.cuStreamBeginCapture, self.stream, driver.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED)
        self._captured, self._overlaps = [], overlaps
        try:
            yield lambda: graphs[0]
        except BaseException:
            self._captured = None
            status, recorded = driver.cuStreamEndCapture(self.stream)
            if not status:  # else the error at hand has ended the recording, and a second one says nothing
                driver.cuGraphDestroy(recorded)
            raise
        allocations, self._captured = self._captured, None
        recorded = check(driver.cuStreamEndCapture, self.stream)
        try:
            graphs.append(Graph(self, recorded, allocations))
        finally:
            check(driver.cuGraphDestroy, recorded)

    # -- kernels --------------------------------------------------------------------------------

    def compile(
        self, instantiations: Sequence[Instantiation], progress: Callable[[int, int], None] | None = None
    ) -> None:
        """Compile (or find in the cache) and load these kernels, several files at a time.

        `progress` is told how many are done of how many. Raises: CompileError, DeviceError.
        """
        with self._compile_lock:
            self.activate()
            wanted = [pair for pair in dict.fromkeys(instantiations) if pair not in self._kernels]
            for spec, _ in wanted:
                if not spec.supports(self.arch):
                    raise DeviceError(f"{spec.name} does not run on {self.device_name} (sm_{self.arch})")
            done = 0
            workers = ThreadPoolExecutor(min(len(wanted), os.cpu_count() or 1) or 1, "nvrtc")
            try:
                programs = sorted(group_programs(wanted), key=self._compiler.work, reverse=True)  # the longest first
                jobs = {workers.submit(self._compiler.compile, program): program for program in programs}
                for job in as_completed(jobs):
                    cubin = job.result()
                    self._load(jobs[job], cubin.code, cubin.lowered_names)
                    done += len(jobs[job].instantiations)
                    if progress is not None:
                        progress(done, len(wanted))
            finally:
                workers.shutdown(cancel_futures=True)

    def _load(self, program: Program, code: bytes, lowered_names: dict[str, str]) -> None:
        module = check(driver.cuModuleLoadData, code)
        self._modules.append(module)
        attributes = driver.CUfunction_attribute
        for spec, template in program.instantiations:
            lowered = lowered_names[spec.instantiation(template)]
            function = check(driver.cuModuleGetFunction, module, lowered.encode())
            static = check(driver.cuFuncGetAttribute, attributes.CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES, function)
            check(
                driver.cuFuncSetAttribute,
                function,
                attributes.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES,
                self.max_shared_bytes - static,
            )
            if spec.overlaps:
                # A multiprocessor must be idle to divide its L1 anew, so kernels that differ in that never overlap.
                check(
                    driver.cuFuncSetAttribute,
                    function,
                    attributes.CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT,
                    ALL_SHARED_PERCENT,
                )
            self._kernels[spec, template] = Kernel(spec, function)

    def _kernel(self, spec: KernelSpec[Any], template: tuple[str, ...]) -> Kernel:
        kernel = self._kernels.get((spec, template))
        if kernel is None:
            self.compile([(spec, template)])
            kernel = self._kernels[spec, template]
        return kernel

    def clusters_at_once(self, spec: KernelSpec[Any], template: tuple[str, ...], config: LaunchConfig) -> int:
        """Clusters of this launch that the device runs at a time; depends on how its multiprocessors are grouped."""
        kernel = self._kernel(spec, template)
        self.activate()
        launch = _extended(config, False, self.stream)
        return int(check(driver.cuOccupancyMaxActiveClusters, kernel.function, launch))

    def launch(self, spec: KernelSpec[P], template: tuple[str, ...], config: LaunchConfig, params: P) -> None:
        """Submit a kernel; compiles it first if it is used for the first time.

        Tensors must live on this device, which the operations have checked.

        Raises: DeviceError if a parameter does not fit its field or the driver refuses.
        """
        kernel = self._kernels.get((spec, template)) or self._kernel(spec, template)
        self.activate()
        overlaps = self._captured is not None and self._overlaps and self.compute_capability >= (9, 0)
        with self._lock:
            overlaps = overlaps and spec.overlaps and not self._weights_written
            self._weights_written = spec.writes_weights
            kernel.set_params(params)
            if overlaps or config.cluster > 1:
                (status,) = driver.cuLaunchKernelEx(
                    _extended(config, overlaps, self.stream), kernel.function, kernel.arguments_address, 0
                )
            else:
                (status,) = driver.cuLaunchKernel(
                    kernel.function,
                    *config.grid,
                    *config.block,
                    config.shared_bytes,
                    self.stream,
                    kernel.arguments_address,
                    0,
                )
        if status:
            raise driver_error(status, f"launch of {spec.instantiation(template)}", config)


@lru_cache(maxsize=4096)
def _extended(config: LaunchConfig, overlaps: bool, stream: Any) -> Any:
    """The driver's form of a launch in clusters, or of one that may begin before the one in front of it has ended."""
    attributes = []
    if overlaps:
        attribute = driver.CUlaunchAttribute()
        attribute.id = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
        attribute.value.programmaticStreamSerializationAllowed = 1
        attributes.append(attribute)
    if config.cluster > 1:
        attribute = driver.CUlaunchAttribute()
        attribute.id = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION
        attribute.value.clusterDim.x = config.cluster
        attribute.value.clusterDim.y = attribute.value.clusterDim.z = 1
        attributes.append(attribute)
    launch = driver.CUlaunchConfig()
    launch.gridDimX, launch.gridDimY, launch.gridDimZ = config.grid
    launch.blockDimX, launch.blockDimY, launch.blockDimZ = config.block
    launch.sharedMemBytes = config.shared_bytes
    launch.hStream = stream
    launch.attrs, launch.numAttrs = attributes, len(attributes)
    return launch


def _address(array: np.ndarray[Any, Any]) -> int:
    if not array.flags.c_contiguous:
        raise DeviceError("only contiguous host arrays can be copied to or from a device")
    return int(array.__array_interface__["data"][0])
