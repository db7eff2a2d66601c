"""`tessera train` and its data: files of chats checked line by line, rendered, learnt and served."""

from __future__ import annotations

import json
import math
import subprocess
import sys
import tracemalloc
from pathlib import Path
from typing import Any

import pytest

from tessera.app.cli.command import main
from tessera.app.cli.train.plot import svg_plot, terminal_plot
from tessera.app.text.chat_template import ChatTemplate, load_chat_template
from tessera.app.text.tokenizer import Tokenizer, load_tokenizer
from tessera.app.training import lines
from tessera.app.training.conversations import TrainingConversation, TrainingPreference
from tessera.app.training.dataset import SHORT, DatasetReader
from tessera.app.training.encoder import ConversationEncoder, EncodedChat
from tessera.app.training.lines import read_lines
from tessera.engine.contract.errors import ConfigError
from tessera.engine.cuda.driver import FoundDevice
from tests.support.cases.quantisers import SCHEMES, quantised_model
from tests.support.paths import BUILTIN, ROOT

USER: dict[str, Any] = {"role": "user", "content": "Hello!"}
REPLY: dict[str, Any] = {"role": "assistant", "content": "Good day."}
CALL = {"id": "c1", "type": "function", "function": {"name": "look", "arguments": '{"at": "x"}'}}
TOOL = {"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}


def write(path: Path, *lines: Any) -> Path:
    path.write_text("".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines))
    return path


# -- files ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "It is not JSON: "),
        ("[1]", "It must be an object."),
        ({}, "messages is required."),
        ({"messages": []}, "messages must have at least 1 entry."),
        ({"messages": [USER]}, "The last message must be the assistant's, which is learnt."),
        ({"messages": [{"role": "robot", "content": "x"}, REPLY]}, "messages[0].role must be one of 'system',"),
        ({"messages": [{"role": "user"}, REPLY]}, "messages[0].content is required."),
        ({"messages": [{**USER, "weight": 1}, REPLY]}, "messages[0].weight is for messages of the assistant alone."),
        ({"messages": [USER, {**REPLY, "weight": 2}]}, "messages[1].weight must be one of 0, 1."),
        ({"messages": [USER, {**REPLY, "weight": 0}]}, "Every message of the assistant has the weight 0"),
        ({"messages": [USER, REPLY], "tools": [{"type": "function"}]}, "tools[0].function is required."),
        ({"messages": [USER, REPLY] * 513}, "A chat may have at most 512 messages of the assistant to learn: split"),
    ],
)
def test_a_wrong_line_says_what_is_wrong(line: Any, message: str, tmp_path: Path) -> None:
    path = write(tmp_path / "chats.jsonl", {"messages": [USER, REPLY]}, "", line)
    with pytest.raises(ConfigError) as caught:
        read_lines(path, TrainingConversation, lambda line: None)
    assert f"{path} has 1 line at fault:\n  line 3: {message}" in str(caught.value)


def test_all_wrong_lines_are_listed_up_to_a_number(tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError, match=r"has 12 lines at fault:(\n  line \d+: It is not JSON: .*){10}\n  and 2 more"
    ):
        read_lines(write(tmp_path / "chats.jsonl", *["{"] * 12), TrainingConversation, lambda line: None)
    with pytest.raises(ConfigError, match=r'chats is empty; a line is {"messages": \.\.\.}'):
        read_lines(write(tmp_path / "chats.jsonl", ""), TrainingConversation, lambda line: None, name="chats")
    with pytest.raises(ConfigError, match="cannot be read: No such file"):
        read_lines(tmp_path / "absent.jsonl", TrainingConversation, lambda line: None)


def test_a_line_that_is_too_long_is_one_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lines, "MAX_LINE_BYTES", 200)
    long = {"messages": [USER, {**REPLY, "content": "x" * 1000}]}
    path = write(tmp_path / "chats.jsonl", long, {"messages": [USER, REPLY]}, long)
    with pytest.raises(ConfigError) as caught:
        read_lines(path, TrainingConversation, lambda line: None, name="It")
    wrong = [f"\n  line {number}: It has more than 200 bytes." for number in (1, 3)]
    assert str(caught.value) == f"It has 2 lines at fault:{''.join(wrong)}"


PREFERENCE: dict[str, Any] = {
    "input": {"messages": [USER], "tools": [TOOL]},
    "preferred_output": [REPLY],
    "non_preferred_output": [{**REPLY, "content": "Hm."}],
}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"input": None}, "input must be an object."),
        ({"input": {"messages": []}}, "input.messages must have at least 1 entry."),
        ({"input": {"messages": [{"role": "user"}]}}, "input.messages[0].content is required."),
        ({"input": {"messages": [USER, REPLY]}}, "The last message of input must not be the assistant's."),
        ({"preferred_output": [REPLY, REPLY]}, "preferred_output may have at most 1 entries."),
        ({"preferred_output": [USER]}, "preferred_output[0] must be a message of the assistant."),
        ({"non_preferred_output": [{"role": "assistant"}]}, "non_preferred_output[0].content is required."),
        ({"non_preferred_output": [REPLY]}, "preferred_output and non_preferred_output are the same."),
    ],
)
def test_a_wrong_preference_says_what_is_wrong(changes: Any, message: str, tmp_path: Path) -> None:
    path = write(tmp_path / "pairs.jsonl", PREFERENCE, {**PREFERENCE, **changes})
    with pytest.raises(ConfigError) as caught:
        read_lines(path, TrainingPreference, lambda line: None)
    assert f"has 1 line at fault:\n  line 2: {message}" in str(caught.value)


# -- rendering --------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return load_tokenizer(BUILTIN)


@pytest.fixture(scope="module")
def template(tokenizer: Tokenizer) -> ChatTemplate:
    found = load_chat_template(BUILTIN, None, tokenizer.special_tokens)
    assert found is not None
    return found


def encode(template: ChatTemplate, tokenizer: Tokenizer, *messages: Any, **fields: Any) -> list[EncodedChat]:
    conversation = TrainingConversation.model_validate({"messages": list(messages), **fields})
    return list(ConversationEncoder(template, tokenizer, [2]).encode(conversation))


def counted_text(encoded: EncodedChat, tokenizer: Tokenizer) -> str:
    counted = [token_id for token_id, counts in zip(encoded.token_ids, encoded.counted, strict=True) if counts]
    return tokenizer.decode(counted, skip_special_tokens=False)


def test_the_assistants_messages_count_with_their_end(template: ChatTemplate, tokenizer: Tokenizer) -> None:
    (encoded,) = encode(template, tokenizer, USER, REPLY, USER, {**REPLY, "content": "Again."})
    assert counted_text(encoded, tokenizer) == "Good day.<|im_end|>Again.<|im_end|>"
    text = tokenizer.decode(encoded.token_ids, skip_special_tokens=False)
    assert text.startswith(
        "<|im_start|>user\nHello!<|im_end|>\n<|im_start|>assistant\nGood day.<|im_end|>\n<|im_start|>"
    )


def test_a_message_of_weight_0_is_context(template: ChatTemplate, tokenizer: Tokenizer) -> None:
    (encoded,) = encode(template, tokenizer, USER, {**REPLY, "weight": 0}, USER, {**REPLY, "content": "Again."})
    assert counted_text(encoded, tokenizer) == "Again.<|im_end|>"


def test_a_call_counts_and_its_result_does_not(template: ChatTemplate, tokenizer: Tokenizer) -> None:
    called = {"role": "assistant", "tool_calls": [CALL]}
    result = {"role": "tool", "tool_call_id": "c1", "content": "sunny"}
    (encoded,) = encode(template, tokenizer, USER, called, result, REPLY, tools=[TOOL])
    text = counted_text(encoded, tokenizer)
    assert text == '<tool_call>{"name": "look", "arguments": {"at": "x"}}</tool_call><|im_end|>Good day.<|im_end|>'
    assert "Tools:" in tokenizer.decode(encoded.token_ids, skip_special_tokens=False)


def test_functions_are_the_older_form_of_tools(template: ChatTemplate, tokenizer: Tokenizer) -> None:
    called = {"role": "assistant", "function_call": CALL["function"]}
    result = {"role": "function", "name": "look", "content": "sunny"}
    (older,) = encode(template, tokenizer, USER, called, result, REPLY, functions=[TOOL["function"]])
    calls = {"role": "assistant", "tool_calls": [CALL]}
    answered = {"role": "tool", "name": "look", "tool_call_id": "c1", "content": "sunny"}
    (newer,) = encode(template, tokenizer, USER, calls, answered, REPLY, tools=[TOOL])
    assert older == newer


def test_a_template_that_changes_earlier_messages_makes_several_examples(tokenizer: Tokenizer) -> None:
    """As templates do that drop the reasoning of all messages but the last."""
    source = (
        "{% for m in messages %}{{ m.role }}: "
        "{{ m.content if loop.last or m.role == 'user' else 'short' }}<|im_end|>{% endfor %}"
        "{% if add_generation_prompt %}assistant: {% endif %}"
    )
    template = ChatTemplate({"default": source}, {})
    encoded = encode(template, tokenizer, USER, REPLY, USER, {**REPLY, "content": "Again."})
    template.close()
    assert [counted_text(each, tokenizer) for each in encoded] == ["Good day.<|im_end|>", "Again.<|im_end|>"]
    assert "short<|im_end|>" in tokenizer.decode(encoded[1].token_ids, skip_special_tokens=False)


@pytest.mark.parametrize("drops", [False, True])
def test_fault_unbounded_numbers_a_long_chat_holds_few_texts_at_a_time(drops: bool) -> None:
    """Of 100 messages of 20 KB each, for every one of which all before it is rendered."""

    class Template:
        """Also the tokenizer; it drops what the assistant has said before, or it does not."""

        def render(self, messages: list[dict[str, Any]], *, add_generation_prompt: bool = True, **_: Any) -> str:
            kept = [each["content"] for each in messages if each["role"] == "user" or not drops]
            last = [] if add_generation_prompt or not drops else [messages[-1]["content"]]
            return "".join(kept + last)

        def encode(self, text: str, **_: Any) -> list[int]:
            return [len(text)]

    template: Any = Template()
    pair = [USER, {**REPLY, "content": "x" * 20_000}]
    conversation = TrainingConversation.model_validate({"messages": pair * 100})
    tracemalloc.start()
    num_examples = sum(1 for _ in ConversationEncoder(template, template, []).encode(conversation))
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert num_examples == (100 if drops else 1)
    assert peak < 20 * 2**20, "a few texts of 2 MB at most"


def test_fault_unbounded_numbers_a_file_has_so_many_tokens_to_learn(tmp_path: Path) -> None:
    path = write(tmp_path / "chats.jsonl", *[{"messages": [USER, REPLY]}] * 3)
    for max_tokens, is_enough in ((3 * SHORT, True), (3 * SHORT - 1, False)):
        reader = DatasetReader(BUILTIN, "model", max_tokens=max_tokens)
        try:
            if is_enough:
                assert len(reader.examples(path).items) == 3
            else:
                with pytest.raises(ConfigError, match=f"line 3: At most {max_tokens} tokens can be learnt"):
                    reader.examples(path)
        finally:
            reader.close()


def test_a_template_without_a_place_for_the_assistant_is_refused(tokenizer: Tokenizer) -> None:
    template = ChatTemplate({"default": "{{ messages | length }} {{ messages[-1].content }}"}, {})
    with pytest.raises(ConfigError, match=r"shows messages\[1\] otherwise than it asks for one"):
        encode(template, tokenizer, USER, REPLY)
    template.close()


# -- the command ------------------------------------------------------------------------------------


def test_an_adapter_is_trained_resumed_and_merged(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    long = {**REPLY, "content": "word " * 50}
    data = write(tmp_path / "chats.jsonl", *[{"messages": [USER, REPLY]}] * 2, {"messages": [USER, long]})
    output = tmp_path / "tuned"
    arguments = ["train", "--data", str(data), "--validation-data", str(data), "--output", str(output)]
    arguments += ["--lora", "--lora-rank", "4", "--lora-targets", "q_proj,v_proj", "--learning-rate", "0.01"]
    arguments += ["--batch-size", "2", "--max-length", "40", "--max-steps", "3"]
    assert main(arguments) == 0
    said = capsys.readouterr().err
    assert "cut at 40 tokens: 1 of 3 chats, of which 0 have nothing left to learn" in said
    assert "tessera-builtin: 21,504 parameters are trained on 3 chats" in said
    assert f"serve it: tessera serve {output / 'model'}" in said
    config = json.loads((output / "adapter" / "adapter_config.json").read_text())
    assert (config["r"], config["target_modules"]) == (4, ["q_proj", "v_proj"])
    assert {"config.json", "model.safetensors", "tokenizer.json", "chat_template.jinja"} <= {
        path.name for path in (output / "model").iterdir()
    }
    assert (output / "loss.svg").read_text().startswith("<svg")
    assert main(arguments) == 2
    assert "holds a training already; --resume goes on with it" in capsys.readouterr().err
    assert main([*arguments, "--resume"]) == 0
    assert "resuming after step 3 of 3" in capsys.readouterr().err
    assert main([*arguments, "--resume", "--seed", "1"]) == 2
    assert "its seed is 0, and here it is 1" in capsys.readouterr().err


def test_preferences_are_learnt(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    seen = {"role": "assistant", "content": "Before."}
    pair = {**PREFERENCE, "input": {"messages": [USER, seen, USER]}}
    data = write(tmp_path / "pairs.jsonl", pair, PREFERENCE)
    output = tmp_path / "tuned"
    arguments = ["train", "--method", "dpo", "--data", str(data), "--validation-data", str(data)]
    arguments += ["--output", str(output), "--lora", "--lora-rank", "2", "--learning-rate", "0.01", "--max-steps", "6"]
    assert main([*arguments, "--no-merge", "--beta", "0.5"]) == 0
    assert "on 2 preferences" in capsys.readouterr().err
    records = [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]
    assert records[0]["loss"] == pytest.approx(math.log(2), rel=1e-4)
    assert records[-1]["validation_loss"] < 0.6
    assert main([*arguments, "--no-merge", "--beta", "0.4", "--resume"]) == 2
    assert "its beta is 0.5, and here it is 0.4" in capsys.readouterr().err


def test_wrong_options_are_one_sentence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = write(tmp_path / "chats.jsonl", {"messages": [USER, REPLY]})
    output = ["--output", str(tmp_path / "out")]
    for arguments, message in (
        (output, "give --data FILE"),
        (["--data", str(data)], "give --output FOLDER"),
        (["--data", str(data), "--output", str(data / "out")], f"cannot be made: {data} is a file"),
        (["--data", str(data), *output, "--max-length", "5000"], "beyond the model's context of 2048"),
        (["--data", str(data), *output, "--max-length", "2"], "no chat has anything to learn within 2 tokens"),
        (["--data", str(data), *output, "--lora-rank", "8"], "train: --lora-rank goes with --lora"),
        (["--data", str(data), *output, "--beta", "0.2"], "train: --beta goes with --method dpo"),
        (["--data", str(data), *output, "--lora", "--lora-targets", "c_attn"], "has no module c_attn for LoRA"),
    ):
        assert main(["train", *arguments]) == 2
        assert message in capsys.readouterr().err


@pytest.mark.parametrize("options", [[], ["--lora"]])
def test_of_a_quantised_model_an_adapter_alone_is_trained(
    options: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    quantised, _ = quantised_model(tmp_path, SCHEMES["awq"])
    data = write(tmp_path / "chats.jsonl", {"messages": [USER, REPLY]})
    assert main(["train", str(quantised), "--data", str(data), "--output", str(tmp_path / "out"), *options]) == 2
    assert "is quantised; an adapter of it can be trained: --lora --no-merge" in capsys.readouterr().err


def test_a_gpu_that_is_not_there_is_one_sentence(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tessera.engine.cuda.driver.find_device", lambda: FoundDevice(False, "there is no driver"))
    data = write(tmp_path / "chats.jsonl", {"messages": [USER, REPLY]})
    assert main(["train", "--data", str(data), "--output", str(tmp_path / "out"), "--device", "cuda"]) == 2
    assert "--device cuda cannot be used: there is no driver; --device cpu needs no GPU" in capsys.readouterr().err


# -- the share of a job ----------------------------------------------------------------------------

BUSY = """
import time
from tessera.app.training.cpu_share import CpuShare
share = CpuShare(0.25, 1)
share.start()
began = time.monotonic()
while time.process_time() < 0.5:
    sum(range(1000))
print(time.process_time() / (time.monotonic() - began))
share.stop()
"""


def test_a_process_is_held_to_its_share_of_the_cpu() -> None:
    done = subprocess.run([sys.executable, "-c", BUSY], capture_output=True, text=True, check=True, cwd=ROOT)
    assert 0 < float(done.stdout) < 0.35


# -- pictures ---------------------------------------------------------------------------------------


def test_a_falling_loss_falls_in_the_plot() -> None:
    lines = terminal_plot([(step, 4 - step / 25) for step in range(1, 101)], columns=20, rows=4).splitlines()
    assert len(lines) == 4
    assert [lines[0].split()[0], lines[-1].split()[0]] == ["3.8800", "0.0800"]
    widths = [len(line.rstrip()) for line in lines]
    assert widths == sorted(widths)
    assert widths[0] < widths[-1]
    svg = svg_plot("A & B", {"training": [(1, 2.0), (2, 1.0)], "validation": []})
    assert "A &amp; B" in svg
    assert svg.count("<polyline") == 1
    assert terminal_plot([]) == ""
