"""What a PromQL expression asks for and which labels its answer has, by its own grammar (promql-parser, the port of Prometheus's)."""

from collections.abc import Mapping
from typing import Any

import promql_parser
from promql_parser import AggModifierType, AggregateExpr, BinaryExpr, Call, LabelModifierType, MatrixSelector, NumberLiteral, VectorSelector

Series = Mapping[str, frozenset[str]]  # the name of a metric -> the labels it has

_VARIABLES = {"$__rate_interval": "5m", "$namespace": ".*", "$application": ".*", "$deployment": ".*", "$model": ".*"}


def plain(query: str) -> str:
    """A dashboard's query with its variables filled in."""
    for name, value in _VARIABLES.items():
        query = query.replace(name, value)
    return query


def labels_of(query: str, known: Series) -> frozenset[str]:
    """The labels of the answer. An AssertionError names a metric that is not known, or a label that it does not have."""
    return _labels(promql_parser.parse(query), known)


def metrics_of(query: str) -> set[str]:
    return {selector.name for selector in selectors_of(query)}


def selectors_of(query: str) -> list[VectorSelector]:
    """What it reads: name and matchers of each."""
    return _selectors(promql_parser.parse(query))


def numbers_of(query: str) -> set[float]:
    """The numbers in it."""

    def found(node: Any) -> set[float]:
        return {node.val} if isinstance(node, NumberLiteral) else set().union(*map(found, _children(node)))

    return found(promql_parser.parse(query))


def _selectors(node: Any) -> list[VectorSelector]:
    if isinstance(node, VectorSelector):
        return [node]
    if isinstance(node, MatrixSelector):
        return [node.vector_selector]
    return [selector for child in _children(node) for selector in _selectors(child)]


def _children(node: Any) -> list[Any]:
    if isinstance(node, Call):
        return list(node.args)
    if isinstance(node, BinaryExpr):
        return [node.lhs, node.rhs]
    inner = getattr(node, "expr", None)
    return [] if inner is None else [inner]


def _labels(node: Any, known: Series) -> frozenset[str]:
    if isinstance(node, MatrixSelector):
        node = node.vector_selector
    if isinstance(node, VectorSelector):
        return _selected(node, known)
    inside = [_labels(child, known) for child in _children(node)]
    if isinstance(node, AggregateExpr):
        return _grouped(node, inside[0])
    if isinstance(node, Call):
        return _returned(node, inside)
    if isinstance(node, BinaryExpr):
        return _matched(node, *inside)
    return inside[0] if inside else frozenset()


def _selected(node: VectorSelector, known: Series) -> frozenset[str]:
    assert node.name in known, f"no exporter has {node.name}"
    matched = {matcher.name for matcher in node.matchers.matchers}
    assert matched <= known[node.name], f"{node.name} has no label {', '.join(matched - known[node.name])}"
    return known[node.name]


def _grouped(node: AggregateExpr, inside: frozenset[str]) -> frozenset[str]:
    if node.modifier is None:
        return frozenset()
    assert node.modifier.type == AggModifierType.By, f"{node}: say which labels stay, not which go"
    by = frozenset(node.modifier.labels)
    assert by <= inside, f"{node}: there is no label {', '.join(by - inside)}"
    return by


def _returned(node: Call, inside: list[frozenset[str]]) -> frozenset[str]:
    name = node.func.name
    labels = frozenset().union(*inside)
    if name == "absent":
        return frozenset()
    if name == "histogram_quantile":
        assert "le" in labels, f"{node}: its buckets have been summed away"
        return labels - {"le"}
    if name == "label_replace":
        made, source = node.args[1].val, node.args[3].val
        assert source in labels, f"{node}: there is no label {source}"
        return labels | {made}
    return labels


def _matched(node: BinaryExpr, left: frozenset[str], right: frozenset[str]) -> frozenset[str]:
    scalar = not (_selectors(node.lhs) and _selectors(node.rhs))
    if scalar:
        return left | right
    matching = node.modifier and node.modifier.matching
    if matching is None:
        assert left == right, f"{node}: {sorted(left)} never match {sorted(right)}"
        return left
    assert matching.type == LabelModifierType.Include, f"{node}: say on which labels it matches"
    on = frozenset(matching.labels)
    assert on <= left & right, f"{node}: both sides need {', '.join(on - (left & right))}"
    return left if str(node.op) in ("and", "or", "unless") else on
