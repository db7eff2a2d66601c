"""One server from start to stop: the engine process, the app processes, and the report to the user."""

from __future__ import annotations

import asyncio
import ipaddress
import logging
import os
import secrets
import signal
import socket
from collections.abc import Callable
from pathlib import Path

import msgspec
import uvloop

from tessera.app.http.counts import make_shared_memory
from tessera.app.server.descriptors import connection_limit, raise_descriptor_limit
from tessera.app.server.listener import listen
from tessera.app.server.logs import configure_logging
from tessera.app.server.start_report import StartReport
from tessera.app.server.worker_pool import WorkerLaunch, WorkerPool
from tessera.app.settings import ServerOptions
from tessera.app.store.folder import RUN_FOLDER, data_folder
from tessera.engine.contract.errors import ConfigError
from tessera.engine.contract.messages import EngineInfo, LoadProgress
from tessera.engine.ipc.client import EngineClient
from tessera.engine.ipc.supervisor import EngineStartError, EngineSupervisor, make_run_dir

logger = logging.getLogger("tessera.serve")

RESPONSE_FILE = "responses.sqlite"
ENGINE_STOP_TIMEOUT = 5.0  # seconds; by then no request is left for the engine to finish
ANY_ADDRESS = {"0.0.0.0": "127.0.0.1", "::": "::1"}  # the address to show for one that listens everywhere


def run_server(options: ServerOptions, read_keys: Callable[[], tuple[str, ...]]) -> int:
    """Serve until SIGTERM or SIGINT; -> exit code 0, or 1 where the engine cannot be started.

    Args:
        read_keys: reads the API keys again, which SIGHUP asks for; raises ConfigError.

    Raises:
        ConfigError: an option or the model is at fault.
    """
    signal.signal(signal.SIGHUP, signal.SIG_IGN)  # until the keys can be read again
    configure_logging(options.app)
    max_connections = connection_limit(raise_descriptor_limit(), options.max_connections)
    listener = listen(options.host, options.port)
    app = msgspec.structs.replace(
        options.app,
        max_connections=max_connections,
        allowed_hosts=options.app.allowed_hosts or _default_hosts(options, listener),
    )
    options = msgspec.structs.replace(options, app=app)
    return uvloop.run(Server(options, listener, read_keys).run())


class Server:
    def __init__(
        self, options: ServerOptions, listener: socket.socket, read_keys: Callable[[], tuple[str, ...]]
    ) -> None:
        self._options = options
        self._read_keys = read_keys
        self._listener = listener
        self._url = _url(options.host, listener)
        self._report = StartReport(as_log=options.app.log_format == "json")
        self._stopping = False

    async def run(self) -> int:
        options = self._options
        folder = data_folder(options.app.data_dir)
        run_dir = make_run_dir()
        app = msgspec.structs.replace(options.app, data_dir=str(folder or run_dir / RUN_FOLDER))
        if options.api_workers > 1:
            app = msgspec.structs.replace(
                app,
                response_file=str(run_dir / RESPONSE_FILE),
                seal_key=secrets.token_hex(32),
                num_app_processes=options.api_workers,
                count_fd=make_shared_memory(),
            )
        self._supervisor = EngineSupervisor(
            options.engine,
            run_dir,
            module=options.engine_module,
            on_progress=self._show_progress,
            step_timeout=options.step_timeout,
        )
        client = self._client = EngineClient(run_dir)
        self._workers = WorkerPool(
            options.api_workers - 1,
            WorkerLaunch(str(run_dir), self._listener.fileno(), options.drain_timeout, app),
        )
        self._supervisor.start()
        await asyncio.sleep(0)  # the engine process starts, and loads while this one imports the rest
        await client.start()
        try:
            from tessera.app.server.http_server import HttpServer, freeze_what_is_loaded

            self._http = HttpServer(client, app, options.drain_timeout)
            freeze_what_is_loaded()
            return await self._serve()
        finally:
            self._report.close()
            self._workers.terminate()
            await self._workers.join()
            await client.close()
            await self._supervisor.stop(ENGINE_STOP_TIMEOUT)

    async def _serve(self) -> int:
        loop = asyncio.get_running_loop()
        for signum in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(signum, self._on_signal, signum)
        loop.add_signal_handler(signal.SIGHUP, self._reload_keys)
        self._report.show_listening(self._url)
        self._workers.start()
        serving = asyncio.create_task(self._http.serve(sockets=[self._listener]))
        starting = asyncio.create_task(self._wait_ready())
        await asyncio.wait({serving, starting}, return_when=asyncio.FIRST_COMPLETED)
        exit_code = 0
        failure: ConfigError | None = None
        if not starting.done():
            starting.cancel()
        else:
            try:
                info = starting.result()
            except ConfigError as error:
                failure = error
            except EngineStartError as error:
                logger.critical("%s; the server ends", error)
                exit_code = 1
            else:
                from tessera.app.text.chat_template import load_chat_template

                app = self._options.app
                template = load_chat_template(Path(app.model_folder), app.chat_template, {})
                self._report.show_ready(
                    info,
                    app,
                    self._url,
                    has_template=template is not None,
                    has_tokenizer=self._http.has_tokenizer,
                )
        if failure is not None or exit_code != 0:
            self._stop()
        await serving
        if failure is not None:
            raise failure
        return exit_code

    async def _wait_ready(self) -> EngineInfo:
        """Wait until requests can be served; raises as `wait_started` does."""
        info = await self._supervisor.wait_started()
        await self._client.wait_first_ready()
        return info

    def _show_progress(self, progress: LoadProgress) -> None:
        if self._supervisor.info is None:
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

    def _reload_keys(self) -> None:
        """Read the API keys again, as SIGHUP asks; a server that was started without keys stays open."""
        if not self._options.app.api_keys:
            logger.info("SIGHUP: there are no API keys to read again")
            return
        try:
            api_keys = self._read_keys()
        except ConfigError as error:
            logger.error("SIGHUP: the API keys stay as they were: %s", error)
            return
        self._http.replace_keys(api_keys)
        self._workers.replace_keys(api_keys)
        logger.info("SIGHUP: %d API keys are accepted from now on", len(api_keys))

    def _stop(self) -> None:
        self._stopping = True
        self._http.stop()
        self._workers.terminate()


def _default_hosts(options: ServerOptions, listener: socket.socket) -> tuple[str, ...]:
    """Any, but for an open server that only this machine's users can reach, and so the pages in their browsers."""
    address = ipaddress.ip_address(listener.getsockname()[0].partition("%")[0])
    return ("*",) if options.app.api_keys or not address.is_loopback else (options.host,)


def _url(host: str, listener: socket.socket) -> str:
    host = ANY_ADDRESS.get(host, host)
    port = listener.getsockname()[1]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
