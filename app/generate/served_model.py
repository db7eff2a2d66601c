"""The generating model as this app process serves it: its engine, tokenizer, chat template and sampling defaults."""

from __future__ import annotations

import time
from pathlib import Path

from tessera.app.engines.engines import Engine
from tessera.app.generate.sampling import load_sampling_defaults
from tessera.app.reasoning.families import choose_reasoning
from tessera.app.reasoning.harmony import HARMONY
from tessera.app.settings import AppSettings
from tessera.app.text.chat_template import load_chat_template, native_template
from tessera.app.text.detokenizer import DetokenizerFactory
from tessera.app.text.tokenizer import load_tokenizer
from tessera.app.text.workers import TextWorkers
from tessera.app.tools.formats.registry import choose_format
from tessera.app.tools.harmony.syntax import HARMONY_TOOLS
from tessera.engine.contract.errors import EngineUnavailableError, InvalidRequestError, NotFoundError
from tessera.engine.contract.messages import EngineInfo


class ServedModel:
    """One model behind one engine.

    Attributes:
        engine: whose process may come and go.
        template: None where the model has no chat template.
        tool_format: the format of its tool calls; None where none is known.
        reasoning: the format of its reasoning; None where completions have none.
        defaults: sampling parameters for requests that give none.
        created: Unix time of the model's files.
    """

    def __init__(self, engine: Engine, settings: AppSettings) -> None:
        """Read the model's tokenizer, chat template and sampling defaults.

        Raises:
            ConfigError: one of them cannot be used.
        """
        folder = Path(settings.model_folder)
        self.engine = engine
        self.client = engine.client
        self.settings = settings
        self.tokenizer = load_tokenizer(folder)
        self.template = load_chat_template(folder, settings.chat_template, self.tokenizer.special_tokens)
        if self.template is None:
            self.template = native_template(self.tokenizer.special_tokens, self.tokenizer.added_tokens)
        sources = self.template.sources.values() if self.template is not None else ()
        self.tool_format = choose_format(settings.tool_call_parser, sources)
        self.reasoning = choose_reasoning(settings.reasoning_parser, sources)
        if self.tool_format is HARMONY_TOOLS:  # whose calls and reasoning are messages of the same kind
            self.reasoning = HARMONY
        self.defaults = load_sampling_defaults(folder)
        self.workers = TextWorkers(settings.text_threads, settings.max_text_jobs)
        self.detokenizers = DetokenizerFactory(self.tokenizer)
        config = folder / "config.json"
        self.created = int(config.stat().st_mtime if config.is_file() else time.time())

    @property
    def info(self) -> EngineInfo:
        """Raises EngineUnavailableError until the engine has reported what it serves."""
        info = self.client.info
        if info is None:
            raise EngineUnavailableError("The model is still being loaded; please try again later.")
        return info

    @property
    def names(self) -> tuple[str, ...]:
        """Its own, and those of the models beside it and of its adapters."""
        settings = self.settings
        beside = (*settings.embedding_model_names, *settings.reranker_model_names)
        return (*settings.served_model_names, *beside, *self.adapter_names)

    @property
    def adapter_names(self) -> tuple[str, ...]:
        """Of the adapters that are served now; of those from the start while the engine has not said."""
        known = self.client.adapters
        return self.settings.adapter_names if known is None else tuple(known)

    @property
    def default_name(self) -> str:
        """The model of requests that name none."""
        return self.settings.served_model_names[0]

    def check_name(self, name: str) -> None:
        """Raise NotFoundError or InvalidRequestError unless requests to generate may name this model so."""
        if name in self.settings.embedding_model_names:
            raise InvalidRequestError(
                f"The model {name[:100]!r} makes embeddings, not text: use /v1/embeddings.", param="model"
            )
        if name in self.settings.reranker_model_names:
            raise InvalidRequestError(
                f"The model {name[:100]!r} scores texts and makes none: use /v1/rerank or /v1/score.", param="model"
            )
        if name not in self.settings.served_model_names and name not in self.adapter_names:
            raise NotFoundError(f"The model {name[:100]!r} does not exist here; see /v1/models.", param="model")

    def check_generates(self) -> None:
        info = self.info
        if info.generates:
            return
        if info.scorer is not None and not info.scorer.beside:
            raise InvalidRequestError(
                "This model scores texts and makes none: use /v1/rerank, /v1/score or /v1/classify.", param="model"
            )
        raise InvalidRequestError("This model makes embeddings, not text: use /v1/embeddings.", param="model")

    def token_id_of(self, text: str) -> int | None:
        """The id of the token that spells all of a text; None where it takes several."""
        token_ids = self.tokenizer.encode(text, add_special_tokens=False)
        return next((token_id for token_id in token_ids if self.tokenizer.token_string(token_id) == text), None)
