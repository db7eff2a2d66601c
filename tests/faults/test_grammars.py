"""Grammars: deep schemas, exponential expressions and slow converters, compiled in the engine or on the event loop."""

from __future__ import annotations

import contextlib
import json
import re
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tessera.app.openai.completions.schema import CompletionRequest
from tessera.app.schema.request import parse_request
from tessera.engine.contract.errors import EngineUnavailableError, InvalidRequestError, QueueFullError
from tessera.engine.contract.sampling_params import MAX_GRAMMAR_LENGTH, Grammar
from tessera.engine.grammar import compiler as grammar_module
from tessera.engine.grammar.compile_shares import MAX_PENDING
from tessera.engine.grammar.compiler import (
    COMPILE_LIMIT,
    MAX_CACHED,
    MAX_CACHED_SECONDS,
    MAX_INLINE_WORDS,
    NUM_THREADS,
    GrammarCompiler,
    GrammarProbe,
)
from tessera.engine.grammar.source import MAX_NESTING
from tests.support.grammar_harness import CLIENT, EOS, MODEL, VOCAB_SIZE, GrammarHarness, schema
from tests.support.servers.http_fixtures import call
from tests.support.servers.surface_fixtures import says, tool_settings


@pytest.fixture(scope="module")
def compiler() -> Iterator[GrammarCompiler]:
    compiler = GrammarCompiler(MODEL, VOCAB_SIZE, [EOS])
    yield compiler
    compiler.close()


@pytest.fixture
def engine(compiler: GrammarCompiler) -> GrammarHarness:
    return GrammarHarness(compiler, asynchronous=True)


def nested_schema(levels: int) -> Any:
    definition: Any = {"type": "integer"}
    for _ in range(levels):
        definition = {"type": "array", "items": definition}
    return definition


def exponential_schema(salt: str) -> dict[str, Any]:
    """One that would take minutes and all memory; refusals are remembered, so each needs its own."""
    return {"allOf": [{"type": "string", "pattern": f"a.*{i}{salt}"} for i in range(40)]}


# ---- depth --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "grammar",
    [
        schema(nested_schema(MAX_NESTING + 1)),
        Grammar("regex", "(" * 100 + "a" + ")" * 100),
        Grammar("lark", "start: " + "(" * 100_000),
        Grammar("gbnf", "root ::= " + "(" * 100_000),
    ],
    ids=["schema", "regex", "lark", "gbnf"],
)
def test_fault_grammars_nest_64_levels_at_most(engine: GrammarHarness, grammar: Grammar) -> None:
    answer = engine.answer(grammar)
    assert (answer.finish_reason, answer.error_status) == ("error", 400)
    assert answer.error is not None
    assert f"at most {MAX_NESTING}" in answer.error
    at_the_limit = engine.answer(schema(nested_schema(MAX_NESTING - 1)), max_tokens=4)
    assert at_the_limit.finish_reason == "length"


def test_fault_grammars_brackets_in_strings_are_no_nesting(engine: GrammarHarness) -> None:
    assert engine.answer(schema({"enum": ["(" * 100]})).text == json.dumps("(" * 100)
    assert engine.answer(Grammar("regex", r"\(" * 100)).text == "(" * 100


@pytest.mark.parametrize("levels", [70, 300, 5000])
def test_fault_grammars_deep_schemas_over_http(tmp_path: Path, levels: int) -> None:
    """As an object the body's own depth refuses them; as text, which is one string, whoever goes into it does."""
    text = '{"items":' * levels + "{}" + "}" * levels
    for given in (text, json.dumps(text)):
        content = f'{{"model": "tiny", "prompt": "x", "structured_outputs": {{"json": {given}}}}}'
        client = says("ok")
        headers = {"content-type": "application/json"}
        response = call(client, tool_settings(tmp_path), "POST", "/v1/completions", content=content, headers=headers)
        if levels == 70 and given != text:
            assert response.status_code == 200, "the engine, of which there is none here, counts these levels"
            continue
        assert response.status_code == 400, response.text
        assert not client.submissions


# ---- time and memory ----------------------------------------------------------------------------

EXPONENTIAL: dict[str, Grammar] = {
    "schema": schema(exponential_schema("a")),
    "regex": Grammar("regex", r"\w?" * 4000),
    "lark": Grammar("lark", "start: a0\n" + "\n".join(f"a{i}: a{i + 1} a{i + 1}" for i in range(30)) + '\na30: "x"'),
}


@pytest.mark.parametrize("grammar", EXPONENTIAL.values(), ids=EXPONENTIAL)
def test_fault_grammars_compile_within_2_seconds_or_are_refused(engine: GrammarHarness, grammar: Grammar) -> None:
    """And cost the engine's own process next to nothing."""
    assert COMPILE_LIMIT == 2
    engine.add("plain", max_tokens=8)
    used, begun = time.process_time(), time.monotonic()
    answer = engine.answer(grammar)
    polling = (time.monotonic() - begun) / 4  # at most, while a busy machine lets the probe wait
    assert time.process_time() - used < COMPILE_LIMIT + polling
    assert (answer.finish_reason, answer.error_status) == ("error", 400)
    assert answer.error is not None
    assert re.search("cannot be used|too complex", answer.error)
    assert engine.answers["plain"].finish_reason == "length"


def test_fault_grammars_that_still_compile_after_the_bound_are_refused(
    monkeypatch: pytest.MonkeyPatch, compiler: GrammarCompiler
) -> None:
    engine = GrammarHarness(compiler)
    monkeypatch.setattr(grammar_module, "COMPILE_LIMIT", 0.0)
    answer = engine.answer(schema({"enum": [f"value {i}" for i in range(3000)]}))
    assert answer.finish_reason == "error"
    assert answer.error is not None
    assert "takes longer than" in answer.error


def test_fault_grammars_that_grow_too_complex_end_their_request_alone(engine: GrammarHarness) -> None:
    definition = {"type": "object", "properties": {f"p{i}": {"type": "string"} for i in range(700)}}
    engine.add("complex", schema(definition))
    engine.add("plain", max_tokens=8)
    answers = engine.run()
    assert (answers["complex"].finish_reason, answers["complex"].error_status) == ("error", 400)
    assert answers["complex"].error is not None
    assert "complex" in answers["complex"].error
    assert answers["plain"].finish_reason == "length"


def test_fault_grammars_beyond_the_longest_text_are_refused_at_once(engine: GrammarHarness) -> None:
    with pytest.raises(InvalidRequestError, match=str(MAX_GRAMMAR_LENGTH)):
        engine.add("long", Grammar("regex", "a" * (MAX_GRAMMAR_LENGTH + 1)))


# Texts that have made an expression search for quadratic time, each with what is repeated; none is a grammar.
HOSTILE = ["\n", " ", '\\"', '"\\"', "a", "a ", "a-", "\na", "::", ":=\n", "/", "#"]


@pytest.mark.parametrize("repeated", HOSTILE)
def test_fault_grammars_cost_the_event_loop_and_the_engine_linear_time(engine: GrammarHarness, repeated: str) -> None:
    text = '"' + repeated * ((MAX_GRAMMAR_LENGTH - 1) // len(repeated))
    used = time.process_time()
    body = {"model": "m", "prompt": "x", "structured_outputs": {"grammar": text}}
    grammar = parse_request(CompletionRequest, body).grammar
    assert time.process_time() - used < 0.5, "on the event loop"
    assert grammar is not None
    assert engine.answer(grammar).error_status == 400
    assert engine.answer(Grammar("gbnf", text)).error_status == 400
    assert time.process_time() - used < 1, "in the engine"


# ---- beside the steps, and what is kept ---------------------------------------------------------


def test_fault_grammars_compile_while_others_are_served(engine: GrammarHarness) -> None:
    engine.add("slow", schema(exponential_schema("b")))
    engine.add("plain", max_tokens=3)
    assert engine.core.stats().num_waiting == 2
    while engine.answers["plain"].finish_reason is None:
        engine.step()
    assert engine.core.has_work
    assert engine.core.stats().num_waiting == 1
    engine.run()
    assert engine.answers["slow"].finish_reason == "error"
    assert engine.core.stats().num_waiting == 0


def test_fault_grammars_can_be_given_up_while_they_compile(engine: GrammarHarness) -> None:
    engine.add("slow", schema(exponential_schema("b")))
    engine.core.abort(["slow"], CLIENT)
    assert not engine.core.has_work
    assert engine.answers["slow"].finish_reason is None


def test_fault_grammars_are_kept_within_bounds(compiler: GrammarCompiler) -> None:
    engine = GrammarHarness(compiler)
    for index in range(MAX_CACHED + 20):
        engine.add(str(index), Grammar("regex", f"n{index}"))
    assert [answer.text for answer in engine.run().values()] == [f"n{index}" for index in range(MAX_CACHED + 20)]
    assert len(compiler._cache) <= MAX_CACHED


def test_fault_grammars_that_took_long_are_not_all_kept(
    compiler: GrammarCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are the large ones: a megabyte for about 10 ms."""
    monkeypatch.setattr("tessera.engine.grammar.compiler.seconds_of", lambda job: 0.4 * MAX_CACHED_SECONDS)
    pending = [compiler.submit(Grammar("regex", f"long{number}", "guided_regex")) for number in range(5)]
    assert [key[1] for key in compiler._cache] == ["long3", "long4"]
    for each in pending:
        each.give_up()


def test_fault_grammars_count_towards_the_queue(compiler: GrammarCompiler) -> None:
    engine = GrammarHarness(compiler, max_queue_len=2)
    engine.add("one", schema(exponential_schema("b")))
    engine.add("two", schema(exponential_schema("b")))
    with pytest.raises(Exception, match="2 requests are waiting"):
        engine.add("three", max_tokens=1)
    engine.core.abort(["one", "two"], CLIENT)


# ---- a busy machine, and processes that are ended from outside ----------------------------------


def test_fault_grammars_survive_a_probe_that_is_ended_from_outside(compiler: GrammarCompiler) -> None:
    """As by the kernel when memory is short: the same grammar is tried again in another process."""
    engine = GrammarHarness(compiler)
    for number in range(4):
        for probe in compiler._probes:
            if probe._process is not None:
                probe._process.kill()
        engine.add(str(number), Grammar("regex", f"killed{number}"))
        assert engine.run()[str(number)].text == f"killed{number}"


def test_fault_grammars_that_cannot_be_tried_now_are_not_refused_for_ever(
    monkeypatch: pytest.MonkeyPatch, compiler: GrammarCompiler
) -> None:
    engine = GrammarHarness(compiler)

    def killed(probe: GrammarProbe) -> Any:
        raise OSError("Cannot allocate memory")

    for probe in compiler._probes:
        probe.close()
    grammar = Grammar("regex", "later")
    with monkeypatch.context() as patch:
        patch.setattr(GrammarProbe, "_start", killed)
        patch.setattr(GrammarProbe, "wait_ready", lambda probe: None)
        engine.add("now", grammar)
        assert engine.run()["now"].error_status == 503
    engine.add("later", grammar)
    assert engine.run()["later"].text == "later"


def test_fault_grammars_are_not_late_for_others_work(
    monkeypatch: pytest.MonkeyPatch, compiler: GrammarCompiler
) -> None:
    """Only processor time of their own counts; one that gets none in time is refused for now."""
    begun, may_go_on = threading.Event(), threading.Event()
    original: Callable[[GrammarProbe, Grammar], str] = GrammarProbe.source_of

    def starved(probe: GrammarProbe, grammar: Grammar) -> str:
        if grammar.text == "starved":
            begun.set()
            assert may_go_on.wait(30)
        return original(probe, grammar)

    monkeypatch.setattr(GrammarProbe, "source_of", starved)
    monkeypatch.setattr(grammar_module, "COMPILE_LIMIT", 0.2)
    pending = compiler.submit(Grammar("regex", "starved"))
    assert begun.wait(30)
    compiler.wait([pending], 0.5)
    assert not pending.ready
    monkeypatch.setattr(grammar_module, "LONGEST_WAIT", 0.1)
    assert pending.ready
    with pytest.raises(EngineUnavailableError, match="too busy"):
        pending.result()
    may_go_on.set()
    monkeypatch.undo()
    again = compiler.submit(Grammar("regex", "starved"))
    compiler.wait([again], 30)
    assert again.result().matcher is not None


def test_fault_grammars_of_two_kinds_with_one_text_are_two(compiler: GrammarCompiler) -> None:
    engine = GrammarHarness(compiler)
    engine.add("regex", Grammar("regex", '["a"]'))
    engine.add("choice", Grammar("choice", '["a"]'))
    answers = engine.run()
    assert answers["choice"].text == "a"
    assert answers["regex"].text in ('"', "a")
    engine.add("refused", Grammar("lark", '["a"]'))
    assert engine.run()["refused"].error_status == 400


def test_fault_grammars_are_not_begun_for_a_sender_that_has_left(
    monkeypatch: pytest.MonkeyPatch, compiler: GrammarCompiler
) -> None:
    """Those under way end; of the others only the one that a second request waits for is compiled."""
    begun: list[str] = []
    may_go_on = threading.Event()
    original: Callable[[GrammarProbe, Grammar], str] = GrammarProbe.source_of

    def slow(probe: GrammarProbe, grammar: Grammar) -> str:
        begun.append(grammar.text)
        assert may_go_on.wait(30)
        return original(probe, grammar)

    engine = GrammarHarness(compiler)
    engine.add("first", Grammar("regex", "both probes are there"))
    engine.run()
    monkeypatch.setattr(GrammarProbe, "source_of", slow)
    names = [f"left{number}" for number in range(30)]
    for name in names:
        engine.add(name, Grammar("regex", name))
    engine.add("stays", Grammar("regex", names[-1]))
    engine.core.abort(names, CLIENT)
    engine.add("again", Grammar("regex", names[-2]))
    may_go_on.set()
    answers = engine.run()
    assert (answers["stays"].text, answers["again"].text) == (names[-1], names[-2])
    assert len(begun) <= NUM_THREADS + 2


def test_fault_grammars_of_one_key_do_not_hold_up_anothers(
    monkeypatch: pytest.MonkeyPatch, compiler: GrammarCompiler
) -> None:
    """Those under way end; then the other key's is next, and a key has only so many waiting."""
    may_go_on = threading.Semaphore(0)
    original: Callable[[GrammarProbe, Grammar], str] = GrammarProbe.source_of

    def slow(probe: GrammarProbe, grammar: Grammar) -> str:
        assert grammar.text == "light" or may_go_on.acquire(timeout=60)
        return original(probe, grammar)

    ready = compiler.submit(Grammar("regex", "both probes are here"))
    compiler.wait([ready], 30)
    monkeypatch.setattr(GrammarProbe, "source_of", slow)
    heavy = [compiler.submit(Grammar("regex", f"heavy{number}"), 1) for number in range(MAX_PENDING)]
    for number in range(NUM_THREADS + 1):
        with contextlib.suppress(QueueFullError):
            heavy.append(compiler.submit(Grammar("regex", f"more{number}"), 1))
    with pytest.raises(QueueFullError, match="grammars are waiting"):
        compiler.submit(Grammar("regex", "one too many"), 1)
    light = compiler.submit(Grammar("regex", "light"), 2)
    may_go_on.release(NUM_THREADS)  # those under way; of the others, none ends before the light one
    compiler.wait([light], 30)
    assert light.result().matcher is not None
    for pending in heavy:
        pending.give_up()
    may_go_on.release(len(heavy))


def test_fault_grammars_whose_every_mask_takes_long_end_their_request(engine: GrammarHarness) -> None:
    """A literal of 100,000 characters took 20 ms for each token; as many in an enumeration take none."""
    words = [f"{number:020d}" for number in range(5000)]
    engine.add("literal", Grammar("choice", json.dumps(["a" * 100_000])))
    engine.add("words", schema({"enum": words}), max_tokens=8)
    answers = engine.run()
    assert (answers["literal"].finish_reason, answers["literal"].error_status) == ("error", 400)
    assert len(answers["literal"].token_ids) <= 1
    assert answers["words"].finish_reason == "length"


def test_fault_grammars_small_masks_wait_for_no_other_thread(compiler: GrammarCompiler) -> None:
    """On a busy machine the pool of threads that computes large ones gave one back after 242 ms."""
    pending = compiler.submit(schema({"type": "object", "properties": {"a": {"type": "integer"}}}))
    compiler.wait([pending], 60.0)
    matcher = pending.result().matcher
    before, compiler._mask_workers = compiler._mask_workers, None
    (alone,) = compiler.fill_masks([matcher.deep_copy()])
    assert 0 < sum(int(word).bit_count() for word in alone) < VOCAB_SIZE
    most = MAX_INLINE_WORDS // len(alone)
    for count in (3, most, most + 1):
        assert compiler._mask_workers is None, "so far none was needed"
        for row in compiler.fill_masks([matcher.deep_copy() for _ in range(count)]):
            assert row.tolist() == alone.tolist()
    assert compiler._mask_workers is not None
    compiler._mask_workers = before
