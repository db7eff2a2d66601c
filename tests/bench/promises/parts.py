"""The benchmarks whose figures are promised, with their bounds: of one H200, or of two where a part takes two GPUs."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Final

from tests.bench.promises.figure import Figure, line, load, pattern, quotient, start

PYTHON: Final = sys.executable
OUTPUT: Final = "{output}"  # in a command: the part's folder
WORKERS: Final = "{workers}"  # processes for the GPUs that the part has
ALL_GPUS: Final = 0
BASE: Final = "{base}"  # in a command: the checkout to compare with
LOADS: Final = (PYTHON, "-m", "tests.bench", "--output", OUTPUT, "--only", "loads", "--model")
PYTEST: Final = (PYTHON, "-m", "pytest", "-q", "-m", "gpu", "-p", "no:benchmark", "-p", "no:cacheprovider")
SHARED_OUT: Final = ("-n", WORKERS, "--dist", "worksteal")
TWO_GPU_TESTS: Final = "tests/gpu/ranks"
GGUF_ROWS: Final = (1, 8, 16, 32, 64, 128, 256, 512)
MEMORY_TESTS: Final = ("tests/gpu/test_device.py", "tests/gpu/engine/test_sleep_gpu.py")  # no other test beside them
PASSED: Final = (
    Figure("tests that passed", pattern(r"(\d+) passed"), at_least=1),
    Figure("tests that failed", pattern(r"(\d+) (?:failed|error)", missing=0), at_most=0),
)


@dataclass(frozen=True)
class Part:
    """A command that measures.

    Attributes:
        seconds: about as long as it takes, or a bit more; it is ended after twice that.
        num_gpus: that it needs; ALL_GPUS: it takes those that there are.
        alone: its first tokens suffer from other benchmarks on the same host.
    """

    name: str
    command: tuple[str, ...]
    seconds: float
    figures: tuple[Figure, ...]
    num_gpus: int = 1
    alone: bool = False


def _streams(**at_least: float) -> tuple[Figure, ...]:
    """Tokens a second of so many streams: `s16=5000`."""
    return tuple(
        Figure(f"{name[1:]} streams, tokens/s", load(int(name[1:])), at_least=bound) for name, bound in at_least.items()
    )


def _one_stream(at_least: float, first_token_ms: float | None = None) -> tuple[Figure, ...]:
    figures = (Figure("1 stream, tokens/s", load(1, input_len=128), at_least=at_least),)
    if first_token_ms is None:
        return figures
    first = load(1, "median_ttft_ms", input_len=8000)
    return (*figures, Figure("8,000 tokens: first token, ms", first, at_most=first_token_ms))


def _long_prompts(tokens: float, first_token_ms: float) -> tuple[Figure, ...]:
    return (
        Figure("32 streams of 6,000, tokens/s", load(32), at_least=tokens),
        Figure("32 streams of 6,000: first token, ms", load(32, "median_ttft_ms"), at_most=first_token_ms),
    )


def _profile(name: str, model: str, *rows: int) -> Part:
    """Where the time of steps goes."""
    command = (PYTHON, "-m", "tests.bench.steps", model, *map(str, rows), "--profile")
    return Part(f"step's profile, {name}", command, 30 + 10 * len(rows), ())


def _speculation(method: str, at_least: float, streams: tuple[int, ...] = (1,)) -> Part:
    def rate(mode: str, number: int) -> Figure:
        drafting, without = (line("tok/s", speculation=each, streams=number) for each in (mode, "off"))
        return Figure(f"{number} streams, {mode}, times without drafts", quotient(drafting, without), at_least=0.98)

    figures = [Figure("1 stream, tokens/s", line("tok/s", speculation="on", streams=1), at_least=at_least)]
    if len(streams) > 1:
        steps = (line("ms a step", speculation=mode, streams=1) for mode in ("on", "off"))
        figures.append(Figure("step of 1 + 7 tokens, times that of 1", quotient(*steps), at_most=1.06))
        figures += [rate("auto", number) for number in streams[1:]]
    numbers = tuple(map(str, streams))
    command = (PYTHON, "-m", "tests.bench.speculation", "held", "--method", method, "--streams", *numbers)
    return Part(f"speculation, {method}", command, 60 + 15 * len(streams), tuple(figures))


PARTS: Final = (
    Part(
        "tests",
        (*PYTEST, *SHARED_OUT, "--timeout", "300", "tests/gpu", "--ignore", TWO_GPU_TESTS),
        480,
        PASSED,
        ALL_GPUS,
    ),
    Part("tests of a card's memory", (*PYTEST, "--timeout", "300", *MEMORY_TESTS), 60, PASSED),
    Part(
        "attack",
        (
            *(PYTHON, "-m", "tests.attack", "--model", "builtin", "--requests", "100000", "--seconds", "270"),
            *("--serve", "--device cuda --dtype bfloat16"),
        ),
        330,
        (),
        alone=True,
    ),
    Part(
        "one order of sums",
        (
            *(PYTHON, "-m", "tests.evaluation", "--device", "cuda", "--dtype", "bfloat16", "--count", "100"),
            *("--concurrency", "1", "8", "32", "100", "256", "--", "--batch-invariant"),
        ),
        120,
        (Figure("digests of 1,500 answers in 5 runs", line("digests"), at_most=1),),
    ),
    Part(
        "demonstration model",
        (PYTHON, "-m", "tessera.engine.builtin.training.train", "--out", OUTPUT, "--minutes", "7"),
        480,
        (
            Figure("right on words held out, %", pattern(r"held-out words: mean ([\d.]+)%"), at_least=99),
            Figure("right in phrasings held out, %", pattern(r"held-out phrasings: mean ([\d.]+)%"), at_least=90),
        ),
    ),
    Part(
        "loads beside the base",
        (PYTHON, "-m", "tests.bench.compare", BASE, "--seconds", "700", "--output", OUTPUT),
        800,
        (Figure("worst change beyond two standard errors, %", line("beyond_error"), at_least=-2),),
        alone=True,
    ),
    Part(
        "start",
        (PYTHON, "-m", "tests.bench", "--output", OUTPUT, "--only", "start", "--model", "llama-8b.gguf"),
        60,
        (Figure("GGUF, kernels cached: first token, s", start(cached=True), at_most=3),),
        alone=True,
    ),
    Part(
        "long prompts",
        (*LOADS, "llama-8b", "--long-prompts"),
        90,
        _long_prompts(1080, 1043),
        alone=True,
    ),
    Part(
        "long prompts, 0.6 B",
        (*LOADS, "qwen3-0.6b", "--long-prompts"),
        60,
        (Figure("32 streams of 6,000: first token, ms", load(32, "median_ttft_ms"), at_most=184),),
        alone=True,
    ),
    Part(
        "GGUF",
        (*LOADS, "llama-8b.gguf"),
        110,
        (*_one_stream(650, 235), *_streams(s16=5000, s64=8000, s256=9500)),
    ),
    Part(
        "FP8 weights and cache",
        (*LOADS, "llama-8b.fp8", "--", "--kv-cache-dtype", "fp8"),
        90,
        (*_one_stream(440, 130), *_streams(s16=5000, s64=10_500, s256=16_000)),
    ),
    Part(
        "FP8, long prompts",
        (*LOADS, "llama-8b.fp8", "--long-prompts", "--", "--kv-cache-dtype", "fp8"),
        70,
        _long_prompts(1900, 700),
    ),
    Part(
        "4-bit weights",
        (*LOADS, "llama-8b", "--", "--quantization", "int4"),
        110,
        (*_one_stream(650, 225), *_streams(s16=5000, s64=7500, s256=9500)),
    ),
    Part(
        "4-bit weights, long prompts",
        (*LOADS, "llama-8b", "--long-prompts", "--", "--quantization", "int4"),
        80,
        _long_prompts(1080, 1043),
    ),
    Part(
        "Qwen3-30B-A3B",
        (*LOADS, "qwen3-30b-a3b"),
        150,
        (*_one_stream(380), *_streams(s16=1400, s64=3200, s256=7500)),
    ),
    Part("gpt-oss-20b", (*LOADS, "gpt-oss-20b", "--streams", "1", "64"), 90, (*_one_stream(550), *_streams(s64=7000))),
    Part("Gemma 3 4B", (*LOADS, "gemma-3-4b", "--streams", "1"), 60, _one_stream(440)),
    Part(
        "beside transformers",
        (PYTHON, "-m", "tests.bench.differential"),
        150,
        (
            Figure("kinds of models", line("kinds"), at_least=16),
            Figure("with equal tokens in float32", line("with_equal_tokens"), at_least=16),
            Figure("error in bfloat16, times theirs, median", line("median_ratio"), at_most=1),
        ),
    ),
    _profile("GGUF", "llama-8b.gguf", 1, 16, 64),
    _profile("FP8", "llama-8b.fp8", 1, 16, 256),
    _profile("Gemma 3 4B", "gemma-3-4b", 1),
    Part(
        "kernels of GGUF",
        (PYTHON, "-m", "tests.bench.block_kernels", "Q4_K", "Q6_K", *("--rows", *map(str, GGUF_ROWS))),
        60,
        (),
    ),
    Part("kernels of mixtures", (PYTHON, "-m", "tests.bench.mixtures"), 90, ()),
    Part("kernels of FP8 beside cuBLAS", (PYTHON, "-m", "tests.bench.fp8_kernels", "--brief"), 90, ()),
    Part(
        "weights in host memory",
        (PYTHON, "-m", "tests.bench.weight_offload"),
        200,
        (
            Figure("8 B, 1 stream, share of the link", line("link_share_1", model="llama-8b"), at_least=0.85),
            Figure("70 B, 1 stream, share of the link", line("link_share_1", model="llama-70b"), at_least=0.85),
            Figure("70 B, 64 streams, tokens/s", line("tokens_per_second_64", model="llama-70b"), at_least=120),
        ),
    ),
    Part(
        "sleep and wake up",
        (PYTHON, "-m", "tests.bench.wake_up"),
        80,
        (
            Figure("slowest of 20 times awake, s", line("wakes", 1), at_most=0.6),
            Figure("growth of the process, MiB", line("process_growth_mib"), at_most=64),
            Figure("growth on the device, MiB", line("device_growth_mib"), at_most=64),
        ),
    ),
    Part(
        "prefixes from host memory",
        (PYTHON, "-m", "tests.bench.returning_prefix", "--model", "llama-8b", "--device", "cuda"),
        60,
        (
            Figure("8,000 tokens back: first token, ms", line("returned_ms"), at_most=45),
            Figure("P99 between tokens of 16 streams, times alone", line("p99_ratio"), at_most=1.5),
        ),
    ),
    Part(
        "conversations",
        (
            *(PYTHON, "-m", "tests.bench.conversations", "--model", "llama-8b", "--device", "cuda"),
            *("--turn-tokens", "600", "--output-tokens", "64", "--streams", "16"),
        ),
        150,
        (
            Figure(
                "tokens/s, times computing again",
                quotient(line("host memory", "tokens_per_second"), line("without", "tokens_per_second")),
                at_least=2,
            ),
        ),
    ),
    Part(
        "LoRA adapters",
        (PYTHON, "-m", "tests.bench.lora", "llama-8b"),
        60,
        (Figure("64 rows over 16 adapters, share of the base", line("adapters"), at_least=0.85),),
    ),
    Part(
        "training",
        (
            PYTHON,
            "-m",
            "tests.bench.training",
            *(word for name in ("llama-8b lora", "gpt2-124m") for word in ("--only", name)),
        ),
        90,
        (
            Figure("LoRA of 8 B, tokens/s", line("llama-8b lora", "tokens_per_second"), at_least=13_000),
            Figure("GPT-2 124M, tokens/s", line("gpt2-124m", "tokens_per_second"), at_least=400_000),
        ),
    ),
    Part(
        "training with checkpointed layers",
        (PYTHON, "-m", "tests.bench.training", "--only", "llama-8b lora, checkpointed"),
        60,
        (Figure("LoRA of 8 B, tokens/s", line("llama-8b lora, checkpointed", "tokens_per_second"), at_least=9500),),
    ),
    _speculation("suffix", 850, (1, 16, 64, 256)),
    _speculation("eagle3", 680),
    _speculation("draft_model", 480),
    Part("tests of two GPUs", (*PYTEST, "--timeout", "300", TWO_GPU_TESTS), 200, PASSED, num_gpus=2),
    Part(
        "sums over two GPUs",
        (PYTHON, "-m", "tests.bench.collectives", "2"),
        60,
        (
            Figure("16 KB, us", line("us", bytes=1 << 14), at_most=4.5),
            Figure("1 MB, us", line("us", bytes=1 << 20), at_most=9),
        ),
        num_gpus=2,
    ),
    Part(
        "two GPUs",
        (*LOADS, "llama-8b", "--", "--tensor-parallel-size", "2"),
        110,
        (*_one_stream(430, 120), *_streams(s64=11_000, s256=17_000)),
        num_gpus=2,
    ),
    Part(
        "70 B on two GPUs",
        (*LOADS, "llama-70b", "--streams", "1", "64", "--", "--tensor-parallel-size", "2"),
        200,
        (*_one_stream(50), *_streams(s64=1700)),
        num_gpus=2,
    ),
    Part(
        "two engines",
        (*LOADS, "llama-8b", "--streams", "512", "--", "--data-parallel-size", "2"),
        90,
        _streams(s512=1.95 * 10_163),
        num_gpus=2,
    ),
)
