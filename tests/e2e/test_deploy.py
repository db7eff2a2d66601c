"""What an operator starts with: compose, Prometheus' configuration and Grafana's dashboard fit the server."""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
from itertools import product
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

from tessera.app.cli.command import build_parser
from tessera.app.cli.serve_options import SERVE_OPTIONS
from tessera.app.server.application import create_app
from tessera.engine.contract.messages import GpuUsage, SchedulerStats
from tessera.engine.core.metrics import EngineMetrics
from tests.image_steps import Image, copy, ignored, instructions
from tests.supply_chain import is_allowed, licences_of, sbom, unhashed
from tests.support.fakes.fake_client import FakeClient, always, play
from tests.support.paths import ROOT
from tests.support.servers.http_fixtures import as_engines, call, ids, settings_for, write_model_folder
from tests.support.servers.monitoring import DASHBOARD, DEPLOY, RULES, queries

COMPOSE: dict[str, Any] = yaml.safe_load((ROOT / "docker-compose.yml").read_text())
GRID_WIDTH = 24
SERVERS = ("tessera", "tessera-cpu")
SCRAPED_LABELS = {"job", "instance"}  # which Prometheus adds


def served(folder: Path) -> dict[str, set[str]]:
    """Sample name -> its labels, of all that a server with a GPU has on /metrics."""
    client = FakeClient(always(play(ids("hello"), finish="length")))
    client.gpu = GpuUsage(1, 2, 0.5)
    settings = settings_for(write_model_folder(folder))
    text = call(client, settings, "GET", "/metrics").text
    engine = EngineMetrics("tiny").render(SchedulerStats(0, 0, 1, 0, 0)).decode()
    counts = create_app(as_engines(client), settings).state.http_counts
    counts.count_response("/health", 503)
    samples = [s for f in text_string_to_metric_families(text + engine) for s in f.samples]
    samples += [s for f in counts.collect("tessera") for s in f.samples]
    return {sample.name: set(sample.labels) for sample in samples}


def test_every_query_is_of_metrics_and_labels_that_exist(tmp_path: Path) -> None:
    metrics = served(tmp_path)
    assert len(queries()) > 30
    for query in queries():
        names = re.findall(r"tessera:\w+", query)
        recorded = re.findall(r"tessera_\w+:\w+", query)
        assert names or recorded, query
        assert set(recorded) <= {rule.get("record") for rule in RULES}, query
        for name in names:
            assert name in metrics, f"{name} of {query}"
        for name, matchers in re.findall(r"(tessera:\w+)\{([^}]*)\}", query):
            for label in re.findall(r"(\w+)\s*(?:=~|!=|!~|=)", matchers):
                assert label in metrics[name], f"{label} of {query}"
        for labels in re.findall(r"by \(([^)]*)\)", query):
            for label in set(labels.split(", ")) - SCRAPED_LABELS:
                assert any(label in metrics[name] for name in names), f"{label} of {query}"


def test_the_dashboard_is_one_that_grafana_takes() -> None:
    for key in ("uid", "title", "schemaVersion", "panels", "templating", "time", "annotations", "tags"):
        assert key in DASHBOARD, key
    assert "id" not in DASHBOARD, "a number of one Grafana's own database"
    assert DASHBOARD["schemaVersion"] >= 36
    assert re.fullmatch(r"[\w-]{1,40}", DASHBOARD["uid"])
    panels = DASHBOARD["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    taken: set[tuple[int, int]] = set()
    for panel in panels:
        assert {"type", "title", "gridPos"} <= set(panel)
        place = panel["gridPos"]
        assert place["x"] + place["w"] <= GRID_WIDTH
        columns, rows = (range(place[at], place[at] + place[size]) for at, size in (("x", "w"), ("y", "h")))
        cells = set(product(columns, rows))
        assert not cells & taken, f"{panel['title']} lies on another panel"
        taken |= cells
        if panel["type"] == "row":
            continue
        assert panel["type"] in ("stat", "timeseries")
        assert panel["description"], panel["title"]
        assert panel["datasource"] == {"type": "prometheus", "uid": "${datasource}"}
        assert {"defaults", "overrides"} == set(panel["fieldConfig"])
        assert panel["fieldConfig"]["defaults"]["unit"]
        references = [target["refId"] for target in panel["targets"]]
        assert len(set(references)) == len(references) > 0
    variables = {variable["name"]: variable for variable in DASHBOARD["templating"]["list"]}
    assert variables["datasource"]["type"] == "datasource"
    used = set(re.findall(r"\$\{?(\w+)", json.dumps(panels))) - {"__rate_interval", "__all"}
    assert used == set(variables)


def test_the_dashboard_shows_what_it_promises() -> None:
    shown = " ".join(queries())
    for wanted in (
        *("generation_tokens_total", "time_to_first_token_seconds_bucket", "inter_token_latency_seconds_bucket"),
        *("e2e_request_latency_seconds_bucket", "num_requests_waiting", "num_requests_running", "kv_cache_blocks"),
        *("prefix_cache_hits_total", "num_preemptions_total", "http_requests_total", "gpu_memory_used_bytes"),
    ):
        assert f"tessera:{wanted}" in shown


def test_files_that_compose_mounts_exist_and_find_each_other() -> None:
    for name, service in COMPOSE["services"].items():
        for volume in service["volumes"]:
            source = volume.split(":")[0]
            if source.startswith("./deploy"):
                assert (ROOT / source).exists(), f"{source} of {name}"
                assert volume.endswith(":ro")
            elif not source.startswith((".", "$")):
                assert source in COMPOSE["volumes"]
    prometheus = yaml.safe_load((DEPLOY / "prometheus.yml").read_text())
    (job,) = prometheus["scrape_configs"]
    assert job["static_configs"] == [{"targets": ["server:8001"]}]
    for server in SERVERS:
        assert COMPOSE["services"][server]["networks"]["default"]["aliases"] == ["server"]
    provisioning = DEPLOY / "grafana/provisioning"
    (source,) = yaml.safe_load((provisioning / "datasources/prometheus.yml").read_text())["datasources"]
    assert source["url"] == "http://prometheus:9090"
    (provider,) = yaml.safe_load((provisioning / "dashboards/tessera.yml").read_text())["providers"]
    grafana = COMPOSE["services"]["grafana"]
    assert f"./deploy/grafana/dashboards:{provider['options']['path']}:ro" in grafana["volumes"]
    assert grafana["environment"]["GF_DASHBOARDS_DEFAULT_HOME_DASHBOARD_PATH"].endswith("/tessera.json")


def test_every_service_is_confined_limited_and_checked() -> None:
    for name, service in COMPOSE["services"].items():
        assert service["read_only"] is True, name
        assert service["cap_drop"] == ["ALL"], name
        assert service["security_opt"] == ["no-new-privileges:true"], name
        assert set(service["deploy"]["resources"]["limits"]) == {"cpus", "memory", "pids"}, name
        assert service["healthcheck"]["test"], name
        assert all("BIND:-127.0.0.1}" in port for port in service["ports"]), "nothing is open to others unasked"
    for server in SERVERS:
        service = COMPOSE["services"][server]
        assert "--admin-port 8001" in service["command"]
        assert ":8001/health" in service["healthcheck"]["test"][-1]
        assert not any(port.endswith(":8001") for port in service["ports"]), "the admin port takes no keys"
    gpu, cpu = (COMPOSE["services"][name] for name in SERVERS)
    assert (gpu["profiles"], cpu["profiles"]) == (["gpu"], ["cpu"])
    assert gpu["deploy"]["resources"]["reservations"]["devices"][0]["capabilities"] == ["gpu"]
    assert "reservations" not in cpu["deploy"]["resources"]


def test_compose_itself_takes_the_file() -> None:
    compose = _compose()
    environment = {**os.environ, "MODEL": "Qwen/Qwen3-0.6B", "TESSERA_ARGS": "--max-num-seqs 64"}
    for profile, server in (("gpu", "tessera"), ("cpu", "tessera-cpu")):
        command = [*compose, "--profile", profile, "config", "--format", "json"]
        done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, timeout=60, check=True)
        services = json.loads(done.stdout)["services"]
        assert set(services) == {server, "prometheus", "grafana"}
        assert services[server]["command"][-3:] == ["--max-num-seqs", "64", "Qwen/Qwen3-0.6B"]


def _compose() -> list[str]:
    for command in (["docker", "compose"], ["docker-compose"]):
        if shutil.which(command[0]):
            found = subprocess.run([*command, "version"], capture_output=True, timeout=30, check=False)
            if found.returncode == 0 and not re.search(rb"version:? v?1\.", found.stdout):
                return command
    pytest.skip("docker compose 2 is not installed")


def test_the_dockerfile_is_read_as_docker_reads_it() -> None:
    steps = instructions("# a\nFROM x AS y\nRUN a \\\n    && b\n\nENV A=1 \\\n    B=2\n")
    assert steps == [("FROM", "x AS y"), ("RUN", "a && b"), ("ENV", "A=1 B=2")]
    patterns = ["*", "!app", "**/__pycache__"]
    assert not ignored(Path("app/ops/ui/index.html"), patterns)
    assert ignored(Path("tests/x.py"), patterns)
    assert ignored(Path("app/__pycache__/x.pyc"), patterns)
    image = Image(Path("/t"))
    assert image.inside("install -d /cache /usr/x && /opt/a/b http://h/c a/b") == (
        "install -d /t/cache /usr/x && /t/opt/a/b http://h/c a/b"
    )


def test_files_are_copied_as_docker_copies_them(tmp_path: Path) -> None:
    copy(["deploy/sbom.py"], tmp_path / "deploy/sbom.py", [])
    copy(["README.md", "LICENSE"], tmp_path, [])
    copy(["deploy/grafana"], tmp_path / "grafana", ["**/provisioning"])
    found = {str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*") if path.is_file()}
    assert found == {"deploy/sbom.py", "README.md", "LICENSE", "grafana/dashboards/tessera.json"}


def test_the_image_runs_as_nobody_in_particular() -> None:
    steps = instructions((ROOT / "Dockerfile").read_text())
    assert [arguments for name, arguments in steps if name == "USER"] == ["10001:10001"]
    assert sum(name == "FROM" for name, _ in steps) == 2, "build tools stay behind"
    assert "HEALTHCHECK" in dict(steps)


def test_kubernetes_confines_the_server_as_compose_does() -> None:
    manifests = {manifest["kind"]: manifest for manifest in yaml.safe_load_all((DEPLOY / "kubernetes.yml").read_text())}
    assert set(manifests) == {"Deployment", "Service", "NetworkPolicy", "PodDisruptionBudget"}
    deployment, service = manifests["Deployment"], manifests["Service"]
    pod = deployment["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    assert pod["securityContext"]["runAsNonRoot"] is True
    assert pod["securityContext"]["runAsUser"] == 10001
    assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    assert pod["automountServiceAccountToken"] is False
    assert container["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "privileged": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }
    assert {"cpu", "memory"} <= set(container["resources"]["limits"])
    assert container["image"] == COMPOSE["services"]["tessera"]["image"]
    for probe in ("startupProbe", "livenessProbe", "readinessProbe"):
        assert container[probe]["httpGet"]["port"] == "admin"
    assert [port["targetPort"] for port in service["spec"]["ports"]] == ["http"], "the admin port takes no keys"
    names = {volume["name"] for volume in pod["volumes"]}
    assert {mount["name"] for mount in container["volumeMounts"]} == names
    options = SERVE_OPTIONS.read(build_parser()[0].parse_args(["serve", *container["args"]]), {})
    assert pod["terminationGracePeriodSeconds"] > options.value("drain_timeout") + 5, (
        "the delay of preStop, and the drain"
    )
    assert container["lifecycle"]["preStop"]["exec"]["command"] == ["sleep", "5"]
    (http, admin) = manifests["NetworkPolicy"]["spec"]["ingress"]
    assert (http["ports"], "from" in http) == ([{"port": "http"}], False)
    assert (admin["ports"], "from" in admin) == ([{"port": "admin"}], True), "the admin port is for monitoring alone"


def test_the_charts_values_are_all_used_and_fit_their_schema() -> None:
    chart = DEPLOY / "kubernetes"
    values = yaml.safe_load((chart / "values.yaml").read_text())
    schema = json.loads((chart / "values.schema.json").read_text())
    jsonschema.validate(values, schema)
    everything = yaml.safe_load((chart / "ci" / "everything-values.yaml").read_text())
    jsonschema.validate(everything, schema)
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate({"replica": 2}, schema)
    templates = "".join(path.read_text() for path in sorted((chart / "templates").iterdir()))
    used = set(re.findall(r"\.Values\.([\w.]+)", templates))
    declared = set(schema["properties"]) - {"global"}
    assert {name.partition(".")[0] for name in used} == declared == set(values)
    for name in used:
        first, _, second = name.partition(".")
        assert not second or second in values[first], f".Values.{name} has no default"


@pytest.mark.skipif(shutil.which("helm") is None, reason="helm is not installed")
def test_the_manifests_are_the_chart_with_its_defaults() -> None:
    command = ["helm", "template", "tessera", str(DEPLOY / "kubernetes")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    rendered, committed = done.stdout, (DEPLOY / "kubernetes.yml").read_text()
    assert list(yaml.safe_load_all(rendered)) == list(yaml.safe_load_all(committed)), "run make chart"


def test_the_bill_of_materials_names_every_package_and_its_licence() -> None:
    bill = sbom().bill()
    assert (bill["bomFormat"], bill["specVersion"]) == ("CycloneDX", "1.5")
    assert bill["metadata"]["component"]["name"] == "tessera-llm"
    parts = {part["name"]: part for part in bill["components"]}
    assert bill["serialNumber"] == sbom().bill()["serialNumber"]
    for name in licences_of("requirements.lock"):
        assert parts[name]["purl"] == f"pkg:pypi/{name}@{parts[name]['version']}"
        assert parts[name]["licenses"], name
    (needs,) = [one["dependsOn"] for one in bill["dependencies"] if one["ref"] == parts["httpx"]["bom-ref"]]
    assert parts["httpcore"]["bom-ref"] in needs
    steps = (ROOT / "Dockerfile").read_text()
    assert "sbom.py > /opt/tessera/sbom.cdx.json" in steps


def test_everything_is_locked_with_hashes_and_may_be_used() -> None:
    assert unhashed() == []
    licences = licences_of("requirements.lock")
    assert len(licences) > 30
    assert [name for name, licence in licences.items() if not is_allowed(name, licence)] == []
    assert not is_allowed("x", "GNU Affero General Public License v3")
    assert not is_allowed("x", "GPL-3.0-only")
    assert not is_allowed("x", "")


@pytest.mark.parametrize("several", [False, True])
def test_the_services_options_are_ones_that_the_server_has(tmp_path: Path, several: bool) -> None:
    """Also the list of models, which is a comment."""
    text = (DEPLOY / "tessera.yaml").read_text()
    if several:
        text = re.sub(r"^# (?=gpu-memory|models|  )", "", text, flags=re.MULTILINE).replace("\nmodel: ", "\n# model: ")
    path = tmp_path / "tessera.yaml"
    path.write_text(text)
    given = SERVE_OPTIONS.read(argparse.Namespace(config=path), {})
    assert (given.value("admin_port"), given.source("api_keys_file")) == (8001, "file")
    assert [entry["served_model_name"] for entry in given.value("models")] == [("small",), ("large",)] * several
    unit = (DEPLOY / "tessera.service").read_text()
    assert "ExecReload=/bin/kill -HUP $MAINPID" in unit
    assert int(re.findall(r"TimeoutStopSec=(\d+)", unit)[0]) > given.value("drain_timeout")


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd-analyze is not installed")
def test_systemd_takes_the_unit(tmp_path: Path) -> None:
    text = (DEPLOY / "tessera.service").read_text()
    unit = tmp_path / "tessera.service"
    unit.write_text(text.replace("/opt/tessera/bin/tessera", sys.executable))
    done = subprocess.run(["systemd-analyze", "verify", unit], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def test_kubernetes_own_schemas_take_the_manifests() -> None:
    validate = pytest.importorskip("kubernetes_validate", reason="kubernetes-validate is not installed")
    for manifest in yaml.safe_load_all((DEPLOY / "kubernetes.yml").read_text()):
        validate.validate(manifest, "1.30", strict=True)
