"""Settings of speculative decoding, as options and in vLLM's form.

Public: `settings.Speculation`, `settings.make_speculation`; `vllm_config.read_speculative_config`, `unused_hints`.
"""
