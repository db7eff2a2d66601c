"""Models of an engine process that make embeddings or scores: the served model, and encoders beside it."""

from __future__ import annotations

import os
import time
from pathlib import Path

import msgspec

from tessera.engine.contract.config import EngineConfig, PoolingName
from tessera.engine.contract.errors import ConfigError, ModelError, OutOfMemoryError
from tessera.engine.contract.messages import EmbedderRole, EmbeddingInfo, EngineInfo, ScorerForm, ScorerInfo
from tessera.engine.core.account import Accounts
from tessera.engine.core.embedder import Embedder, EmbeddingMetrics, EmbeddingModel, EmbeddingOnlyCore, PassTurns
from tessera.engine.gguf.model import stored_bytes
from tessera.engine.models.config import ModelConfig, load_config
from tessera.engine.models.pooling import load_pooling
from tessera.engine.models.specs import ScoreFunction
from tessera.engine.models.weights.weights import ClassifierWeights
from tessera.engine.ops.interface import Ops
from tessera.engine.runner.embedding_runner import DecoderEmbeddingRunner, EmbeddingRunner, EncoderRunner, Progress
from tessera.engine.runner.head import ClassifierHead, token_head
from tessera.engine.runner.memory.weight_offload import AUTO
from tessera.engine.runner.model_runner import ModelRunner
from tessera.engine.runner.scorer import Scorer
from tessera.engine.runner.yes_no import yes_no_tokens


class EmbeddingEngine:
    """The embedders of one engine process, and what scores.

    Attributes:
        embedders: by role.
        infos: what clients need to know of those that make embeddings.
        scorer: what they need to know of what scores; None where nothing does.
    """

    def __init__(self, config: EngineConfig, accounts: Accounts | None = None) -> None:
        """`accounts`: those of the engine, which embeddings are charged to as well."""
        self.embedders: dict[EmbedderRole, Embedder] = {}
        self.infos: tuple[EmbeddingInfo, ...] = ()
        self.scorer: ScorerInfo | None = None
        self._config = config
        self._accounts = accounts if accounts is not None else Accounts()
        self._turns = PassTurns(self._accounts)
        self._by_name: dict[str, Embedder] = {}
        self._scorers: dict[str, Embedder] = {}
        self._metrics = EmbeddingMetrics(self._by_name, self._scorers)
        # Lengths and dtype that the user chose are the served model's.
        self._own = msgspec.structs.replace(config, max_model_len=None, dtype="auto")

    def load_beside(self, ops: Ops, progress: Progress | None) -> None:
        """The encoders of `embedding_model` and `reranker_model`, where such are asked for.

        Raises: ConfigError, ModelError.
        """
        config = self._config
        if config.embedding_model:
            folder, model = _encoder_beside("--embedding-model", config.embedding_model)
            if model.classifier is not None:
                raise ModelError(
                    f"--embedding-model {folder} has a head for classification: give it as --reranker-model"
                )
            runner = EncoderRunner(self._own, model, folder, ops.device, ops, progress, pooling=config.pooling)
            self._add("beside", model, runner, config.embedding_name or folder.name)
        if config.reranker_model:
            folder, model = _encoder_beside("--reranker-model", config.reranker_model)
            if model.classifier is None:
                raise ModelError(
                    f"--reranker-model {folder} has no head for classification (...ForSequenceClassification): give "
                    "it as --embedding-model, and pairs are scored by the angle of their embeddings"
                )
            runner = EncoderRunner(self._own, model, folder, ops.device, ops, progress)
            self._add_classifier(model, runner, runner.classifier, config.reranker_name or folder.name, beside=True)

    def add_decoder(self, model: ModelConfig, runner: ModelRunner) -> None:
        """The served model itself. Raises: ConfigError, ModelError."""
        config, name, head = self._config, self._served_name, model.classifier
        if head is not None:
            self._check_alone()
        chosen: PoolingName = "auto" if config.embedding_model else config.pooling
        try:
            embedding_runner = DecoderEmbeddingRunner(
                runner.decoder,
                runner.buffers,
                load_pooling(Path(config.model), chosen if head is None else head.pooling, "last"),
                max_model_len=runner.max_model_len,
                max_num_tokens=runner.max_num_tokens,
                max_num_seqs=runner.config.max_num_seqs,
                block_size=runner.block_size,
            )
        except OutOfMemoryError as error:
            raise ConfigError(f"too little memory for embeddings: {error}; pass --max-num-batched-tokens") from error
        if head is not None:
            self._add_classifier(model, embedding_runner, runner.decoder.weights.classifier, name, beside=False)
            return
        self._add("main", model, embedding_runner, name)
        tokens = yes_no_tokens(config, model) if runner.generates and not config.reranker_model else None
        if tokens is not None:
            lm_head = runner.decoder.weights.lm_head
            assert lm_head is not None, "a model that generates has a head"
            yes_no = token_head(lm_head, *tokens, runner.decoder.ops, model.logits_multiplier)
            self._add_scorer("yes_no", model, Scorer(embedding_runner, yes_no, "last"), name, ("yes",), "sigmoid")

    def load_alone(
        self, model: ModelConfig, ops: Ops, device_reason: str, progress: Progress | None
    ) -> tuple[EmbeddingOnlyCore, EngineInfo]:
        """An encoder as the only model. Raises: ConfigError, ModelError."""
        config = self._config
        if config.embedding_model:
            raise ConfigError(
                f"--embedding-model goes beside a model that generates text, but {config.model} is an encoder itself"
            )
        if config.cpu_offload_gib not in (None, AUTO):
            raise ConfigError(f"--cpu-offload-gib is for decoders, but {config.model} is an encoder")
        if model.classifier is not None:
            self._check_alone()
        start = time.monotonic()
        folder = Path(config.model)
        self.load_beside(ops, progress)
        runner = EncoderRunner(config, model, folder, ops.device, ops, progress, pooling=config.pooling)
        if model.classifier is not None:
            self._add_classifier(model, runner, runner.classifier, self._served_name, beside=False)
        else:
            self._add("main", model, runner, self._served_name)
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
            scorer=self.scorer,
            stored_bytes=runner.stored_bytes or stored_bytes(folder),
        )
        return EmbeddingOnlyCore(), info

    def render_metrics(self) -> bytes:
        """Prometheus text format."""
        return self._metrics.render()

    @property
    def _served_name(self) -> str:
        return self._config.served_name or Path(self._config.model).name

    def _check_alone(self) -> None:
        """Raises: ConfigError where another model than the served one is to score pairs."""
        if self._config.reranker_model:
            raise ConfigError(
                f"--reranker-model goes beside a model that scores nothing, but {self._config.model} scores itself"
            )

    def _add_classifier(
        self,
        model: ModelConfig,
        runner: EmbeddingRunner,
        weights: ClassifierWeights | None,
        name: str,
        *,
        beside: bool,
    ) -> None:
        head = model.classifier
        assert head is not None, "its configuration has a head"
        assert weights is not None, "a classifier's head has weights"
        scorer = Scorer(runner, ClassifierHead(head, weights), head.pooling)
        self._add_scorer("pair", model, scorer, name, head.labels, head.scores, beside=beside)

    def _add_scorer(
        self,
        form: ScorerForm,
        model: ModelConfig,
        scorer: Scorer,
        name: str,
        labels: tuple[str, ...],
        scores: ScoreFunction,
        *,
        beside: bool = False,
    ) -> None:
        embedder = self._make_embedder(scorer)
        self.embedders["scorer"] = self._scorers[name] = embedder
        self.scorer = ScorerInfo(
            beside=beside,
            form=form,
            architecture=model.architecture,
            labels=labels,
            scores=scores,
            vocab_size=scorer.vocab_size,
            max_input_tokens=scorer.max_input_tokens,
        )

    def _make_embedder(self, model: EmbeddingModel) -> Embedder:
        return Embedder(model, max_queue_len=self._config.max_queue_len, accounts=self._accounts, turns=self._turns)

    def _add(self, role: EmbedderRole, model: ModelConfig, runner: EmbeddingRunner, name: str) -> None:
        embedder = self._make_embedder(runner)
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


def _encoder_beside(option: str, path: str) -> tuple[Path, ModelConfig]:
    folder = Path(path)
    model = load_config(folder)
    if not model.is_encoder:
        raise ModelError(
            f"{option} {folder} is a {model.architecture}, which is served alone; beside another model only an encoder "
            "can be served"
        )
    return folder, model
