"""Completions of earlier requests, in which later ones with the same salt look for what they repeat."""

from __future__ import annotations

from collections import OrderedDict

from tessera.engine.contract.messages import TokenIds
from tessera.engine.speculation.suffix_automaton import SuffixAutomaton

MAX_SALTS = 8
MAX_GENERATION = 1 << 13  # tokens of an automaton, some 500 bytes each
MAX_TEXT = 1 << 10  # tokens of a completion that are kept, the first ones: a few milliseconds


class EarlierTexts:
    """For each of the salts used last, the newest completions, in two automata: one that grows and the one before."""

    def __init__(self) -> None:
        self._by_salt: OrderedDict[bytes, list[SuffixAutomaton]] = OrderedDict()

    def of_salt(self, salt: bytes) -> list[SuffixAutomaton]:
        """The newest last; they go on growing."""
        if salt in self._by_salt:
            self._by_salt.move_to_end(salt)
        return list(self._by_salt.get(salt, ()))

    def append_text(self, salt: bytes, token_ids: TokenIds) -> None:
        """Keep a completion."""
        generations = self._by_salt.setdefault(salt, [SuffixAutomaton()])
        self._by_salt.move_to_end(salt)
        if len(self._by_salt) > MAX_SALTS:
            self._by_salt.popitem(last=False)
        if generations[-1].num_tokens >= MAX_GENERATION:
            generations[:] = [generations[-1], SuffixAutomaton()]
        for token_id in token_ids[:MAX_TEXT]:
            generations[-1].append_token(token_id)
        generations[-1].end_text()

    def forget(self) -> None:
        self._by_salt.clear()
