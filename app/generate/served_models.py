"""All models of this server: found by their names, and held while a request uses them."""

from __future__ import annotations

from collections.abc import Iterator, MutableMapping
from typing import Any, Protocol

from fastapi import Request
from starlette.types import ASGIApp, Receive, Scope, Send

from tessera.app.engines.engines import Engines
from tessera.app.generate.served_model import ServedModel
from tessera.app.http.limits import account_of
from tessera.app.http.streaming import run_while_connected
from tessera.app.settings import AppSettings
from tessera.engine.contract.config import PRIVATE_PREFIX
from tessera.engine.contract.errors import NotFoundError

GRACE = 5.0  # seconds beyond the time for loading, in which the refusal arrives


class PrivateModels(Protocol):
    """Says which tenants fine-tuned models are for."""

    def is_visible(self, name: str, tenant: str) -> bool: ...
    async def owner_of(self, name: str) -> str | None: ...


class ServedModels:
    """The models in the order of the configuration; the first is that of requests that name none.

    Attributes:
        private: None where no model is for one API key alone.
    """

    def __init__(self, engines: Engines, settings: AppSettings) -> None:
        """Read every model's tokenizer, chat template and sampling defaults. Raises ConfigError."""
        self.engines = engines
        self.private: PrivateModels | None = None
        self._timeout = settings.model_load_timeout
        self._models = tuple(ServedModel(engine, each) for engine, each in zip(engines, settings.models, strict=True))
        # Adapters come and go.
        self._by_name = {
            name: model for model in reversed(self._models) for name in model.names if name not in model.adapter_names
        }

    def __iter__(self) -> Iterator[ServedModel]:
        return iter(self._models)

    def __len__(self) -> int:
        return len(self._models)

    @property
    def default(self) -> ServedModel:
        return self._models[0]

    @property
    def names(self) -> tuple[str, ...]:
        """Of all models and of what is served beside them."""
        return tuple(name for model in self._models for name in model.names)

    def find(self, name: str) -> ServedModel | None:
        """The model that is served, or has one served beside it, under this name."""
        found = self._by_name.get(name)
        return found or next((model for model in self._models if name in model.adapter_names), None)

    def names_for(self, tenant: str, *models: ServedModel) -> list[str]:
        """Of `models`, or all if none are given, and of what is served beside them: the names a tenant may know of."""
        names = [name for model in models or self._models for name in model.names]
        return [name for name in names if self.private is None or self.private.is_visible(name, tenant)]

    async def check_visible(self, name: str, tenant: str) -> None:
        """Raises: NotFoundError where a fine-tuned model is for others."""
        if self.private is not None and name.startswith(PRIVATE_PREFIX):
            owner = await self.private.owner_of(name)
            if owner is not None and owner != tenant:
                raise self.unknown(name)

    def unknown(self, name: str) -> NotFoundError:
        """The error for a name that is not served."""
        return NotFoundError(f"The model {name[:100]!r} does not exist here; see /v1/models.", param="model")

    def check_name(self, name: str) -> None:
        """Raise RequestError unless requests to generate may name a model so."""
        (self.find(name) or self.default).check_name(name)

    async def hold(self, http_request: Request, model: ServedModel) -> None:
        """Wait until the model is loaded, and keep it until the request's end. Raises RequestError."""
        held: list[int] = http_request.scope.setdefault("state", {}).setdefault("held_models", [])
        index = model.engine.index
        if index in held:
            return
        account = account_of(http_request.scope).id
        if self.engines.needs_wait(index):
            work = self.engines.hold(index, self._timeout, account)
            await run_while_connected(http_request.receive, work, self._timeout + GRACE)
        else:
            await self.engines.hold(index, self._timeout, account)
        held.append(index)

    def release(self, scope: MutableMapping[str, Any]) -> None:
        """The request of an ASGI scope uses its models no more."""
        for index in scope.get("state", {}).pop("held_models", ()):
            self.engines.release(index)


class HoldMiddleware:
    """Lets go of a request's models at its end."""

    def __init__(self, app: ASGIApp, models: ServedModels) -> None:
        self._app = app
        self._models = models

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await self._app(scope, receive, send)
        finally:
            self._models.release(scope)


def models_of(request: Request) -> ServedModels:
    models: Any = request.app.state.models
    assert isinstance(models, ServedModels)
    return models


def model_of(request: Request) -> ServedModel:
    """The model of this request: the one that `model_for` has found, else the first."""
    model: Any = request.scope.get("state", {}).get("model")
    return model if isinstance(model, ServedModel) else models_of(request).default


async def model_for(request: Request, asked: str | None) -> ServedModel:
    """The model that the request names, loaded and held; the first where it names none, or one that is not served.

    Raises:
        RequestError: it cannot be loaded, or not in time.
    """
    models = models_of(request)
    if asked:
        await models.check_visible(asked, request.scope.get("state", {}).get("tenant", ""))
    found = models.find(asked) if asked else models.default
    if found is None:
        return models.default  # which refuses the name
    request.scope.setdefault("state", {})["model"] = found
    await models.hold(request, found)
    return found
