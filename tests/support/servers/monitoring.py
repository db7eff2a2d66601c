"""What `deploy/` has for Prometheus and Grafana."""

from __future__ import annotations

import json
import re
from typing import Any

import yaml

from tests.support.paths import ROOT

DEPLOY = ROOT / "deploy"
DASHBOARD: dict[str, Any] = json.loads((DEPLOY / "grafana/dashboards/tessera.json").read_text())
_GROUPS: list[dict[str, Any]] = yaml.safe_load((DEPLOY / "alerts.yml").read_text())["groups"]
RULES: list[dict[str, Any]] = [rule for group in _GROUPS for rule in group["rules"]]


def queries() -> list[str]:
    """Every expression of the dashboard and of the rules, as Prometheus gets them."""
    panels = [target["expr"] for panel in DASHBOARD["panels"] for target in panel.get("targets", ())]
    variables = [v["query"]["query"] for v in DASHBOARD["templating"]["list"] if v["type"] == "query"]
    found = panels + [re.sub(r"label_values\((.*), \w+\)", r"\1", query) for query in variables]
    found += [rule["expr"] for rule in RULES]
    return [expr.replace("$__rate_interval", "1m").replace("$model", ".*") for expr in found]
