"""What clients depend on, as a list: each entry has a test that is named after it."""

from __future__ import annotations

# `test_wire_NUMBER_...`
POINTS = {
    1: "frames are `data: {json}`, and the stream ends with [DONE]",
    2: "first and last chunk of each choice; object, id and created stay the same",
    3: "one usage chunk where it was asked for, null in all others; stream_options need stream",
    4: "choices interleave by their index; n is at most 128",
    5: "stop strings and unfinished characters never leak",
    6: "an error in mid-stream is a frame on which the SDK raises",
    7: "tool-call deltas have an index; id, type and name come once, arguments in pieces",
    8: "finish_reason, also of calls that were cut or forced",
    9: "errors: four fields, and the status, param and code that clients look at",
    10: "choices always have logprobs, messages refusal, usage its details",
    11: "logprobs with the tokens' raw bytes; those of completions, and echo",
    12: "both names of the token limit; null equals omitted; stop is a string or up to 64",
    13: "roles and forms of content",
    14: "response_format, refused where it cannot be enforced",
    15: "embeddings as base64, and of fewer dimensions",
    16: "reasoning under both names, there and back",
    17: "unknown fields are ignored, known ones strict, images refused and not fetched",
    18: "the server's own x-request-id on every answer, the client's apart",
}

# `test_wire_parameter_NAME`
PARAMETERS = (
    "top_k",
    "min_p",
    "top_n_sigma",
    "repetition_penalty",
    "min_tokens",
    "stop_token_ids",
    "ignore_eos",
    "skip_special_tokens",
    "include_stop_str_in_output",
    "chat_template_kwargs",
    "priority",
    "cache_salt",
    "add_generation_prompt",
    "continue_final_message",
    "return_token_ids",
    "prompt_logprobs",
    "structured_outputs",
    "thinking",
    "continuous_usage_stats",
    "allowed_token_ids",
    "bad_words",
    "truncate_prompt_tokens",
)

# `test_wire_endpoint_NAME`
ENDPOINTS = (
    "models",
    "chat_completions",
    "completions",
    "embeddings",
    "responses",
    "messages",
    "ollama",
    "tokenize_and_detokenize",
    "health_ready_and_version",
    "metrics",
)

# What dashboards read, after the prefix; counters end with _total. `test_wire_metrics_...`
GAUGES = ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc")
COUNTERS = (
    "prompt_tokens",
    "generation_tokens",
    "prompt_tokens_cached",
    "prefix_cache_queries",
    "prefix_cache_hits",
    "num_preemptions",
    "request_success",
)
HISTOGRAMS = (
    "time_to_first_token_seconds",
    "inter_token_latency_seconds",
    "e2e_request_latency_seconds",
    "request_queue_time_seconds",
    "request_prefill_time_seconds",
    "request_decode_time_seconds",
    "request_prompt_tokens",
    "request_generation_tokens",
    "iteration_tokens_total",
    "request_time_per_output_token_seconds",
    "request_max_num_generation_tokens",
    "request_params_n",
    "request_params_max_tokens",
)
