"""A suffix automaton, grown token by token: the longest end of a text that occurs elsewhere, in constant time."""

from __future__ import annotations

from array import array

from tessera.engine.contract.messages import TokenIds

ROOT = 0
BREAK = -1  # between two texts: no match crosses it


class SuffixAutomaton:
    """All substrings of the texts that were appended (Blumer et al. 1985, "The smallest automaton recognizing the
    subwords of a text"). It has at most 2 states a token.

    Attributes:
        token_ids: the texts one after the other, each ended by BREAK.
    """

    def __init__(self) -> None:
        self.token_ids: TokenIds = array("i")
        self._edges: list[dict[int, int]] = [{}]
        self._links = array("i", [-1])
        self._lengths = array("i", [0])  # of the longest substring of a state
        self._ends = array("i", [0])  # place behind an occurrence of it, the newest that is known
        self._last = ROOT

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    def append_token(self, token_id: int) -> None:
        """The present text goes on with `token_id`."""
        # Spelled out, since the device may wait: calls would take half of the time.
        edges, links, lengths, ends = self._edges, self._links, self._lengths, self._ends
        self.token_ids.append(token_id)
        end, before = len(self.token_ids), self._last
        known = edges[before].get(token_id)
        if known is not None:  # an earlier text begins with all of this one
            self._last = known if lengths[known] == lengths[before] + 1 else self._clone(before, token_id, known)
            ends[self._last] = end
            return
        state = self._last = len(edges)
        edges.append({})
        links.append(ROOT)
        lengths.append(lengths[before] + 1)
        ends.append(end)
        while before >= 0:
            of_before = edges[before]
            known = of_before.get(token_id)
            if known is not None:
                is_own = lengths[known] == lengths[before] + 1
                links[state] = known if is_own else self._clone(before, token_id, known)
                return
            of_before[token_id] = state
            before = links[before]

    def end_text(self) -> None:
        """What is appended next begins a text of its own."""
        self.token_ids.append(BREAK)
        self._last = ROOT

    def repeated_end(self) -> tuple[int, int]:
        """The longest end of the present text that occurs at another place of it or of an earlier one.

        -> its number of tokens, and the place behind that other occurrence, which is marked as the newest known.
        """
        state = self._links[self._last]
        if state <= ROOT:
            return 0, 0
        place = self._ends[state]
        self._ends[state] = len(self.token_ids)
        return self._lengths[state], place

    def end_match(self) -> tuple[int, int]:
        """That longest end as a match, from which `follow` goes on as if the text did."""
        state = self._links[self._last]
        return (state, self._lengths[state]) if state > ROOT else (ROOT, 0)

    def follow(self, match: tuple[int, int], token_ids: TokenIds) -> tuple[int, int]:
        """Follow another text: from `match`, a state and the length matched, to the longest that ends with `token_ids`.

        (ROOT, 0) is the empty match.
        """
        state, length = match
        edges, links, lengths = self._edges, self._links, self._lengths
        for token_id in token_ids:
            found = edges[state].get(token_id)
            while found is None and state:
                state = links[state]
                length = min(length, lengths[state])
                found = edges[state].get(token_id)
            state, length = (found, length + 1) if found is not None else (ROOT, 0)
        return state, length

    def place_behind(self, state: int) -> int:
        """The place behind an occurrence of a state's substrings."""
        return self._ends[state]

    def continuation(self, place: int, most: int) -> list[int]:
        """At most `most` tokens from `place` on, within one text."""
        found = self.token_ids[place : place + most].tolist()
        return found[: found.index(BREAK)] if BREAK in found else found

    def _new_state(self, length: int, end: int) -> int:
        self._edges.append({})
        self._links.append(-1)
        self._lengths.append(length)
        self._ends.append(end)
        return len(self._edges) - 1

    def _clone(self, before: int, token_id: int, known: int) -> int:
        """Split the substrings of `known` that are no longer than those of `before` and a token into a new state."""
        edges, links = self._edges, self._links
        clone = self._new_state(self._lengths[before] + 1, self._ends[known])
        edges[clone] = dict(edges[known])
        links[clone] = links[known]
        links[known] = clone
        while before >= 0 and edges[before].get(token_id) == known:
            edges[before][token_id] = clone
            before = links[before]
        return clone
