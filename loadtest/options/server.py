"""Options about the server under test, and what each request has."""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal

import msgspec

from tessera.options.declaration import Option
from tessera.options.errors import OptionError

Backend = Literal["openai", "vllm", "openai-chat", "openai-embeddings"]

ENDPOINTS: dict[Backend, str] = {
    "openai": "/v1/completions",
    "vllm": "/v1/completions",
    "openai-chat": "/v1/chat/completions",
    "openai-embeddings": "/v1/embeddings",
}
SERVER, SAMPLING = "server", "sampling"
DEFAULT_PORT = 8000


def parse_base_url(text: str) -> str:
    """Without the /v1 that OpenAI's clients want at its end. Raises OptionError."""
    if not re.fullmatch(r"https?://[^\s/?#]+[^\s?#]*", text):
        raise OptionError(f"must begin with http:// or https:// and a host, not {text!r}")
    return text.rstrip("/").removesuffix("/v1")


def parse_header(text: str) -> tuple[str, str]:
    """NAME=VALUE -> both. Raises OptionError."""
    name, separator, value = text.partition("=")
    if not separator or not name:
        raise OptionError("must be NAME=VALUE")  # the value may be a key, so it is not shown
    return name, value


class ServerUnderTest(msgspec.Struct, frozen=True, kw_only=True):
    """Where requests go."""

    base_url: Annotated[
        str | None,
        Option(
            "server to drive, any with an OpenAI API",
            group=SERVER,
            metavar="URL",
            parse=parse_base_url,
            default="http://HOST:PORT",
        ),
    ] = None
    host: Annotated[str, Option("of the server, without --base-url", group=SERVER, metavar="HOST")] = "127.0.0.1"
    port: Annotated[
        int, Option("of the server, without --base-url", group=SERVER, metavar="PORT", low=1, high=65535)
    ] = DEFAULT_PORT
    model: Annotated[
        str | None,
        Option("name that requests use", group=SERVER, metavar="NAME", default="the first that the server lists"),
    ] = None
    served_model_name: Annotated[
        str | None,
        Option("name that requests use, where --model names a tokenizer", group=SERVER, metavar="NAME", default="none"),
    ] = None
    backend: Annotated[
        Backend, Option("openai-chat: chat completions; openai, vllm: completions; or embeddings", group=SERVER)
    ] = "openai"
    endpoint: Annotated[
        str | None,
        Option("path of the endpoint", group=SERVER, metavar="PATH", default="as the backend says"),
    ] = None
    stream: Annotated[
        bool, Option("receive tokens as they are made; without it only E2EL is measured", group=SERVER)
    ] = True
    api_key: Annotated[
        str | None,
        Option("sent as bearer token", group=SERVER, metavar="KEY", secret=True, default="from OPENAI_API_KEY"),
    ] = None
    header: Annotated[
        tuple[tuple[str, str], ...],
        Option(
            "of each request",
            group=SERVER,
            metavar="NAME=VALUE",
            parse=parse_header,
            repetition="words",
            secret=True,
        ),
    ] = ()
    request_id_prefix: Annotated[
        str | None,
        Option(
            "send X-Request-Id: this, then process and number",
            group=SERVER,
            metavar="TEXT",
            pattern=r"[!-~]{1,100}",
            form="1 to 100 printable ASCII characters",
            default="no such header",
        ),
    ] = None
    insecure: Annotated[bool, Option("do not check the server's certificate", group=SERVER)] = False
    ready_check_timeout_sec: Annotated[
        float,
        Option(
            "wait as long for the server to complete a first request; 0: do not check",
            group=SERVER,
            metavar="SECONDS",
            low=0,
            high=1e6,
        ),
    ] = 0.0
    request_timeout: Annotated[
        float,
        Option("longest time for one request", group=SERVER, metavar="SECONDS", low=0.001, high=1e6),
    ] = 6 * 3600.0

    @property
    def url(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return self.base_url or f"http://{host}:{self.port}"

    @property
    def path(self) -> str:
        return self.endpoint or ENDPOINTS[self.backend]


class SamplingOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Fields of each request; those without a value are left to the server."""

    temperature: Annotated[
        float, Option("0: greedy; below 0: the server's own", group=SAMPLING, metavar="T", low=-1, high=100)
    ] = 0.0
    top_p: Annotated[float | None, Option("of sampling", group=SAMPLING, metavar="P", low=0, high=1)] = None
    top_k: Annotated[int | None, Option("of sampling", group=SAMPLING, metavar="K", low=-1, high=2**31 - 1)] = None
    min_p: Annotated[float | None, Option("of sampling", group=SAMPLING, metavar="P", low=0, high=1)] = None
    frequency_penalty: Annotated[
        float | None, Option("of sampling", group=SAMPLING, metavar="PENALTY", low=-2, high=2)
    ] = None
    presence_penalty: Annotated[
        float | None, Option("of sampling", group=SAMPLING, metavar="PENALTY", low=-2, high=2)
    ] = None
    repetition_penalty: Annotated[
        float | None, Option("of sampling", group=SAMPLING, metavar="PENALTY", low=0.001, high=100)
    ] = None
    logprobs: Annotated[
        int | None,
        Option("ask for the log-probabilities of so many tokens", group=SAMPLING, metavar="N", low=0, high=1000),
    ] = None
    ignore_eos: Annotated[
        bool | None,
        Option(
            "let completions have their full length, for servers that know the field",
            group=SAMPLING,
            default="with random prompts",
        ),
    ] = None
    extra_body: Annotated[dict[str, Any], Option("further fields of each request", group=SAMPLING, metavar="JSON")] = {}

    def fields(self, *, chat: bool) -> dict[str, Any]:
        """Those of a request, `extra_body` last."""
        names = ("top_p", "top_k", "min_p", "frequency_penalty", "presence_penalty", "repetition_penalty")
        given = {name: getattr(self, name) for name in names if getattr(self, name) is not None}
        if self.logprobs is not None:
            given |= {"logprobs": True, "top_logprobs": self.logprobs} if chat else {"logprobs": self.logprobs}
        return given | self.extra_body
