"""Grammars in the engine: what is generated matches, ends in time, and what is wrong with one harms no other."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from tessera.engine.contract.errors import InvalidRequestError
from tessera.engine.contract.messages import RequestOutput
from tessera.engine.contract.sampling_params import Grammar, SamplingParams
from tessera.engine.grammar.compiler import GrammarCompiler, GrammarProbe, GrammarTokenizer, load_tokenizer
from tests.support.cases.token_ids import token_ids
from tests.support.grammar_harness import CLIENT, EOS, MODEL, VOCAB_SIZE, GrammarHarness, decode, encode, schema

SEEDS = range(12)


@pytest.fixture(scope="module")
def compiler() -> Iterator[GrammarCompiler]:
    compiler = GrammarCompiler(MODEL, VOCAB_SIZE, [EOS])
    yield compiler
    compiler.close()


@pytest.fixture(params=[False, True], ids=["in_step", "one_ahead"])
def engine(request: pytest.FixtureRequest, compiler: GrammarCompiler) -> GrammarHarness:
    return GrammarHarness(compiler, asynchronous=request.param)


# ---- what comes out -----------------------------------------------------------------------------

SHORT = {"type": "string", "maxLength": 12}
SCHEMAS: dict[str, dict[str, Any]] = {
    "object": {
        "type": "object",
        "properties": {"name": SHORT, "age": {"type": "integer", "minimum": 3, "maximum": 150}},
        "required": ["name", "age"],
        "additionalProperties": False,
    },
    "nested": {
        "type": "object",
        "properties": {
            "outer": {
                "type": "object",
                "properties": {"inner": {"type": "array", "items": {"type": "boolean"}, "minItems": 2, "maxItems": 4}},
                "required": ["inner"],
                "additionalProperties": False,
            }
        },
        "required": ["outer"],
        "additionalProperties": False,
    },
    "enum": {"enum": ["red", "green", 7, None, {"a": [1]}, 'ünïcode "quoted" \\ 😀']},
    "const": {"const": {"version": 1.5, "tags": ["x"]}},
    "array of arrays": {
        "type": "array",
        "items": {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": 9}, "maxItems": 3},
        "minItems": 1,
        "maxItems": 3,
    },
    "numbers": {
        "type": "object",
        "properties": {
            "positive": {"type": "number", "exclusiveMinimum": 0, "maximum": 1},
            "even": {"type": "integer", "multipleOf": 2, "minimum": -10, "maximum": 10},
        },
        "required": ["positive", "even"],
        "additionalProperties": False,
    },
    "anyOf": {"anyOf": [{"type": "null"}, {"type": "integer", "maximum": 9, "minimum": 0}, SHORT]},
    "ref": {
        "$defs": {
            "item": {
                "type": "object",
                "properties": {"id": {"enum": ["a", "b"]}},
                "required": ["id"],
                "additionalProperties": False,
            }
        },
        "type": "array",
        "items": {"$ref": "#/$defs/item"},
        "minItems": 2,
        "maxItems": 3,
    },
    "recursive": {
        "$defs": {
            "tree": {
                "type": "object",
                "properties": {
                    "leaf": {"type": "boolean"},
                    "children": {"type": "array", "items": {"$ref": "#/$defs/tree"}, "maxItems": 1},
                },
                "required": ["leaf"],
                "additionalProperties": False,
            }
        },
        "$ref": "#/$defs/tree",
    },
    "pattern": {"type": "string", "pattern": "^[A-Z]{2}-[0-9]{4}$"},
    "lengths": {"type": "string", "minLength": 5, "maxLength": 8},
    "format": {"type": "string", "format": "date"},
    "allOf": {
        "allOf": [
            {"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"]},
            {"type": "object", "properties": {"b": {"enum": [1, 2]}}, "required": ["b"]},
        ],
        "properties": {"a": True, "b": True},
        "additionalProperties": False,
    },
    "optional": {
        "type": "object",
        "properties": {f"field_{i}": {"type": "boolean"} for i in range(4)},
        "additionalProperties": False,
    },
    "tuple": {"type": "array", "prefixItems": [{"type": "boolean"}, {"enum": ["x"]}], "items": False, "minItems": 2},
    "open object": {"type": "object"},
}


@pytest.mark.parametrize("definition", SCHEMAS.values(), ids=SCHEMAS)
def test_answers_under_a_schema_parse_and_validate(engine: GrammarHarness, definition: dict[str, Any]) -> None:
    for seed in SEEDS:  # of an open object's answers noise ends a fifth within 256 tokens, and half within 1,000
        engine.add(str(seed), schema(definition), seed=seed, max_tokens=1000)
    answers = engine.run().values()
    validator = jsonschema.Draft202012Validator(definition)
    for answer in answers:
        assert answer.finish_reason in ("stop", "length"), answer.error
        if answer.finish_reason == "stop":
            validator.validate(json.loads(answer.text))
    assert sum(answer.finish_reason == "stop" for answer in answers) >= len(answers) // 3


REGEXES = [
    r"[a-z]{3,6}-\d{2}",
    r"(yes|no)( indeed){0,3}!",
    r"^\+?[0-9]{1,3}(\.[0-9]{2})?$",
    r"[äöü😀]{2,5}",
    r'"[^"\\]{0,9}"',
    r"line one\nline two/\t?",
]


@pytest.mark.parametrize("expression", REGEXES)
def test_a_regex_matches_the_whole_answer(engine: GrammarHarness, expression: str) -> None:
    for seed in SEEDS:
        engine.add(str(seed), Grammar("regex", expression), seed=seed)
    for answer in engine.run().values():
        assert answer.finish_reason == "stop"
        assert re.fullmatch(expression, answer.text)


def test_a_choice_is_one_of_the_strings(engine: GrammarHarness) -> None:
    choices = ["yes", "no", "yes, but", 'say "hi"', "back\\slash", "line\nend", "/x/", "ünï 😀", "<|im_end|>", " "]
    for seed in range(48):
        engine.add(str(seed), Grammar("choice", json.dumps(choices)), seed=seed)
    answers = engine.run().values()
    assert {answer.finish_reason for answer in answers} == {"stop"}
    texts = {answer.text for answer in answers}
    assert texts <= set(choices)
    assert len(texts) >= 5


ARITHMETIC = """
start: term (" " sign " " term){1,3}
term: /[1-9][0-9]?/ | "(" term " " sign " " term ")"
sign: "+" | "-"
"""
SELECT = """
root ::= "SELECT " column (", " column)? " FROM " [a-z]{2,4}
column ::= "id" | "name"
"""


@pytest.mark.parametrize(
    ("grammar", "expected"),
    [
        (Grammar("lark", ARITHMETIC), r"[0-9()+\- ]+"),
        (Grammar("gbnf", SELECT), r"SELECT (id|name)(, (id|name))? FROM [a-z]{2,4}"),
        (Grammar("lark", 'start: "{" pair "}"\npair: %json {"enum": [1, "x"]}'), r'\{(1|"x")\}'),
    ],
    ids=["lark", "gbnf", "json in lark"],
)
def test_a_grammar_is_followed(engine: GrammarHarness, grammar: Grammar, expected: str) -> None:
    for seed in SEEDS:
        engine.add(str(seed), grammar, seed=seed)
    for answer in engine.run().values():
        assert answer.finish_reason in ("stop", "length")
        if answer.finish_reason == "stop":
            assert re.fullmatch(expected, answer.text)


def test_any_json_object(engine: GrammarHarness) -> None:
    grammar = Grammar("json_object")
    for seed in range(24):
        engine.add(str(seed), grammar, seed=seed, max_tokens=128)
    whole = [answer.text for answer in engine.run().values() if answer.finish_reason == "stop"]
    assert whole
    assert all(isinstance(json.loads(text), dict) for text in whole)


# ---- where it ends ------------------------------------------------------------------------------


def test_it_ends_with_the_token_after_which_nothing_can_follow(engine: GrammarHarness) -> None:
    answer = engine.answer(Grammar("regex", "abc"))
    assert (answer.text, answer.finish_reason, answer.stop_token_id) == ("abc", "stop", None)
    assert EOS not in answer.token_ids


@pytest.mark.parametrize("params", [{"ignore_eos": True}, {"min_tokens": 20}, {"ignore_eos": True, "min_tokens": 20}])
def test_it_ends_though_the_request_would_have_it_go_on(engine: GrammarHarness, params: dict[str, Any]) -> None:
    answer = engine.answer(Grammar("regex", "[a-c]{2,4}"), **params)
    assert answer.finish_reason == "stop"
    assert re.fullmatch("[a-c]{2,4}", answer.text)


def test_the_end_may_come_where_the_grammar_has_one(engine: GrammarHarness) -> None:
    for seed in range(40):
        engine.add(str(seed), Grammar("regex", "[a-c]+"), seed=seed, max_tokens=100)
    answers = [answer for answer in engine.run().values() if answer.finish_reason == "stop"]
    assert answers
    assert all(answer.stop_token_id == EOS and re.fullmatch("[a-c]+", answer.text) for answer in answers)


def test_end_tokens_cannot_come_while_they_are_ignored(engine: GrammarHarness) -> None:
    for seed in range(20):
        engine.add(str(seed), Grammar("regex", "[a-c]+"), seed=seed, max_tokens=64, ignore_eos=True)
    assert {(a.finish_reason, len(a.token_ids)) for a in engine.run().values()} == {("length", 64)}


def test_an_answer_may_be_empty(engine: GrammarHarness) -> None:
    answer = engine.answer(Grammar("regex", "a{0}"))
    assert (answer.token_ids, answer.finish_reason) == ([EOS], "stop")


def test_cut_by_length_it_says_so(engine: GrammarHarness) -> None:
    answer = engine.answer(schema(SCHEMAS["object"]), max_tokens=3)
    assert (answer.finish_reason, len(answer.token_ids)) == ("length", 3)


def test_complete_with_its_last_token_it_is_not_cut(engine: GrammarHarness) -> None:
    length = len(engine.answer(Grammar("regex", "abc")).token_ids)
    assert engine.answer(Grammar("regex", "abc"), max_tokens=length).finish_reason == "stop"


# ---- with the request's other fields ------------------------------------------------------------


def test_allowed_token_ids_are_the_only_ones(engine: GrammarHarness) -> None:
    answer = engine.answer(allowed_token_ids=(70, 71, 2559), max_tokens=50)
    assert set(answer.token_ids) == {70, 71, 2559}
    assert answer.finish_reason == "length"


def test_allowed_token_ids_limit_a_grammar(engine: GrammarHarness) -> None:
    allowed = tuple({*encode("a"), *encode("b"), EOS})
    for seed in SEEDS:
        engine.add(str(seed), Grammar("regex", "[a-z]{1,5}"), seed=seed, allowed_token_ids=allowed)
    assert all(re.fullmatch("[ab]{1,5}", answer.text) for answer in engine.run().values())


def test_fields_that_leave_no_token_refuse_the_request(engine: GrammarHarness) -> None:
    answer = engine.answer(Grammar("regex", "xyz", "structured_outputs"), allowed_token_ids=tuple(encode("q")))
    assert (answer.finish_reason, answer.error_status, answer.error_param) == ("error", 400, "structured_outputs")


def test_fields_that_leave_no_token_later_end_the_request(engine: GrammarHarness) -> None:
    answer = engine.answer(Grammar("regex", "qz"), allowed_token_ids=tuple(encode("q")))
    assert (answer.finish_reason, answer.error_status) == ("error", 400)
    assert answer.error is not None
    assert "no token can follow" in answer.error


def test_a_row_without_any_token_ends_with_an_error(engine: GrammarHarness) -> None:
    """As when suppressed ids are all that the mask allows: the runner says -1."""
    engine.add("dead", allowed_token_ids=(5,))
    engine.add("alive", max_tokens=4)
    sequence = next(iter(engine.core.scheduler.waiting))
    assert sequence.constraint is not None
    sequence.constraint.mask = sequence.constraint.mask ^ sequence.constraint.mask
    answers = engine.run()
    assert (answers["dead"].finish_reason, answers["dead"].error_status) == ("error", 400)
    assert answers["alive"].finish_reason == "length"


def test_a_grammar_may_begin_after_a_token(engine: GrammarHarness) -> None:
    """As after reasoning: anything but an end before the token, the grammar from the token on."""
    start = encode("q")[0]
    allowed = tuple({start, EOS, *encode("x"), *encode("y"), *range(100, 120)})
    for seed in SEEDS:
        grammar = Grammar("regex", "[xy]{3}", start_token_id=start)
        engine.add(str(seed), grammar, seed=seed, allowed_token_ids=allowed)
    begun = [answer for answer in engine.run().values() if start in answer.token_ids]
    assert begun
    assert all(EOS not in answer.token_ids for answer in engine.answers.values())
    for answer in begun:
        assert answer.finish_reason == "stop"
        assert re.fullmatch("[xy]{3}", decode(answer.token_ids[answer.token_ids.index(start) + 1 :]))


def test_a_grammar_may_wait_for_the_end_of_a_section_that_the_answer_may_begin_with(engine: GrammarHarness) -> None:
    """As reasoning that is up to the model: with `<` first anything up to `>`, else the grammar at once."""
    begin, end = encode("<")[0], encode(">")[0]
    allowed = (begin, end, EOS, *encode("x"), *encode("y"))
    for seed in SEEDS:
        grammar = Grammar("regex", "[xy]{3}", start_token_id=end, section_token_id=begin)
        engine.add(str(seed), grammar, seed=seed, allowed_token_ids=allowed)
    answers = engine.run().values()
    texts = [decode(answer.token_ids).removesuffix("<|im_end|>") for answer in answers]
    assert all(re.fullmatch(r"(<[<xy]*>)?[xy]{3}", text) for text in texts), texts
    assert {text[0] == "<" for text in texts} == {True, False}
    assert all(answer.finish_reason == "stop" for answer in answers)


@pytest.mark.parametrize("grammar", [None, Grammar("regex", "[xyz]{120}")])
def test_bad_words_do_not_come(engine: GrammarHarness, grammar: Grammar | None) -> None:
    """Words of one, two and three tokens, also beginning within one another."""
    x, y, z = (encode(letter)[0] for letter in "xyz")
    words = ((x, x), (x, y, x), (z, z, z, y))
    for seed in SEEDS:
        engine.add(str(seed), grammar, seed=seed, allowed_token_ids=(x, y, z), bad_words=words)
        engine.add(f"{seed} without z", grammar, seed=seed, allowed_token_ids=(x, y, z), bad_words=(*words, (z,)))
    for name, answer in engine.run().items():
        text = decode(answer.token_ids)
        assert len(text) == (120 if grammar is not None else 256)
        assert not re.search("xx|xyx|zzzy", text)
        assert ("z" in text) == ("without" not in name)


def test_bad_words_alone_leave_all_other_tokens(engine: GrammarHarness) -> None:
    first = engine.answer(max_tokens=20, ignore_eos=True)
    again = engine.answer(
        max_tokens=20, ignore_eos=True, bad_words=((first.token_ids[4],), tuple(first.token_ids[8:10]))
    )
    assert again.token_ids[:4] == first.token_ids[:4]
    assert first.token_ids[4] not in again.token_ids


def test_bad_words_that_leave_nothing_say_so(engine: GrammarHarness) -> None:
    answer = engine.answer(bad_words=((70,),), allowed_token_ids=(70,))
    assert (answer.finish_reason, answer.error_status) == ("error", 400)
    assert answer.error is not None
    assert "allowed_token_ids" in answer.error


# ---- in company ---------------------------------------------------------------------------------


def test_neighbours_are_not_affected(compiler: GrammarCompiler) -> None:
    alone = GrammarHarness(compiler)
    plain = [alone.answer(seed=seed, prompt=f"Neighbour {seed}", max_tokens=60).token_ids for seed in range(4)]
    bound = [alone.answer(schema(SCHEMAS["object"]), seed=seed).token_ids for seed in range(4)]
    together = GrammarHarness(compiler)
    for seed in range(4):
        together.add(f"plain {seed}", seed=seed, prompt=f"Neighbour {seed}", max_tokens=60)
        together.add(f"bound {seed}", schema(SCHEMAS["object"]), seed=seed)
    answers = together.run()
    assert [answers[f"plain {seed}"].token_ids for seed in range(4)] == plain
    assert [answers[f"bound {seed}"].token_ids for seed in range(4)] == bound


def test_a_preempted_sequence_goes_on_where_its_grammar_was(compiler: GrammarCompiler) -> None:
    definition = {"type": "array", "items": {"type": "boolean"}, "minItems": 40, "maxItems": 40}
    roomy = GrammarHarness(compiler)
    expected = [roomy.answer(schema(definition), seed=seed).token_ids for seed in range(4)]
    tight = GrammarHarness(compiler, num_kv_blocks=40, prefix_caching=False)
    for seed in range(4):
        tight.add(str(seed), schema(definition), seed=seed)
    answers = tight.run()
    assert "num_preemptions_total" in tight.core.render_metrics().decode()
    preempted = re.search(r"num_preemptions_total\{[^}]*\} ([0-9.]+)", tight.core.render_metrics().decode())
    assert preempted is not None
    assert float(preempted[1]) > 0
    assert [answers[str(seed)].token_ids for seed in range(4)] == expected


def test_cached_prefixes_and_chunked_prompts_change_nothing(compiler: GrammarCompiler) -> None:
    prompt = "All of this is said again and again. " * 8
    plain = GrammarHarness(compiler, prefix_caching=False)
    expected = plain.answer(schema(SCHEMAS["nested"]), prompt=prompt).token_ids
    cached = GrammarHarness(compiler, max_num_batched_tokens=64)
    for _ in range(2):
        assert cached.answer(schema(SCHEMAS["nested"]), prompt=prompt).token_ids == expected


def test_only_constrained_rows_carry_a_mask(engine: GrammarHarness) -> None:
    engine.add("plain", max_tokens=20)
    engine.run()
    assert engine.runner.num_masked_rows == 0


# ---- what is refused ----------------------------------------------------------------------------


REFUSED: dict[str, tuple[Grammar, str]] = {
    "not": (schema({"not": {"type": "string"}}), '"not"'),
    "uniqueItems": (schema({"type": "array", "uniqueItems": True}), '"uniqueItems"'),
    "if": (schema({"if": {"type": "string"}, "then": {"maxLength": 3}}), '"if"'),
    "propertyNames": (schema({"type": "object", "propertyNames": {"pattern": "a"}}), '"propertyNames"'),
    "lenient by itself": (schema({"x-guidance": {"lenient": True}, "contains": {}}), '"contains"'),
    "unknown format": (schema({"type": "string", "format": "shoe size"}), "shoe size"),
    "unknown type": (schema({"type": "strin"}), "strin"),
    "remote reference": (schema({"$ref": "http://127.0.0.1:9/schema.json"}), "127.0.0.1"),
    "missing reference": (schema({"$ref": "#/$defs/none"}), "none"),
    "look-ahead in a pattern": (schema({"type": "string", "pattern": "^(?=a)"}), "look-around"),
    "unsatisfiable": (schema({"type": "string", "minLength": 3, "maxLength": 2}), "minLength"),
    "endless": (schema({"$ref": "#"}), "does not compile"),
    "regex": (Grammar("regex", "(unclosed"), "unclosed"),
    "backreference": (Grammar("regex", r"(a)\1"), "backreferences"),
    "lark": (Grammar("lark", "start: missing"), "missing"),
    "lark syntax": (Grammar("lark", "start: ((("), "does not compile"),
    "unknown special token": (Grammar("lark", "start: <nonsense>"), "nonsense"),
    "gbnf": (Grammar("gbnf", 'root ::= "unclosed'), "does not compile"),
    "not json": (Grammar("json_schema", "{"), "does not compile"),
}


@pytest.mark.parametrize(("grammar", "complaint"), REFUSED.values(), ids=REFUSED)
def test_a_wrong_grammar_is_refused_alone(engine: GrammarHarness, grammar: Grammar, complaint: str) -> None:
    engine.add("wrong", grammar)
    engine.add("plain", max_tokens=8)
    engine.add("right", Grammar("regex", "[ab]{3}"))
    answers = engine.run()
    wrong = answers["wrong"]
    assert (wrong.finish_reason, wrong.error_status, wrong.error_param) == ("error", 400, "response_format")
    assert wrong.error is not None
    assert complaint in wrong.error
    assert "backtrace" not in wrong.error
    assert len(wrong.error) < 500
    assert answers["plain"].finish_reason == "length"
    assert re.fullmatch("[ab]{3}", answers["right"].text)


@pytest.mark.parametrize("ids", [(), (-1,), (VOCAB_SIZE,), (5,) * 70_000])
def test_wrong_allowed_token_ids_are_refused(engine: GrammarHarness, ids: tuple[int, ...]) -> None:
    with pytest.raises(InvalidRequestError, match="allowed_token_ids"):
        engine.add("wrong", allowed_token_ids=ids)


def test_reading_the_tokenizer_is_not_counted_as_compiling(monkeypatch: pytest.MonkeyPatch) -> None:
    """With no time at all to compile, a grammar still waits for the tokenizer, and only then is late."""
    may_load = threading.Event()

    def load_late(*arguments: Any) -> GrammarTokenizer:
        assert may_load.wait(30)
        return load_tokenizer(*arguments)

    monkeypatch.setattr("tessera.engine.grammar.compiler.load_tokenizer", load_late)
    monkeypatch.setattr("tessera.engine.grammar.compiler.COMPILE_LIMIT", -1.0)
    compiler = GrammarCompiler(MODEL, VOCAB_SIZE, [EOS])
    try:
        pending = compiler.submit(Grammar("regex", "a+"))
        for _ in range(3000):
            if pending._job.future.running():
                break
            compiler.wait([pending], 0.01)
        assert pending._job.future.running()
        assert not pending.ready
        may_load.set()
        compiler.wait([pending], 30)
        assert pending.result().matcher is not None
    finally:
        may_load.set()
        compiler.close()


@pytest.mark.parametrize("tokenizer", [None, "{}", "[]", "not json", '{"model": {"type": "nonsense"}}'])
def test_a_model_without_a_usable_tokenizer_refuses_grammars(tmp_path: Path, tokenizer: str | None) -> None:
    if tokenizer is not None:
        (tmp_path / "tokenizer.json").write_text(tokenizer)
    compiler = GrammarCompiler(tmp_path, VOCAB_SIZE, [EOS])
    engine = GrammarHarness(compiler)
    engine.add("plain", max_tokens=3)
    answer = engine.answer(Grammar("json_object"))
    compiler.close()
    assert (answer.finish_reason, answer.error_status) == ("error", 400)
    assert answer.error is not None
    assert "tokenizer.json" in answer.error
    assert engine.answers["plain"].finish_reason == "length"


def test_an_engine_without_grammars_refuses_them() -> None:
    engine = GrammarHarness(None)
    with pytest.raises(InvalidRequestError, match="response_format"):
        engine.add("bound", Grammar("json_object"))


# ---- while it compiles --------------------------------------------------------------------------


def test_equal_grammars_are_compiled_once(monkeypatch: pytest.MonkeyPatch, compiler: GrammarCompiler) -> None:
    compiled: list[str] = []
    original: Callable[[GrammarProbe, Grammar], str] = GrammarProbe.source_of

    def source_of(probe: GrammarProbe, grammar: Grammar) -> str:
        if grammar.kind == "regex":  # a probe that starts compiles another one
            compiled.append(grammar.text)
        return original(probe, grammar)

    monkeypatch.setattr(GrammarProbe, "source_of", source_of)
    engine = GrammarHarness(compiler)
    for index in range(6):
        engine.add(str(index), Grammar("regex", f"once{'x' if index % 2 else 'y'}"))
    assert {answer.text for answer in engine.run().values()} == {"oncex", "oncey"}
    assert sorted(compiled) == ["oncex", "oncey"]


def test_a_refusal_is_an_output_like_any_other(engine: GrammarHarness) -> None:
    engine.core.add_request(_request("wrong", Grammar("regex", "(")), CLIENT)
    outputs: list[RequestOutput] = []
    while engine.core.has_work:
        outputs += engine.core.step().get(CLIENT, [])
    (output,) = outputs
    assert (output.request_id, output.token_ids, output.finish_reason) == ("wrong", [], "error")


def _request(name: str, grammar: Grammar) -> Any:
    from tessera.engine.contract.messages import AddRequest

    return AddRequest(name, token_ids(encode("Hi")), SamplingParams(max_tokens=4, grammar=grammar), 0.0)
