"""Ranks that share a model give the tokens of one that has it whole, whatever the scheduler does with them."""

from __future__ import annotations

import contextlib
import dataclasses
import multiprocessing
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from queue import Queue
from typing import Any

import numpy as np
import pytest

from tessera.engine.collectives.cpu import CpuCollectives
from tessera.engine.collectives.interface import LeftSum, SummedHalf
from tessera.engine.collectives.rendezvous import LOOK_SECONDS, Rendezvous, _Watch
from tessera.engine.contract.config import EngineConfig
from tessera.engine.contract.errors import ConfigError, RankError
from tessera.engine.contract.messages import AddRequest, RequestOutput, rows_of
from tessera.engine.contract.sampling_params import SamplingParams
from tessera.engine.core.core import EngineCore
from tessera.engine.core.step_batch import StepBatch
from tessera.engine.formats import LinearWeight
from tessera.engine.kv_tiers.make import make_tiers
from tessera.engine.models.config import load_config
from tessera.engine.ops.linear_interface import Activate, Activation, RMSNorm
from tessera.engine.ops.make import make_ops
from tessera.engine.ranks.cuda_runner import make_cuda_runner
from tessera.engine.ranks.parallel_runner import ParallelRunner, make_cpu_runner
from tessera.engine.runner.model_runner import ModelRunner
from tessera.engine.tensor import CPU, Tensor, empty
from tests.support.cases.token_ids import token_ids
from tests.support.decoder_harness import Row, step_batch
from tests.support.models.tiny_encoder import build_encoder
from tests.support.models.tiny_families import FAMILIES, build_family
from tests.support.models.tiny_models import TINY_MODELS, build
from tests.support.paths import BUILTIN

CLIENT = b"client"
SPAWN = multiprocessing.get_context("spawn")
DEADLINE = 30.0  # seconds; only a failing test waits this long
PREFIX = [3 + 7 * place % 60 for place in range(17)]
# One prompt begins with another, which is in the prefix cache by then.
PROMPTS = {"a": PREFIX, "b": [*PREFIX, 5, 9, 4], "c": [40, 41, 8], "d": PREFIX[::-1]}
TINY: dict[str, Any] = {
    "max_num_batched_tokens": 12,
    "max_num_seqs": 4,
    "num_kv_blocks": 9,
    "block_size": 8,
    "max_model_len": 40,
}


OF_FOUR = (
    "llama",
    "llama-tied-biases",
    "qwen3",
    "gpt2",
    "stablelm-parallel",
    "glm4moe",
    "gptoss-mxfp4",
    "olmo2",
    "gemma3",
)


class Counted:
    """A runner, and the steps that it took."""

    def __init__(self, runner: ModelRunner | ParallelRunner) -> None:
        self.runner = runner
        self.batches: list[StepBatch] = []
        self.asynchronous, self.full_sizes = runner.asynchronous, runner.full_sizes
        self.num_awaited_graphs = 0

    def start(self, batch: StepBatch) -> Any:
        self.batches.append(batch)
        return self.runner.start(batch)

    def sample(self, running: Any, mask: Any) -> None:
        self.runner.sample(running, mask)


@dataclass
class Work:
    """What an engine did: its steps, and log-probabilities in the order in which they came."""

    batches: list[StepBatch]
    num_preemptions: int
    cached_tokens: dict[str, int]
    scores: list[float]


def run(
    folder: Path, size: int, requests: dict[str, SamplingParams], **settings: Any
) -> tuple[dict[str, list[int]], Work]:
    """Tokens of each request."""
    config = EngineConfig(model=str(folder), device="cpu", tensor_parallel_size=size, **{**TINY, **settings})
    config = config.with_device_defaults("cpu")
    model = load_config(folder)
    ranks = make_cpu_runner(config, model, on_hang=print) if size > 1 else None
    runner = ranks.first if ranks is not None else ModelRunner(config, model, CPU, make_ops(CPU))
    counted = Counted(ranks or runner)
    planes = ranks.planes if ranks is not None else runner.kv_cache.planes
    tiers, _ = make_tiers(config, CPU, planes, runner.dtype, "tiny")
    core = EngineCore(
        config,
        counted,
        vocab_size=model.vocab_size,
        max_model_len=runner.max_model_len,
        num_kv_blocks=runner.num_kv_blocks,
        eos_token_ids=[],
        short_rope_len=runner.short_rope_len,
        tiers=tiers,
    )
    found: dict[str, list[int]] = {name: [] for name in requests}
    work = Work(counted.batches, 0, {}, [])

    def collect(output: RequestOutput) -> None:
        found[output.request_id] += [*output.token_ids]
        work.scores += [entry.logprob for entry in [*rows_of(output.prompt_logprobs or []), *(output.logprobs or [])]]
        work.cached_tokens.setdefault(output.request_id, output.num_cached_tokens)

    for name, params in requests.items():
        core.add_request(AddRequest(name, token_ids(PROMPTS[name]), params, 0.0), CLIENT)
        for output in core.step().get(CLIENT, []):  # the first prompt's blocks are cached when the second comes
            collect(output)
    for _ in range(1000):
        if not core.has_work:
            break
        for output in core.step().get(CLIENT, []):
            collect(output)
    work.num_preemptions = core.metrics.num_preemptions
    if ranks is not None:
        ranks.close()
    return found, work


def greedy(count: int, **changes: Any) -> SamplingParams:
    return SamplingParams(max_tokens=count, temperature=0.0, ignore_eos=True, **changes)


@pytest.fixture
def folder_of(tmp_path: Path) -> Callable[[str], Path]:
    def make(name: str) -> Path:
        if name in FAMILIES:
            return build_family(name, tmp_path)
        model = TINY_MODELS[name]
        if model.config.get("quantization_config"):  # whole blocks for each of four
            model = dataclasses.replace(model, config=model.config | {"intermediate_size": 128})
        return build(model, tmp_path)

    return make


@pytest.mark.parametrize("name", [*TINY_MODELS, *FAMILIES])
def test_tokens_are_those_of_one_rank(name: str, folder_of: Callable[[str], Path]) -> None:
    """Of every architecture: prompts in chunks, beside decodes, in float32."""
    folder = folder_of(name)
    size = 4 if name in OF_FOUR else 2
    requests = {"a": greedy(1), "b": greedy(2)}
    expected, _ = run(folder, 1, requests, dtype="float32")
    found, _ = run(folder, size, requests, dtype="float32")
    assert found == expected, f"{size} ranks"


@pytest.mark.parametrize("size", [2, 4])
def test_tokens_do_not_depend_on_how_ranks_are_scheduled(size: int, folder_of: Callable[[str], Path]) -> None:
    """A cached prefix, chunks, preemption with blocks kept in host memory, sampling by seed, penalties, and scores of
    prompts' tokens."""
    folder = folder_of("llama")
    requests = {
        "a": greedy(22),
        "b": greedy(17, logprobs=2),
        "c": SamplingParams(max_tokens=20, temperature=1.0, top_p=0.9, seed=5, presence_penalty=1.0, ignore_eos=True),
        "d": greedy(20, prompt_logprobs=2),
    }
    settings = {"kv_offload_gib": 0.001, "max_model_len": 40}
    expected, _ = run(folder, 1, requests, **settings)
    found, engine = run(folder, size, requests, **settings)
    assert found == expected
    assert engine.num_preemptions > 0
    assert engine.cached_tokens["b"] == 8
    assert max(np.diff(batch.cu_seqlens_q).max() for batch in engine.batches) > 1
    assert max(batch.num_seqs for batch in engine.batches) >= 3
    scores, expected_scores = engine.scores, run(folder, 1, requests, **settings)[1].scores
    assert len(scores) == len(PROMPTS["d"]) - 1 + 17
    assert np.allclose(scores, expected_scores, atol=1e-4)
    drafting = {"speculation": "on", "speculative_method": "ngram", "prompt_lookup_min": 1}
    drafted, engine = run(folder, size, requests, **settings, **drafting)
    assert drafted == expected
    assert any(batch.rounds for batch in engine.batches)


def test_ranks_sample_without_gathering_logits(
    folder_of: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Greedily and by chance, unless a request needs the logits of the whole vocabulary."""
    folder, gathered = folder_of("qwen3"), []
    gather = CpuCollectives.gather_columns

    def noted(ranks: CpuCollectives, *tensors: Any, **places: Any) -> None:
        gathered.append(ranks.index)
        gather(ranks, *tensors, **places)

    monkeypatch.setattr(CpuCollectives, "gather_columns", noted)
    by_chance = SamplingParams(max_tokens=9, temperature=1.3, seed=11, ignore_eos=True)
    requests = {"a": by_chance, "b": greedy(9), "c": by_chance}
    expected, _ = run(folder, 1, requests)
    assert run(folder, 4, requests)[0] == expected
    assert gathered == []
    requests["d"] = greedy(9, repetition_penalty=1.5)
    expected, _ = run(folder, 1, requests)
    assert run(folder, 4, requests)[0] == expected
    assert set(gathered) == {0, 1, 2, 3}


@pytest.mark.parametrize("name", ["llama", "qwen3", "gemma"])
def test_sums_of_one_row_are_left_to_the_next_product(
    name: str, folder_of: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of all layers but the last, in decodes of one sequence and in pieces of a prompt that are one token."""
    left: list[tuple[int, int]] = []

    def leaves_sums(ranks: CpuCollectives, halves: Sequence[SummedHalf]) -> bool:
        assert {half.activation is None for half in halves[::2]} == {False}
        return bool(ranks.least(1))

    def leave_sum(ranks: CpuCollectives, x: Tensor, weight: LinearWeight, half: int, update: Tensor) -> None:
        assert x.shape[0] == 1
        make_ops(x.device).linear(x, weight, out=update)
        left.append((ranks.index, half))

    def project_sum(
        ranks: CpuCollectives,
        x: Tensor,
        sum: LeftSum,
        norm: Tensor,
        eps: float,
        weight: LinearWeight,
        activation: Activation | None,
        out: Tensor,
    ) -> None:
        ops = make_ops(x.device)
        ranks.all_reduce(sum.update)
        assert sum.out.pointer not in (x.pointer, sum.update.pointer)
        ops.add(x, sum.update, out=sum.out)
        scratch = empty((1, weight.shape[0]), x.dtype, x.device)
        activate = None if activation is None else Activate(activation, scratch)
        prologue = RMSNorm(norm, eps, empty(x.shape, x.dtype, x.device))
        ops.linear(sum.out, weight, prologue=prologue, epilogue=activate, out=out)

    folder = folder_of(name)
    settings = {"dtype": "float32", "max_num_batched_tokens": len(PREFIX) - 1}
    requests = {"a": greedy(9), "d": greedy(4, prompt_logprobs=1)}
    expected, _ = run(folder, 1, requests, **settings)
    for method in (leaves_sums, leave_sum, project_sum):
        monkeypatch.setattr(CpuCollectives, method.__name__, method)
    found, engine = run(folder, 2, requests, **settings)
    assert found == expected
    assert any(batch.num_tokens == 1 and len(batch.logits_indices) == 1 for batch in engine.batches)
    assert {half for _, half in left} == {0, 1}
    assert left.count((0, 0)) == left.count((0, 1)) == left.count((1, 0)) == left.count((1, 1))


def test_sums_are_the_same_bits_each_time(folder_of: Callable[[str], Path]) -> None:
    folder = folder_of("qwen3")
    first, second = (run(folder, 4, {"b": greedy(6, logprobs=1)}, dtype="bfloat16")[1].scores for _ in range(2))
    assert first == second


@pytest.mark.parametrize(("model", "sizes"), [("stories260K", (2, 4)), ("builtin", (2, 3))])
def test_trained_models_say_the_same(model: str, sizes: tuple[int, ...], shared_models: Path) -> None:
    """Stories; and the demonstration model, of whose three key/value heads two ranks share one, and of whose vocabulary
    three ranks have unequal parts."""
    folder = BUILTIN if model == "builtin" else shared_models / model
    requests = {name: greedy(24) for name in PROMPTS}
    roomy = {"num_kv_blocks": 64, "max_model_len": 128, "dtype": "float32"}
    expected, _ = run(folder, 1, requests, **roomy)
    for size in sizes:
        assert run(folder, size, requests, **roomy)[0] == expected


# -- what goes wrong ------------------------------------------------------------------------------


class Stuck:
    """Rank `index`'s runner fails or hangs when a step starts."""

    def __init__(self, runner: ModelRunner, index: int, fault: Callable[[], None]) -> None:
        self._start, self.index, self._fault = runner.start, index, fault

    def __call__(self, batch: StepBatch) -> Any:
        self._fault()
        return self._start(batch)


def faulty(
    folder: Path, index: int, fault: Callable[[], None], on_hang: Callable[[RankError], None] | None
) -> ParallelRunner:
    """`on_hang`: None for what the engine does, when it does."""
    config = EngineConfig(model=str(folder), tensor_parallel_size=2, **TINY)
    ranks = make_cpu_runner(config, load_config(folder), on_hang=on_hang)
    if on_hang is not None:
        ranks.rendezvous.timeout = 0.5
    runner = (ranks.first, *ranks.others)[index]
    runner.start = Stuck(runner, index, fault)  # type: ignore[method-assign]
    return ranks


def unexpected(error: RankError) -> None:
    raise AssertionError(str(error))


def step_of(token: int) -> StepBatch:
    row = Row(slot=0, blocks=[0, 1], prompt=[token], params=greedy(2))
    return step_batch([row], TINY["block_size"])


@pytest.mark.parametrize("index", [0, 1])
def test_a_rank_that_fails_ends_the_step_of_all(index: int, folder_of: Callable[[str], Path]) -> None:
    def fail() -> None:
        raise MemoryError("no more")

    ranks = faulty(folder_of("llama"), index, fail, unexpected)
    with pytest.raises(MemoryError, match="no more"):
        ranks.start(step_of(5))
    with pytest.raises((RankError, MemoryError)):
        ranks.start(step_of(6))  # and of all that come
    ranks.close()


@pytest.mark.parametrize("index", [0, 1])
def test_a_rank_that_hangs_is_noticed_by_the_others(index: int, folder_of: Callable[[str], Path]) -> None:
    """Whoever is in a step is told by the time, but the late one itself: so the engine's process ends itself."""
    freed, told = threading.Event(), Queue[RankError]()
    ranks = faulty(folder_of("llama"), index, lambda: assert_set(freed), told.put)
    thread = threading.Thread(target=swallow, args=(lambda: ranks.start(step_of(5)),))
    thread.start()
    assert str(told.get(timeout=DEADLINE)) == f"rank {index} has not come for 0.5 s"
    freed.set()
    thread.join(DEADLINE)
    assert not thread.is_alive()
    ranks.close()


def hang_in_a_step(folder: Path, index: int, begun: Any) -> None:
    """The life of a process whose ranks are as the engine has them."""

    def hang() -> None:
        begun.set()
        threading.Event().wait()

    faulty(folder, index, hang, on_hang=None).start(step_of(5))


@pytest.mark.parametrize("index", [0, 1])
def test_a_hang_ends_the_process_within_five_seconds(index: int, folder_of: Callable[[str], Path]) -> None:
    """Whose supervisor then starts it again."""
    begun = SPAWN.Event()
    process = SPAWN.Process(target=hang_in_a_step, args=(folder_of("llama"), index, begun), daemon=True)
    process.start()
    assert begun.wait(DEADLINE)
    process.join(5)
    assert process.exitcode == 1


def assert_set(event: threading.Event) -> None:
    assert event.wait(DEADLINE)


def swallow(function: Callable[[], Any]) -> None:
    with contextlib.suppress(RankError):
        function()


def test_a_rank_that_hangs_is_late_after_the_time_that_is_named() -> None:
    watch = _Watch(4.0)
    looks = next(number for number in count(1) if watch.hangs([None]))
    assert looks * LOOK_SECONDS == 4.0


def test_a_rank_that_computes_is_not_late() -> None:
    """However long it takes."""
    rendezvous, come = Rendezvous(2, timeout=0.5, on_hang=unexpected), threading.Event()

    def compute() -> None:
        rendezvous.begin(1)
        end = time.thread_time() + 1.2
        while time.thread_time() < end:
            come.is_set()
        rendezvous.wait(1)

    thread = threading.Thread(target=compute)
    thread.start()
    rendezvous.begin(0)
    rendezvous.wait(0)
    thread.join(DEADLINE)
    assert rendezvous.states[0].wait_seconds > 1


def test_what_ranks_cannot_do_is_refused(folder_of: Callable[[str], Path], tmp_path: Path) -> None:
    folder = folder_of("llama")
    with pytest.raises(ConfigError, match="--tensor-parallel-size 2 is for models that generate text, not for encod"):
        make_cpu_runner(
            EngineConfig(model="m", tensor_parallel_size=2), load_config(build_encoder(tmp_path / "encoder"))
        )
    with pytest.raises(ConfigError, match="--lora and --allow-lora-loading cannot be used with --tensor-parallel-size"):
        EngineConfig(model="m", tensor_parallel_size=2, lora=("a=/a",)).verify()
    with pytest.raises(ConfigError, match="--tensor-parallel-size 3 does not divide the model's 4 attention heads"):
        run(folder, 3, {})
    with pytest.raises(ConfigError, match="--scoring yes-no cannot be used with --tensor-parallel-size"):
        EngineConfig(model="m", tensor_parallel_size=2, scoring="yes-no").verify()
    with pytest.raises(ConfigError, match="--cpu-offload-gib cannot be used with --tensor-parallel-size"):
        EngineConfig(model="m", tensor_parallel_size=2, cpu_offload_gib="1").verify()
    with pytest.raises(ConfigError, match="the KV cache has memory for 0 tokens"):
        run(folder, 2, {}, num_kv_blocks=None, cpu_kv_cache_gib=1e-6)


@pytest.mark.parametrize(
    ("name", "settings", "error"),
    [
        ("llama", {"kv_offload_gib": 1.0}, "--tensor-parallel-size 2 on GPUs cannot be used with --kv-offload-gib"),
        ("olmo2", {}, "--tensor-parallel-size 2 on GPUs: norms over all heads together, which this model has"),
    ],
)
def test_what_gpus_cannot_do_is_refused_before_they_are_looked_for(
    name: str, settings: dict[str, Any], error: str, folder_of: Callable[[str], Path]
) -> None:
    folder = folder_of(name)
    config = EngineConfig(model=str(folder), tensor_parallel_size=2, **settings)
    with pytest.raises(ConfigError, match=error):
        make_cuda_runner(config, load_config(folder), None, make_ops(CPU))  # type: ignore[arg-type]
