"""The queries of other servers' Grafana dashboards, with Grafana's variables filled in by `prepared`.

Typed from vLLM's examples/observability/prometheus_grafana/grafana.json and examples/observability/dashboards/grafana/
{performance_statistics,query_statistics,vllm_overview,vllm_instances,vllm_service_status,vllm_kv_cache}.json (without
KV connectors and block residency), and from SGLang's examples/monitoring/grafana/dashboards/json/sglang-dashboard.json,
as of November 2026. Queries that differ in their labels alone are here once.
"""

from __future__ import annotations

LATENCIES = ("e2e_request_latency_seconds", "inter_token_latency_seconds", "time_to_first_token_seconds")


def _vllm() -> list[str]:
    model, deployment = '{model_name="$model_name"}', '{model_name=~"$Deployment_id"}'
    found = []
    for latency in LATENCIES:
        for share in ("0.99", "0.95", "0.9", "0.5"):
            found += [
                f"histogram_quantile({share}, sum by(le) (rate(vllm:{latency}_bucket{model}[$__rate_interval])))",
                f"histogram_quantile({share}, sum by(le) (rate(vllm:{latency}_bucket[$__range])))",
            ]
        found += [
            f"rate(vllm:{latency}_sum{model}[$__rate_interval]) / rate(vllm:{latency}_count{model}[$__rate_interval])",
            f"(sum(increase(vllm:{latency}_sum[$__range])) / sum(increase(vllm:{latency}_count[$__range])))",
        ]
    for tokens in ("prompt_tokens", "generation_tokens"):
        found += [
            f"rate(vllm:{tokens}_total{model}[$__rate_interval])",
            f"sum by (model_name) (rate(vllm:{tokens}_total{deployment}[$__rate_interval]))",
            f"sum by(le) (increase(vllm:request_{tokens}_bucket{model}[$__rate_interval]))",
        ]
    for gauge in ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc"):
        found.append(f"vllm:{gauge}{model}")
    for phase in ("queue", "prefill", "decode"):
        found.append(f"rate(vllm:request_{phase}_time_seconds_sum{model}[$__rate_interval])")
    for share in ("0.50", "0.90", "0.99"):
        prompts = f"rate(vllm:request_prompt_tokens_bucket{deployment}[$__rate_interval])"
        found.append(f"histogram_quantile({share}, sum by(le, model_name) ({prompts}))")
    where = 'job=~"$job", model_name=~"$model_name", instance=~"$instance", engine=~"$engine"'
    success = f"vllm:request_success_total{{{where}"
    reported = f"count(vllm:num_requests_running{{{where}}})"
    return [
        *found,
        f'(1 - (sum(rate({success}, finished_reason="error"}}[5m])) / (sum(rate({success}}}[5m])) > 0))) '
        f"and on () {reported}",
        f"(60 * sum(rate({success}}}[5m]))) and on () {reported}",
        f"sum(rate(vllm:prefix_cache_hits_total{{{where}}}[$__rate_interval])) "
        f"/ (sum(rate(vllm:prefix_cache_queries_total{{{where}}}[$__rate_interval])) > 0)",
        f"sum(rate(vllm:prompt_tokens_cached_total{{{where}}}[$__rate_interval])) "
        f"/ (sum(rate(vllm:prompt_tokens_total{{{where}}}[$__rate_interval])) > 0)",
        f"sum(rate(vllm:num_preemptions_total{{{where}}}[$__rate_interval]))",
        f"max by (instance, engine) (vllm:kv_cache_usage_perc{{{where}}})",
        f'sum(rate(vllm:time_to_first_token_seconds_bucket{{{where}, le="1.0"}}[$__rate_interval])) '
        f"/ (sum(rate(vllm:time_to_first_token_seconds_count{{{where}}}[$__rate_interval])) > 0)",
        f'max by (model_name, instance) ((time() - process_start_time_seconds{{job=~"$job", instance=~"$instance"}}) '
        f"* on (job, instance) group_left (model_name) "
        f"group by (job, instance, model_name) (vllm:num_requests_running{{{where}}}))",
        f"sum by(finished_reason) (increase(vllm:request_success_total{model}[$__rate_interval]))",
        f"rate(vllm:request_max_num_generation_tokens_sum{model}[$__rate_interval])",
        "rate(vllm:iteration_tokens_total_count[$__rate_interval])",
        f"sum by (model_name) (rate(vllm:request_success_total{deployment}[$__rate_interval]))",
        f"sum by (le, model_name) (rate(vllm:request_prompt_tokens_bucket{deployment}[$__rate_interval]))",
        f"sum(rate(vllm:prompt_tokens_total{deployment}[$__rate_interval])) "
        f"/ sum(rate(vllm:request_success_total{deployment}[$__rate_interval]))",
    ]


def _sglang() -> list[str]:
    found = []
    for latency in ("e2e_request_latency_seconds", "time_to_first_token_seconds"):
        for share in ("0.99", "0.9", "0.5"):
            found.append(f"histogram_quantile({share}, sum by (le) (rate(sglang:{latency}_bucket[$__rate_interval])))")
        found += [
            f"avg(rate(sglang:{latency}_sum[$__rate_interval]) / rate(sglang:{latency}_count[$__rate_interval]))",
            f'sum by(le) (increase(sglang:{latency}_bucket{{model_name=~"$model_name"}}[$__rate_interval]))',
        ]
    gauges = ("num_running_reqs", "gen_throughput", "cache_hit_rate", "num_queue_reqs")
    return found + [f"sglang:{gauge}" for gauge in gauges]


VLLM_QUERIES = _vllm()
SGLANG_QUERIES = _sglang()
# What comes with the other server's prefix alone, vLLM's older names, and what SGLang's documentation lists.
OTHER_NAMES = {
    "vllm": (
        *("gpu_cache_usage_perc", "time_per_output_token_seconds_bucket", "gpu_prefix_cache_hits_total"),
        *("request_inference_time_seconds_bucket", "num_preemptions_total", "request_params_n_bucket"),
        *("engine_sleep_state", "num_requests_waiting_by_reason", "cache_config_info"),
        *("prefix_cache_queries_total", "request_time_per_output_token_seconds_sum"),
    ),
    "sglang": (
        *("token_usage", "num_used_tokens", "max_total_num_tokens", "num_requests_total", "cached_tokens_total"),
        *("prompt_tokens_total", "generation_tokens_total", "inter_token_latency_seconds_bucket"),
        *("time_per_output_token_seconds_bucket", "queue_time_seconds_sum"),
    ),
}


def prepared(query: str, model: str) -> str:
    """As Prometheus gets it."""
    anything = dict.fromkeys(("$job", "$instance", "$engine", "$Deployment_id"), ".*")
    variables = {"$__rate_interval": "1m", "$__range": "1m", "$model_name": model, **anything}
    for name, value in variables.items():
        query = query.replace(name, value)
    return query
