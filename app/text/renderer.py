"""Renders chat templates in a process of its own: `python -m tessera.app.text.renderer`, lines of JSON in and out.

The first line is a `RendererSetup`, each further one a `RenderJob`, answered by a `Rendered`. A template may loop
without end or make text without end, in code that nothing in the same process can stop. Here the kernel bounds memory
and CPU time: a job over its time is interrupted; one stuck inside a single operation is killed by SIGXCPU.
"""

from __future__ import annotations

import re
import resource
import signal
import sys
from datetime import datetime
from functools import cache
from types import FrameType
from typing import Any

import jinja2
import msgspec

from tessera.app.text.sandbox import TemplateEnvironment

MAX_MEMORY = 2**29  # bytes of address space
MIN_SECONDS = 0.001
MAX_ERROR_LENGTH = 500

_ADDRESS = re.compile(r" at 0x[0-9a-fA-F]+")


class RendererSetup(msgspec.Struct, frozen=True):
    """Template texts by name."""

    sources: dict[str, str]


class RenderJob(msgspec.Struct, frozen=True):
    """One rendering: which template, with which variables, at what time, within what CPU time and length."""

    template: str
    variables: dict[str, Any]
    now: datetime
    cpu_seconds: float
    max_chars: int


class Rendered(msgspec.Struct, frozen=True):
    """The text, or why there is none."""

    text: str = ""
    error: str = ""


class _OutOfTimeError(BaseException):
    """Not an Exception, so that no template operation swallows it."""


class Renderer:
    """The templates of one model, compiled when they are first rendered."""

    def __init__(self, setup: RendererSetup) -> None:
        self._environment = TemplateEnvironment()
        self._compiled = cache(lambda name: self._environment.from_string(setup.sources[name]))

    def render(self, job: RenderJob) -> Rendered:
        """Raises MemoryError and _OutOfTimeError; every other failure is the result's error."""
        self._environment.now = job.now
        pieces: list[str] = []
        size = 0
        try:
            for piece in self._compiled(job.template).generate(job.variables):
                size += len(piece)
                if size > job.max_chars:
                    return Rendered(
                        error=f"The chat template makes more than {job.max_chars} characters of these messages."
                    )
                pieces.append(piece)
        except jinja2.exceptions.SecurityError:
            return Rendered(error="The chat template attempts what its sandbox forbids.")
        except RecursionError:
            return Rendered(error="The chat template nests too deeply.")
        except MemoryError:
            raise
        except Exception as error:  # a template can raise whatever its expressions raise
            reason = _ADDRESS.sub("", str(error))[:MAX_ERROR_LENGTH] or type(error).__name__
            return Rendered(error=f"The chat template cannot render these messages: {reason}")
        return Rendered("".join(pieces))


def _interrupt(number: int, frame: FrameType | None) -> None:
    raise _OutOfTimeError


def _render_within_limits(renderer: Renderer, job: RenderJob) -> Rendered:
    used = resource.getrusage(resource.RUSAGE_SELF)
    seconds = max(job.cpu_seconds, MIN_SECONDS)
    # The handler waits for the running operation to end, so one that does not end is killed a second later.
    killed_at = int(used.ru_utime + used.ru_stime + seconds) + 2
    resource.setrlimit(resource.RLIMIT_CPU, (killed_at, resource.RLIM_INFINITY))
    try:
        signal.setitimer(signal.ITIMER_PROF, seconds)
        try:
            return renderer.render(job)
        finally:
            signal.setitimer(signal.ITIMER_PROF, 0)
    except _OutOfTimeError:
        return Rendered(error="The chat template takes too long to render these messages.")
    except MemoryError:
        return Rendered(error="The chat template needs too much memory to render these messages.")


def main() -> None:
    resource.setrlimit(resource.RLIMIT_AS, (MAX_MEMORY, MAX_MEMORY))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
    signal.signal(signal.SIGPROF, _interrupt)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the server's to handle; this ends with its input
    renderer = Renderer(msgspec.json.decode(sys.stdin.buffer.readline(), type=RendererSetup))
    decoder, encoder = msgspec.json.Decoder(RenderJob), msgspec.json.Encoder()
    for line in sys.stdin.buffer:
        try:
            job = decoder.decode(line)
        except MemoryError:
            rendered = Rendered(error="The chat template needs too much memory to render these messages.")
        else:
            rendered = _render_within_limits(renderer, job)
        sys.stdout.buffer.write(encoder.encode(rendered) + b"\n")
        sys.stdout.buffer.flush()


if __name__ == "__main__":
    main()
