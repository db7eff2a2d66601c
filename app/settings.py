"""Settings of the server that a user decides on, and those that the server derives for its processes."""

from __future__ import annotations

import ipaddress
from typing import Annotated

import msgspec

from tessera.app.engines import keep_alive
from tessera.app.engines.messages import EngineLaunch
from tessera.app.keys.api_key import AcceptedKeys, ApiKey
from tessera.app.model_settings import ModelSettings
from tessera.engine.contract.machine import num_cores
from tessera.options.declaration import Option
from tessera.options.errors import OptionError

CORES_FOR_TWO = 8  # from so many on, two app processes speak HTTP: one would keep a fast model waiting
MOST_CONNECTIONS = 2**14  # of one app process, unless the user asks for more


def parse_proxy(text: str) -> str:
    """An address, a network in CIDR form, or `unix`. Raises OptionError."""
    if text == "unix":
        return text
    try:
        return str(ipaddress.ip_network(text))
    except ValueError as error:
        hint = " (bits are set beyond the network's)" if "host bits" in str(error) else ""
        raise OptionError(f"must be an address, a network such as 10.0.0.0/8, or unix, not {text!r}{hint}") from None


def parse_mode(text: str) -> int:
    """Permissions in octal. Raises OptionError."""
    try:
        mode = int(text, 8)
    except ValueError:
        mode = -1
    if not 0 <= mode <= 0o777:
        raise OptionError(f"must be permissions in octal, from 0 to 777, such as 660, not {text!r}")
    return mode


def parse_keep_alive(text: str) -> float:
    """Seconds, infinite for ever. Raises OptionError."""
    try:
        return keep_alive.seconds_of(text)
    except ValueError as error:
        raise OptionError(f"must be {error}, not {text!r}") from None


class AppSettings(ModelSettings, frozen=True, kw_only=True):
    """Settings of one app process, which speaks HTTP; crosses the process boundary as JSON. Times are seconds.

    Those of a model are the first model's. The fields without an Option:

    Attributes:
        api_keys: accepted bearer keys from options; without these and `keys` every route is open.
        keys: entries of the keys file.
        key_use_fd: descriptor of the memory that several app processes count the use of keys in; None: each for itself.
        max_body_bytes: larger request bodies are refused with 413.
        body_timeout: a request whose head or body takes longer to arrive is refused with 408.
        stall_timeout: a client that reads nothing for this long loses its stream.
        template_timeout: most CPU seconds for rendering one chat template.
        text_threads: threads that render templates and encode long texts.
        max_text_jobs: most renderings and encodings waiting for those threads; beyond it 429.
        max_choices: most sequences of one request, prompts times n.
        max_stored_objects: most responses that are stored per API key, and as many conversations and chat
            completions; 0 stores none.
        max_stored_bytes: most bytes of each of them.
        num_app_processes: of this server; `app_process` is the number of this one, from 0.
        count_fd: descriptor of the memory that several app processes count HTTP requests in; None: each for itself.
        max_connections: most open connections of one app process, and a few more for health checks.
        other_models: the models after the first.
        is_static: the one model is loaded at the start and stays.
        share_prefix_cache: whether holders of different API keys share cached prompt prefixes.
    """

    api_keys: tuple[str, ...] = ()
    keys: tuple[ApiKey, ...] = ()
    key_use_fd: int | None = None
    max_body_bytes: int = 16 * 2**20
    body_timeout: float = 60.0
    stall_timeout: float = 60.0
    template_timeout: float = 5.0
    text_threads: int = 2
    max_text_jobs: int = 512
    max_choices: int = 1024
    max_stored_objects: int = 2**16
    max_stored_bytes: int = 2**30
    num_app_processes: int = 1
    app_process: int = 0
    count_fd: int | None = None
    max_connections: int = 1024
    share_prefix_cache: bool = False
    other_models: tuple[ModelSettings, ...] = ()
    is_static: bool = True
    model_load_timeout: Annotated[
        float,
        Option(
            "longest time for which a request waits until its model is loaded, and for others to become idle where "
            "there is no room",
            group="models",
            metavar="SECONDS",
            low=1,
            high=86400,
        ),
    ] = 120.0
    sleep_host_gib: Annotated[
        float | None,
        Option(
            "most host memory that models take to sleep, in GiB: a model that makes room for another, is idle or gets "
            "POST /sleep keeps its weights there, page-locked, and is back without reading its files",
            group="models",
            metavar="GIB",
            low=0.001,
            high=65536,
            default="none",
        ),
    ] = None
    cors_origins: Annotated[
        tuple[str, ...],
        Option(
            "origin whose pages may call the server from a browser, as https://example.org, or * for all; may be "
            "given several times",
            group="HTTP",
            metavar="ORIGIN",
            pattern=r"\*|https?://[^\s/?#@*]+",
            form="* or an origin such as https://example.org",
            name="cors-origin",
            default="none",
        ),
    ] = ()
    root_path: Annotated[
        str,
        Option(
            "path below which a proxy shows this server, such as /llm; whether the proxy takes it off is all one",
            group="HTTP",
            metavar="PATH",
            pattern=r"((/[A-Za-z0-9._~-]+)+)?",
            form="a path such as /llm, without a slash at the end",
            default="none",
        ),
    ] = ""
    forwarded_allow_ips: Annotated[
        tuple[str, ...],
        Option(
            "proxies whose X-Forwarded-For, -Proto, -Host and -Prefix count: addresses, networks in CIDR form, or unix "
            "for all that connect by --uds, separated by commas",
            group="HTTP",
            metavar="PROXIES",
            repetition="commas",
            parse=parse_proxy,
            form="addresses, networks such as `10.0.0.0/8`, `unix`",
            default="none",
        ),
    ] = ()
    ssl_certfile: Annotated[
        str | None,
        Option(
            "PEM file with the certificate and those between it and the authority's; the server speaks HTTPS then, on "
            "the admin port as well; SIGHUP reads all --ssl files again",
            group="TLS",
            metavar="FILE",
            default="none, plain HTTP",
        ),
    ] = None
    ssl_keyfile: Annotated[
        str | None,
        Option("PEM file with the certificate's key", group="TLS", metavar="FILE", default="in --ssl-certfile"),
    ] = None
    ssl_keyfile_password: Annotated[
        str | None,
        Option(
            "password of an encrypted key; other users of this machine may see it on the command line, so better set "
            "TESSERA_SSL_KEYFILE_PASSWORD",
            group="TLS",
            metavar="PASSWORD",
            secret=True,
            default="none",
        ),
    ] = None
    ssl_ca_certs: Annotated[
        str | None,
        Option(
            "PEM file with authorities; clients must show a certificate that one of them has signed, except on the "
            "admin port",
            group="TLS",
            metavar="FILE",
            default="none; clients need no certificate",
        ),
    ] = None
    timeout_keep_alive: Annotated[
        float,
        Option(
            "how long a connection without a request is kept; a proxy must give its idle connections up sooner",
            group="HTTP",
            metavar="SECONDS",
            low=1,
            high=86400,
        ),
    ] = 75.0
    keepalive: Annotated[
        float,
        Option(
            "silence of a stream after which a comment is sent, as proxies end connections that are silent for long",
            group="HTTP",
            metavar="SECONDS",
            low=0.1,
            high=3600,
        ),
    ] = 15.0
    allowed_hosts: Annotated[
        tuple[str, ...],
        Option(
            "name by which the server may be called, beside addresses and localhost, or * for any; may be given "
            "several times",
            group="HTTP",
            metavar="NAME",
            pattern=r"\*|[A-Za-z0-9]([A-Za-z0-9._-]*[A-Za-z0-9])?",
            form="* or a host name without a port",
            name="allowed-host",
            default="none where it listens on a loopback address without keys, else any",
        ),
    ] = ()
    request_timeout: Annotated[
        float,
        Option(
            "longest time from a request's arrival to the end of its response",
            group="HTTP",
            metavar="SECONDS",
            low=1,
            high=604800,
        ),
    ] = 3600.0
    metrics_prefix: Annotated[
        str,
        Option(
            "prefix of the names on /metrics, without the colon; vllm and sglang also add the names that those "
            "servers' dashboards read",
            group="HTTP",
            metavar="NAME",
            pattern=r"[A-Za-z_][A-Za-z0-9_]*",
            form="letters, digits and _, not beginning with a digit",
        ),
    ] = "tessera"
    min_free_memory: Annotated[
        int,
        Option(
            "requests are refused while less memory than this is available, in MiB; 0 refuses none",
            group="HTTP",
            metavar="MIB",
            low=0,
            high=2**30,
        ),
    ] = 64
    ui: Annotated[bool, Option("have a page with a chat and a dashboard at /", group="HTTP")] = True
    data_dir: Annotated[
        str | None,
        Option(
            "folder for what is stored: responses, files, batches; none: a temporary one, gone when the server ends",
            group="storage",
            metavar="FOLDER",
            default="tessera in $XDG_STATE_HOME, which is ~/.local/state",
        ),
    ] = None
    data_limit: Annotated[
        float,
        Option("most that is stored in the data folder", group="storage", metavar="GIB", low=0.001, high=2**20),
    ] = 16.0
    key_data_limit: Annotated[
        float,
        Option(
            "most files and batches that are stored for one API key",
            group="storage",
            metavar="GIB",
            low=0.001,
            high=2**20,
        ),
    ] = 4.0
    max_file_size: Annotated[
        float,
        Option("largest file that can be uploaded", group="storage", metavar="MIB", low=0.001, high=2**20),
    ] = 512.0
    max_batch_lines: Annotated[
        int, Option("most requests of one batch", group="storage", metavar="N", low=1, high=10**6)
    ] = 50_000
    batch_concurrency: Annotated[
        int,
        Option(
            "requests of batches that run at a time, over all app processes; 0 takes half of --max-num-seqs, which "
            "leaves the other half to interactive requests",
            group="scheduling",
            metavar="N",
            low=0,
            high=4096,
        ),
    ] = 0
    data_days: Annotated[
        float,
        Option(
            "age at which what is stored is deleted; 0 keeps it until it is deleted or a limit is reached",
            group="storage",
            metavar="DAYS",
            low=0,
            high=36500,
        ),
    ] = 30.0
    enable_fine_tuning: Annotated[
        bool,
        Option(
            "offer /v1/fine_tuning/jobs, which train LoRA adapters of the served models, in a process of its own, on "
            "the device of the model",
            group="fine-tuning",
        ),
    ] = False
    fine_tuning_share: Annotated[
        float,
        Option(
            "most of the machine's CPU time, and of the GPU's time, that fine-tuning takes, from 0.01 to 1; on CPUs at "
            "the lowest priority in any case",
            group="fine-tuning",
            metavar="SHARE",
            low=0.01,
            high=1,
        ),
    ] = 0.5
    otlp_traces_endpoint: Annotated[
        str | None,
        Option(
            "collector that OpenTelemetry traces of requests are sent to: http://HOST:4318 or https://... for "
            "OTLP over HTTP, grpc://HOST:4317 or grpcs://... for gRPC; needs the extra `otel`",
            group="log",
            metavar="URL",
            pattern=r"(https?|grpcs?)://[^\s@/?#]+(/[^\s?#]*)?",
            form="a URL such as http://127.0.0.1:4318 or grpc://127.0.0.1:4317, without a user",
            default="none",
        ),
    ] = None
    log_prompts: Annotated[
        bool,
        Option("write each request's prompt into its log line; otherwise no content is logged", group="log"),
    ] = False

    @property
    def models(self) -> tuple[AppSettings, ...]:
        """The settings of each model, with all that they have in common."""
        others = ({field: getattr(model, field) for field in model.__struct_fields__} for model in self.other_models)
        return (self, *(msgspec.structs.replace(self, **fields) for fields in others))

    @property
    def accepted_keys(self) -> AcceptedKeys:
        return AcceptedKeys(self.api_keys, self.keys)


class ServerOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Settings of the process that starts the others. Times are seconds. The fields without an Option:

    Attributes:
        engines: of the models, in the order of `app.models`.
        device_share: most of the device that the loaded models may take together.
        keys_file: read again when it changes.
    """

    engines: tuple[EngineLaunch, ...]
    app: AppSettings
    engine_module: str = "tessera.engine.ipc.process"
    keys_file: str | None = None
    device_share: float = 1.0
    host: Annotated[str, Option("address to listen on", group="HTTP", metavar="HOST")] = "127.0.0.1"
    port: Annotated[
        int, Option("port to listen on; 0 takes a free one", group="HTTP", metavar="PORT", low=0, high=65535)
    ] = 8000
    uds: Annotated[
        str | None,
        Option(
            "Unix socket to listen on, in the place of --host and --port",
            group="HTTP",
            metavar="PATH",
            default="none",
        ),
    ] = None
    uds_mode: Annotated[
        int,
        Option(
            "permissions of the Unix socket's file, in octal: 660 lets the user and the group connect",
            group="HTTP",
            metavar="MODE",
            parse=parse_mode,
            form="octal, from 0 to 777",
            default="660",
        ),
    ] = 0o660
    admin_port: Annotated[
        int | None,
        Option(
            "port of the same address that answers GET /health, /ready, /version and /metrics, without a key, from a "
            "thread of its own, whatever the rest of the server does; 0 takes a free one",
            group="HTTP",
            metavar="PORT",
            low=0,
            high=65535,
            default="none; --port answers them as well",
        ),
    ] = None
    api_workers: Annotated[
        int | None,
        Option(
            "processes that speak HTTP",
            group="HTTP",
            metavar="N",
            low=1,
            high=64,
            default=f"2 where there are {CORES_FOR_TWO} cores, else 1",
        ),
    ] = None
    max_connections: Annotated[
        int | None,
        Option(
            "most HTTP connections of one app process",
            group="HTTP",
            metavar="N",
            low=1,
            high=2**20,
            default=f"what the limit of descriptors leaves room for, at most {MOST_CONNECTIONS}",
        ),
    ] = None
    drain_timeout: Annotated[
        int,
        Option(
            "how long running requests may go on after SIGTERM or Ctrl-C; a second signal ends at once",
            group="HTTP",
            metavar="SECONDS",
            low=0,
            high=86400,
        ),
    ] = 30
    step_timeout: Annotated[
        float | None,
        Option(
            "a longer step counts as hung and the engine is restarted",
            group="scheduling",
            metavar="SECONDS",
            low=1,
            high=86400,
            default="60 on CUDA, 600 on the CPU",
        ),
    ] = None

    @property
    def num_api_workers(self) -> int:
        return self.api_workers or (2 if num_cores() >= CORES_FOR_TWO else 1)
