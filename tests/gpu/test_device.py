"""The driver layer on a real device: tensors, memory, copies, events, graphs and launches."""

from __future__ import annotations

import gc
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from tessera.engine.contract.errors import DeviceError, OutOfMemoryError, TesseraError
from tessera.engine.cuda.driver import check
from tessera.engine.cuda.kernel import KernelSpec, LaunchConfig
from tessera.engine.cuda.memory import COPY_BYTES, PIECE_TYPES, CopyBytesParams, copy_config, piece_bytes
from tessera.engine.ops.cuda.activation import GeluParams
from tessera.engine.ops.cuda.elementwise import SCALE, ScaleParams
from tessera.engine.ops.cuda.types import flat_config
from tessera.engine.tensor import (
    CPU,
    bfloat16,
    empty,
    float16,
    float32,
    from_numpy,
    int32,
    uint8,
    uint32,
    uint64,
    zeros,
)
from tests.gpu.alone import measures_free_memory

if TYPE_CHECKING:
    from tessera.engine.cuda.device import CudaDevice
    from tessera.engine.ops.cuda import CudaOps

pytestmark = pytest.mark.gpu

DTYPES = [float32, float16, bfloat16, int32, uint32, uint64, uint8]


def address(array: np.ndarray[Any, Any]) -> int:
    return int(array.__array_interface__["data"][0])


def numbers(shape: tuple[int, ...], dtype: np.dtype[Any] = float32, seed: int = 0) -> np.ndarray[Any, Any]:
    return np.random.default_rng(seed).integers(0, 200, shape).astype(dtype)


class TestDevice:
    def test_describes_itself(self, cuda_device: CudaDevice) -> None:
        major, minor = cuda_device.compute_capability
        assert cuda_device.name == repr(cuda_device) == "cuda:0"
        assert cuda_device.arch == f"{major}{minor}" + ("a" if major >= 9 else "")
        assert cuda_device.multiprocessors > 0
        assert cuda_device.max_shared_bytes >= 96 * 1024
        assert 0 < cuda_device.free_memory() <= cuda_device.total_memory

    def test_one_that_does_not_exist(self, cuda_device: CudaDevice) -> None:
        from tessera.engine.cuda.device import CudaDevice

        with pytest.raises(DeviceError, match="there is no CUDA device 1000"):
            CudaDevice(1000)


class TestTensor:
    @pytest.mark.parametrize("dtype", DTYPES, ids=str)
    @pytest.mark.parametrize("shape", [(), (1,), (3, 5), (2, 3, 7)], ids=str)
    def test_there_and_back(self, cuda_device: CudaDevice, dtype: np.dtype[Any], shape: tuple[int, ...]) -> None:
        array = numbers(shape, dtype)
        tensor = from_numpy(array, cuda_device)
        assert (tensor.device, tensor.shape, tensor.dtype) == (cuda_device, shape, dtype)
        assert tensor.pointer % 256 == 0
        np.testing.assert_array_equal(tensor.numpy(), array)
        np.testing.assert_array_equal(tensor.to(CPU).numpy(), array)
        np.testing.assert_array_equal(from_numpy(array, CPU).to(cuda_device).numpy(), array)
        assert tensor.to(cuda_device) is tensor

    def test_empty_array(self, cuda_device: CudaDevice) -> None:
        assert from_numpy(np.zeros((0, 4), np.float32), cuda_device).numpy().shape == (0, 4)

    def test_rows_that_are_not_contiguous_on_the_host(self, cuda_device: CudaDevice) -> None:
        array = numbers((6, 8))[::2, 1:5]
        np.testing.assert_array_equal(from_numpy(array, cuda_device).numpy(), array)

    def test_clone_is_a_copy_of_its_own(self, cuda_device: CudaDevice) -> None:
        tensor = from_numpy(numbers((4, 4)), cuda_device)
        clone = tensor.clone()
        tensor.upload(np.zeros((4, 4), np.float32))
        np.testing.assert_array_equal(clone.numpy(), numbers((4, 4)))

    def test_upload_into_a_row(self, cuda_device: CudaDevice) -> None:
        tensor = zeros((3, 4), float32, cuda_device)
        tensor[1].upload(np.ones(4, np.float32))
        np.testing.assert_array_equal(tensor.numpy(), [[0] * 4, [1] * 4, [0] * 4])
        np.testing.assert_array_equal(tensor[1:].numpy(), [[1] * 4, [0] * 4])

    @pytest.mark.parametrize("dtype", DTYPES, ids=str)
    def test_cuda_array_interface(self, cuda_device: CudaDevice, dtype: np.dtype[Any]) -> None:
        tensor = from_numpy(numbers((3, 5), dtype), cuda_device)[1:]
        interface = tensor.__cuda_array_interface__
        assert interface["shape"] == (2, 5)
        assert interface["data"] == (tensor.pointer, False)
        assert interface["typestr"] == ("<V2" if dtype == bfloat16 else dtype.str)
        assert (interface["strides"], interface["version"]) == (None, 3)

    def test_memory_lives_as_long_as_a_view(self, cuda_device: CudaDevice) -> None:
        row = from_numpy(numbers((3, 1000)), cuda_device)[2]
        gc.collect()
        others = [zeros((3, 1000), float32, cuda_device) for _ in range(3)]
        np.testing.assert_array_equal(row.numpy(), numbers((3, 1000))[2])
        del others


class TestMemory:
    def test_freed_memory_is_used_again(self, cuda_device: CudaDevice) -> None:
        cuda_device.empty_cache()
        statistics = cuda_device.pool_statistics
        hits, misses, in_use = statistics.hits, statistics.misses, statistics.in_use
        pointer = empty((1000,), float32, cuda_device).pointer
        assert (statistics.hits, statistics.misses, statistics.in_use) == (hits, misses + 1, in_use)
        assert statistics.cached == 4096
        assert empty((999,), float32, cuda_device).pointer == pointer
        assert (statistics.hits, statistics.misses) == (hits + 1, misses + 1)
        cuda_device.empty_cache()
        assert statistics.cached == 0

    @measures_free_memory
    def test_large_memory_goes_back_to_the_driver(self, cuda_device: CudaDevice) -> None:
        cuda_device.empty_cache()
        before = cuda_device.free_memory()
        tensor = empty((256, 2**20), uint8, cuda_device)
        assert cuda_device.free_memory() <= before - 2**28
        del tensor
        assert cuda_device.free_memory() >= before - 2**21

    def test_more_than_there_is(self, cuda_device: CudaDevice) -> None:
        with pytest.raises(OutOfMemoryError, match="MiB of device memory were asked for, but only"):
            cuda_device.allocate(cuda_device.total_memory * 2)
        assert zeros((4,), float32, cuda_device).numpy().tolist() == [0, 0, 0, 0]  # and the device goes on

    def test_fill_bytes(self, cuda_device: CudaDevice) -> None:
        tensor = zeros((16,), uint8, cuda_device)
        cuda_device.fill_bytes(tensor.pointer + 4, 0xAB, 8)
        assert tensor.numpy().tolist() == [0] * 4 + [0xAB] * 8 + [0] * 4


class TestCopies:
    def test_every_copy_between_host_and_device_is_counted(self, cuda_device: CudaDevice, cuda_ops: CudaOps) -> None:
        counter = cuda_device.transfers
        before = (counter.uploads, counter.upload_bytes, counter.downloads, counter.download_bytes)
        tensor = from_numpy(numbers((10,)), cuda_device)
        tensor.clone().numpy()
        after = (counter.uploads, counter.upload_bytes, counter.downloads, counter.download_bytes)
        assert np.subtract(after, before).tolist() == [1, 40, 1, 40]
        cuda_ops.scale(cuda_ops.copy(tensor, tensor.clone()), 2.0)
        assert (counter.uploads, counter.downloads) == (after[0], after[2])

    def test_pinned_memory(self, cuda_device: CudaDevice) -> None:
        buffer = cuda_device.pinned(64)
        source = buffer.view((8,), float32)
        target = buffer.view((8,), float32, offset=32)
        source[:] = np.arange(8)
        target[:] = -1
        tensor = zeros((8,), float32, cuda_device)
        del buffer
        gc.collect()  # the views keep the memory
        cuda_device.upload_async(tensor.pointer, source)
        cuda_device.download_async(target[2:6], tensor[2:6].pointer)
        cuda_device.synchronize()
        assert target.tolist() == [-1, -1, 2, 3, 4, 5, -1, -1]

    @pytest.mark.parametrize("nbytes", [1, 15, 64, 4099, 3 * 16384, 200_001])
    @pytest.mark.parametrize("offset", [0, 4, 3])
    def test_small_copies_move_their_bytes_and_no_others(
        self, cuda_device: CudaDevice, nbytes: int, offset: int
    ) -> None:
        """By a kernel, from page-locked memory and back, at addresses of every alignment."""
        source, target = cuda_device.pinned(nbytes + 32).array, cuda_device.pinned(nbytes + 32).array
        source[:] = np.random.default_rng(nbytes).integers(0, 256, source.size)
        target[:] = 0xEE
        there = zeros((nbytes + 32,), uint8, cuda_device)
        wanted, place = slice(offset, offset + nbytes), there.pointer + offset
        for to, its in ((place, address(source) + offset), (address(target) + offset, place)):
            piece = piece_bytes(to, its)
            params = CopyBytesParams(source=its, target=to, size=nbytes)
            cuda_device.launch(COPY_BYTES, (PIECE_TYPES[piece],), copy_config(nbytes, piece), params)
        cuda_device.synchronize()
        expected = np.zeros(nbytes + 32, np.uint8)
        expected[wanted] = source[wanted]
        assert (there.numpy() == expected).all()
        expected[:], expected[wanted] = 0xEE, source[wanted]
        assert (target == expected).all()

    def test_small_copies_go_past_large_ones(self, cuda_device: CudaDevice) -> None:
        """What a step uploads and downloads does not wait for what another stream copies, in either direction."""
        from cuda.bindings import driver

        large = cuda_device.pinned(2**30).array
        there = zeros((2**30,), uint8, cuda_device)
        small, back = cuda_device.pinned(4096).array, cuda_device.pinned(4096).array
        place = zeros((4096,), uint8, cuda_device)
        stream = check(driver.cuStreamCreate, driver.CUstream_flags.CU_STREAM_NON_BLOCKING)
        done = cuda_device.event()
        for to_device in (True, False):
            small[:] = 3 if to_device else 4
            cuda_device.upload_small(place.pointer, small)  # compiled
            cuda_device.synchronize()
            for start in range(0, 2**30, 2**21):
                at, its = there.pointer + start, address(large) + start
                if to_device:
                    check(driver.cuMemcpyHtoDAsync, at, its, 2**21, stream)
                else:
                    check(driver.cuMemcpyDtoHAsync, its, at, 2**21, stream)
            done.record(stream)
            cuda_device.upload_small(place.pointer, small)
            cuda_device.download_small(back, place.pointer)
            cuda_device.synchronize()
            assert not done.query(), "it waited"
            assert (back == small).all()
            done.synchronize()

    def test_memory_that_is_freed_while_a_thread_first_touches_the_device(
        self, cuda_device: CudaDevice, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """As a collection of garbage does that happens to run there."""
        from cuda.bindings import driver

        buffers = [cuda_device.pinned(64)]
        set_current = driver.cuCtxSetCurrent

        def collecting(context: Any) -> Any:
            buffers.clear()
            return set_current(context)

        errors: list[Any] = []
        monkeypatch.setattr(driver, "cuCtxSetCurrent", collecting)
        monkeypatch.setattr(sys, "unraisablehook", errors.append)
        with ThreadPoolExecutor(1) as pool:
            pool.submit(cuda_device.activate).result()
        assert (buffers, errors) == ([], [])

    def test_only_contiguous_host_memory(self, cuda_device: CudaDevice) -> None:
        tensor = zeros((4,), float32, cuda_device)
        with pytest.raises(DeviceError, match="contiguous"):
            cuda_device.download(np.zeros(8, np.float32)[::2], tensor.pointer)

    def test_work_runs_in_the_order_of_the_calls(self, cuda_device: CudaDevice, cuda_ops: CudaOps) -> None:
        """Copies must wait for kernels before them, and freed memory for its last reader."""
        x = from_numpy(np.ones(2**22, np.float32), cuda_device)
        for factor in range(1, 21):
            x = cuda_ops.scale(x, float(factor % 3 + 1))
        assert set(x.numpy().tolist()) == {float(np.prod([i % 3 + 1 for i in range(1, 21)]))}


class TestEvents:
    def test_order_and_time(self, cuda_device: CudaDevice, cuda_ops: CudaOps) -> None:
        x = zeros((2**24,), float32, cuda_device)
        start, stop = cuda_device.event(timing=True), cuda_device.event(timing=True)
        start.record()
        cuda_ops.scale(x, 2.0, out=x)
        stop.record()
        stop.synchronize()
        assert start.query()
        assert stop.query()
        assert stop.milliseconds_since(start) > 0

    def test_time_without_timing_is_refused(self, cuda_device: CudaDevice) -> None:
        events = [cuda_device.event(), cuda_device.event()]
        for event in events:
            event.record()
        cuda_device.synchronize()
        with pytest.raises(DeviceError, match="cuEventElapsedTime"):
            events[1].milliseconds_since(events[0])


class TestGraphs:
    def test_replays_on_new_values(self, cuda_device: CudaDevice, cuda_ops: CudaOps) -> None:
        x, y = from_numpy(numbers((1000,)), cuda_device), zeros((1000,), float32, cuda_device)
        with cuda_device.capture() as finish:
            cuda_ops.add(cuda_ops.scale(x, 3.0), x, out=y)
        graph = finish()
        assert not y.numpy().any()  # recorded, not run
        for seed in range(3):
            array = numbers((1000,), seed=seed)
            x.upload(array)
            graph.launch()
            np.testing.assert_array_equal(y.numpy(), array * 4)

    def test_keeps_what_was_allocated_in_it(self, cuda_device: CudaDevice, cuda_ops: CudaOps) -> None:
        x, y = from_numpy(numbers((1000,)), cuda_device), zeros((1000,), float32, cuda_device)
        with cuda_device.capture() as finish:
            cuda_ops.scale(cuda_ops.scale(x, 2.0), 2.0, out=y)  # the inner result is freed at once
        graph = finish()
        gc.collect()
        others = [from_numpy(np.full(1000, np.nan, np.float32), cuda_device) for _ in range(8)]
        graph.launch()
        np.testing.assert_array_equal(y.numpy(), numbers((1000,)) * 4)
        assert all(np.isnan(other.numpy()).all() for other in others)

    @pytest.mark.parametrize(("m", "k"), [(32, 64), (64, 64), (96, 64), (320, 320)])
    def test_products_by_what_is_computed_inside(
        self, m: int, k: int, cuda_device: CudaDevice, cuda_ops: CudaOps
    ) -> None:
        """Which would be read before it is written, did kernels overlap."""
        x = zeros((m, k), bfloat16, cuda_device)
        gram, squared = (zeros((m, m), bfloat16, cuda_device) for _ in range(2))

        def run() -> None:
            cuda_ops.matmul(x, x, out=gram)
            cuda_ops.matmul(gram, gram, out=squared)

        run()
        with cuda_device.capture(overlaps=False) as finish:
            run()
        graph = finish()
        for seed in range(20 if cuda_device.asynchronous else 2):
            x.upload(((numbers((m, k), seed=seed) - 100) / 256).astype(bfloat16))
            run()
            expected = squared.numpy().copy()
            gram.upload(np.full((m, m), np.nan, bfloat16))
            graph.launch()
            np.testing.assert_array_equal(squared.numpy(), expected)

    def test_an_error_inside_leaves_the_device_usable(self, cuda_device: CudaDevice, cuda_ops: CudaOps) -> None:
        x = from_numpy(numbers((10,)), cuda_device)
        with pytest.raises(TesseraError, match="is on cpu"), cuda_device.capture():
            cuda_ops.add(cuda_ops.scale(x, 2.0), zeros((10,), float32, CPU))
        with pytest.raises(DeviceError, match="cuStreamSynchronize"), cuda_device.capture():
            cuda_device.synchronize()
        np.testing.assert_array_equal(cuda_ops.scale(x, 2.0).numpy(), numbers((10,)) * 2)


class TestLaunch:
    def test_compiles_on_first_use_and_then_loads_from_the_cache(self, cuda_device: CudaDevice, tmp_path: Path) -> None:
        from tessera.engine.cuda.device import CudaDevice

        for _ in range(2):
            device = CudaDevice(0, tmp_path)
            x = from_numpy(numbers((33,)), device)
            out = empty((33,), float32, device)
            params = ScaleParams(x=x, out=out, size=33, factor=0.5)
            device.launch(SCALE, ("float",), flat_config(33), params)
            np.testing.assert_array_equal(out.numpy(), numbers((33,)) / 2)
            assert len(list((tmp_path / "cubin").iterdir())) == 1

    def test_progress_counts_kernels(self, cuda_device: CudaDevice, tmp_path: Path) -> None:
        from tessera.engine.cuda.device import CudaDevice

        seen: list[tuple[int, int]] = []
        pairs = [(SCALE, ("float",)), (SCALE, ("__half",)), (SCALE, ("float",))]
        device = CudaDevice(0, tmp_path)
        device.compile(pairs, lambda done, total: seen.append((done, total)))
        assert seen == [(2, 2)]
        device.compile(pairs, lambda done, total: seen.append((done, total)))
        assert len(seen) == 1

    def test_wrong_arguments_are_refused(self, cuda_device: CudaDevice) -> None:
        x = zeros((4,), float32, cuda_device)
        of_gelu: Any = GeluParams(x=x, out=x, size=4)
        with pytest.raises(DeviceError, match="scale_kernel takes ScaleParams, not GeluParams"):
            cuda_device.launch(SCALE, ("float",), flat_config(4), of_gelu)
        broken: Any = ScaleParams(x=x, out=x, size=4.5, factor=1.0)  # type: ignore[arg-type]
        with pytest.raises(DeviceError, match=r"scale_kernel .*: long long size cannot be 4\.5"):
            cuda_device.launch(SCALE, ("float",), flat_config(4), broken)

    def test_an_impossible_launch_is_named(self, cuda_device: CudaDevice) -> None:
        x = zeros((4,), float32, cuda_device)
        config = LaunchConfig((1, 1, 1), (2048, 1, 1))
        with pytest.raises(DeviceError, match=r"launch of scale_kernel<float>.*CUDA_ERROR_INVALID_VALUE"):
            cuda_device.launch(SCALE, ("float",), config, ScaleParams(x=x, out=x, size=4, factor=1.0))

    def test_a_kernel_for_another_architecture_is_refused(self, cuda_device: CudaDevice) -> None:
        other = KernelSpec("elementwise/elementwise.cu", "scale_kernel", ("T",), SCALE.params, min_arch=999)
        with pytest.raises(DeviceError, match="scale_kernel does not run on"):
            cuda_device.compile([(other, ("float",))])

    def test_from_other_threads(self, cuda_device: CudaDevice, cuda_ops: CudaOps) -> None:
        def scaled(factor: int) -> np.ndarray[Any, Any]:
            return cuda_ops.scale(from_numpy(numbers((500,)), cuda_device), float(factor)).numpy()

        with ThreadPoolExecutor(4) as workers:
            for factor, result in enumerate(workers.map(scaled, range(64))):
                np.testing.assert_array_equal(result, numbers((500,)) * factor)

    def test_tensors_of_another_device_are_refused(self, cuda_device: CudaDevice, cuda_ops: CudaOps) -> None:
        here, there = zeros((4,), float32, cuda_device), zeros((4,), float32, CPU)
        with pytest.raises(TesseraError, match="b is on cpu, but this operation runs on cuda:0"):
            cuda_ops.add(here, there)
        with pytest.raises(TesseraError, match="out is on cpu, but this operation runs on cuda:0"):
            cuda_ops.scale(here, 2.0, out=there)
