"""OpenTelemetry traces of requests, for the extra `otel`: without `--otlp-traces-endpoint` none of it is imported.

Public: `packages.check_packages`, `tracing.start_tracing`, `middleware.TracingMiddleware`.
"""
