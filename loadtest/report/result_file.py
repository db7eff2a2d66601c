"""The JSON files of a run's figures."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import orjson

from tessera.loadtest.options.report import ReportOptions
from tessera.options.errors import OptionError


def check_places(options: ReportOptions) -> None:
    """Make the result folder; raise OptionError where a file could not be written, before the load and not after."""
    try:
        if options.result_dir is not None:
            options.result_dir.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise OptionError(f"--result-dir {options.result_dir}: {error.strerror}") from None
    for option, path in (("--output", options.output), ("--html", options.html)):
        if path is not None and not path.absolute().parent.is_dir():
            raise OptionError(f"{option} {path}: there is no folder {path.absolute().parent}")
        if path is not None and path.is_dir():
            raise OptionError(f"{option} {path} is a folder")


def write_results(options: ReportOptions, summary: dict[str, Any], detailed: dict[str, Any]) -> list[Path]:
    """Write the files that the options ask for; -> their paths.

    Args:
        detailed: further fields, with --save-detailed.
    """
    content = {**summary, **detailed} if options.save_detailed else summary
    written = []
    if options.output is not None:
        options.output.write_bytes(orjson.dumps(content, option=orjson.OPT_INDENT_2))
        written.append(options.output)
    if options.save_result or options.append_result:
        path = (options.result_dir or Path()) / (options.result_filename or result_name(summary))
        line = orjson.dumps(content)
        if options.append_result and path.is_file() and path.stat().st_size:
            with path.open("ab") as file:
                file.write(b"\n" + line)
        else:
            path.write_bytes(line)
        written.append(path)
    return written


def result_name(summary: dict[str, Any]) -> str:
    """As `vllm bench serve` names it."""
    concurrency = summary["max_concurrency"]
    limit = f"-concurrency{concurrency}" if concurrency is not None else ""
    model = summary["model_id"].rpartition("/")[2]
    return f"{summary['label']}-{summary['request_rate']}qps{limit}-{model}-{summary['date']}.json"
