"""Rules and alerts: over series that exist, tested with promtool, and evaluated by a real Prometheus that scrapes the real service."""

import json
import re
import subprocess
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import yaml

from service.ports import free_port
from tests.deploy.exported import DEPLOY, binary
from tests.deploy.promql import Series, labels_of, metrics_of, plain
from tests.deploy.test_dashboards import PANELS
from tests.service.live import LiveService

PROMETHEUS = DEPLOY / "prometheus"
NAMES = ("rules", "alerts")
GROUPS = {name: yaml.safe_load((PROMETHEUS / f"{name}.yaml").read_text())["spec"]["groups"] for name in NAMES}
RULES = [rule for group in GROUPS["rules"] for rule in group["rules"]]
ALERTS = [rule for group in GROUPS["alerts"] for rule in group["rules"]]
PATIENCE_S = 60.0


def write_rules(folder: Path) -> None:
    """The groups of both files, as Prometheus itself reads them."""
    for name in NAMES:
        (folder / f"{name}.yaml").write_text(yaml.safe_dump({"groups": GROUPS[name]}))


@pytest.fixture(scope="session")
def recorded(known: Series) -> Series:
    """What there is, and what the rules make of it."""
    return {**known, **{rule["record"]: labels_of(rule["expr"], known) for rule in RULES}}


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule["record"])
def test_a_rule_is_about_series_that_exist_and_called_after_its_labels(rule: dict[str, Any], recorded: Series) -> None:
    level = rule["record"].split(":")[0]
    assert recorded[rule["record"]] == ({"model"} if level == "model" else set())


@pytest.mark.parametrize("alert", ALERTS, ids=lambda alert: alert["alert"])
def test_an_alert_is_about_series_that_exist_and_says_what_is_wrong(alert: dict[str, Any], recorded: Series) -> None:
    labels = labels_of(alert["expr"], recorded)
    told = "".join(alert["annotations"].values())
    assert set(re.findall(r"\$labels\.(\w+)", told)) <= labels
    assert set(alert["annotations"]) == {"summary", "description"}
    assert alert["labels"]["severity"] in ("page", "ticket")


@pytest.mark.parametrize("alert", ALERTS, ids=lambda alert: alert["alert"])
def test_every_alert_has_its_place_in_the_book(alert: dict[str, Any]) -> None:
    assert f"\n### {alert['alert']}\n" in (DEPLOY / "observability.md").read_text()


def test_every_alert_is_tested_both_ways() -> None:
    tests = [case for test in yaml.safe_load((PROMETHEUS / "tests.yaml").read_text())["tests"] for case in test["alert_rule_test"]]
    for expected in (True, False):
        assert {case["alertname"] for case in tests if bool(case.get("exp_alerts")) is expected} == {alert["alert"] for alert in ALERTS}


# By Prometheus itself --------------------------------------------------------------------------------------------------------------------


@pytest.mark.prometheus
def test_promtool_takes_the_rules_and_its_tests_pass(tmp_path: Path) -> None:
    write_rules(tmp_path)
    (tmp_path / "tests.yaml").write_text((PROMETHEUS / "tests.yaml").read_text())
    for command in (["check", "rules", "rules.yaml", "alerts.yaml"], ["test", "rules", "tests.yaml"]):
        done = subprocess.run([binary("promtool"), *command], cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False)
        assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.prometheus
def test_promtool_takes_the_scrape_configuration(tmp_path: Path) -> None:
    command = [binary("promtool"), "check", "config", str(PROMETHEUS / "scrape.yaml")]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


class Prometheus:
    """A running server; `ask` gives the samples of a query."""

    def __init__(self, port: int) -> None:
        self._url = f"http://127.0.0.1:{port}"

    def get(self, path: str, **parameters: str) -> Any:
        with urllib.request.urlopen(f"{self._url}{path}?{urllib.parse.urlencode(parameters)}", timeout=10) as answer:
            return json.load(answer)["data"]

    def ask(self, query: str) -> list[Any]:
        samples: list[Any] = self.get("/api/v1/query", query=query)["result"]
        return samples

    def until(self, condition: Callable[[], object], what: str) -> None:
        deadline = time.monotonic() + PATIENCE_S
        while not condition():
            assert time.monotonic() < deadline, f"not within {PATIENCE_S:g} s: {what}"
            time.sleep(0.1)


@contextmanager
def scraping(port: int, folder: Path) -> Iterator[Prometheus]:
    """A Prometheus with the rules of this repository, that scrapes this port of loopback twice a second."""
    write_rules(folder)
    scrape = yaml.safe_load((PROMETHEUS / "scrape.yaml").read_text())["scrape_configs"][0]
    config = {
        "global": {"evaluation_interval": "500ms"},
        "rule_files": ["rules.yaml", "alerts.yaml"],
        "scrape_configs": [{**scrape, "scrape_interval": "500ms", "static_configs": [{"targets": [f"127.0.0.1:{port}"]}]}],
    }
    for group in (*config["rule_files"],):  # each group's own interval is for production
        file = folder / str(group)
        file.write_text(file.read_text().replace("interval: 15s", "interval: 500ms"))
    (folder / "prometheus.yaml").write_text(yaml.safe_dump(config))
    own = free_port()
    command = [binary("prometheus"), f"--config.file={folder / 'prometheus.yaml'}", f"--storage.tsdb.path={folder / 'data'}"]
    with (folder / "log").open("w") as log:
        process = subprocess.Popen([*command, f"--web.listen-address=127.0.0.1:{own}"], stdout=log, stderr=subprocess.STDOUT)
    try:
        server = Prometheus(own)
        server.until(lambda: _listens(server, process, folder / "log"), "Prometheus answers")
        yield server
    finally:
        process.terminate()
        process.wait(30)


def _listens(server: Prometheus, process: "subprocess.Popen[bytes]", log: Path) -> bool:
    assert process.poll() is None, log.read_text()
    try:
        return bool(server.get("/api/v1/targets"))
    except OSError:
        return False


@pytest.mark.service
@pytest.mark.prometheus
def test_a_real_prometheus_scrapes_the_service_and_every_panel_of_ours_has_something_to_show(service: LiveService, tmp_path: Path) -> None:
    def post(path: str, **body: Any) -> int:
        request = urllib.request.Request(service.url + path, json.dumps(body).encode(), {"content-type": "application/json"})
        try:
            with urllib.request.urlopen(request, timeout=60) as answer:
                return int(answer.status)
        except urllib.error.HTTPError as error:
            return error.code

    binary("prometheus")
    with scraping(service.port, tmp_path) as server:
        asked = 0
        while asked < 200 and len(server.ask("model:attnserve_first_token_seconds:p95_5m >= 0")) < 1:
            assert post("/v1/embeddings", model="all-MiniLM-L6-v2", input=[f"text {asked}", "and another that is longer"]) == 200
            assert post("/v1/completions", model="tiny-decoder", prompt="def", max_tokens=8, ignore_eos=True) == 200
            assert post("/v1/embeddings", model="all-MiniLM-L6-v2", input="") == 400
            asked += 1
        server.until(lambda: server.ask("model:attnserve_requests:rate5m > 0"), "a rule has been computed")
        assert [sample["value"][1] for sample in server.ask("up")] == ["1"]
        empty = {
            panel["title"]
            for _, panel in PANELS
            for target in panel["targets"]
            if _is_ours(target) and not server.ask(plain(target["expr"]))
        }
        assert not empty
        for _, panel in PANELS:  # what only a cluster has is understood at least
            for target in panel["targets"]:
                server.ask(plain(target["expr"]))
        groups = server.get("/api/v1/rules")["groups"]
        unwell = {rule["name"]: rule["lastError"] for group in groups for rule in group["rules"] if rule["health"] == "err"}
        assert not unwell
        assert not [alert["labels"]["alertname"] for alert in server.get("/api/v1/alerts")["alerts"] if alert["state"] == "firing"]


def _is_ours(target: dict[str, Any]) -> bool:
    return not any(metric.startswith("ray_") for metric in metrics_of(plain(target["expr"])))
