"""One server from start to stop: the engine process, the app processes, and the report to the user.

What takes long to import is imported once the engine process has been started, which loads meanwhile.
"""

from __future__ import annotations

import asyncio
import gc
import ipaddress
import logging
import os
import signal
import socket
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import uvloop

from tessera.app.engines.pool import EnginePool
from tessera.app.keys.api_key import AcceptedKeys
from tessera.app.keys.key_ring import accounts_of_name
from tessera.app.keys.keys_file import with_slots
from tessera.app.limits.shared_memory import make_shared_memory
from tessera.app.server.logs import configure_logging
from tessera.app.settings import ServerOptions
from tessera.app.sockets.descriptors import connection_limit, raise_descriptor_limit
from tessera.app.sockets.listener import listen
from tessera.app.sockets.tls import make_context
from tessera.app.sockets.unix_socket import SocketFile, listen_unix
from tessera.app.store.folder import RUN_FOLDER, data_folder
from tessera.engine.contract.errors import ConfigError
from tessera.engine.contract.messages import EngineInfo, LoadProgress
from tessera.engine.ipc.supervisor import EngineStartError, make_run_dir

if TYPE_CHECKING:
    from tessera.app.server.admin_server import AdminServer
    from tessera.app.server.start_report import StartReport

logger = logging.getLogger("tessera.serve")

GIB = 2**30
ENGINE_STOP_TIMEOUT = 5.0  # seconds; by then no request is left for the engine to finish
KEYS_FILE_INTERVAL = 1.0  # seconds between two looks
ANY_ADDRESS = {"0.0.0.0": "127.0.0.1", "::": "::1"}  # the address to show for one that listens everywhere


def run_server(options: ServerOptions, read_keys: Callable[[], AcceptedKeys]) -> int:
    """Serve until SIGTERM or SIGINT; -> exit code 0, or 1 where the engine cannot be started.

    Args:
        read_keys: reads the API keys again, which SIGHUP asks for; raises ConfigError.

    Raises:
        ConfigError: an option or the model is at fault.
    """
    signal.signal(signal.SIGHUP, signal.SIG_IGN)  # until keys and certificates can be read again
    configure_logging(options.app)
    max_connections = connection_limit(raise_descriptor_limit(), options.max_connections)
    listener = _listen(options)
    admin_listener = None if options.admin_port is None else listen(options.host, options.admin_port, "--admin-port")
    app = msgspec.structs.replace(
        options.app,
        max_connections=max_connections,
        allowed_hosts=options.app.allowed_hosts or _default_hosts(options, listener),
    )
    options = msgspec.structs.replace(options, app=app)
    gc.disable()  # until `freeze_what_is_loaded`: next to nothing of what is imported and loaded is garbage
    return uvloop.run(Server(options, listener, read_keys, admin_listener).run())


class Server:
    def __init__(
        self,
        options: ServerOptions,
        listener: socket.socket,
        read_keys: Callable[[], AcceptedKeys],
        admin_listener: socket.socket | None = None,
    ) -> None:
        self._options = options
        self._read_keys = read_keys
        self._named_keys = options.app.keys
        self._listener = listener
        self._admin_listener = admin_listener
        self._admin: AdminServer | None = None
        self._socket_file = SocketFile(listener) if listener.family == socket.AF_UNIX else None
        self._url = _url(options, listener)
        self._report: StartReport
        self._stopping = False
        self._has_started = False

    async def run(self) -> int:
        options = self._options
        folder = data_folder(options.app.data_dir)
        run_dir = make_run_dir()
        app = msgspec.structs.replace(options.app, data_dir=str(folder or run_dir / RUN_FOLDER))
        num_workers = options.num_api_workers
        if num_workers > 1:
            app = msgspec.structs.replace(
                app,
                num_app_processes=num_workers,
                count_fd=make_shared_memory("http requests"),
                key_use_fd=make_shared_memory("uses of keys"),
            )
        self._pool = EnginePool(
            run_dir,
            options.engines,
            budget=options.device_share,
            patience=options.app.model_load_timeout,
            host_bytes=int((options.app.sleep_host_gib or 0) * GIB),
            module=options.engine_module,
            step_timeout=options.step_timeout,
            on_progress=self._show_progress,
        )
        self._pool.start()
        await self._pool.wait_launched()  # the engine loads while this process imports the rest
        await self._pool.listen()
        from tessera.app.server.start_report import StartReport
        from tessera.app.server.worker_pool import WorkerLaunch, WorkerPool

        self._report = StartReport(as_log=options.app.log_format == "json")
        self._workers = WorkerPool(
            num_workers - 1,
            WorkerLaunch(str(run_dir), self._listener.fileno(), options.drain_timeout, app),
        )
        from tessera.app.server.http_server import HttpServer, engines_of, freeze_what_is_loaded

        engines = self._engines = engines_of(run_dir, app)
        await engines.start()
        try:
            self._http = HttpServer(engines, app, options.drain_timeout)
            if self._admin_listener is not None:
                from tessera.app.server.admin_server import AdminServer

                self._admin = AdminServer(str(run_dir), app, self._http.counts, self._admin_listener)
                self._admin.start()
            freeze_what_is_loaded(self._http.garbage, self._http.is_idle)
            return await self._serve()
        finally:
            self._report.close()
            self._workers.terminate()
            await self._workers.join()
            if self._socket_file is not None:
                self._socket_file.remove()
            if self._admin is not None:
                self._admin.stop()
            await engines.close()
            await self._pool.stop(ENGINE_STOP_TIMEOUT)

    async def _serve(self) -> int:
        loop = asyncio.get_running_loop()
        keys_file = self._options.keys_file
        for signum in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(signum, self._on_signal, signum)
        loop.add_signal_handler(signal.SIGHUP, self._on_hangup)
        self._report.show_listening(self._url)
        if self._admin_listener is not None:
            admin_url = _url(self._options, self._admin_listener)
            self._report.show(f"Health and metrics for operators are on {admin_url}, without a key")
        self._workers.start()
        serving = asyncio.create_task(self._http.serve(sockets=[self._listener]))
        starting = asyncio.create_task(self._wait_ready())
        watching = asyncio.create_task(self._watch_keys_file(Path(keys_file))) if keys_file is not None else None
        await asyncio.wait({serving, starting}, return_when=asyncio.FIRST_COMPLETED)
        exit_code = 0
        failure: ConfigError | None = None
        if not starting.done():
            starting.cancel()
        else:
            try:
                infos = starting.result()
            except ConfigError as error:
                failure = error
            except EngineStartError as error:
                logger.critical("%s; the server ends", error)
                exit_code = 1
            else:
                self._has_started = True
                self._report.show_ready(
                    infos,
                    self._options.app,
                    self._url,
                    has_template=self._http.has_template,
                    has_tokenizer=self._http.has_tokenizer,
                )
        if failure is not None or exit_code != 0:
            self._stop()
        await serving
        if watching is not None:
            watching.cancel()
        if failure is not None:
            raise failure
        return exit_code

    async def _wait_ready(self) -> dict[str, EngineInfo]:
        """Wait until requests can be served; raises as `wait_started` does. -> facts by model."""
        infos = await self._pool.wait_started()
        for engine in self._engines:
            if engine.name in infos:
                await engine.client.wait_first_ready()
        return infos

    def _show_progress(self, progress: LoadProgress) -> None:
        if not self._has_started:
            self._report.show_progress(progress)

    def _on_signal(self, signum: int) -> None:
        if self._stopping:
            # The engine and the workers end with this process.
            os._exit(128 + signum)
        self._report.close()
        self._report.show(
            f"Stopping: running requests have up to {self._options.drain_timeout} s to finish; once more stops at once"
        )
        self._stop()

    def _on_hangup(self) -> None:
        self._reload_keys()
        self._reload_certificates()

    def _reload_certificates(self) -> None:
        """Read the files for TLS again; connections that are open keep what they began with."""
        app = self._options.app
        try:
            context = make_context(app)
            of_admin = make_context(app, asks_clients=False)
        except ConfigError as error:
            logger.error("the certificate stays as it was: %s", error)
            return
        if context is None or of_admin is None:
            return
        self._http.replace_tls(context)
        self._workers.reload_certificates()
        if self._admin is not None:
            self._admin.replace_tls(of_admin)
        logger.info("new connections get the certificate in %s", app.ssl_certfile)

    def _reload_keys(self) -> None:
        """Read the API keys again, as SIGHUP asks; a server that was started without keys stays open."""
        if not self._options.app.accepted_keys:
            logger.info("SIGHUP: there are no API keys to read again")
            return
        try:
            keys = self._read_keys()
        except ConfigError as error:
            logger.error("the API keys stay as they were: %s", error)
            return
        keys = AcceptedKeys(keys.plain, with_slots(keys.named, self._named_keys))
        revoked = {key.name for key in self._named_keys} - {key.name for key in keys.named}
        self._named_keys = keys.named
        self._http.replace_keys(keys)
        self._workers.replace_keys(keys)
        logger.info("%d API keys are accepted from now on", len(keys.plain) + sum(len(k.sha256) for k in keys.named))
        self._forget_prefixes(revoked)

    def _forget_prefixes(self, revoked: set[str]) -> None:
        """Nothing that these keys have computed stays in a cache."""
        accounts = [account for name in revoked for account in accounts_of_name(name)]
        for engine in self._engines if accounts else ():
            engine.client.reset_prefix_cache(accounts)

    async def _watch_keys_file(self, path: Path) -> None:
        """Read the keys again whenever the file is another one."""
        known = _fingerprint(path)
        while True:
            await asyncio.sleep(KEYS_FILE_INTERVAL)
            if (found := _fingerprint(path)) != known:
                known = found
                self._reload_keys()

    def _stop(self) -> None:
        self._stopping = True
        if self._admin is not None:
            self._admin.begin_drain()
        self._http.stop()
        self._workers.terminate()


def _default_hosts(options: ServerOptions, listener: socket.socket) -> tuple[str, ...]:
    """Any, but for an open server that only this machine's users can reach, and so the pages in their browsers."""
    if listener.family == socket.AF_UNIX:
        return ("*",)  # no browser reaches it
    address = ipaddress.ip_address(listener.getsockname()[0].partition("%")[0])
    return ("*",) if options.app.accepted_keys or not address.is_loopback else (options.host,)


def _fingerprint(path: Path) -> tuple[int, ...] | None:
    """Differs between two states of a file; None where there is none just now."""
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_mtime_ns, found.st_size, found.st_ino


def _listen(options: ServerOptions) -> socket.socket:
    if options.uds is not None:
        return listen_unix(os.path.abspath(options.uds), options.uds_mode)
    return listen(options.host, options.port)


def _url(options: ServerOptions, listener: socket.socket) -> str:
    scheme = "http" if options.app.ssl_certfile is None else "https"
    if listener.family == socket.AF_UNIX:
        return f"{scheme}+unix:{listener.getsockname()}"
    host = ANY_ADDRESS.get(options.host, options.host)
    port = listener.getsockname()[1]
    return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"
