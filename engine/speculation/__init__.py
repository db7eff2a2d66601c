"""Speculative decoding: tokens are drafted from text that exists, and a step verifies several at a time.

Public: `speculator.Speculator`, `drafting.Drafting`, `verification.VerifiedDraft` and `masks.masks_along`.
"""
