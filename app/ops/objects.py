"""Models of what the operators' endpoints return, for /openapi.json."""

from __future__ import annotations

from typing import Literal

from tessera.app.http.description import ApiObject


class HealthObject(ApiObject):
    status: Literal["ok", "unavailable"]
    reason: str


class LoadObject(ApiObject):
    server_load: int


class ResetObject(ApiObject):
    success: bool


class SleepingObject(ApiObject):
    is_sleeping: bool


class ReadinessObject(ApiObject):
    status: Literal["ready", "not ready"]


class VersionObject(ApiObject):
    version: str
