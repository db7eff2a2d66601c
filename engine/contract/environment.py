"""The environment of child processes."""

from __future__ import annotations

import os

# Children need none of these, and whatever reads their memory or /proc would find them there.
SECRETS = frozenset({"TESSERA_API_KEY", "TESSERA_SSL_KEYFILE_PASSWORD", "HF_TOKEN", "HUGGING_FACE_HUB_TOKEN"})
# Keys of the traces' collector; app processes alone send traces.
COLLECTOR_SECRETS = frozenset({"OTEL_EXPORTER_OTLP_HEADERS", "OTEL_EXPORTER_OTLP_TRACES_HEADERS"})


def environment_without_secrets(*, sends_traces: bool = False) -> dict[str, str]:
    """This process's, without keys and tokens; those of the traces' collector are for a child that `sends_traces`."""
    hidden = SECRETS if sends_traces else SECRETS | COLLECTOR_SECRETS
    return {name: value for name, value in os.environ.items() if name not in hidden}
