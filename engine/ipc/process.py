"""The engine process: `python -m tessera.engine.ipc.process RUN_DIR REPORT_FD`, an EngineCore behind a socket.

The supervisor writes an EngineConfig as one line of JSON to standard input and keeps that pipe open;
when it ends, the parent has died, and this process exits too. The start is reported over the inherited
REPORT_FD as lines of JSON (`EngineReport`). Exit codes: 0 drained, 1 fault, 2 ConfigError.

The driver takes a quarter of a second to start, and Python twice as long to import the engine, so both begin at once.
"""

from __future__ import annotations

import contextlib
import gc
import logging
import os
import signal
import sys
import threading
from typing import TYPE_CHECKING

import msgspec

from tessera.engine.contract.config import EngineConfig
from tessera.engine.contract.errors import ConfigError
from tessera.engine.contract.heap import HeapTrimmer
from tessera.engine.contract.logs import configure_logging
from tessera.engine.contract.messages import EngineReport, LoadProgress, Ready, StartFailed

if TYPE_CHECKING:
    from tessera.engine.ipc.loaded_engine import LoadedEngine, Loader, Progress

logger = logging.getLogger("tessera.engine")

STDIN_FD = 0


def serve(load: Loader) -> int:
    """Run an engine process to its end; -> its exit code."""
    gc.disable()  # until all is imported and loaded, of which next to nothing is garbage
    run_dir, report_fd, owner_dir = sys.argv[1], int(sys.argv[2]), sys.argv[3]
    signal.signal(signal.SIGHUP, signal.SIG_IGN)  # it is the server's to handle
    config = msgspec.json.decode(_read_line(STDIN_FD), type=EngineConfig)
    configure_logging(config.log_format, config.log_level, process="engine")
    if config.device != "cpu":
        threading.Thread(target=_start_driver, name="driver", daemon=True).start()
    from tessera.engine.ipc.engine_process import EngineProcess

    def report(message: EngineReport) -> None:
        os.write(report_fd, msgspec.json.encode(message) + b"\n")

    process = EngineProcess(run_dir, owner_dir, report)
    try:
        engine = load(config, lambda stage, done, total: report(LoadProgress(stage, done, total)))
        process.garbage.take_over()  # later collections skip all that was loaded
        HeapTrimmer(lambda: not process.has_work).start()
        report(Ready(process.epoch, engine.info))
    except ConfigError as error:
        report(StartFailed(str(error), user_error=True))
        process.close()
        return 2
    except Exception as error:
        logger.exception("the engine failed to start")
        report(StartFailed(f"{type(error).__name__}: {error}", user_error=False))
        process.close()
        return 1
    try:
        process.run(engine)
    except Exception:
        logger.exception("the engine failed")
        return 1
    finally:
        process.close()
    return 0


def _read_line(fd: int) -> bytes:
    """One line, and not a byte more: the heartbeat thread watches the rest."""
    line = b""
    while (byte := os.read(fd, 1)) not in (b"", b"\n"):
        line += byte
    return line


def _start_driver() -> None:
    with contextlib.suppress(Exception):  # the engine meets it again, and says what it is
        from tessera.engine.cuda.driver import open_context

        open_context()


def _load(config: EngineConfig, progress: Progress) -> LoadedEngine:
    from tessera.engine.ipc.load import load_engine

    return load_engine(config, progress)


def main() -> None:
    code = serve(_load)
    sys.stderr.flush()
    if code == 1:
        os._exit(code)  # a device in an error state can hang the interpreter's shutdown
    sys.exit(code)


if __name__ == "__main__":
    main()
