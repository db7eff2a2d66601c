"""Embedding models of an engine process: the served model, an encoder beside it, or an encoder alone."""

from __future__ import annotations

import os
import time
from pathlib import Path

import msgspec

from tessera.engine.contract.config import EngineConfig
from tessera.engine.contract.errors import ConfigError, ModelError, OutOfMemoryError
from tessera.engine.contract.messages import EmbedderRole, EmbeddingInfo, EngineInfo
from tessera.engine.core.account import Accounts
from tessera.engine.core.embedder import Embedder, EmbeddingMetrics, EmbeddingOnlyCore
from tessera.engine.gguf import stored_bytes
from tessera.engine.models.config import ModelConfig, load_config
from tessera.engine.models.pooling import load_pooling
from tessera.engine.ops.interface import Ops
from tessera.engine.runner.embedding_runner import DecoderEmbeddingRunner, EmbeddingRunner, EncoderRunner, Progress
from tessera.engine.runner.model_runner import ModelRunner


class EmbeddingEngine:
    """The embedders of one engine process.

    Attributes:
        embedders: by role.
        infos: what clients need to know of them.
    """

    def __init__(self, config: EngineConfig, accounts: Accounts) -> None:
        """`accounts`: those of the engine, which embeddings are charged to as well."""
        self.embedders: dict[EmbedderRole, Embedder] = {}
        self.infos: tuple[EmbeddingInfo, ...] = ()
        self._config = config
        self._accounts = accounts
        self._by_name: dict[str, Embedder] = {}
        self._metrics = EmbeddingMetrics(self._by_name)

    def load_beside(self, ops: Ops, progress: Progress | None) -> None:
        """The encoder of `embedding_model`, where one is asked for. Raises: ConfigError, ModelError."""
        config = self._config
        if not config.embedding_model:
            return
        folder = Path(config.embedding_model)
        model = load_config(folder)
        if not model.is_encoder:
            raise ModelError(
                f"--embedding-model {folder} is a {model.architecture}, which is served alone; beside another model "
                "only an encoder (BertModel) can be served"
            )
        # Lengths and dtype that the user chose are the served model's.
        own = msgspec.structs.replace(config, max_model_len=None, dtype="auto")
        runner = EncoderRunner(own, model, folder, ops.device, ops, progress, pooling=config.pooling)
        self._add("beside", model, runner, folder.name)

    def add_decoder(self, model: ModelConfig, runner: ModelRunner) -> None:
        """The served model itself. Raises: ConfigError, ModelError."""
        config = self._config
        chosen = "auto" if config.embedding_model else config.pooling
        try:
            embedding_runner = DecoderEmbeddingRunner(
                runner.decoder,
                runner.buffers,
                load_pooling(Path(config.model), chosen, "last"),
                max_model_len=runner.max_model_len,
                max_num_tokens=runner.max_num_tokens,
                max_num_seqs=runner.config.max_num_seqs,
                block_size=runner.block_size,
            )
        except OutOfMemoryError as error:
            raise ConfigError(f"too little memory for embeddings: {error}; pass --max-num-batched-tokens") from error
        self._add("main", model, embedding_runner, config.served_name or Path(config.model).name)

    def load_alone(
        self, model: ModelConfig, ops: Ops, device_reason: str, progress: Progress | None
    ) -> tuple[EmbeddingOnlyCore, EngineInfo]:
        """An encoder as the only model. Raises: ConfigError, ModelError."""
        config = self._config
        if config.embedding_model:
            raise ConfigError(
                f"--embedding-model goes beside a model that generates text, but {config.model} is an encoder itself"
            )
        start = time.monotonic()
        folder = Path(config.model)
        runner = EncoderRunner(config, model, folder, ops.device, ops, progress, pooling=config.pooling)
        self._add("main", model, runner, config.served_name or folder.name)
        info = EngineInfo(
            device=ops.device.name,
            device_name=getattr(ops.device, "device_name", f"{os.cpu_count()} cores"),
            device_reason=device_reason,
            dtype=runner.dtype,
            architecture=model.architecture,
            vocab_size=model.vocab_size,
            max_model_len=runner.max_input_tokens,
            max_num_seqs=runner.max_num_inputs,
            max_num_batched_tokens=runner.max_num_tokens,
            block_size=0,
            num_kv_blocks=0,
            kv_cache_bytes=0,
            weight_bytes=runner.weight_bytes,
            num_parameters=runner.num_parameters,
            eos_token_ids=(),
            load_seconds=time.monotonic() - start,
            generates=False,
            embeddings=self.infos,
            stored_bytes=stored_bytes(folder),
        )
        return EmbeddingOnlyCore(), info

    def render_metrics(self) -> bytes:
        """Prometheus text format."""
        return self._metrics.render()

    def _add(self, role: EmbedderRole, model: ModelConfig, runner: EmbeddingRunner, name: str) -> None:
        embedder = Embedder(runner, max_queue_len=self._config.max_queue_len, accounts=self._accounts)
        self.embedders[role] = embedder
        self._by_name[name] = embedder
        self.infos += (
            EmbeddingInfo(
                role=role,
                architecture=model.architecture,
                pooling=runner.pooling,
                dimension=runner.dimension,
                vocab_size=runner.vocab_size,
                max_input_tokens=runner.max_input_tokens,
                matryoshka_dimensions=runner.matryoshka_dimensions,
            ),
        )
