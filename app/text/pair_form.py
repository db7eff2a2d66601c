"""Two texts as one input of a model that scores pairs."""

from __future__ import annotations

from dataclasses import dataclass

import tokenizers


@dataclass(frozen=True)
class PairForm:
    """The special tokens in front of, between and behind two texts of one input, and the types of all its tokens.

    Joined so a long text is copied once. `post_process` of the library copies all that it knows of each token, and
    keeps the interpreter's lock meanwhile.
    """

    specials: tuple[list[int], list[int], list[int]]
    types: tuple[list[int], list[int], list[int]]  # of the special tokens
    text_types: tuple[int, int]  # of the text that comes first, and of the other
    is_swapped: bool = False  # the second text comes first

    @classmethod
    def of(cls, example: tokenizers.Encoding) -> PairForm:
        """`example`: an input of two texts, neither of them empty."""
        places = example.sequence_ids  # None: of a special token
        begins = sorted(places.index(text) for text in (0, 1))
        ends = sorted(len(places) - places[::-1].index(text) for text in (0, 1))
        parts = slice(0, begins[0]), slice(ends[0], begins[1]), slice(ends[1], None)
        ids, types = example.ids, example.type_ids
        return cls(
            (ids[parts[0]], ids[parts[1]], ids[parts[2]]),
            (types[parts[0]], types[parts[1]], types[parts[2]]),
            (types[begins[0]], types[begins[1]]),
            places.index(1) < places.index(0),
        )

    @property
    def num_special(self) -> int:
        return sum(map(len, self.specials))

    def join(self, one: list[int], other: list[int]) -> tuple[list[int], int]:
        """The input, and its tokens before the first one of type 1."""
        if self.is_swapped:
            one, other = other, one
        first, middle, last = self.specials
        ids = [*first, *one, *middle, *other, *last]
        num_before = 0
        types = (self.types[0], self.text_types[:1], self.types[1], self.text_types[1:], self.types[2])
        for part, its_types in zip((first, one, middle, other, last), types, strict=True):
            if part and 1 in its_types:
                return ids, num_before + its_types.index(1)
            num_before += len(part)
        return ids, len(ids)
