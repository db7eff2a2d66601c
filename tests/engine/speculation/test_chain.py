"""Steps of a draft that are submitted together compute what they compute one by one.

A recording on the CPU is a list of steps that are computed again at each launch, over the same padded inputs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tessera.engine.core.step_batch import StepBatch
from tessera.engine.drafters.chain import MAX_STEPS
from tessera.engine.drafters.draft_model import DraftModel
from tessera.engine.models.config import load_config
from tessera.engine.runner.step_inputs import StepInputs
from tessera.engine.tensor import CPU
from tests.support.models.tiny_eagle3 import write_head
from tests.support.models.tiny_models import TINY_MODELS, build
from tests.support.speculation import ask_all, assert_same, make_core, make_runner, num_drafted, varied_requests

SIZES = (1, 2, 4, 8)
Step = Callable[[], None]


class Recorded:
    def __init__(self, steps: list[Step]) -> None:
        self.steps, self.launches = steps, 0

    def launch(self) -> None:
        self.launches += 1
        for step in self.steps:
            step()


class Recorder:
    """The CPU, with a `capture` of what `compute` is asked for."""

    def __init__(self, compute: Callable[[StepInputs, int, bool], None]) -> None:
        self._compute = compute
        self._steps: list[Step] = []
        self.recorded: list[Recorded] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(CPU, name)

    def compute(self, inputs: StepInputs, number: int, filtered: bool) -> None:
        self._steps.append(partial(self._compute, inputs, number, filtered))

    @contextmanager
    def capture(self) -> Iterator[Callable[[], Recorded]]:
        self._steps = []
        yield lambda: self.recorded[-1]
        self.recorded.append(Recorded(self._steps))


@pytest.mark.parametrize("num_tokens", [4, MAX_STEPS + 3])
@pytest.mark.parametrize("method", ["draft_model", "eagle3"])
def test_chained_steps_draft_the_same(method: str, num_tokens: int, tmp_path: Path) -> None:
    folder = build(TINY_MODELS["llama"], tmp_path / "served")
    model = load_config(folder)
    if method == "eagle3":
        write_head(tmp_path / "draft", model.hidden_size, model.vocab_size, 50)
    else:
        build(TINY_MODELS["llama-linear"], tmp_path / "draft")
    settings: dict[str, Any] = {
        "speculation": "on",
        "speculative_method": method,
        "speculative_model": str(tmp_path / "draft"),
        "max_num_seqs": 8,
        "num_speculative_tokens": num_tokens,
    }
    asked = varied_requests(model.vocab_size, 16)
    runner = make_runner(folder, **settings)
    drafter = runner.drafter
    assert isinstance(drafter, DraftModel)
    expected = ask_all(make_core(folder, runner, **settings), asked)
    found = drafts_of(drafter)
    ask_all(make_core(folder, runner, **settings), asked)

    one_by_one, launched = list(found), count_steps(drafter)
    found.clear()
    recorder = Recorder(drafter._compute)
    drafter._compute = recorder.compute  # type: ignore[method-assign]
    drafter.capture_chains(recorder, SIZES)
    told = ask_all(make_core(folder, runner, **settings), asked)
    assert_same(told, expected)
    assert found == one_by_one
    assert num_drafted(told) > len(asked) * 3
    assert sum(each.launches for each in recorder.recorded) > 10
    assert all(number == 0 or number > MAX_STEPS for number in launched), "the others were chained"


def drafts_of(drafter: DraftModel) -> list[list[list[int]]]:
    """Of each step from now on, by slots in turn."""
    found: list[list[list[int]]] = []
    draft = drafter.draft

    def watch(steps: Any) -> Any:
        download = draft(steps)
        drafts = download.result()
        found.append([drafts[number, step.sampling.slots].tolist() for number, step in enumerate(steps)])
        return download

    drafter.draft = watch  # type: ignore[method-assign]
    return found


def count_steps(drafter: DraftModel) -> list[int]:
    """The numbers of steps that are started one by one from now on."""
    found: list[int] = []
    start = drafter.start

    def watch(batch: StepBatch) -> Any:
        found.append(drafter._number)
        return start(batch)

    drafter.start = watch  # type: ignore[method-assign]
    return found
