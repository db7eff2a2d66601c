"""Drafters propose what followed the same tokens before, and nothing where nothing did."""

from __future__ import annotations

import random

import pytest

from tessera.engine.speculation.acceptance import Acceptance
from tessera.engine.speculation.earlier_texts import MAX_GENERATION, MAX_SALTS, EarlierTexts
from tessera.engine.speculation.look_up import LookUp
from tessera.engine.speculation.prediction import PredictionDrafter
from tessera.engine.speculation.suffix_automaton import ROOT, SuffixAutomaton
from tessera.engine.speculation.suffixes import MAX_AT_ONCE, MAX_BEHIND, IndexBudget, SuffixDrafter
from tests.support.cases.token_ids import token_ids


@pytest.mark.parametrize(
    ("text", "draft"),
    [
        ([1, 2, 3, 4, 9, 1, 2], [3, 4, 9]),
        ([1, 2, 3, 8, 1, 2, 4, 9, 5, 1, 2], [4, 9, 5]),  # the last of equal matches
        ([1, 2, 3, 8, 8, 7, 2, 4, 4, 4, 1, 2], [3, 8, 8]),  # the longer match
        ([5, 5, 5, 5, 5, 5], [5, 5, 5]),  # a period goes on
        ([1, 7, 1, 7, 1], [7, 1, 7]),
        ([1, 2, 3, 4, 5], []),
        ([7, 2, 3, 8, 2], []),  # one token is too few
        ([4, 4], []),
        ([4], []),
    ],
)
def test_look_up_continues_the_longest_match_of_the_last_tokens(text: list[int], draft: list[int]) -> None:
    assert LookUp(2, 4).propose(token_ids(text), 3) == draft


def test_look_up_takes_no_match_longer_than_asked_for() -> None:
    text = [1, 2, 3, 8, 6, 2, 3, 9, 1, 2, 3]
    assert LookUp(1, 2).propose(token_ids(text), 1) == [9]
    assert LookUp(1, 3).propose(token_ids(text), 1) == [8]


def longest_repeated_end(text: list[int]) -> int:
    for length in range(len(text) - 1, 0, -1):
        ending = text[-length:]
        if any(text[start : start + length] == ending for start in range(len(text) - length)):
            return length
    return 0


@pytest.mark.parametrize("seed", range(20))
def test_the_automaton_finds_the_longest_end_that_occurred_before(seed: int) -> None:
    print(f"seed {seed}")
    rng = random.Random(seed)
    automaton, text = SuffixAutomaton(), list[int]()
    for _ in range(120):
        text.append(rng.randrange(rng.choice((2, 5))))
        automaton.append_token(text[-1])
        length, place = automaton.repeated_end()
        assert length == longest_repeated_end(text)
        assert text[place - length : place] == text[len(text) - length :]
        assert place < len(text) or not length


@pytest.mark.parametrize("seed", range(10))
def test_a_text_is_followed_through_earlier_ones(seed: int) -> None:
    print(f"seed {seed}")
    rng = random.Random(seed)
    texts = [[rng.randrange(3) for _ in range(rng.randrange(1, 30))] for _ in range(6)]
    automaton = SuffixAutomaton()
    for text in texts:
        for token_id in text:
            automaton.append_token(token_id)
        automaton.end_text()
    match, followed = (ROOT, 0), list[int]()
    for _ in range(60):
        followed.append(rng.randrange(3))
        match = automaton.follow(match, token_ids(followed[-1:]))
        length = max(
            (n for n in range(len(followed) + 1) for t in texts if followed[len(followed) - n :] in windows(t, n)),
            default=0,
        )
        assert match[1] == length
        place = automaton.place_behind(match[0])
        assert automaton.token_ids[place - length : place].tolist() == followed[len(followed) - length :]
        assert -1 not in automaton.continuation(place, 20)


def windows(text: list[int], length: int) -> list[list[int]]:
    return [text[start : start + length] for start in range(len(text) - length + 1)]


def make_budget() -> IndexBudget:
    return IndexBudget(EarlierTexts())


def test_suffixes_draft_twice_as_much_as_matches() -> None:
    text = [1, 2, 3, 4, 5, 6, 7, 8, 9, 1, 2]
    assert SuffixDrafter([], make_budget()).propose(token_ids(text), 8) == [3, 4, 5, 6]
    assert SuffixDrafter([], make_budget()).propose(token_ids([1, 2, 3, 9, 1, 2, 3]), 2) == [9, 1]
    assert SuffixDrafter([], make_budget()).propose(token_ids([1, 2, 3, 9, 4, 3]), 8) == [], "one token is no match"


def test_suffixes_follow_a_text_that_grows_by_a_token() -> None:
    rng = random.Random(7)
    for alphabet in (2, 3, 5):
        drafter = SuffixDrafter([], make_budget())
        text = token_ids([rng.randrange(alphabet) for _ in range(5)])
        for _ in range(60):
            text.append(rng.randrange(alphabet))
            length = longest_repeated_end(text.tolist())
            proposal = drafter.propose(text, 8)
            assert len(proposal) == (min(8, 2 * length) if length > 1 else 0)
            ending = text[len(text) - length :].tolist()
            assert not proposal or [*ending, proposal[0]] in windows(text.tolist(), length + 1)


def test_suffixes_look_up_several_tokens_in_the_text_before_them() -> None:
    rng = random.Random(8)
    for several in (2, 5, 8):
        budget = make_budget()
        drafter, text = SuffixDrafter([], budget), token_ids([1, 2, 3])
        drafter.propose(text, 8)
        for _ in range(40):
            budget.renew()
            before = text.tolist()
            text.extend(rng.randrange(3) for _ in range(several))
            proposal = drafter.propose(text, 8)
            found = [length for length in range(2, len(before)) if text.tolist()[-length:] in windows(before, length)]
            assert len(proposal) == min(8, 2 * max(found, default=0))
            if rng.random() < 0.5:
                budget.catch_up()  # else the next proposal does


def test_suffixes_draft_nothing_until_texts_are_indexed_which_goes_on_step_by_step() -> None:
    budget = make_budget()
    first, second = SuffixDrafter([], budget), SuffixDrafter([], budget)
    text = token_ids([*range(MAX_AT_ONCE), 1, 2, 3])
    assert (first.propose(text, 2), second.propose(text, 2)) == ([], [])
    budget.renew()
    assert (first.propose(text, 2), second.propose(text, 2)) == ([4, 5], []), "no step waits for all of it"
    budget.renew()
    assert second.propose(text, 2) == [4, 5]


def test_what_is_indexed_before_a_step_and_behind_it_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    num_indexed = 0
    append_token = SuffixAutomaton.append_token

    def counted(automaton: SuffixAutomaton, token_id: int) -> None:
        nonlocal num_indexed
        num_indexed += 1
        append_token(automaton, token_id)

    monkeypatch.setattr(SuffixAutomaton, "append_token", counted)
    rng, earlier = random.Random(9), EarlierTexts()
    budget = IndexBudget(earlier)
    earlier.append_text(b"", token_ids([1, 2, 3]))
    texts = [token_ids(rng.randrange(2) for _ in range(200)) for _ in range(64)]
    drafters = [SuffixDrafter(earlier.of_salt(b""), budget) for _ in texts]
    for _ in range(40):
        for text in texts:
            text.append(text[-100])
        num_indexed = 0
        budget.renew()
        proposals = [drafter.propose(text, 8) for drafter, text in zip(drafters, texts, strict=True)]
        assert num_indexed <= MAX_AT_ONCE
        num_indexed = 0
        budget.catch_up()
        assert num_indexed <= MAX_BEHIND
    assert all(proposals), "no text is forgotten"
    for text in texts:
        text.extend([*range(100), *text[:20]])
        earlier.append_text(b"", text[:100])
    for _ in range(60):
        for text in texts:
            text.append(text[-100])
        num_indexed = 0
        budget.renew()
        proposals = [drafter.propose(text, 8) for drafter, text in zip(drafters, texts, strict=True)]
        assert num_indexed <= MAX_AT_ONCE
        num_indexed = 0
        budget.catch_up()
        assert num_indexed <= MAX_BEHIND
    assert num_indexed == len(texts), "each has caught up, and completions are indexed"
    assert all(proposals)
    assert earlier.of_salt(b"")[-1].num_tokens == 4 + 64 * 101


def test_suffixes_look_into_earlier_completions_of_the_same_salt() -> None:
    earlier = EarlierTexts()
    earlier.append_text(b"a", token_ids([1, 2, 3, 4, 5]))
    earlier.append_text(b"a", token_ids([6, 7]))
    earlier.catch_up(20)
    prompt = token_ids([9, 1, 2, 3])
    assert SuffixDrafter(earlier.of_salt(b"a"), make_budget()).propose(prompt, 4) == [4, 5], "as far as that text goes"
    assert SuffixDrafter(earlier.of_salt(b"b"), make_budget()).propose(prompt, 4) == []
    earlier.forget()
    assert SuffixDrafter(earlier.of_salt(b"a"), make_budget()).propose(prompt, 4) == []


def test_fault_memory_of_earlier_completions_is_bounded() -> None:
    earlier = EarlierTexts()
    for number in range(4 * MAX_SALTS):
        earlier.append_text(b"%d" % number, token_ids([number]))
    assert sum(bool(earlier.of_salt(b"%d" % number)) for number in range(4 * MAX_SALTS)) == MAX_SALTS
    rng = random.Random(1)
    for _ in range(40):
        earlier.append_text(b"a", token_ids(rng.randrange(50) for _ in range(3000)))
        earlier.catch_up(700)
    generations = earlier.of_salt(b"a")
    assert len(generations) == 2
    assert all(each.num_tokens < 1.2 * MAX_GENERATION for each in generations)


def test_a_prediction_is_followed_and_found_again_after_a_change() -> None:
    prediction = list(range(10, 40))
    drafter = PredictionDrafter(token_ids(prediction), 2)
    text = [1, 2]
    assert drafter.propose(token_ids(text), 4) == [10, 11, 12, 13], "from the start, before there is a completion"
    text += [10, 11]
    assert drafter.propose(token_ids(text), 2) == [12, 13]
    text += [99]
    assert drafter.propose(token_ids(text), 2) == []
    text += [15]
    assert drafter.propose(token_ids(text), 2) == []
    text += [16]
    assert drafter.propose(token_ids(text), 3) == [17, 18, 19], "two tokens soon after the last place"
    text += list(range(17, 40))
    assert drafter.propose(token_ids(text), 3) == [], "at its end"


def test_acceptance_learns_from_proposals_whether_they_were_drafted_or_not() -> None:
    good, bad = Acceptance(), Acceptance()
    text = token_ids([0])
    for number in range(1, 30):
        good.note_proposal(text, [number, number + 1])
        bad.note_proposal(text, [0, 0])
        text.append(number)
    assert good.rate > 0.95
    assert bad.rate < 0.1
