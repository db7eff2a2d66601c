"""Output on the terminal while the server starts: progress, then the settings in effect."""

from __future__ import annotations

import json
import logging
import shlex
import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING

from tessera import __version__
from tessera.app.settings import AppSettings
from tessera.app.units import si
from tessera.engine.contract.messages import DraftInfo, EngineInfo, LoadProgress, OffloadInfo

if TYPE_CHECKING:
    from tessera.app.server.progress_bars import ProgressBars

logger = logging.getLogger("tessera.serve")

STAGES = {"kernels": "compiling kernels", "weights": "loading weights"}
BYTE_STAGES = frozenset({"weights"})  # the other stages count pieces
PLAIN_STEPS = 4  # lines per stage where there is no terminal to draw a bar on


class StartReport:
    """Draws bars on a terminal, prints plain lines elsewhere; everything goes to standard error.

    With `as_log` it writes log lines, for programs that read standard error.
    """

    def __init__(self, *, as_log: bool = False) -> None:
        self._as_log = as_log
        self._bars: ProgressBars | None = None
        if sys.stderr.isatty() and not as_log:
            from tessera.app.server.progress_bars import ProgressBars  # takes longer to import than all of this

            self._bars = ProgressBars()
        self._reported: dict[str, int] = {}

    def show_progress(self, progress: LoadProgress) -> None:
        if progress.total <= 0:
            return
        if self._bars is not None:
            stage = STAGES.get(progress.stage, progress.stage)
            self._bars.draw(stage, progress.done, progress.total, _amount(progress))
        else:
            self._print_step(progress)

    def show_listening(self, url: str) -> None:
        self._line(f"Tessera {__version__} listens on {url} and answers 503 until the model is loaded")

    def show_ready(
        self,
        infos: Mapping[str, EngineInfo],
        settings: AppSettings,
        url: str,
        *,
        has_template: bool,
        has_tokenizer: bool = True,
    ) -> None:
        """`infos`: what is known of the models that are loaded, by name; the request to try is the first model's."""
        self.close()
        info = infos.get(settings.served_model_names[0])
        if settings.other_models or info is None:
            facts = _several_facts(infos, settings)
        else:
            facts = _facts(info, settings)
        width = 2 + max(map(len, ("embeddings", *facts)))
        for name, value in facts.items():
            self._line(f"  {name:<{width}}{value}")
        self._line(f"Ready on {url}  Try:")
        text = "Once upon a time" if has_tokenizer else [1]
        if info is not None and info.scorer is not None and not info.scorer.beside:
            ranks = has_tokenizer and len(info.scorer.labels) == 1
            line = rerank_line(settings, url) if ranks else classify_line(settings, url, text=text)
        elif info is None or info.generates:
            line = curl_line(settings, url, has_template=has_template and has_tokenizer, text=text)
        else:
            line = embed_line(settings, url, text=text)
        self._line(f"  {line}")

    def show(self, sentence: str) -> None:
        self._line(sentence)

    def close(self) -> None:
        """Leave the bars as they are."""
        if self._bars is not None:
            self._bars.close()

    def _print_step(self, progress: LoadProgress) -> None:
        step = PLAIN_STEPS * progress.done // progress.total
        if step != self._reported.get(progress.stage, 0):
            self._reported[progress.stage] = step
            self._line(f"{STAGES.get(progress.stage, progress.stage)}: {_amount(progress)}")

    def _line(self, text: str) -> None:
        if self._as_log:
            logger.info("%s", text.strip())
        elif self._bars is not None:
            self._bars.print_line(text)
        else:
            print(text, file=sys.stderr, flush=True)


def embed_line(settings: AppSettings, url: str, *, text: str | list[int]) -> str:
    """As `curl_line`, for a model that makes embeddings only."""
    return _curl(settings, url + "/v1/embeddings", {"input": text})


def rerank_line(settings: AppSettings, url: str) -> str:
    """As `curl_line`, for a model that scores pairs."""
    documents = ["The cat sat on the mat.", "It rains."]
    return _curl(settings, url + "/v1/rerank", {"query": "Where is the cat?", "documents": documents})


def classify_line(settings: AppSettings, url: str, *, text: str | list[int]) -> str:
    """As `curl_line`, for a model that classifies texts."""
    return _curl(settings, url + "/v1/classify", {"input": text})


def curl_line(settings: AppSettings, url: str, *, has_template: bool, text: str | list[int]) -> str:
    """A request that can be pasted into a shell; `text` in token ids where the model has no tokenizer."""
    if has_template:
        messages = [{"role": "user", "content": "Hello!"}]
        return _curl(settings, url + "/v1/chat/completions", {"messages": messages, "max_tokens": 64})
    return _curl(settings, url + "/v1/completions", {"prompt": text, "max_tokens": 64})


def _curl(settings: AppSettings, url: str, fields: dict[str, object]) -> str:
    body = {"model": settings.served_model_names[0], **fields}
    scheme, is_unix, path = url.partition("+unix:")
    words = ["curl"]
    if is_unix:  # as `serve` shows a Unix socket: its path, then the request's
        socket_path, _, rest = path.partition("/v1/")
        words += ["--unix-socket", shlex.quote(socket_path)]
        url = f"{scheme}://localhost/v1/{rest}"
    words += [shlex.quote(url), "-H", shlex.quote("Content-Type: application/json")]
    if settings.accepted_keys:
        words += ["-H", '"Authorization: Bearer $TESSERA_API_KEY"']
    return " ".join([*words, "-d", shlex.quote(json.dumps(body))])


def _several_facts(infos: Mapping[str, EngineInfo], settings: AppSettings) -> Mapping[str, str]:
    """A line for each of several models."""
    facts = {}
    for model in settings.models:
        name = model.served_model_names[0]
        info = infos.get(name)
        if info is None:
            facts[name] = "loaded on demand"
        else:
            facts[name] = (
                f"{info.architecture}, {si(info.num_parameters)} parameters, {info.dtype} on {info.device_name}, "
                f"loaded in {info.load_seconds:.1f} s"
            )
    return facts


def _facts(info: EngineInfo, settings: AppSettings) -> Mapping[str, str]:
    names = ", ".join(settings.served_model_names)
    num_tokens = info.num_kv_blocks * info.block_size
    kv_cache = (
        f"{info.num_kv_blocks} blocks of {info.block_size} tokens, {num_tokens} tokens in all, "
        f"{si(info.kv_cache_bytes)}B{f' in {info.kv_cache_dtype}' if info.kv_cache_dtype else ''}"
    )
    facts = {
        "model": f"{names} ({info.architecture}, {si(info.num_parameters)} parameters)",
        "device": f"{info.device}, {info.device_name}: {info.device_reason}",
        **({"ranks": f"{info.num_ranks} share the model"} if info.num_ranks > 1 else {}),
        **({"engines": f"{settings.data_parallel_size}, each as follows"} if settings.data_parallel_size > 1 else {}),
        "dtype": f"{info.dtype}, {si(info.weight_bytes)}B of weights",
        **({"in host": _weight_offload(info.weight_offload)} if info.weight_offload is not None else {}),
        **({"stored as": _mix(info.stored_bytes)} if info.stored_bytes else {}),
        **({"KV cache": kv_cache} if info.generates else {}),
        **({"draft model": _draft(info.draft)} if info.draft is not None else {}),
        **({"KV offload": _offload(info)} if info.num_host_kv_blocks else {}),
        "context": f"{info.max_model_len} tokens",
        "step": f"at most {info.max_num_seqs} sequences and {info.max_num_batched_tokens} tokens",
        "loaded in": f"{info.load_seconds:.1f} s",
    }
    for embedding in info.embeddings:
        beside = f"{', '.join(settings.embedding_model_names)}, " if embedding.role == "beside" else ""
        facts["embeddings" if embedding.role == "main" else "beside it"] = (
            f"{beside}{embedding.dimension} dimensions, {embedding.pooling} pooling, "
            f"of at most {embedding.max_input_tokens} tokens"
        )
    scorer = info.scorer
    if scorer is not None:
        beside = f"{', '.join(settings.reranker_model_names)} beside it, " if scorer.beside else ""
        kind = "yes or no" if scorer.form == "yes_no" else f"{len(scorer.labels)} label{'s'[: len(scorer.labels) > 1]}"
        facts["scores"] = f"{beside}{kind}, {scorer.scores}, of at most {scorer.max_input_tokens} tokens"
    return facts


def _draft(draft: DraftInfo) -> str:
    """A second model, and what it takes beside the first."""
    return (
        f"{draft.architecture}, {si(draft.num_parameters)} parameters, at most {draft.num_tokens} tokens: "
        f"{si(draft.weight_bytes)}B of weights, {si(draft.kv_cache_bytes)}B beside the KV cache"
    )


def _weight_offload(offload: OffloadInfo) -> str:
    """Weights in host memory, and what they cost."""
    seconds = offload.copy_seconds
    return (
        f"{offload.num_layers} of {offload.num_all_layers} layers, {si(offload.nbytes)}B, which a step copies in "
        f"{1000 * seconds:.3g} ms at {si(offload.nbytes / seconds)}B/s: at most {1 / seconds:.3g} steps/s"
    )


def _offload(info: EngineInfo) -> str:
    """Room for KV blocks beyond the device."""
    block_bytes = info.kv_cache_bytes / info.num_kv_blocks
    places = {"in host memory": info.num_host_kv_blocks, "on disk": info.num_disk_kv_blocks}
    return ", ".join(
        f"{count * info.block_size} tokens {place}, {si(count * block_bytes)}B"
        for place, count in places.items()
        if count
    )


def _mix(stored_bytes: Mapping[str, int]) -> str:
    total = sum(stored_bytes.values())
    shares = (f"{name} ({100 * nbytes / total:.3g} %)" for name, nbytes in stored_bytes.items())
    return f"{si(total)}B: {', '.join(shares)}"


def _amount(progress: LoadProgress) -> str:
    if progress.stage in BYTE_STAGES:
        return f"{si(progress.done)}B of {si(progress.total)}B"
    return f"{progress.done} of {progress.total}"
