"""The budget of a completion's reasoning, for models whose reasoning ends with a token of its own."""

from __future__ import annotations

from tessera.app.generate.prompt import ChatPrompt
from tessera.app.generate.served_model import ServedModel
from tessera.app.schema.chat import NO_BUDGET, ChatRequest
from tessera.app.schema.request import log_once
from tessera.engine.contract.sampling_params import ReasoningBudget


def reasoning_budget(model: ServedModel, request: ChatRequest, prompt: ChatPrompt) -> ReasoningBudget | None:
    """The budget that the engine enforces; None where nothing limits the reasoning, or there is none.

    Reasoning that is to be off, but that the chat template cannot turn off, has a budget of no tokens.
    """
    limit = 0 if request.reasoning_effort == "none" else request.thinking_token_budget
    if limit is None or limit == NO_BUDGET or model.reasoning is None or prompt.reasoning == "none":
        return None
    reasoning = model.reasoning
    begin, end = model.token_id_of(reasoning.budget_begin or reasoning.begin), model.token_id_of(reasoning.end)
    if end is None or (begin is None and prompt.reasoning == "possible"):
        log_once("reasoning budget", "budgets of reasoning are not enforced: no token of this model's ends it")
        return None
    if reasoning.has_channels:
        limit += 1  # the rest of the header
    return ReasoningBudget(limit, end, begin if prompt.reasoning == "possible" else None)
