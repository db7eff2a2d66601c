"""Spans on their way to a collector. Where it is away or slow, further spans are dropped and counted; nothing waits."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Sequence

from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult

from tessera.app.http.counts import HttpCounts

logger = logging.getLogger("tessera.tracing")

MAX_SPANS = 8192  # in the queue, unless OTEL_BSP_MAX_QUEUE_SIZE says otherwise
BATCH = 128  # unless OTEL_BSP_MAX_EXPORT_BATCH_SIZE does: encoding a batch takes the interpreter's lock for 2 ms
COMPLAINT_INTERVAL = 60.0  # seconds between two log lines


class SpanQueue(BatchSpanProcessor):
    """OpenTelemetry's queue and the thread that sends from it, with a bound of its own.

    Args:
        endpoint: for the log.
        counts: gets the spans that were sent and dropped.
    """

    def __init__(self, exporter: SpanExporter, endpoint: str, counts: HttpCounts) -> None:
        self._max_spans = _from_environment("OTEL_BSP_MAX_QUEUE_SIZE", MAX_SPANS)
        self._counted = CountingExporter(exporter, endpoint, counts)
        super().__init__(
            self._counted,
            max_queue_size=self._max_spans,
            max_export_batch_size=min(_from_environment("OTEL_BSP_MAX_EXPORT_BATCH_SIZE", BATCH), self._max_spans),
        )

    def on_end(self, span: ReadableSpan) -> None:
        if span.context is None or not span.context.trace_flags.sampled:
            return
        if self._counted.expect_span(self._max_spans):
            super().on_end(span)


class CountingExporter(SpanExporter):
    """Counts the spans that wait, were sent and were dropped."""

    def __init__(self, exporter: SpanExporter, endpoint: str, counts: HttpCounts) -> None:
        self._exporter = exporter
        self._endpoint = endpoint
        self._counts = counts
        self._lock = threading.Lock()
        self._num_waiting = 0
        self._num_dropped = 0  # since the last complaint
        self._complained_at = float("-inf")

    def expect_span(self, limit: int) -> bool:
        """Whether there is room for one more; counts it either way."""
        with self._lock:
            if self._num_waiting < limit:
                self._num_waiting += 1
                return True
        self._drop(1)
        return False

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        with self._lock:
            self._num_waiting -= len(spans)
        try:
            result = self._exporter.export(spans)
        except Exception:
            logger.debug("spans could not be sent", exc_info=True)
            result = SpanExportResult.FAILURE
        if result is SpanExportResult.SUCCESS:
            with self._lock:
                self._counts.count_spans(sent=len(spans))
        else:
            self._drop(len(spans))
        return result

    def shutdown(self) -> None:
        self._exporter.shutdown()

    def force_flush(self, timeout_millis: int = 30000) -> bool:
        return self._exporter.force_flush(timeout_millis)

    def _drop(self, num_spans: int) -> None:
        with self._lock:
            self._counts.count_spans(dropped=num_spans)
            self._num_dropped += num_spans
            now = time.monotonic()
            if now - self._complained_at < COMPLAINT_INTERVAL:
                return
            self._complained_at, num_dropped, self._num_dropped = now, self._num_dropped, 0
        logger.warning("%d spans are dropped: %s does not take them", num_dropped, self._endpoint)


def _from_environment(name: str, default: int) -> int:
    """A number of at least 1; OpenTelemetry itself ignores what is none."""
    value = os.environ.get(name, "")
    return max(int(value), 1) if value.isdecimal() else default
