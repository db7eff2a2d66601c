"""Decides how many tokens are drafted for each sequence in a step, and counts what becomes of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from tessera.engine.contract.messages import TokenIds
from tessera.engine.contract.speculation.settings import Speculation
from tessera.engine.grammar.compiler import GrammarCompiler
from tessera.engine.grammar.constraint import TokenConstraint
from tessera.engine.grammar.token_tables import Words
from tessera.engine.speculation.draft_lengths import Candidate, choose_lengths, may_pay
from tessera.engine.speculation.drafting import Drafter, Drafting
from tessera.engine.speculation.earlier_texts import EarlierTexts
from tessera.engine.speculation.look_up import LookUp
from tessera.engine.speculation.masks import masks_along
from tessera.engine.speculation.model_drafts import ModelDrafts
from tessera.engine.speculation.prediction import PredictionDrafter
from tessera.engine.speculation.step_costs import Costs, StepCosts
from tessera.engine.speculation.suffixes import IndexBudget, SuffixDrafter
from tessera.engine.speculation.verification import VerifiedDraft


class DraftedSequence(Protocol):
    """The part of a running sequence that drafts concern; see `engine.core.sequence.Sequence`."""

    token_ids: TokenIds
    block_table: list[int]
    max_num_tokens: int
    num_pending_tokens: int
    constraint: TokenConstraint | None
    drafting: Drafting | None
    draft: list[int]
    draft_source: str
    draft_masks: list[Words]
    num_drafter_tokens: int
    num_drafter_chunk: int

    @property
    def can_draft(self) -> bool: ...


@dataclass
class DraftCounts:
    """Sequences' steps that verified draft tokens, those tokens, and how many of them were accepted."""

    num_drafts: int = 0
    num_tokens: int = 0
    num_accepted: int = 0


class Speculator:
    """The engine's drafting, by its settings.

    Attributes:
        by_source: what became of drafts, by the settings' method, `prediction` and `grammar`.
        num_accepted_by_position: [num_tokens], draft tokens that were accepted, by their place in their draft.
        costs: of steps; see `StepCosts`.
    """

    def __init__(self, settings: Speculation, max_tokens: int, model: ModelDrafts | None = None) -> None:
        """`max_tokens`: most draft tokens of a step. `model`: of the settings' method, where that is a model's."""
        self.settings = settings
        self.by_source: dict[str, DraftCounts] = {settings.method: DraftCounts()}
        self._max_tokens = max_tokens
        self._model = model
        self.costs = StepCosts()
        self.num_accepted_by_position = [0] * settings.num_tokens
        self._earlier = EarlierTexts()
        self._indexing = IndexBudget(self._earlier)
        self._unrecorded: list[tuple[int, int, float, bool]] = []  # steps
        self._had_drafts = False  # the last step
        self._num_seqs = 0  # beside which the last drafts were made

    @property
    def num_draft_tokens(self) -> int:
        return sum(counts.num_tokens for counts in self.by_source.values())

    @property
    def num_accepted_tokens(self) -> int:
        return sum(self.num_accepted_by_position)

    def make_drafting(self, salt: bytes, num_prompt_tokens: int, prediction: TokenIds | None) -> Drafting:
        """Drafts for a sequence of `salt`, whose completion is expected to be much like `prediction`."""
        drafters: dict[str, Drafter] = {}
        if prediction:
            drafters["prediction"] = PredictionDrafter(prediction, num_prompt_tokens)
        if self.settings.method == "suffix":
            drafters["suffix"] = SuffixDrafter(self._earlier.of_salt(salt), self._indexing)
        elif self.settings.method == "ngram":
            drafters["ngram"] = LookUp(self.settings.lookup_min, self.settings.lookup_max)
        return Drafting(drafters)

    def awaits_tokens(self, running: Sequence[DraftedSequence]) -> bool:
        """Whether the next step should wait for the tokens of the one before, because drafts are likely to follow that
        save more time.

        Otherwise it runs ahead of them, and drafts nothing.
        """
        self._record_steps()
        costs = self._costs_that_may_pay(len(running))
        if costs is None and not self.settings.always:
            return False
        self._indexing.renew()
        candidates: list[Candidate] = []
        for sequence in running:
            if sequence.drafting is not None and sequence.num_pending_tokens:
                most = len(self._propose(sequence.drafting, sequence)) - 1
                if most <= 0 and self._model_goes_on(sequence):
                    most = self.settings.num_tokens
                if most > 0:
                    if self.settings.always:
                        return True
                    candidates.append(Candidate(sequence.drafting.acceptance_rate, most))
        return costs is not None and any(choose_lengths(candidates, len(running), costs, self._max_tokens))

    def draft(self, running: Sequence[DraftedSequence], compiler: GrammarCompiler | None) -> None:
        """Set the drafts of the next step, for sequences whose tokens are all known."""
        costs = self._costs_that_may_pay(len(running))
        if costs is None and not self.settings.always:
            return
        self._indexing.renew()
        self._num_seqs = len(running)
        model, num_tokens = self._model, self.settings.num_tokens
        if model is not None:
            model.begin_step(len(running))
        found: list[tuple[DraftedSequence, Drafting, list[int]]] = []
        lengths: list[int] = []
        for sequence in running:
            sequence.num_drafter_chunk = 0
            drafting = sequence.drafting
            if drafting is None or not sequence.can_draft:
                continue
            proposal = self._propose(drafting, sequence)
            most = sequence.max_num_tokens - len(sequence.token_ids) - 1
            lengths.append(min(most, len(proposal) if proposal or model is None else num_tokens, num_tokens))
            found.append((sequence, drafting, proposal))
        if costs is not None:
            candidates = [
                Candidate(drafting.acceptance_rate, most) for (_, drafting, _), most in zip(found, lengths, strict=True)
            ]
            lengths = choose_lengths(candidates, len(running), costs, self._max_tokens)
        for (sequence, drafting, proposal), length in zip(found, lengths, strict=True):
            draft = proposal[:length]
            sequence.draft_source = drafting.source
            if draft and sequence.constraint is not None:
                sequence.draft_masks = masks_along(sequence.constraint, draft, compiler)
                draft = draft[: len(sequence.draft_masks)]
            if model is not None and not draft:
                draft = model.plan(sequence, length)
                sequence.draft_source = self.settings.method
                if length == 0:
                    drafting.note_pause()
            sequence.draft = draft

    def catch_up(self) -> None:
        """Do what the next step need not wait for; to be called once it is submitted."""
        self._indexing.catch_up()
        self._record_steps()

    def _model_goes_on(self, sequence: DraftedSequence) -> bool:
        """Whether the draft model can follow the sequence when its token on the way has come."""
        is_last = len(sequence.token_ids) + 2 >= sequence.max_num_tokens
        return self._model is not None and not is_last and self._model.most_tokens(sequence) > 1

    def _propose(self, drafting: Drafting, sequence: DraftedSequence) -> list[int]:
        # One more than a draft has: where a token is on its way, that comes first.
        return drafting.propose(sequence.token_ids, self.settings.num_tokens + 1, sequence.constraint)

    def _costs_that_may_pay(self, num_seqs: int) -> Costs | None:
        """Of a step of so many sequences, if drafts can save time beside them, however good they are; none are needed
        where the settings ask for drafts in any case."""
        costs = self.costs.expect(num_seqs) if num_seqs and not self.settings.always else None
        if costs is None or not may_pay(num_seqs, self.settings.num_tokens, costs, self._max_tokens):
            return None
        return costs

    def record_step(self, num_seqs: int, num_drafts: int, seconds: float, *, is_plain: bool) -> None:
        """See `StepCosts`; it learns of the step when nothing waits. What drafts cost is noted for the sequences that
        they were made beside: their step may have more, which start in it, or fewer."""
        if self.settings.always:
            return
        self._unrecorded.append((self._num_seqs if num_drafts else num_seqs, num_drafts, seconds, is_plain))
        if num_drafts and not self._had_drafts:  # it may be a trial, by which the next step is decided
            self._record_steps()
        self._had_drafts = num_drafts > 0

    def _record_steps(self) -> None:
        for num_seqs, num_drafts, seconds, is_plain in self._unrecorded:
            self.costs.record_step(num_seqs, num_drafts, seconds, is_plain=is_plain)
        self._unrecorded.clear()

    def note_verified(self, drafting: Drafting, draft: VerifiedDraft, num_accepted: int) -> None:
        """Count a sequence's draft."""
        num_draft_tokens = len(draft.rows)
        drafting.note_verified(num_draft_tokens, num_accepted)
        if self._model is not None and draft.source == self.settings.method:
            drafting.note_computed_draft(num_draft_tokens, num_accepted)
        counts = self.by_source.get(draft.source)
        if counts is None:
            counts = self.by_source[draft.source] = DraftCounts()
        counts.num_drafts += 1
        counts.num_tokens += num_draft_tokens
        counts.num_accepted += num_accepted
        for position in range(num_accepted):
            self.num_accepted_by_position[position] += 1

    def keep_completion(self, salt: bytes, completion: TokenIds, num_seqs: int) -> None:
        """Let later sequences of `salt` look into it, unless `num_seqs` sequences are too many for drafts."""
        pays = self.settings.always or self._costs_that_may_pay(num_seqs) is not None
        if self.settings.method == "suffix" and completion and pays:
            self._earlier.append_text(salt, completion)

    def forget_completions(self) -> None:
        self._earlier.forget()
