"""Greedy tokens of an engine in this process."""

from __future__ import annotations

import time
from array import array
from collections.abc import Iterable, Sequence

from tessera.engine.contract.config import EngineConfig
from tessera.engine.contract.messages import AddRequest
from tessera.engine.contract.sampling_params import SamplingParams
from tessera.engine.ipc.load import load_engine


def greedy_tokens(config: EngineConfig, requests: Iterable[tuple[Sequence[int], int]]) -> list[list[int]]:
    """After each prompt as many tokens as it wants, all requests at once."""
    core = load_engine(config, lambda stage, done, total: None).core
    found: dict[str, list[int]] = {}
    for number, (prompt, max_tokens) in enumerate(requests):
        params = SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True)
        core.add_request(AddRequest(str(number), array("i", prompt), params, time.monotonic()), b"")
        found[str(number)] = []
    while core.has_work:
        for output in core.step().get(b"", []):
            assert output.error is None, output.error
            found[output.request_id] += output.token_ids
    return list(found.values())
