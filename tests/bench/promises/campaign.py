"""Parts one after the other, on as many GPUs as there are, within the time that is given."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import reduce
from pathlib import Path

from tests.bench.promises.figure import Result
from tests.bench.promises.parts import ALL_GPUS, BASE, OUTPUT, WORKERS, Part
from tests.support.paths import ROOT

WORKERS_PER_GPU = 14  # processes of tests
PATIENCE = 2.0  # times a part's usual seconds, before it is ended


@dataclass(frozen=True)
class Outcome:
    """What became of a part.

    Attributes:
        ended: "done", "exit code 1", "ended after 90 s" or the reason why it was left out.
        values: of the part's figures; None where there is none.
    """

    part: Part
    ended: str
    seconds: float = 0.0
    values: tuple[float | None, ...] = ()

    @property
    def is_kept(self) -> bool:
        return self.ended == "done" and all(
            value is not None and figure.is_kept(value)
            for figure, value in zip(self.part.figures, self.values, strict=True)
        )


@dataclass
class Campaign:
    """Begins parts in their order, each as soon as its GPUs are free; a part that is `alone` has the machine.

    Args:
        gpus: names that CUDA_VISIBLE_DEVICES takes.
        deadline: time.monotonic(); no part begins that would take longer.
        base: see `parts.BASE`.
        say: is called as parts begin and end, from any thread.
        side_by_side: nothing is alone.
    """

    output: Path
    gpus: Sequence[str]
    deadline: float
    base: Path | None
    say: Callable[[str], None]
    side_by_side: bool = False
    _found: dict[str, Outcome] = field(default_factory=dict)

    def run(self, parts: Iterable[Part]) -> list[Outcome]:
        """An outcome for each part, in the same order."""
        parts = list(parts)
        waiting, free, freed = parts.copy(), list(self.gpus), threading.Condition()
        threads = []

        def work(part: Part, gpus: list[str]) -> None:
            try:
                self._take(part, gpus)
            finally:
                with freed:
                    free.extend(gpus)
                    freed.notify()

        while waiting:
            with freed:
                freed.wait_for(lambda: self._next(waiting, len(free)) is not None)
                part = self._next(waiting, len(free))
                assert part is not None
                waiting.remove(part)
                free.sort(key=self.gpus.index)
                wanted = self._wanted(part)
                gpus, free[:wanted] = free[:wanted], []
            threads.append(threading.Thread(target=work, args=(part, gpus)))
            threads[-1].start()
        for thread in threads:
            thread.join()
        return [self._found[part.name] for part in parts]

    def _wanted(self, part: Part) -> int:
        """GPUs that nothing else may use meanwhile."""
        whole = part.num_gpus == ALL_GPUS or (part.alone and not self.side_by_side)
        return len(self.gpus) if whole else min(part.num_gpus, len(self.gpus))

    def _next(self, waiting: Sequence[Part], free: int) -> Part | None:
        """The first part that has room; none overtakes one that waits for the whole machine."""
        for part in waiting:
            if self._wanted(part) <= free:
                return part
            if self._wanted(part) == len(self.gpus):
                return None
        return None

    def _take(self, part: Part, gpus: Sequence[str]) -> None:
        gpus = gpus[: part.num_gpus or None]
        reason = self._reason_against(part, gpus)
        if reason is not None:
            outcome = Outcome(part, reason)
        else:
            self.say(f"{part.name}: begins on GPU {', '.join(gpus)}")
            outcome = self._run(part, gpus)
        self._found[part.name] = outcome
        self.say(
            f"{part.name}: {outcome.ended}, {outcome.seconds:.0f} s" if reason is None else f"{part.name}: {reason}"
        )

    def _reason_against(self, part: Part, gpus: Sequence[str]) -> str | None:
        if len(gpus) < part.num_gpus:
            return f"left out: it needs {part.num_gpus} GPUs"
        if BASE in part.command and self.base is None:
            return "left out: it needs --base"
        if time.monotonic() + part.seconds > self.deadline:
            return f"left out: {part.seconds:.0f} s are no longer left"
        return None

    def _run(self, part: Part, gpus: Sequence[str]) -> Outcome:
        folder = self.output / part.name.replace(" ", "-").replace(",", "")
        folder.mkdir(parents=True, exist_ok=True)
        words = {OUTPUT: str(folder), BASE: str(self.base), WORKERS: str(WORKERS_PER_GPU * len(gpus))}
        command = [reduce(lambda text, word: text.replace(*word), words.items(), word) for word in part.command]
        environment = {**os.environ, "CUDA_VISIBLE_DEVICES": ",".join(gpus), "TESSERA_REQUIRE_GPU": "1"}
        log, begin = folder / "log", time.monotonic()
        with log.open("wb") as file:
            process = subprocess.Popen(
                command, cwd=ROOT, stdout=file, stderr=subprocess.STDOUT, env=environment, start_new_session=True
            )
            try:
                code = process.wait(min(PATIENCE * part.seconds, self.deadline - begin))
                ended = f"exit code {code}" if code else "done"
            except subprocess.TimeoutExpired:
                ended = f"ended after {time.monotonic() - begin:.0f} s"
            finally:
                _end_group(process)
        result = Result.read(log, folder)
        values = tuple(figure.of(result) for figure in part.figures)
        return Outcome(part, ended, time.monotonic() - begin, values)


def _end_group(process: subprocess.Popen[bytes]) -> None:
    """A part's processes are ended with it: a server that lives on would hold the GPU."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
