"""The page's figures: the heartbeats of the last two minutes as rates, latencies and a short history."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any, TypeAlias

from tessera import __version__
from tessera.app.generate.served_model import ServedModel
from tessera.app.generate.served_models import ServedModels
from tessera.engine.contract.histogram import SECONDS_PER_REQUEST, SECONDS_PER_TOKEN, SECONDS_TO_FIRST_TOKEN, quantile
from tessera.engine.contract.messages import EngineInfo, EngineTotals, SchedulerStats

History: TypeAlias = Sequence[tuple[float, SchedulerStats]]

RATE_SECONDS = 5.0
LATENCY_SECONDS = 60.0
NUM_POINTS = 60  # of the history that is drawn


def status_object(model: ServedModel, models: ServedModels, tenant: str) -> dict[str, Any]:
    """The current state of one model for a tenant; parts that are not known yet are None. Its names come first."""
    client = model.client
    well, reason = model.engine.health()
    history = list(client.history)
    gpu = client.gpu
    ordered = [model, *(other for other in models if other is not model)]
    names = models.names_for(tenant, *ordered)
    return {
        "version": __version__,
        "state": {"ready": well, "reason": reason},
        "models": names,
        "default_names": [each.default_name for each in models],
        "generating_models": [
            name
            for each in ordered
            for name in names
            if name in each.settings.served_model_names or name in each.adapter_names
        ],
        "chat": model.template is not None,
        "engine": _engine(client.info) if client.info is not None else None,
        "now": _now(history[-1][1]) if history else None,
        "rates": _rates(history),
        "latency": _latency(history),
        "totals": _totals(history),
        "history": _points(history),
        "gpu": {"memory_used": gpu.memory_used, "memory_total": gpu.memory_total, "utilization": gpu.utilization}
        if gpu is not None
        else None,
    }


def _engine(info: EngineInfo) -> dict[str, Any]:
    return {
        "device": info.device,
        "device_name": info.device_name,
        "dtype": info.dtype,
        "architecture": info.architecture,
        "num_parameters": info.num_parameters,
        "weight_bytes": info.weight_bytes,
        "max_model_len": info.max_model_len,
        "max_num_seqs": info.max_num_seqs,
        "max_num_batched_tokens": info.max_num_batched_tokens,
        "block_size": info.block_size,
        "num_kv_blocks": info.num_kv_blocks,
        "kv_cache_bytes": info.kv_cache_bytes,
        "kv_cache_dtype": info.kv_cache_dtype or info.dtype,
        "num_host_kv_blocks": info.num_host_kv_blocks,
        "num_disk_kv_blocks": info.num_disk_kv_blocks,
        "generates": info.generates,
    }


def _now(stats: SchedulerStats) -> dict[str, int]:
    return {
        "running": stats.num_running,
        "waiting": stats.num_waiting,
        "blocks_used": stats.num_used_blocks,
        "blocks_cached": stats.num_cached_blocks,
        "blocks_free": stats.num_free_blocks,
    }


def _rates(history: History) -> dict[str, float] | None:
    """Per second, over the last few seconds."""
    begin = _since(history, RATE_SECONDS)
    if begin is None:
        return None
    (begin_time, earlier), (end_time, now) = begin, history[-1]
    before, after = earlier.totals, now.totals
    if before is None or after is None or end_time <= begin_time:
        return None
    seconds = end_time - begin_time
    return {
        "prompt_tokens": (after.num_prompt_tokens - before.num_prompt_tokens) / seconds,
        "generation_tokens": (after.num_generation_tokens - before.num_generation_tokens) / seconds,
        "requests": (_num_finished(after) - _num_finished(before)) / seconds,
    }


def _latency(history: History) -> dict[str, dict[str, float | None]] | None:
    """Median and 99th percentile in seconds, of the last minute."""
    begin = _since(history, LATENCY_SECONDS)
    if begin is None:
        return None
    before, after = begin[1].totals, history[-1][1].totals
    if before is None or after is None:
        return None
    return {
        "ttft": _percentiles(SECONDS_TO_FIRST_TOKEN, before.time_to_first_token, after.time_to_first_token),
        "itl": _percentiles(SECONDS_PER_TOKEN, before.inter_token_latency, after.inter_token_latency),
        "e2e": _percentiles(SECONDS_PER_REQUEST, before.e2e_latency, after.e2e_latency),
    }


def _percentiles(bounds: Sequence[float], before: Sequence[int], after: Sequence[int]) -> dict[str, float | None]:
    counts = [late - early for early, late in zip(before, after, strict=True)]
    return {"p50": quantile(bounds, counts, 0.5), "p99": quantile(bounds, counts, 0.99)}


def _totals(history: History) -> dict[str, Any] | None:
    totals = history[-1][1].totals if history else None
    if totals is None:
        return None
    return {
        "prompt_tokens": totals.num_prompt_tokens,
        "generation_tokens": totals.num_generation_tokens,
        "finished": totals.num_finished,
        "preemptions": totals.num_preemptions,
        "prefix_queries": totals.num_prefix_queries,
        "prefix_hits": totals.num_prefix_hits,
        "draft_tokens": totals.num_draft_tokens,
        "accepted_draft_tokens": totals.num_accepted_draft_tokens,
    }


def _points(history: History) -> list[dict[str, float]]:
    """About NUM_POINTS points of the history, each with the tokens per second since the one before."""
    step = max(1, len(history) // NUM_POINTS)
    kept = list(history)[::-1][::step][::-1]
    points = []
    for (earlier, before), (time, stats) in pairwise(kept):
        if before.totals is None or stats.totals is None or time <= earlier:
            continue
        tokens = stats.totals.num_generation_tokens - before.totals.num_generation_tokens
        points.append(
            {
                "age": round(history[-1][0] - time, 2),
                "running": stats.num_running,
                "waiting": stats.num_waiting,
                "blocks_used": stats.num_used_blocks,
                "generation_tokens": round(tokens / (time - earlier), 1),
            }
        )
    return points


def _since(history: History, seconds: float) -> tuple[float, SchedulerStats] | None:
    """The oldest entry of the last `seconds`; None where there is only one."""
    if len(history) < 2:
        return None
    end = history[-1][0]
    return next(entry for entry in history if end - entry[0] <= seconds)


def _num_finished(totals: EngineTotals) -> int:
    return sum(totals.num_finished.values())
