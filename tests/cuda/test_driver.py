"""The driver layer without a driver: argument blocks, the memory pool, and why a device is refused."""

from __future__ import annotations

import ctypes
import gc
import struct
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any, NamedTuple

import pytest
from cuda.bindings import driver as bindings

from tessera.engine.contract.errors import DeviceError, OutOfMemoryError
from tessera.engine.cuda import memory
from tessera.engine.cuda.driver import check, find_device
from tessera.engine.cuda.generated import declare_header
from tessera.engine.cuda.kernel import Kernel, KernelSpec
from tessera.engine.cuda.memory import LARGEST_POOLED, MemoryPool, Returns, size_class
from tessera.engine.cuda.params import (
    Float32,
    InT,
    Int32,
    Int64,
    OutFloat,
    TensorMap,
    Uint32,
    Uint64,
    fields_of,
    signature_of,
)
from tessera.engine.tensor import CPU, Buffer, Tensor, float32

Status = bindings.CUresult
TENSOR = Tensor(Buffer(CPU, 1 << 40, 64, None), (4,), float32)
MIB = 2**20


class MixedParams(NamedTuple):
    rows: Int32
    x: InT
    eps: Float32
    flags: Uint32
    size: Int64
    seed: Uint64


class MapParams(NamedTuple):
    n: Int32
    map: TensorMap
    x: OutFloat


class NoParams(NamedTuple):
    pass


MIXED = KernelSpec("mixed.cu", "mixed_kernel", ("T", "N"), MixedParams)
FORMATS = ["i", "Q", "f", "I", "q", "Q"]


def arguments_of(kernel: Kernel, formats: list[str]) -> list[Any]:
    """What a launch would read: each argument where its pointer says."""
    pointers = (ctypes.c_uint64 * len(formats)).from_address(kernel.arguments_address)
    return [
        struct.unpack(f"={code}", ctypes.string_at(pointer, struct.calcsize(f"={code}")))[0]
        for pointer, code in zip(pointers, formats, strict=True)
    ]


class TestArguments:
    def test_each_is_where_its_pointer_says(self) -> None:
        kernel = Kernel(MIXED, None)
        cases: list[list[Any]] = [[-1, 2**63, 0.5, 2**32 - 1, -(2**40), 2**64 - 1], [7, 0, -2.0, 0, 2**40, 1]]
        for values in cases:
            kernel.set_params(MixedParams(*values))
            assert arguments_of(kernel, FORMATS) == values

    def test_each_is_aligned_to_its_size(self) -> None:
        kernel = Kernel(MIXED, None)
        pointers = (ctypes.c_uint64 * len(FORMATS)).from_address(kernel.arguments_address)
        for pointer, code in zip(pointers, FORMATS, strict=True):
            assert pointer % struct.calcsize(f"={code}") == 0

    def test_a_map_among_others(self) -> None:
        kernel = Kernel(KernelSpec("a.cu", "a_kernel", (), MapParams), None)
        values: list[Any] = [5, bytes(range(128)), 1 << 40]
        kernel.set_params(MapParams(*values))
        assert arguments_of(kernel, ["i", "128s", "Q"]) == values
        with pytest.raises(DeviceError, match="TensorMap map cannot be b'short'"):
            kernel.set_params(MapParams(n=5, map=b"short", x=None))

    def test_a_tensor_is_its_address_and_none_is_null(self) -> None:
        kernel = Kernel(MIXED, None)
        tensor = Tensor(Buffer(CPU, 1 << 40, 64, None), (4,), float32, offset=16)
        for x, address in ((tensor, (1 << 40) + 16), (None, 0)):
            kernel.set_params(MixedParams(rows=1, x=x, eps=0.0, flags=0, size=0, seed=0))
            assert arguments_of(kernel, FORMATS)[1] == address

    def test_a_kernel_without_parameters(self) -> None:
        Kernel(KernelSpec("a.cu", "a_kernel", (), NoParams), None).set_params(NoParams())

    @pytest.mark.parametrize(
        ("values", "wrong"),
        [
            ([2**31, 2, 3.0, 4, 5, 6], "int rows cannot be 2147483648"),
            ([1, -1, 3.0, 4, 5, 6], r"const T\* x cannot be -1"),
            ([1.5, 2, 3.0, 4, 5, 6], "int rows cannot be 1.5"),
            ([1, 2, "3", 4, 5, 6], "float eps cannot be '3'"),
            ([1, 2, 3.0, -4, 5, 6], "unsigned flags cannot be -4"),
            ([TENSOR, 2, 3.0, 4, 5, 6], r"int rows cannot be Tensor"),
        ],
    )
    def test_what_does_not_fit_is_refused(self, values: list[Any], wrong: str) -> None:
        with pytest.raises(DeviceError, match=f"mixed_kernel was launched with wrong parameters: {wrong}"):
            Kernel(MIXED, None).set_params(MixedParams(*values))

    def test_a_missing_or_unknown_field_is_refused(self) -> None:
        with pytest.raises(TypeError, match="seed"):
            MixedParams(rows=1, x=2, eps=3.0, flags=4, size=5)  # type: ignore[call-arg]
        with pytest.raises(TypeError, match="seeds"):
            MixedParams(rows=1, x=2, eps=3.0, flags=4, size=5, seeds=6)  # type: ignore[call-arg]

    def test_parameters_of_another_kernel_are_refused(self) -> None:
        with pytest.raises(DeviceError, match="mixed_kernel takes MixedParams, not MapParams"):
            Kernel(MIXED, None).set_params(MapParams(n=5, map=bytes(128), x=None))


class TestSpec:
    def test_instantiation(self) -> None:
        assert MIXED.instantiation(("__half", "4")) == "mixed_kernel<__half, 4>"
        assert KernelSpec("a.cu", "a_kernel", (), NoParams).instantiation(()) == "a_kernel"
        with pytest.raises(DeviceError, match="template parameters"):
            MIXED.instantiation(("__half",))

    def test_architectures(self) -> None:
        assert [arch for arch in ("80", "89", "90a", "120a") if MIXED.supports(arch)] == ["80", "89", "90a", "120a"]
        sm90 = KernelSpec("a.cu", "a_kernel", (), NoParams, min_arch=90, arch_specific=True)
        assert [arch for arch in ("80", "90a", "100a") if sm90.supports(arch)] == ["90a"]
        newer = KernelSpec("a.cu", "a_kernel", (), NoParams, min_arch=90)
        assert [arch for arch in ("80", "90a", "100a") if newer.supports(arch)] == ["90a", "100a"]


class TestHeaders:
    def test_a_signature_names_its_types(self) -> None:
        assert signature_of(MixedParams) == "MIXED_PARAMS(T)"
        assert signature_of(MapParams) == "MAP_PARAMS"
        assert [field.type for field in fields_of(MapParams)] == [
            "int",
            "const __grid_constant__ TensorMap",
            "float*",
        ]

    def test_a_field_without_a_type_of_c_is_refused(self) -> None:
        class OddParams(NamedTuple):
            x: int

        with pytest.raises(DeviceError, match=r"OddParams\.x has no type that a kernel takes"):
            fields_of(OddParams)

    def test_a_header_has_one_home(self) -> None:
        declare_header("of_test_driver", __name__)
        with pytest.raises(DeviceError, match=r"elsewhere and .*test_driver both declare"):
            declare_header("of_test_driver", "elsewhere")


class FakeDriver:
    """Answers the pool's calls from a budget of bytes."""

    def __init__(self, budget: int) -> None:
        self.budget = budget
        self.live: dict[int, int] = {}
        self.next_pointer = 2**40

    def check(self, function: Callable[..., Any], *arguments: Any) -> Any:
        if function is bindings.cuMemAlloc:
            (size,) = arguments
            if sum(self.live.values()) + size > self.budget:
                raise OutOfMemoryError("full")
            self.next_pointer += 2**36
            self.live[self.next_pointer] = size
            return self.next_pointer
        if function is bindings.cuMemFree:
            del self.live[arguments[0]]
            return None
        assert function is bindings.cuMemGetInfo
        return self.budget - sum(self.live.values()), self.budget


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> FakeDriver:
    fake = FakeDriver(100 * MIB)
    monkeypatch.setattr(memory, "check", fake.check)
    return fake


class TestPool:
    def test_size_classes_waste_at_most_a_fifth(self) -> None:
        for nbytes in [*range(513, 5000), *range(MIB, LARGEST_POOLED, 99_991), LARGEST_POOLED]:
            size = size_class(nbytes)
            assert nbytes <= size <= nbytes * 1.25
            assert size % 128 == 0
            assert size_class(size) == size
        assert size_class(1) == size_class(512) == 512
        assert size_class(LARGEST_POOLED) == LARGEST_POOLED
        assert size_class(LARGEST_POOLED + 1) == LARGEST_POOLED + 2 * MIB
        for nbytes in range(LARGEST_POOLED + 1, 9 * LARGEST_POOLED, 9_999_991):
            size = size_class(nbytes, pooled=True)
            assert nbytes <= size <= nbytes * 1.125
            assert size_class(size, pooled=True) == size

    def test_freed_memory_is_handed_out_again(self, fake: FakeDriver) -> None:
        pool = MemoryPool(lambda: None)
        first = pool.allocate(1000)
        pointer = first.pointer
        assert (pool.statistics.hits, pool.statistics.misses, pool.statistics.in_use) == (0, 1, 1024)
        del first
        gc.collect()
        assert (pool.statistics.in_use, pool.statistics.cached) == (0, 1024)
        assert pool.allocate(900).pointer == pointer
        assert pool.statistics.hits == 1

    def test_memory_in_use_is_not_handed_out(self, fake: FakeDriver) -> None:
        pool = MemoryPool(lambda: None)
        held = [pool.allocate(1000) for _ in range(5)]
        assert len({allocation.pointer for allocation in held}) == 5

    def test_large_pieces_go_straight_back(self, fake: FakeDriver) -> None:
        pool = MemoryPool(lambda: None)
        piece = pool.allocate(LARGEST_POOLED + 1)
        assert len(fake.live) == 1
        del piece
        gc.collect()
        assert fake.live == {}
        assert pool.statistics.cached == 0

    def test_large_pieces_that_are_needed_again_stay(self, fake: FakeDriver) -> None:
        pool = MemoryPool(lambda: None)
        pool.keeps_large = True
        piece = pool.allocate(LARGEST_POOLED + 1)
        pointer = piece.pointer
        del piece
        gc.collect()
        assert pool.statistics.cached == LARGEST_POOLED * 9 // 8
        again = pool.allocate(LARGEST_POOLED * 9 // 8)
        assert again.pointer == pointer
        assert pool.statistics.misses == 1

    def test_garbage_can_be_held(self, fake: FakeDriver) -> None:
        returns = Returns(nullcontext)
        pool, returns.held = MemoryPool(lambda: None, returns), True
        piece = pool.allocate(LARGEST_POOLED + 1)
        del piece
        gc.collect()
        assert len(fake.live) == 1
        returns.flush()
        assert fake.live == {}

    def test_empty_cache(self, fake: FakeDriver) -> None:
        pool = MemoryPool(lambda: None)
        pieces = [pool.allocate(size) for size in (10, 10, 5000)]
        del pieces
        gc.collect()
        pool.empty_cache()
        assert fake.live == {}
        assert (pool.statistics.cached, pool.statistics.in_use) == (0, 0)

    def test_cached_pieces_are_given_up_for_one_that_does_not_fit(self, fake: FakeDriver) -> None:
        pool = MemoryPool(lambda: None)
        pieces = [pool.allocate(20 * MIB) for _ in range(4)]
        del pieces
        gc.collect()
        assert sum(fake.live.values()) == 80 * MIB
        piece = pool.allocate(90 * MIB)
        assert list(fake.live) == [piece.pointer]

    def test_too_much(self, fake: FakeDriver) -> None:
        pool = MemoryPool(lambda: None)
        kept = pool.allocate(40 * MIB)
        with pytest.raises(OutOfMemoryError, match=r"^64\.0 MiB .* only 60\.0 MiB of 100\.0 MiB are free"):
            pool.allocate(64 * MIB)
        assert list(fake.live) == [kept.pointer]
        assert pool.statistics.misses == 1


def answering(**answers: tuple[Any, ...]) -> Callable[[pytest.MonkeyPatch], None]:
    """Make the driver's functions answer so."""

    def patch(monkeypatch: pytest.MonkeyPatch) -> None:
        for name, answer in answers.items():

            def function(*arguments: Any, answer: tuple[Any, ...] = answer) -> tuple[Any, ...]:
                return answer

            function.__name__ = name
            monkeypatch.setattr(f"tessera.engine.cuda.driver.driver.{name}", function)

    return patch


WORKING: dict[str, tuple[Any, ...]] = {
    "cuInit": (Status.CUDA_SUCCESS,),
    "cuDriverGetVersion": (Status.CUDA_SUCCESS, 13_000),
    "cuDeviceGetCount": (Status.CUDA_SUCCESS, 1),
    "cuDeviceGet": (Status.CUDA_SUCCESS, 0),
    "cuDeviceGetName": (Status.CUDA_SUCCESS, b"NVIDIA Test\0\0"),
    "cuDeviceGetAttribute": (Status.CUDA_SUCCESS, 9),
    "cuDeviceTotalMem": (Status.CUDA_SUCCESS, 80 * 2**30),
    "cuGetErrorName": (Status.CUDA_SUCCESS, b"CUDA_ERROR_SOMETHING"),
    "cuGetErrorString": (Status.CUDA_SUCCESS, b"something happened"),
}


class TestFindDevice:
    def test_a_usable_one(self, monkeypatch: pytest.MonkeyPatch) -> None:
        answering(**WORKING)(monkeypatch)
        assert find_device() == (True, "NVIDIA Test (compute capability 9.9, 80.0 GiB of memory)")

    @pytest.mark.parametrize(
        ("answers", "index", "reason"),
        [
            ({"cuInit": (Status.CUDA_ERROR_NO_DEVICE,)}, 0, "the NVIDIA driver sees no CUDA device"),
            (
                {"cuInit": (Status.CUDA_ERROR_SYSTEM_DRIVER_MISMATCH,)},
                0,
                "the NVIDIA driver does not start: cuInit(0) failed with CUDA_ERROR_SOMETHING: something happened",
            ),
            (
                {"cuDriverGetVersion": (Status.CUDA_SUCCESS, 12_080)},
                0,
                "the NVIDIA driver supports CUDA 12.8, but CUDA 13.0 (driver 580) or newer is needed",
            ),
            ({}, 1, "there is no CUDA device 1; this machine has 1, numbered from 0"),
            ({}, -1, "there is no CUDA device -1; this machine has 1, numbered from 0"),
            (
                {"cuDeviceGetAttribute": (Status.CUDA_SUCCESS, 7)},
                0,
                "NVIDIA Test has compute capability 7.7, but 8.0 or newer is needed",
            ),
            (
                {"cuDeviceGetCount": (Status.CUDA_ERROR_UNKNOWN,)},
                0,
                "CUDA device 0 does not answer: cuDeviceGetCount() failed with CUDA_ERROR_SOMETHING: "
                "something happened",
            ),
        ],
    )
    def test_why_not(
        self, answers: dict[str, tuple[Any, ...]], index: int, reason: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        answering(**(WORKING | answers))(monkeypatch)
        assert find_device(index) == (False, reason)

    def test_without_a_driver(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def missing(flags: int) -> tuple[Any, ...]:
            raise RuntimeError("libcuda is not there")

        monkeypatch.setattr("tessera.engine.cuda.driver.driver.cuInit", missing)
        assert find_device() == (False, "no NVIDIA driver is installed (libcuda was not found)")


class TestCheck:
    def test_results(self) -> None:
        assert check(lambda: (Status.CUDA_SUCCESS,)) is None
        assert check(lambda: (Status.CUDA_SUCCESS, 0)) == 0
        assert check(lambda: (Status.CUDA_SUCCESS, 1, 2)) == (1, 2)

    @pytest.mark.parametrize(
        ("status", "error"),
        [(Status.CUDA_ERROR_OUT_OF_MEMORY, OutOfMemoryError), (Status.CUDA_ERROR_ILLEGAL_ADDRESS, DeviceError)],
    )
    def test_errors_say_what_was_called(
        self, status: Any, error: type[DeviceError], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        answering(**WORKING)(monkeypatch)

        def cuSomething(size: int) -> tuple[Any, ...]:
            return (status,)

        with pytest.raises(error, match=r"^cuSomething\(17\) failed with CUDA_ERROR_SOMETHING: something happened$"):
            check(cuSomething, 17)
