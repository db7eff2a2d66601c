"""Admission of Ollama's requests: bodies as curl sends them, names with and without a tag."""

from __future__ import annotations

from typing import TypeVar

from fastapi import Request

from tessera.app.generate.admission import Admission, receive, tenant_of
from tessera.app.generate.served_model import ServedModel
from tessera.app.generate.served_models import model_for, model_of, models_of
from tessera.app.http.body import keep_for_reading, read_json_object
from tessera.app.http.limits import holder_of
from tessera.app.ollama.names import served_name
from tessera.app.ollama.schema import OllamaRequest
from tessera.app.schema.request import RequestModel

R = TypeVar("R", bound=RequestModel)
G = TypeVar("G", bound=OllamaRequest)

PAGE_HEADERS = ("origin", "referer", "sec-fetch-site")  # of browsers


async def receive_any(http_request: Request, schema: type[R]) -> R:
    """`receive` for a body of any declared media type: `curl -d` calls JSON a form.

    A browser may only send JSON, because a page of another site can send forms.
    """
    is_program = not any(name in http_request.headers for name in PAGE_HEADERS)
    settings = model_of(http_request).settings
    keep_for_reading(http_request, await read_json_object(http_request, settings, any_media_type=is_program))
    return await receive(http_request, schema)


def keep_loaded(http_request: Request, model: ServedModel, seconds: float | None) -> None:
    """Keep a model for `seconds` after its last request, where the request's key may decide on it."""
    holder = holder_of(http_request.scope)
    may_decide = holder is None or holder.key is None or holder.key.may_administer
    if seconds is not None and may_decide:
        models_of(http_request).engines.keep(model.engine.index, seconds)


async def admit_ollama(http_request: Request, schema: type[G]) -> tuple[Admission[G], str]:
    """-> (admission, the model's name as it is served); the request keeps the name that it asked for.

    Raises:
        RequestError: the body cannot be read, a field is wrong, or the model is not served.
    """
    request = await receive_any(http_request, schema)
    models = models_of(http_request)
    if not request.model:
        request = request.model_copy(update={"model": models.default.default_name})
    name = served_name(request.model, models.names_for(tenant_of(http_request)))
    models.check_name(name)
    model = await model_for(http_request, name)
    keep_loaded(http_request, model, request.keep_alive)
    return Admission(request, model, http_request, name), name
