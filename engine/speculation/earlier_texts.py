"""Completions of earlier requests, in which later ones with the same salt look for what they repeat."""

from __future__ import annotations

from collections import OrderedDict, deque

from tessera.engine.contract.messages import TokenIds
from tessera.engine.speculation.suffix_automaton import SuffixAutomaton

MAX_SALTS = 8
MAX_GENERATION = 1 << 13  # tokens of an automaton, some 500 bytes each
MAX_TEXT = 1 << 10  # tokens of a completion that are kept, the first ones
MAX_WAITING = 2 * MAX_GENERATION  # tokens that wait to be indexed


class EarlierTexts:
    """For each of the salts used last, the newest completions, in two automata: one that grows and the one before."""

    def __init__(self) -> None:
        self._by_salt: OrderedDict[bytes, list[SuffixAutomaton]] = OrderedDict()
        self._waiting: deque[tuple[list[SuffixAutomaton], TokenIds]] = deque()  # texts, and where they belong
        self._num_waiting = 0  # tokens
        self._num_indexed = 0  # of the first of them

    def of_salt(self, salt: bytes) -> list[SuffixAutomaton]:
        """The newest last; they go on growing."""
        if salt in self._by_salt:
            self._by_salt.move_to_end(salt)
        return list(self._by_salt.get(salt, ()))

    def append_text(self, salt: bytes, token_ids: TokenIds) -> None:
        """Keep a completion, which `catch_up` will index; where too much waits for that, it is forgotten."""
        text = token_ids[:MAX_TEXT]
        if self._num_waiting + len(text) > MAX_WAITING:
            return
        generations = self._by_salt.setdefault(salt, [SuffixAutomaton()])
        self._by_salt.move_to_end(salt)
        if len(self._by_salt) > MAX_SALTS:
            self._by_salt.popitem(last=False)
        self._waiting.append((generations, text))
        self._num_waiting += len(text)

    def catch_up(self, most: int) -> None:
        """Index at most so many tokens."""
        while self._waiting and most > 0:
            generations, text = self._waiting[0]
            if not self._num_indexed and generations[-1].num_tokens >= MAX_GENERATION:
                generations[:] = [generations[-1], SuffixAutomaton()]
            new = text[self._num_indexed : self._num_indexed + most]
            for token_id in new:
                generations[-1].append_token(token_id)
            most -= len(new)
            self._num_waiting -= len(new)
            self._num_indexed += len(new)
            if self._num_indexed == len(text):
                generations[-1].end_text()
                self._waiting.popleft()
                self._num_indexed = 0

    def forget(self) -> None:
        self._by_salt.clear()
        self._waiting.clear()
        self._num_waiting = self._num_indexed = 0
