"""Token masks along a draft: each as if the draft tokens before it had been chosen."""

from __future__ import annotations

from tessera.engine.grammar.compiler import GrammarCompiler
from tessera.engine.grammar.constraint import TokenConstraint, advance_constraints
from tessera.engine.grammar.token_tables import Words


def masks_along(constraint: TokenConstraint, draft: list[int], compiler: GrammarCompiler | None) -> list[Words]:
    """The masks behind each token of a draft, as far as its tokens can be chosen and something must follow them.

    Of a constraint that is idle, as far as it stays so.
    """
    masks: list[Words] = []
    branch, mask = constraint.branch(), constraint.mask
    for token_id in draft:
        if token_id // 32 >= len(mask) or not int(mask[token_id // 32]) >> token_id % 32 & 1:
            break
        advance_constraints([branch], [token_id], compiler)
        if branch.is_complete or branch.error is not None or (constraint.is_idle and not branch.is_idle):
            break
        mask = branch.mask
        masks.append(mask)
    return masks
