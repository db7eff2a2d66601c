"""The packages of the extra `otel`, which servers without traces need not have."""

from __future__ import annotations

from importlib.util import find_spec

from tessera.engine.contract.errors import ConfigError

PACKAGES = {
    "opentelemetry.sdk": "opentelemetry-sdk",
    "opentelemetry.instrumentation.asgi": "opentelemetry-instrumentation-asgi",
    "opentelemetry.exporter.otlp.proto.http": "opentelemetry-exporter-otlp-proto-http",
    "opentelemetry.exporter.otlp.proto.grpc": "opentelemetry-exporter-otlp-proto-grpc",
}


def check_packages() -> None:
    """Raise ConfigError unless all of them are installed."""
    if missing := [package for module, package in PACKAGES.items() if not _is_installed(module)]:
        raise ConfigError(
            f"--otlp-traces-endpoint needs the extra `otel`, and {', '.join(missing)} is not installed: "
            "pip install 'tessera-llm[otel]'"
        )


def _is_installed(module: str) -> bool:
    try:
        return find_spec(module) is not None
    except ModuleNotFoundError:  # nor is its parent
        return False
