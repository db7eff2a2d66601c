"""`tessera doctor`: makes the checks and says what will work."""

from __future__ import annotations

import orjson
from msgspec import to_builtins
from rich.console import Console
from rich.table import Table
from rich.text import Text

from tessera.app.cli.doctor.check import Check
from tessera.app.cli.doctor.gpu import gpu_checks
from tessera.app.cli.doctor.machine import machine_checks
from tessera.app.cli.doctor.options import DoctorOptions
from tessera.app.cli.doctor.software import data_check, model_checks, package_checks
from tessera.options.command_options import GivenOptions

EXIT_BROKEN = 1
MARKS = {"ok": ("ok", "green"), "warning": ("!", "yellow"), "error": ("x", "red")}


def doctor_command(given: GivenOptions) -> int:
    """-> exit code: 1 if a check found something broken."""
    options = given.make(DoctorOptions)
    gpu, no_gpu = gpu_checks(options.timeout)
    models, no_download = model_checks(options.timeout, network=options.network)
    checks = [*gpu, *machine_checks(options.host, options.port), *package_checks(), *models, data_check()]
    broken = [check for check in checks if check.status == "error"]
    on_cpu = ", ".join(check.value for check in broken if check.group != "GPU")
    verdicts = {"serving on the GPU": no_gpu, "serving on the CPU": on_cpu}
    if options.network or no_download:  # otherwise it is not known
        verdicts["downloading models"] = no_download
    if options.json:
        works = {name: {"works": not reason, "reason": reason or None} for name, reason in verdicts.items()}
        found = {"ok": not broken, "works": works, "checks": to_builtins(checks)}
        print(orjson.dumps(found, option=orjson.OPT_INDENT_2).decode())
    else:
        _print(checks, verdicts)
    return EXIT_BROKEN if broken else 0


def _print(checks: list[Check], verdicts: dict[str, str]) -> None:
    console = Console(highlight=False)
    for group in dict.fromkeys(check.group for check in checks):
        console.print(Text(group[0].upper() + group[1:], style="bold"))
        table = Table(box=None, show_header=False, pad_edge=False, padding=(0, 1, 0, 0))
        table.add_column(no_wrap=True, justify="right", min_width=3)
        table.add_column(no_wrap=True, style="dim", min_width=16)
        table.add_column(overflow="fold")
        for check in checks:
            if check.group == group:
                mark, style = MARKS[check.status]
                value = Text(check.value)
                if check.advice:
                    value.append(f"\n-> {check.advice}", style=style)
                table.add_row(Text(mark, style=style), check.name, value)
        console.print(table)
    console.print()
    table = Table(box=None, show_header=False, pad_edge=False, padding=(0, 1, 0, 0))
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for name, reason in verdicts.items():
        verdict = Text("no", style="red") if reason else Text("yes", style="green")
        if reason:
            verdict.append(f" ({reason})", style="default")
        table.add_row(f"{name[0].upper()}{name[1:]}:", verdict)
    console.print(table)
