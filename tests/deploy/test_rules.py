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
from promql_parser import MatchOp

from loadtest.common.server import free_port
from service.telemetry.metrics import GeneratorMetrics, Metrics
from tests.deploy.exported import LISTS, binary
from tests.deploy.promql import Series, labels_of, metrics_of, numbers_of, plain, selectors_of
from tests.deploy.rendered import CHART, DEPLOY, rendered
from tests.deploy.test_dashboards import PANELS
from tests.service.exposition import samples
from tests.service.fakes import PATIENCE_S
from tests.service.live import LiveService

SCRAPE = DEPLOY / "prometheus" / "scrape.yaml"
RULES_FOLDER = CHART / "rules"
NAMES = ("rules", "alerts")
TESTS = ("tests.yaml", "tests-objectives.yaml")
GROUPS = {name: yaml.safe_load((RULES_FOLDER / f"{name}.yaml").read_text())["spec"]["groups"] for name in NAMES}
RULES = [rule for group in GROUPS["rules"] for rule in group["rules"]]
ALERTS = [rule for group in GROUPS["alerts"] for rule in group["rules"]]


def write_rules(folder: Path) -> None:
    """The groups of both files, as Prometheus itself reads them."""
    for name in NAMES:
        (folder / f"{name}.yaml").write_text(yaml.safe_dump({"groups": GROUPS[name]}))


@pytest.fixture(scope="session")
def recorded(known: Series) -> Series:
    """What there is, and what the rules make of it, one from the other."""
    found = dict(known)
    for rule in RULES:
        found[rule["record"]] = labels_of(rule["expr"], found)
    return found


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule["record"])
def test_a_rule_is_about_series_that_exist_and_called_after_its_labels(rule: dict[str, Any], recorded: Series) -> None:
    level = rule["record"].split(":")[0]
    assert recorded[rule["record"]] == ({"namespace", "model"} if level == "model" else {"namespace"})


@pytest.mark.parametrize("alert", ALERTS, ids=lambda alert: alert["alert"])
def test_an_alert_is_about_series_that_exist_and_says_what_is_wrong(alert: dict[str, Any], recorded: Series) -> None:
    labels = labels_of(alert["expr"], recorded)
    told = "".join(alert["annotations"].values())
    assert set(re.findall(r"\$labels\.(\w+)", told)) <= labels
    assert set(alert["annotations"]) == {"summary", "description", "runbook_url"}
    assert alert["labels"]["severity"] in ("page", "ticket")


@pytest.mark.parametrize("rule", [*RULES, *ALERTS], ids=lambda rule: rule.get("record") or rule["alert"])
def test_every_selector_names_job_and_namespace(rule: dict[str, Any]) -> None:
    """vLLM, text-embeddings-inference and other clusters of Ray have series of the same names in the same Prometheus."""
    made_here = {each["record"] for each in RULES}
    for selector in selectors_of(rule["expr"]):
        if selector.name not in made_here:
            matchers = {matcher.name: (matcher.op, matcher.value) for matcher in selector.matchers.matchers}
            job = "kube-state-metrics" if selector.name.startswith("kube_") else "attnserve"
            assert matchers["job"] == (MatchOp.Equal, job), selector.name
            assert matchers["namespace"] == (MatchOp.Re, "attnserve"), selector.name


@pytest.mark.parametrize("alert", ALERTS, ids=lambda alert: alert["alert"])
def test_every_alert_has_its_place_in_the_book(alert: dict[str, Any]) -> None:
    page, anchor = alert["annotations"]["runbook_url"].split("#")
    assert anchor == alert["alert"].lower()
    assert anchor in anchors(DEPLOY.parent / page)


def anchors(page: Path) -> set[str]:
    """Of its headings, as GitHub and GitLab make them."""
    headings = re.findall(r"^#+ (.+)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("rule", [*RULES, *ALERTS], ids=lambda rule: rule.get("record") or rule["alert"])
def test_a_bound_that_is_asked_for_is_the_bound_of_a_bucket(rule: dict[str, Any]) -> None:
    """Of one as it is exported: `le="1"` finds nothing where there is `le="1.0"`."""
    metrics = Metrics()
    metrics.request("/v1/embeddings", "mini", 200, 0.1)
    GeneratorMetrics(metrics, "wordy")
    exported = {(sample.name, sample.labels.get("le")) for sample in samples(metrics.exposition().decode())}
    for selector in selectors_of(rule["expr"]):
        for matcher in selector.matchers.matchers:
            assert matcher.name != "le" or (selector.name, matcher.value) in exported, f"{selector.name} has no bucket {matcher.value}"


def test_memory_is_told_of_before_ray_kills_for_it() -> None:
    """Ray's own default is 0.95: `RAY_memory_usage_threshold` in its src/ray/common/ray_config_def.h."""
    (alert,) = [each for each in ALERTS if each["alert"] == "AttnserveNodeMemory"]
    (warned_at,) = numbers_of(alert["expr"])
    flags = (CHART / "templates" / "settings.yaml").read_text() + (DEPLOY / "faults.md").read_text()
    assert all(warned_at + 0.05 <= float(kills_at) for kills_at in [*re.findall(r"RAY_memory_usage_threshold=([\d.]+)", flags), 0.95])


def test_burn_rates_are_those_of_their_windows() -> None:
    """Of a budget of 30 days: 2 % in an hour, 5 % in six, 10 % in a day and in three; the short window is a twelfth of the long one."""
    minutes = {"m": 1, "h": 60, "d": 1440}
    spends = {"1h": 0.02, "6h": 0.05, "1d": 0.1, "3d": 0.1}
    found = re.findall(
        r"model:(\w+):ratio_(\w+) > (?:([\d.]+) \* )?([\d.]+) and model:\1:ratio_(\w+) > (?:\3 \* )?\4",
        "".join(alert["expr"] for alert in ALERTS),
    )
    assert [window for _, window, *_ in found] == ["1h", "6h", "1d", "3d"] * 3
    for _, window, rate, _, short in found:
        long, brief = (int(each[:-1]) * minutes[each[-1]] for each in (window, short))
        assert float(rate or 1) == pytest.approx(spends[window] * 30 * 1440 / long)
        assert long == 12 * brief


def promtools_tests(file: str) -> dict[str, Any]:
    listed: dict[str, Any] = yaml.safe_load((LISTS / file).read_text())
    return listed


def test_every_alert_is_tested_both_ways() -> None:
    tests = [case for file in TESTS for test in promtools_tests(file)["tests"] for case in test["alert_rule_test"]]
    for expected in (True, False):
        assert {case["alertname"] for case in tests if bool(case.get("exp_alerts")) is expected} == {alert["alert"] for alert in ALERTS}


# By Prometheus itself --------------------------------------------------------------------------------------------------------------------


@pytest.mark.live
def test_promtool_takes_the_rules_and_its_tests_pass(tmp_path: Path) -> None:
    write_rules(tmp_path)
    for file in TESTS:
        (tmp_path / file).write_text((LISTS / file).read_text())
    promtool(tmp_path, "check", "rules", "rules.yaml", "alerts.yaml")
    promtool(tmp_path, "test", "rules", *TESTS)


def promtool(folder: Path, *command: str) -> None:
    done = subprocess.run([binary("promtool"), *command], cwd=folder, capture_output=True, text=True, timeout=PATIENCE_S, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.live
@pytest.mark.parametrize("name", NAMES)
def test_what_is_to_be_changed_is_changed_by_the_line_that_says_how(name: str) -> None:
    """Other namespaces, and an address in front of the runbook's pages."""
    file = (RULES_FOLDER / f"{name}.yaml").read_text()
    (script,) = re.findall(r"^#   kubectl kustomize deploy/chart/rules \| sed '(.+)' \| kubectl apply", file, re.MULTILINE)
    done = subprocess.run(["sed", script], input=rendered(RULES_FOLDER), capture_output=True, text=True, timeout=PATIENCE_S, check=True)
    rules = [rule for each in yaml.safe_load_all(done.stdout) for group in each["spec"]["groups"] for rule in group["rules"]]
    if name == "rules":
        made_here = {rule["record"] for rule in RULES}
        read = [selector for rule in rules for selector in selectors_of(rule["expr"]) if selector.name not in made_here]
        namespaces = {matcher.value for selector in read for matcher in selector.matchers.matchers if matcher.name == "namespace"}
        assert namespaces == {"production|staging"}
    else:
        pages = [rule["annotations"]["runbook_url"] for rule in rules if "alert" in rule]
        assert all(page.startswith("https://git.example/attnserve/blob/main/deploy/") for page in pages)


@pytest.mark.live
def test_promtool_takes_the_scrape_configuration(tmp_path: Path) -> None:
    command = [binary("promtool"), "check", "config", str(SCRAPE)]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=PATIENCE_S, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


class Prometheus:
    """A running server; `ask` gives the samples of a query."""

    def __init__(self, port: int) -> None:
        self._url = f"http://127.0.0.1:{port}"

    def get(self, path: str, **parameters: str) -> Any:
        with urllib.request.urlopen(f"{self._url}{path}?{urllib.parse.urlencode(parameters)}", timeout=PATIENCE_S) as answer:
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
    written = yaml.safe_load(SCRAPE.read_text())["scrape_configs"]
    scrapes = [each for each in written if "static_configs" in each]
    for scrape in scrapes:
        scrape["scrape_interval"] = "500ms"
        scrape["static_configs"][0]["targets"] = [f"127.0.0.1:{port}"]
    config = {
        "global": {"evaluation_interval": "500ms"},
        "rule_files": ["rules.yaml", "alerts.yaml"],
        "scrape_configs": scrapes,
    }
    for group in (*config["rule_files"],):  # each group's own interval is for production
        file = folder / str(group)
        file.write_text(re.sub(r"interval: \w+", "interval: 500ms", file.read_text()))
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
        process.wait(PATIENCE_S)


def _listens(server: Prometheus, process: "subprocess.Popen[bytes]", log: Path) -> bool:
    assert process.poll() is None, log.read_text()
    try:
        return bool(server.get("/api/v1/targets"))
    except OSError:
        return False


@pytest.mark.live
def test_a_real_prometheus_scrapes_the_service_and_every_panel_of_ours_has_something_to_show(service: LiveService, tmp_path: Path) -> None:
    def post(path: str, **body: Any) -> int:
        request = urllib.request.Request(service.url + path, json.dumps(body).encode(), {"content-type": "application/json"})
        try:
            with urllib.request.urlopen(request, timeout=PATIENCE_S) as answer:
                return int(answer.status)
        except urllib.error.HTTPError as error:
            return error.code

    binary("prometheus")
    with scraping(service.port, tmp_path) as server:
        seen = ("te_request_duration_count > 0", "vllm:time_to_first_token_seconds_count > 0", "te_request_failure > 0")
        for asked in range(2):  # a series is seen to grow from its second scrape on
            assert post("/v1/embeddings", model="all-MiniLM-L6-v2", input=[f"text {asked}", "and another that is longer"]) == 200
            assert post("/v1/completions", model="tiny-decoder", prompt="def", max_tokens=8, ignore_eos=True) == 200
            assert post("/v1/embeddings", model="all-MiniLM-L6-v2", input="") == 400
            server.until(lambda: all(map(server.ask, seen)), "the requests have been scraped")
        timed = [f"model:attnserve_late_{what}:ratio_1h >= 0" for what in ("answers", "first_tokens")]
        server.until(lambda: all(map(server.ask, timed)), "the objectives have been computed")
        server.until(lambda: server.ask("model:attnserve_requests:rate5m > 0"), "a rule has been computed")
        found = [(sample["metric"]["job"], sample["metric"]["namespace"], sample["value"][1]) for sample in server.ask("up")]
        assert found == [("attnserve", "attnserve", "1")] * 2  # the service, and its HAProxy
        server.until(lambda: server.ask("attnserve:proxy_errors:ratio_rate5m == 0"), "HAProxy has answered, and nothing of its own")
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
    """One process without a file of keys has it: neither series of Ray nor of tenants, nor an error 5xx."""
    elsewhere = ("ray_", "attnserve_tenant_")
    return 'err=~"5.."' not in target["expr"] and not any(metric.startswith(elsewhere) for metric in metrics_of(plain(target["expr"])))
