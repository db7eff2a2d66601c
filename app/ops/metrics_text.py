"""The text of the metrics of all engines and of the app itself, with the model as a label."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Protocol

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric

from tessera.app.engines.engines import Engine, Engines
from tessera.app.ops.metric_aliases import with_aliases
from tessera.app.ops.metrics_page import EngineText
from tessera.app.ops.server_process import ServerProcess

_ENGINE_PREFIX = re.compile(rb"^((?:# (?:HELP|TYPE) )?)tessera:", re.MULTILINE)
_SAMPLE = re.compile(rb"^([^\s{]+)(?:\{(.*)\})?( .*)$")


class Countable(Protocol):
    """Counts of the app processes."""

    def collect(self, prefix: str) -> Iterator[Metric]: ...


class EngineTexts:
    """The engines' own metrics; of one that is busy the last ones, and nothing of one that is not loaded."""

    def __init__(self, engines: Engines, patience: float) -> None:
        self._labels = _labels_of(engines)
        self._engines = [
            (engine, _labels(engine, number, self._labels), EngineText(member.metrics, patience))
            for engine in engines
            for number, member in enumerate(engine.members)
        ]

    async def latest(self) -> bytes:
        resident = [(labels, text) for engine, labels, text in self._engines if engine.is_resident]
        texts = await asyncio.gather(*(text.latest() for _, text in resident))
        if not self._labels:
            return b"".join(texts)
        return merged([(labels, text) for (labels, _), text in zip(resident, texts, strict=True)])


def _labels_of(engines: Engines) -> list[str]:
    """The labels that tell engines apart: none for a single one."""
    several = {"model_name": len(engines) > 1, "engine": any(len(engine.members) > 1 for engine in engines)}
    return [name for name, is_needed in several.items() if is_needed]


def _labels(engine: Engine, number: int, names: Sequence[str]) -> dict[str, str]:
    """Of the engine process `number` of a model."""
    values = {"model_name": engine.name, "engine": str(number)}
    return {name: values[name] for name in names}


def merged(texts: Sequence[tuple[Mapping[str, str], bytes]]) -> bytes:
    """One text of several, each with labels: a family's samples stand together, and all have the labels."""
    heads: dict[bytes, list[bytes]] = {}
    samples: dict[bytes, list[bytes]] = {}
    for labels, text in texts:
        family = b""
        for line in text.splitlines():
            if line.startswith((b"# HELP ", b"# TYPE ")):
                family = line.split(b" ", 3)[2]
                samples.setdefault(family, [])
                if line not in heads.setdefault(family, []):
                    heads[family].append(line)
            elif line and not line.startswith(b"#"):
                samples.setdefault(family, []).append(_labelled(line, labels))
    lines = (line for family, found in samples.items() for line in (*heads.get(family, ()), *found))
    return b"".join(line + b"\n" for line in lines)


def _labelled(line: bytes, labels: Mapping[str, str]) -> bytes:
    match = _SAMPLE.match(line)
    if match is None:
        return line
    parts = [match[2] or b""]
    for name, value in labels.items():
        label = f'{name}="'.encode()
        if label not in parts[0]:
            escaped = value.replace("\\", "\\\\").replace('"', '\\"').encode()
            parts.append(label + escaped + b'"')
    return match[1] + b"{" + b",".join(part for part in parts if part) + b"}" + match[3]


async def render_metrics(
    engines: Engines, counts: Sequence[Countable], prefix: str, texts: EngineTexts, process: ServerProcess
) -> bytes:
    """The engines' metrics and the app's own, which remain while an engine is down."""
    text = await texts.latest()
    process_metrics = await process.metrics()
    families = [*_own_metrics(engines, counts, prefix), *process_metrics]
    return await asyncio.to_thread(_whole_text, text, prefix, families)


def _whole_text(engine_text: bytes, prefix: str, families: Sequence[Metric]) -> bytes:
    """Of hundreds of samples, which takes 10 ms: called in a thread, beside the event loop."""
    text = _ENGINE_PREFIX.sub(rb"\g<1>" + prefix.encode() + b":", with_aliases(engine_text, prefix))
    return text + generate_latest(_Families(families))


def _own_metrics(engines: Engines, counts: Sequence[Countable], prefix: str) -> Iterator[Metric]:
    yield from _engine_metrics(engines, prefix)
    if not engines.is_static:
        loaded = GaugeMetricFamily(f"{prefix}:model_loaded", "Whether the model is loaded.", labels=["model_name"])
        loads = CounterMetricFamily(f"{prefix}:model_loads", "Times that it was loaded.", labels=["model_name"])
        for engine in engines:
            loaded.add_metric([engine.name], int(engine.status.state == "loaded"))
            loads.add_metric([engine.name], engine.status.num_loads)
        yield from (loaded, loads)
    if any(engine.status.host_bytes for engine in engines):
        yield from _sleep_metrics(engines, prefix)
    yield from _gpu_metrics(engines, prefix)
    for each in counts:
        yield from each.collect(prefix)


def _sleep_metrics(engines: Engines, prefix: str) -> Iterator[Metric]:
    """Of models that have slept with their weights in host memory."""
    labels = ["model_name"]
    asleep = GaugeMetricFamily(
        f"{prefix}:model_in_host_memory",
        "Whether the model is unloaded, with its weights in host memory.",
        labels=labels,
    )
    taken = GaugeMetricFamily(
        f"{prefix}:model_host_memory_bytes", "Host memory that the model takes to sleep, asleep or not.", labels=labels
    )
    wakes = CounterMetricFamily(f"{prefix}:model_wakes", "Times that it was loaded from host memory.", labels=labels)
    for engine in engines:
        asleep.add_metric([engine.name], int(engine.status.in_host_memory))
        taken.add_metric([engine.name], engine.status.host_bytes)
        wakes.add_metric([engine.name], engine.status.num_wakes)
    yield from (asleep, taken, wakes)


def _engine_metrics(engines: Engines, prefix: str) -> Iterator[Metric]:
    """Of the engines that should be up; with several models, by model, and with several engines of one, by engine."""
    labels = _labels_of(engines)
    up = GaugeMetricFamily(f"{prefix}:engine_up", "Whether the engine gets on with its work.", labels=labels)
    cache = GaugeMetricFamily(
        f"{prefix}:cache_config_info",
        "The KV cache, as labels; always 1.",
        labels=[*labels, "block_size", "num_gpu_blocks", "kv_cache_bytes", "cache_dtype"],
    )
    for engine in engines:
        if not engine.is_resident:
            continue
        for number, member in enumerate(engine.members):
            values = list(_labels(engine, number, labels).values())
            well = engine.health()[0] and member.health()[0]
            up.add_metric(values, int(well))
            info = member.info
            if info is not None:
                sizes = [str(info.block_size), str(info.num_kv_blocks), str(info.kv_cache_bytes)]
                cache.add_metric([*values, *sizes, info.kv_cache_dtype or info.dtype], 1)
    yield up
    if cache.samples:
        yield cache


def _gpu_metrics(engines: Engines, prefix: str) -> Iterator[Metric]:
    """Of the GPU, or of the GPU of each engine; engines of equal numbers share one."""
    labels = [name for name in _labels_of(engines) if name == "engine"]
    used = GaugeMetricFamily(f"{prefix}:gpu_memory_used_bytes", "Memory of the GPU in use.", labels=labels)
    total = GaugeMetricFamily(f"{prefix}:gpu_memory_total_bytes", "Memory of the GPU.", labels=labels)
    documentation = "Share of the last moments in which the GPU ran a kernel, 0 to 1."
    utilization = GaugeMetricFamily(f"{prefix}:gpu_utilization_perc", documentation, labels=labels)
    for number in range(max(len(engine.members) for engine in engines)):
        members = (engine.members[number] for engine in engines if number < len(engine.members))
        gpu = next((member.gpu for member in members if member.gpu is not None), None)
        values = [str(number)] if labels else []
        if gpu is not None:
            used.add_metric(values, gpu.memory_used)
            total.add_metric(values, gpu.memory_total)
            if gpu.utilization is not None:
                utilization.add_metric(values, gpu.utilization)
    yield from (family for family in (used, total, utilization) if family.samples)


class _Families(CollectorRegistry):
    """The families of one scrape, for `generate_latest`."""

    def __init__(self, families: Sequence[Metric]) -> None:
        super().__init__(auto_describe=False)
        self._families = families

    def collect(self) -> Iterator[Metric]:
        return iter(self._families)
