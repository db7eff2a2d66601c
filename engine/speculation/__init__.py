"""Speculative decoding: tokens are drafted, from text that exists or by a model, and a step verifies several at a time.

Public: `speculator.Speculator`, `drafting.Drafting`, `verification.VerifiedDraft` and `masks.masks_along`.
"""
