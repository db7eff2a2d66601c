"""Messages to prompt text, by the template that came with the model or was given at the start."""

from __future__ import annotations

import logging
import secrets
from collections.abc import Callable, Container, Mapping, Sequence
from datetime import datetime
from functools import cached_property
from pathlib import Path
from typing import Any

import jinja2
import jinja2.nodes

from tessera.app.text.harmony import (
    TEMPLATE,
    TOKENS,
    needs_replacing,
    prepared_messages,
    prepared_tools,
    prepared_variables,
)
from tessera.app.text.mistral import VERSIONS, mistral_template
from tessera.app.text.render_process import RenderProcesses
from tessera.app.text.renderer import RenderJob
from tessera.app.text.sandbox import TemplateEnvironment
from tessera.app.text.tokenizer import load_json
from tessera.engine.contract.errors import ConfigError, InvalidRequestError, ModelError
from tessera.engine.gguf.names import is_gguf
from tessera.engine.tokens.special import SPECIAL_TOKEN_NAMES
from tessera.engine.tokens.tekken import TEKKEN_FILE, read_tekken_chat

# What a request's chat_template_kwargs may not set, because the server decides it.
RESERVED_KWARGS = frozenset(
    {"messages", "tools", "documents", "chat_template", "tokenize", "add_generation_prompt", "continue_final_message"}
    | {"conversation", "raise_exception", "strftime_now", "range", "dict", "namespace", "lipsum", "cycler", "joiner"}
    | {"loop", "self", "caller", "varargs", "kwargs", *SPECIAL_TOKEN_NAMES, "additional_special_tokens"}
)
RENDER_SECONDS = 5.0
SYSTEM_PROMPT_FILE = "SYSTEM_PROMPT.txt"  # what Mistral suggests beside its models

logger = logging.getLogger("tessera.serve")


class ChatTemplate:
    """Templates of one model. Rendering waits for another process: call it off the event loop.

    Attributes:
        sources: template texts by name; `default` always, `tool_use` where the model has one.
        variables: names that the templates read.
        shows_schemas: the variable `response_schema` is shown to the model.
    """

    def __init__(
        self,
        sources: Mapping[str, str],
        special_tokens: Mapping[str, str],
        *,
        now: Callable[[], datetime] = datetime.now,
    ) -> None:
        """Raises ConfigError where a template is not valid Jinja."""
        self.sources = dict(sources)
        self._special_tokens = dict(special_tokens)
        self._now = now
        self._processes = RenderProcesses(self.sources)
        environment = TemplateEnvironment()
        try:
            trees = [environment.parse(text) for text in sources.values()]
        except jinja2.TemplateSyntaxError as error:
            raise ConfigError(
                f"The chat template is not valid Jinja: line {error.lineno}: {error.message};"
                " --chat-template FILE gives another"
            ) from None
        names = (node for tree in trees for node in tree.find_all(jinja2.nodes.Name))
        self.variables = frozenset(node.name for node in names if node.ctx == "load")
        self._handles_developer = any("developer" in source for source in sources.values())
        self.shows_schemas = self._is_harmony = sources["default"] == TEMPLATE

    def render(
        self,
        messages: list[dict[str, Any]],
        *,
        tools: list[dict[str, Any]] | None = None,
        documents: list[dict[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        extra: Mapping[str, Any] | None = None,
        source: str | None = None,
        seconds: float = RENDER_SECONDS,
        max_chars: int = 2**24,
    ) -> str:
        """The prompt's text.

        Args:
            extra: the request's chat_template_kwargs, checked with `check_kwargs`.
            source: a template's text, instead of the model's own.
            continue_final_message: leave the last message open, so that the model goes on with it.
            seconds: most CPU time.
            max_chars: longest text.

        Raises:
            InvalidRequestError: the template refuses or cannot render these messages, or takes too long.
            EngineUnavailableError: the rendering process was ended from outside.
        """
        is_harmony = source is None and self._is_harmony
        if not (self._handles_developer if source is None else "developer" in source):
            messages = [{**m, "role": "system"} if m["role"] == "developer" else m for m in messages]
        if not is_harmony and not _begins_with_all_system_messages(messages) and not self._places_system_messages:
            messages = _with_late_system_messages_as_users(messages)
        mark = ""
        if continue_final_message:
            # Templates may trim what stands at a message's end, so the end is marked and found again.
            mark = f"|{secrets.token_hex(16)}|"
            messages = [*messages[:-1], {**messages[-1], "content": messages[-1]["content"] + mark}]
        if source is None and not is_harmony and self._takes_parts:
            messages = [_in_parts(message) for message in messages]
        template = "tool_use" if tools and "tool_use" in self.sources else "default"
        variables: dict[str, Any] = {
            **self._special_tokens,
            **(prepared_variables(extra or {}) if is_harmony else extra or {}),
            "messages": prepared_messages(messages) if is_harmony else messages,
            "tools": prepared_tools(tools) if is_harmony else tools,
            "documents": documents,
            "add_generation_prompt": add_generation_prompt,
        }
        rendered = self._processes.render(RenderJob(template, variables, self._now(), seconds, max_chars, source))
        if rendered.error:
            raise InvalidRequestError(rendered.error, param="messages")
        text = rendered.text
        if not continue_final_message:
            return text
        end = text.rfind(mark)
        if end < 0:
            raise InvalidRequestError(
                "continue_final_message cannot be used here: this model's chat template changes the final message.",
                param="continue_final_message",
            )
        return text[:end]

    @cached_property
    def _places_system_messages(self) -> bool:
        """Whether a system message in mid-conversation is shown there: some templates refuse, move or drop it."""
        roles = ("user", "assistant", "system", "user", "assistant", "user", "system")
        probe = [{"role": role, "content": f"probe{place}"} for place, role in enumerate(roles)]
        variables = {**self._special_tokens, "messages": probe, "tools": None, "documents": None}
        rendered = self._processes.render(RenderJob("default", variables, self._now(), RENDER_SECONDS, 2**24))
        places = [rendered.text.find(message["content"]) for message in probe]
        return not rendered.error and places[0] >= 0 and places == sorted(places)

    @cached_property
    def _takes_parts(self) -> bool:
        """Whether a message's content must be a list of parts: templates of models that see may pass over a text."""
        if not any("type" in source for source in self.sources.values()):
            return False
        probe = {"role": "user", "content": "probe"}
        return not self._shows("probe", probe) and self._shows("probe", _in_parts(probe))

    def _shows(self, text: str, message: dict[str, Any]) -> bool:
        """Whether the prompt of this message alone has the text."""
        variables = {**self._special_tokens, "messages": [message], "tools": None, "documents": None}
        rendered = self._processes.render(RenderJob("default", variables, self._now(), RENDER_SECONDS, 2**24))
        return not rendered.error and text in rendered.text

    def start(self) -> None:
        """Start a rendering process before the first prompt needs it."""
        self._processes.start()

    def close(self) -> None:
        """End the rendering processes."""
        self._processes.close()


def _in_parts(message: Mapping[str, Any]) -> dict[str, Any]:
    """With its text as a list of parts."""
    text = message.get("content")
    return {**message, "content": [{"type": "text", "text": text}] if text is not None else []}


def _begins_with_all_system_messages(messages: Sequence[Mapping[str, Any]]) -> bool:
    is_system = [message["role"] == "system" for message in messages]
    return is_system == sorted(is_system, reverse=True)


def _with_late_system_messages_as_users(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """System messages after others become the user's, joined to those beside them, since many templates alternate."""
    groups: list[list[Mapping[str, Any]]] = []
    began = joins = False  # another message has come; the next one of the user's joins the last group
    for message in messages:
        is_late = began and message["role"] == "system"
        began = began or message["role"] != "system"
        is_users = is_late or message["role"] == "user"
        if is_users and groups and groups[-1][-1]["role"] == "user" and (is_late or joins):
            groups[-1].append({"role": "user", "content": message["content"]})
        else:
            groups.append([{**message, "role": "user"} if is_late else message])
        joins = is_late or (joins and is_users)
    return [
        {**group[0], "content": "\n\n".join(message["content"] for message in group)}
        if len(group) > 1
        else {**group[0]}
        for group in groups
    ]


def check_kwargs(kwargs: Mapping[str, Any]) -> None:
    """Raise InvalidRequestError for a chat_template_kwargs entry that would replace the server's own."""
    for name in kwargs:
        if name in RESERVED_KWARGS or name.startswith("_"):
            raise InvalidRequestError(
                f"chat_template_kwargs may not set {name[:100]!r}: the server decides it.",
                param="chat_template_kwargs",
            )


def load_chat_template(folder: Path, override: str | None, special_tokens: Mapping[str, str]) -> ChatTemplate | None:
    """The template of a model folder or GGUF file, or of the file `override`; None where the model has none.

    Raises:
        ConfigError: the file cannot be read, or its template is not valid.
    """
    sources = _override_sources(Path(override)) if override is not None else _model_sources(folder)
    if not sources:
        return None
    if "default" not in sources:
        sources["default"] = next(iter(sources.values()))
    if override is None and needs_replacing(sources["default"]):
        sources["default"] = TEMPLATE
    return ChatTemplate(sources, special_tokens)


def native_template(special_tokens: Mapping[str, str], added_tokens: Container[str]) -> ChatTemplate | None:
    """The template of a model without one whose tokens show its chat form; None where they do not."""
    if not all(token in added_tokens for token in TOKENS):
        return None
    return ChatTemplate({"default": TEMPLATE}, special_tokens)


def _override_sources(path: Path) -> dict[str, str]:
    try:
        return {"default": path.read_text(encoding="utf-8")}
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not UTF-8 text"
        raise ConfigError(f"--chat-template {path} cannot be read: {reason}") from None


def _model_sources(folder: Path) -> dict[str, str]:
    """From chat_template.jinja and additional_chat_templates/, else tokenizer_config.json or chat_template.json.

    A GGUF file has them in its metadata. A folder that has none is given Mistral's, if it has a tekken.json.
    """
    if is_gguf(folder):
        from tessera.engine.gguf.tokenizer import read_gguf_templates

        return read_gguf_templates(folder)
    try:
        sources = {path.stem: path.read_text(encoding="utf-8") for path in _template_files(folder)}
    except (OSError, UnicodeDecodeError) as error:
        raise ModelError(f"A chat template in {folder} cannot be read: {error}") from None
    if "chat_template" in sources:
        return {"default": sources.pop("chat_template"), **sources}
    for name in ("tokenizer_config.json", "chat_template.json"):
        found = load_json(folder / name).get("chat_template")
        if isinstance(found, str):
            return {"default": found}
        if isinstance(found, list):
            return {str(entry["name"]): str(entry["template"]) for entry in found if _is_named_template(entry)}
    return _mistral_sources(folder)


def _mistral_sources(folder: Path) -> dict[str, str]:
    """By the version in tekken.json. SYSTEM_PROMPT.txt is the client's to send, as with vLLM and mistral-common."""
    path = folder / TEKKEN_FILE
    if not path.is_file():
        return {}
    try:
        version, special = read_tekken_chat(path)
    except ModelError as error:
        logger.warning("no chat template: %s", error)
        return {}
    source = mistral_template(version, special)
    if source is None:
        logger.warning("no chat template: %s is of the version %r; known are %s", path, version, ", ".join(VERSIONS))
        return {}
    if (folder / SYSTEM_PROMPT_FILE).is_file():
        logger.info("%s is not applied: send it as the system message", folder / SYSTEM_PROMPT_FILE)
    return {"default": source}


def _template_files(folder: Path) -> list[Path]:
    main = folder / "chat_template.jinja"
    others = sorted((folder / "additional_chat_templates").glob("*.jinja"))
    return [main, *others] if main.is_file() else []


def _is_named_template(entry: object) -> bool:
    return isinstance(entry, dict) and isinstance(entry.get("name"), str) and isinstance(entry.get("template"), str)
