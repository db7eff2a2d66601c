"""The application that `serve run` and `serve deploy` start."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel, Field
from ray import serve
from ray.serve import Application
from ray.serve.config import AutoscalingConfig, AutoscalingPolicy, RequestRouterConfig

from tessera.app.ray_serve.front import Front
from tessera.app.ray_serve.prefix_router import PrefixRouter
from tessera.app.ray_serve.replica import Replica
from tessera.app.ray_serve.scaling import QueueAndCachePolicy
from tessera.app.routing.policy import TOKENS_PER_REQUEST

STATS_PERIOD = 1.0  # seconds between two looks at a replica's load
FRONT_REQUESTS = 4096  # under way in one front


class Arguments(BaseModel, extra="forbid"):
    """The arguments of `build`.

    Attributes:
        serve: arguments of `tessera serve` in one string, such as "Qwen/Qwen3-8B --max-num-seqs 256".
        min_replicas, max_replicas: bounds of the scaling.
        gpus, cpus: of one replica; with several GPUs give `serve` a --tensor-parallel-size or --data-parallel-size.
        fronts: processes that take requests and route them.
        max_ongoing_requests: most requests under way in one replica; further ones wait for another.
        max_queued_requests: most that wait in one front; -1: no limit.
        under_way, cache_use: targets of the scaling, see `QueueAndCachePolicy`.
        upscale_delay, downscale_delay: seconds for which more or fewer replicas must be wanted.
        tokens_per_request: see `RoutingPolicy`.
        drain: seconds that a replica which is to end has for its requests.
    """

    serve: str
    min_replicas: int = Field(default=1, ge=0)
    max_replicas: int = Field(default=1, ge=1)
    gpus: float = Field(default=1, ge=0)
    cpus: float = Field(default=4, ge=0)
    fronts: int = Field(default=1, ge=1)
    max_ongoing_requests: int = Field(default=512, ge=1)
    max_queued_requests: int = Field(default=-1, ge=-1)
    under_way: float = Field(default=64, gt=0)
    cache_use: float = Field(default=0.7, gt=0, le=1)
    upscale_delay: float = Field(default=10, ge=0)
    downscale_delay: float = Field(default=300, ge=0)
    tokens_per_request: float = Field(default=TOKENS_PER_REQUEST, ge=0)
    drain: float = Field(default=60, ge=0)


def build(given: Mapping[str, Any]) -> Application:
    """Fronts before replicas of one model; `given` is what `Arguments` takes, from Serve's command line or file."""
    arguments = Arguments.model_validate(given)
    policy = AutoscalingPolicy(
        policy_function=QueueAndCachePolicy,
        policy_kwargs={"under_way": arguments.under_way, "cache_use": arguments.cache_use},
    )
    replicas = serve.deployment(
        Replica,
        name="Replica",
        max_ongoing_requests=arguments.max_ongoing_requests,
        max_queued_requests=arguments.max_queued_requests,
        ray_actor_options={"num_gpus": arguments.gpus, "num_cpus": arguments.cpus},
        graceful_shutdown_timeout_s=arguments.drain,
        health_check_period_s=5,
        health_check_timeout_s=15,
        autoscaling_config=AutoscalingConfig(
            min_replicas=arguments.min_replicas,
            max_replicas=max(arguments.min_replicas, arguments.max_replicas),
            upscale_delay_s=arguments.upscale_delay,
            downscale_delay_s=arguments.downscale_delay,
            policy=policy,
        ),
        request_router_config=RequestRouterConfig(
            request_router_class=PrefixRouter,
            request_router_kwargs={"tokens_per_request": arguments.tokens_per_request},
            request_routing_stats_period_s=STATS_PERIOD,
        ),
    )
    fronts = serve.deployment(
        Front,
        name="Front",
        num_replicas=arguments.fronts,
        max_ongoing_requests=FRONT_REQUESTS,
        ray_actor_options={"num_cpus": 0.1},
        graceful_shutdown_timeout_s=arguments.drain,
    )
    application: Application = fronts.bind(replicas.bind(shlex.split(arguments.serve)))
    return application
