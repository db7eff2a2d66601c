"""Incremental text: whole characters only, the same text however the tokens are cut; stop strings never leak."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
from tokenizers import Tokenizer, decoders, models

from tessera.app.generate.generation import Choice, Delta, TextOptions
from tessera.app.text.detokenizer import Detokenizer, DetokenizerFactory, WindowDetokenizer
from tessera.app.text.stop_strings import StopMatcher
from tessera.app.text.tokenizer import HuggingFaceTokenizer
from tessera.engine.contract.errors import EngineUnavailableError
from tessera.engine.contract.messages import RequestOutput
from tests.app.text.metaspace import TEXT, metaspace_tokenizer
from tests.support.fakes.fake_client import play
from tests.support.servers.http_fixtures import TOKENIZER, ids

SEED = 20250309


def byte_level(*, skip_special_tokens: bool = True) -> Detokenizer:
    factory = DetokenizerFactory(HuggingFaceTokenizer(TOKENIZER, {}))
    return factory.make(skip_special_tokens=skip_special_tokens, at_start=True)


def decode_all(detokenizer: Detokenizer, pieces: Sequence[Sequence[int]]) -> list[str]:
    return [*(detokenizer.decode_tokens(list(piece)) for piece in pieces), detokenizer.flush()]


def test_a_character_waits_for_all_its_bytes() -> None:
    pieces = [[i] for i in ids("a🙂b")]
    assert decode_all(byte_level(), pieces) == ["a", "", "", "", "🙂", "b", ""]


def test_an_unfinished_character_is_flushed_as_replacement() -> None:
    assert decode_all(byte_level(), [ids("a🙂")[:-1]]) == ["a", "\ufffd"]


def test_invalid_bytes_do_not_hold_up_the_text() -> None:
    lone_continuation = ids("ü")[1]
    assert "".join(decode_all(byte_level(), [[lone_continuation], ids("ab")])) == "\ufffdab"


def test_text_does_not_depend_on_how_tokens_are_cut() -> None:
    print(f"seed {SEED}")
    rng = random.Random(SEED)
    token_ids = ids(TEXT)
    for _ in range(50):
        cuts = sorted(rng.sample(range(1, len(token_ids)), 5))
        pieces = [token_ids[a:b] for a, b in zip([0, *cuts], [*cuts, len(token_ids)], strict=True)]
        assert "".join(decode_all(byte_level(), pieces)) == TEXT


def test_special_tokens_are_skipped_on_request() -> None:
    token_ids = [*ids("hi"), 0]
    assert "".join(decode_all(byte_level(), [token_ids])) == "hi"
    assert "".join(decode_all(byte_level(skip_special_tokens=False), [token_ids])) == "hi<|im_end|>"


def test_leading_space_is_dropped_only_at_the_start_of_a_text() -> None:
    tokenizer = metaspace_tokenizer()
    factory = DetokenizerFactory(tokenizer)
    pieces = [[i] for i in tokenizer.encode("hi hi ü", add_special_tokens=False)]
    standalone = decode_all(factory.make(skip_special_tokens=True, at_start=True), pieces)
    continuing = decode_all(factory.make(skip_special_tokens=True, at_start=False), pieces)
    assert "".join(standalone) == "hi hi ü"
    assert "".join(continuing) == " hi hi ü"


def test_other_decoders_go_through_a_window() -> None:
    inner = Tokenizer(models.WordPiece(vocab={"un": 0, "##able": 1, "to": 2}, unk_token="un"))
    inner.decoder = decoders.WordPiece()
    factory = DetokenizerFactory(HuggingFaceTokenizer(inner, {}))
    detokenizer = factory.make(skip_special_tokens=True, at_start=True)
    assert isinstance(detokenizer, WindowDetokenizer)
    assert decode_all(detokenizer, [[0], [1], [2]]) == ["un", "able", " to", ""]


def matched(stops: Sequence[str], pieces: Sequence[str], *, include_stop: bool = False) -> tuple[list[str], bool]:
    matcher = StopMatcher(stops, include_stop=include_stop)
    shown = []
    for piece in pieces:
        shown.append(matcher.match_text(piece))
        if matcher.stopped:
            return shown, True
    return [*shown, matcher.flush()], False


def test_no_part_of_a_stop_string_is_shown() -> None:
    assert matched(["STOP"], ["a S", "TO", "P b"]) == (["a ", "", ""], True)


def test_a_false_beginning_is_shown_late() -> None:
    assert matched(["STOP"], ["a S", "TO", "x"]) == (["a ", "", "STOx", ""], False)
    assert matched(["STOP"], ["a ST"]) == (["a ", "ST"], False)
    assert matched(["aab"], ["aa", "a", "b"]) == (["", "a", ""], True)


def test_stop_string_can_be_included() -> None:
    assert matched(["STOP"], ["a ST", "OP b"], include_stop=True) == (["a ", "STOP"], True)


def test_the_match_that_ends_first_wins() -> None:
    assert matched(["bcd", "c"], ["abcde"]) == (["ab"], True)
    assert matched(["c", "bc"], ["abc"]) == (["a"], True)


def test_stop_matching_agrees_with_searching_the_whole_text() -> None:
    print(f"seed {SEED}")
    rng = random.Random(SEED)
    for _ in range(2000):
        text = "".join(rng.choice("ab") for _ in range(rng.randint(1, 12)))
        stops = ["".join(rng.choice("ab") for _ in range(rng.randint(1, 4))) for _ in range(rng.randint(1, 3))]
        shown, stopped = matched(stops, list(text))
        ends = [(text.find(stop) + len(stop), -len(stop)) for stop in stops if stop in text]
        expected = text
        if ends:
            end, negative_length = min(ends)
            expected = text[: end + negative_length]
        assert ("".join(shown), stopped) == (expected, bool(ends)), (text, stops)
        whole = "".join(shown)
        for length in range(len(shown)):
            assert whole.startswith("".join(shown[:length]))


def run_choice(outputs: Sequence[RequestOutput], options: TextOptions, *, text_offset: int = 0) -> list[Delta]:
    choice = Choice(0, byte_level(), options, text_offset=text_offset)
    deltas = []
    for output in outputs:
        delta = choice.advance(output)
        if delta is not None:
            deltas.append(delta)
        if choice.finish_reason is not None:
            break
    return deltas


@pytest.mark.parametrize("per_output", [1, 2, 3, 50])
def test_stop_string_counts_the_same_tokens_however_outputs_merge(per_output: int) -> None:
    options = TextOptions(stops=("lo",))
    choice = Choice(0, byte_level(), options)
    outputs = play(ids("say hello again"), finish="length", per_output=per_output)
    text = ""
    for output in outputs:
        delta = choice.advance(output)
        text += delta.text if delta is not None else ""
        if choice.finish_reason is not None:
            break
    assert (text, choice.finish_reason) == ("say hel", "stop")
    assert choice.num_tokens == len(ids("say hello"))


def test_stop_strings_are_looked_for_after_min_tokens() -> None:
    options = TextOptions(stops=("a",), min_tokens=2)
    deltas = run_choice(play(ids("aaba"), finish="length"), options)
    assert "".join(delta.text for delta in deltas) == "aab"


def test_the_stop_tokens_text_is_left_out_unless_included() -> None:
    token_ids = ids("xyz")
    outputs = play(token_ids, stop_token_id=token_ids[-1])
    assert "".join(d.text for d in run_choice(outputs, TextOptions())) == "xy"
    assert "".join(d.text for d in run_choice(outputs, TextOptions(include_stop=True))) == "xyz"


def test_logprobs_go_with_their_text() -> None:
    outputs = play(ids("ab🙂STOP"), finish="length", logprobs=True)
    deltas = run_choice(outputs, TextOptions(stops=("STOP",), wants_logprobs=True), text_offset=10)
    assert [(d.text, [e.text_offset for e in d.entries]) for d in deltas] == [
        ("a", [10]),
        ("b", [11]),
        ("🙂", [12, 12, 12, 12]),
        ("", []),
    ]
    assert deltas[-1].finish_reason == "stop"


def test_logprobs_of_held_back_text_come_with_it() -> None:
    outputs = play(ids("aSTx"), finish="length", logprobs=True)
    deltas = run_choice(outputs, TextOptions(stops=("STOP",), wants_logprobs=True))
    assert [(d.text, len(d.entries)) for d in deltas] == [("a", 1), ("STx", 3)]


def test_an_aborted_sequence_is_an_error_not_an_answer() -> None:
    with pytest.raises(EngineUnavailableError):
        run_choice([RequestOutput("r", [], finish_reason="abort")], TextOptions())


def test_a_stop_matcher_says_whether_it_holds_text_back() -> None:
    """The log-probabilities of tokens that are held back are held back as well."""
    matcher = StopMatcher(["stop"], include_stop=False)
    assert matcher.holding is False
    assert matcher.match_text("a st") == "a "
    assert matcher.holding is True
    assert matcher.match_text("ay") == "stay"
    assert matcher.holding is False
