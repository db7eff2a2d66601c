"""The floors of the rooms, and the imports allowed besides those that point down; `test_rooms.py` enforces both."""

from __future__ import annotations

# Rooms from the top floor to the bottom. A room may import those on lower floors and nothing of its own floor.
FLOORS: tuple[tuple[str, ...], ...] = (
    ("tessera.__main__",),
    ("app.cli",),
    ("app.cli.chat", "app.cli.doctor"),
    ("app.cli.cache", "app.cli.completion"),
    ("app.cli.hub",),
    ("app.cli.gguf_files", "app.cli.download_bar"),
    ("app.server",),
    ("app.openapi",),
    ("app.openai.invocations", "app.openai.batches", "app.ollama"),
    ("app.openai.rerank",),
    (
        *(
            f"app.openai.{room}"
            for room in ("chat", "completions", "responses", "embeddings", "models", "tokenize", "files")
        ),
        "app.anthropic",
        "app.ops",
    ),
    ("app.openai.conversations",),
    ("app.openai",),
    ("app.generate", "app.store"),
    ("app.tools.formats",),
    ("app.tools",),
    ("app.reasoning", "app.text", "app.http"),
    ("app.schema",),
    ("app.settings",),
    ("app.limits",),
    ("app.keys",),
    ("engine.ipc.process",),
    ("engine.ipc",),
    ("engine.runner",),
    ("engine.core",),
    ("engine.grammar",),
    ("engine.models",),
    ("engine.models.weights",),
    ("engine.models.config",),
    ("engine.models.classifier", "engine.models.layers"),
    ("engine.models.gguf",),
    ("engine.models.quantised", "engine.models.text_part", "engine.models.registry", "engine.models.rope"),
    ("engine.models.specs",),
    ("engine.models.fields",),
    ("engine.ops.make",),
    ("engine.ops.cpu", "engine.ops.cuda"),
    ("engine.ops.cuda.attention", "engine.ops.cuda.quant"),
    ("engine.ops.cuda.linear",),
    ("engine.ops.cuda.candidates", "engine.ops.cuda.types"),
    ("engine.ops",),
    ("engine.formats",),
    ("engine.cuda",),
    ("engine.tensor",),
    ("engine.tokens",),
    ("engine.gguf",),
    ("engine.contract",),
    ("loadtest",),
    ("loadtest.report",),
    ("loadtest.run",),
    ("loadtest.client",),
    ("loadtest.workload",),
    ("loadtest.options",),
    ("loadtest.metrics", "engine.builtin.training"),
    ("engine.builtin",),
    ("tessera.options",),
    ("tessera",),
)
# The app knows the engine by its client and its contract alone, wherever their floors are; and the files of tokenizers,
# which may be those of weights.
APP_SEES = ("engine.ipc.client", "engine.contract", "engine.gguf", "engine.tokens", "loadtest", "tessera")
EXCEPTIONS = {
    "app.server.serve": ("engine.ipc.supervisor",),
    "app.cli.hub": ("engine",),
    "app.cli.cache.model_facts": ("engine",),
    "app.cli.doctor.gpu": ("engine.cuda.cache",),
}
