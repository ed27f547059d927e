"""Each panel asks for series that exist, by labels that they have, and is readable without other documents."""

import json
import re
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from tests.deploy.exported import ray_series
from tests.deploy.promql import Series, labels_of, plain, selectors_of
from tests.deploy.rendered import CHART

FILES = sorted((CHART / "dashboards").glob("*.json"))
DASHBOARDS = {file.stem: json.loads(file.read_text()) for file in FILES}
PANELS = [(name, panel) for name, board in DASHBOARDS.items() for panel in board["panels"] if panel["type"] != "row"]


@pytest.mark.parametrize(("name", "panel"), PANELS, ids=lambda each: each if isinstance(each, str) else each["title"])
def test_a_panels_queries_find_series_and_its_legend_finds_labels(name: str, panel: dict[str, Any], known: Series) -> None:
    assert panel["targets"]
    for target in panel["targets"]:
        labels = labels_of(plain(target["expr"]), known)
        assert "$" not in plain(target["expr"]), "a variable that the dashboard does not have"
        for selector in selectors_of(target["expr"].replace("[$__rate_interval]", "[5m]")):  # vLLM has series of the same names
            matchers = {matcher.name: matcher.value for matcher in selector.matchers.matchers}
            assert (matchers["job"], matchers["namespace"]) == ("attnserve", "$namespace"), selector.name
        shown = set(re.findall(r"{{\s*(\w+)\s*}}", target["legendFormat"]))
        assert shown <= labels, f"{target['expr']} has no {shown - labels}"
        assert shown == labels or not labels <= {"model", "model_name", "method", "err", "lane"}, "two lines would have one name"


@pytest.mark.parametrize(("name", "panel"), PANELS, ids=lambda each: each if isinstance(each, str) else each["title"])
def test_a_panel_can_be_read(name: str, panel: dict[str, Any]) -> None:
    assert panel["title"]
    assert panel["description"].endswith(".")
    assert panel["fieldConfig"]["defaults"]["unit"]
    assert all(target["legendFormat"] for target in panel["targets"])


@pytest.mark.parametrize("name", DASHBOARDS)
def test_panels_do_not_lie_on_each_other(name: str) -> None:
    places = [panel["gridPos"] for panel in DASHBOARDS[name]["panels"]]
    cells = [(x, y) for at in places for x in range(at["x"], at["x"] + at["w"]) for y in range(at["y"], at["y"] + at["h"])]
    assert len(cells) == len(set(cells))
    assert max(x for x, _ in cells) < 24
    ids = [panel["id"] for panel in DASHBOARDS[name]["panels"]]
    assert len(ids) == len(set(ids))


@pytest.mark.parametrize("name", DASHBOARDS)
def test_choices_are_made_of_labels_that_exist(name: str, known: Series) -> None:
    queries = [each["query"]["query"] for each in DASHBOARDS[name]["templating"]["list"] if each["type"] == "query"]
    assert queries
    for query in queries:
        series, label = re.fullmatch(r"label_values\((.+), (\w+)\)", query).groups()  # type: ignore[union-attr]
        assert label in labels_of(plain(series), known)
        assert 'job="attnserve"' in series


def test_dashboards_have_names_of_their_own() -> None:
    assert len({board["uid"] for board in DASHBOARDS.values()}) == len(FILES)
    listed = (CHART / "dashboards" / "kustomization.yaml").read_text()
    assert all(f"files: [{file.name}]" in listed for file in FILES)


@pytest.mark.parametrize("name", ray_series())
def test_what_we_ask_of_ray_is_defined_where_the_list_says(name: str) -> None:
    ray = find_spec("ray")
    assert ray is not None
    source = (Path(str(ray.origin)).parent / ray_series()[name]["source"]).read_text()
    defined = name.removeprefix("ray_").removesuffix("_bucket")
    assert f'"{defined}"' in source or f'"{defined.removesuffix("_total")}"' in source
    for label in set(ray_series()[name]["labels"]) - {"le", "application", "deployment", "replica"}:
        # Those of nodes are in constants beside it, and a loop's in constants of its class.
        assert re.search(rf'"{label}"', source) or label in _node_labels(Path(str(ray.origin)).parent)


def _node_labels(ray: Path) -> set[str]:
    lines = re.findall(r"^(?:NODE|GPU)_TAG_KEYS = .*$", (ray / "dashboard" / "consts.py").read_text(), re.MULTILINE)
    return set(re.findall(r'"(\w+)"', "".join(lines)))
