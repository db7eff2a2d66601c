"""Settings of speculative decoding, as options and in vLLM's form.

Public: `settings.Speculation`, `make_speculation`, `read_speculative_config`.
"""
