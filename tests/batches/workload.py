"""The lines of the proof, and the answers that they must get."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

import numpy as np

NUM_PROMPTS = 256
ENDPOINTS = ("/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/embeddings")
MAX_TOKENS = 2
TOLERANCE = 1e-4  # of the numbers of embeddings


class Part:
    """One batch: `num_lines` lines for one endpoint, each with a prompt that its number decides."""

    def __init__(self, number: int, num_lines: int, model: str) -> None:
        self.number = number
        self.num_lines = num_lines
        self.endpoint = ENDPOINTS[number % len(ENDPOINTS)]
        self._model = model

    def input_file(self) -> bytes:
        lines = (
            {"custom_id": self._custom_id(i), "method": "POST", "url": self.endpoint, "body": self._body(i)}
            for i in range(self.num_lines)
        )
        return b"".join(json.dumps(line).encode() + b"\n" for line in lines)

    def check(self, lines: Iterable[str], answers: Answers, only_every: int = 1) -> list[str]:
        """What is wrong with the lines of an output file; only the answers to every so-manieth prompt are known."""
        wrong: list[str] = []
        seen = bytearray(self.num_lines)
        for text in lines:
            line = json.loads(text)
            prefix, _, index = line["custom_id"].partition("-")
            if prefix != f"part{self.number}" or not index.isdigit() or int(index) >= self.num_lines:
                wrong.append(f"the custom_id {line['custom_id']} is not of this batch")
                continue
            seen[int(index)] = min(seen[int(index)] + 1, 255)
            if line["error"] is not None or line["response"]["status_code"] != 200:
                wrong.append(f"{line['custom_id']} failed: {text[:300]}")
                continue
            prompt = int(index) % NUM_PROMPTS
            if prompt % only_every == 0 and not answers.is_right(self.endpoint, prompt, line["response"]["body"]):
                wrong.append(f"{line['custom_id']} has a wrong answer: {text[:300]}")
        wrong += [f"{self._custom_id(i)} has {count} results" for i, count in enumerate(seen) if count != 1]
        return wrong

    def _custom_id(self, index: int) -> str:
        return f"part{self.number}-{index}"

    def _body(self, index: int) -> dict[str, Any]:
        return body(self.endpoint, self._model, index % NUM_PROMPTS)


def body(endpoint: str, model: str, prompt: int) -> dict[str, Any]:
    text = f"{prompt * 7919} tales of the {prompt}th sailor"
    if endpoint == "/v1/completions":
        return {"model": model, "prompt": text, "max_tokens": MAX_TOKENS, "temperature": 0}
    if endpoint == "/v1/chat/completions":
        messages = [{"role": "user", "content": text}]
        return {"model": model, "messages": messages, "max_tokens": MAX_TOKENS, "temperature": 0}
    if endpoint == "/v1/responses":
        return {"model": model, "input": text, "max_output_tokens": MAX_TOKENS, "temperature": 0, "store": False}
    return {"model": model, "input": text}


class Answers:
    """What the server answered to each prompt before anything was killed."""

    def __init__(self) -> None:
        self._answers: dict[tuple[str, int], Any] = {}

    def learn(self, endpoint: str, prompt: int, answer: dict[str, Any]) -> None:
        self._answers[endpoint, prompt] = _essence(endpoint, answer)

    def is_right(self, endpoint: str, prompt: int, answer: dict[str, Any]) -> bool:
        expected, found = self._answers[endpoint, prompt], _essence(endpoint, answer)
        if endpoint == "/v1/embeddings":
            return len(found) == len(expected) and bool(np.allclose(found, expected, atol=TOLERANCE))
        return bool(found == expected)

    def num_distinct(self, endpoint: str) -> int:
        return len({str(answer) for (of, _), answer in self._answers.items() if of == endpoint})


def _essence(endpoint: str, answer: dict[str, Any]) -> Any:
    """What two answers to the same request have in common: the text and the numbers of tokens, or the embedding."""
    if endpoint == "/v1/embeddings":
        return answer["data"][0]["embedding"]
    usage = answer["usage"]
    if endpoint == "/v1/responses":
        text = [part["text"] for item in answer["output"] for part in item.get("content", ())]
        return text, usage["input_tokens"], usage["output_tokens"]
    choice = answer["choices"][0]
    text = choice["text"] if endpoint == "/v1/completions" else choice["message"]["content"]
    return text, choice["finish_reason"], usage["prompt_tokens"], usage["completion_tokens"]
