"""The options of `tessera bench`, named as `vllm bench serve` names them."""

from __future__ import annotations

from tessera.loadtest.options.arrival import ARRIVAL, ArrivalOptions
from tessera.loadtest.options.report import REPORT, UNUSED, ReportOptions, UnusedOptions
from tessera.loadtest.options.server import SAMPLING, SERVER, SamplingOptions, ServerUnderTest
from tessera.loadtest.options.work import WORK, WorkOptions
from tessera.options.command_options import CommandOptions

BENCH_OPTIONS = CommandOptions(
    "TESSERA_BENCH_",
    (ServerUnderTest, SamplingOptions, WorkOptions, ArrivalOptions, ReportOptions, UnusedOptions),
    groups=(SERVER, SAMPLING, WORK, ARRIVAL, REPORT, "configuration", UNUSED),
)
