"""Make chat_templates.json: what transformers' apply_chat_template renders for real models.

Run with an interpreter that has transformers, giving a folder that holds one tokenizer folder per model:

    python tests/golden/make_chat_goldens.py TOKENIZERS_FOLDER

The prompts' token ids are kept as well, as tokenizer(text, add_special_tokens=False) gives them.
"""

from __future__ import annotations

import json
import sys
from datetime import datetime, tzinfo
from pathlib import Path
from typing import Any

NOW = datetime(2025, 3, 9, 14, 30)
MODELS = ("qwen3", "smollm3", "phi-3", "minimind")

WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Weather of a place, in °C & <words>.",
        "parameters": {
            "type": "object",
            "properties": {"place": {"type": "string"}, "days": {"type": "integer", "minimum": 1}},
            "required": ["place"],
        },
    },
}
CALL = {"id": "call_1", "type": "function", "function": {"name": "get_weather", "arguments": {"place": "Zürich"}}}

ONE_TURN = [{"role": "user", "content": 'Say <hi> & 你好 "now"\n'}]
WITH_SYSTEM = [{"role": "system", "content": "Be brief. /no_think"}, *ONE_TURN]
MULTI_TURN = [
    {"role": "system", "content": "You are terse."},
    {"role": "user", "content": "2+2?"},
    {"role": "assistant", "content": "<think>\nsum\n</think>\n\n4"},
    {"role": "user", "content": "  and 3+3?  "},
    {"role": "assistant", "content": "6"},
    {"role": "user", "content": "thanks 🙂"},
]
WITH_TOOL_TURN = [
    {"role": "user", "content": "Weather in Zürich?"},
    {"role": "assistant", "content": "", "tool_calls": [CALL, CALL]},
    {"role": "tool", "tool_call_id": "call_1", "content": "7 °C"},
    {"role": "tool", "tool_call_id": "call_1", "content": "8 °C"},
    {"role": "assistant", "content": "7 or 8.", "reasoning_content": "two answers"},
    {"role": "user", "content": "ok"},
]
OPEN_ANSWER = [*ONE_TURN, {"role": "assistant", "content": "The answer begins"}]

CASES = {
    "one turn": {"messages": ONE_TURN, "add_generation_prompt": True},
    "one turn without generation prompt": {"messages": ONE_TURN, "add_generation_prompt": False},
    "system": {"messages": WITH_SYSTEM, "add_generation_prompt": True},
    "several turns": {"messages": MULTI_TURN, "add_generation_prompt": True},
    "thinking off": {"messages": MULTI_TURN, "add_generation_prompt": True, "extra": {"enable_thinking": False}},
    "thinking on": {"messages": ONE_TURN, "add_generation_prompt": True, "extra": {"enable_thinking": True}},
    "open thinking": {"messages": ONE_TURN, "add_generation_prompt": True, "extra": {"open_thinking": True}},
    "tools": {"messages": WITH_SYSTEM, "add_generation_prompt": True, "tools": [WEATHER]},
    "tool turn": {"messages": WITH_TOOL_TURN, "add_generation_prompt": True, "tools": [WEATHER]},
    "continue": {"messages": OPEN_ANSWER, "add_generation_prompt": False, "continue_final_message": True},
}


def render(tokenizer: Any, case: dict[str, Any]) -> dict[str, object] | None:
    """Text and token ids, or None where this template does not take these messages."""
    options = {key: value for key, value in case.items() if key not in ("messages", "extra")}
    try:
        text = tokenizer.apply_chat_template(
            case["messages"],
            tokenize=False,
            **options,
            **case.get("extra", {}),
        )
    except Exception:
        return None
    return {"text": text, "token_ids": tokenizer(text, add_special_tokens=False).input_ids}


def main(folder: Path) -> None:
    from transformers import AutoTokenizer, __version__
    from transformers.utils import chat_template_utils

    class FixedDatetime(datetime):
        @classmethod
        def now(cls, tz: tzinfo | None = None) -> FixedDatetime:
            return cls.fromtimestamp(NOW.timestamp())

    chat_template_utils.datetime = FixedDatetime
    rendered = {}
    for model in MODELS:
        tokenizer = AutoTokenizer.from_pretrained(folder / model)
        answers = {name: render(tokenizer, case) for name, case in CASES.items()}
        rendered[model] = {name: answer for name, answer in answers.items() if answer is not None}
    golden = {"transformers": __version__, "now": NOW.isoformat(), "cases": CASES, "rendered": rendered}
    path = Path(__file__).with_name("chat_templates.json")
    path.write_text(json.dumps(golden, ensure_ascii=False, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
