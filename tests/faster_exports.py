"""Makes torch's exporter faster in tests: it remembers what it would compute again and again, such as products of sizes.

Exported graphs are the same to the byte (compared for four models when this was written, torch 2.13). A part whose names a later version of
torch, onnxscript or sympy does not have is left out, and exports are slower.
"""

from collections.abc import Callable
from contextlib import suppress
from functools import cache, wraps
from typing import Any

# Methods of `SymNode` that depend on their two sizes alone; `mod` also depends on bounds that are known of them.
_PURE = ("add", "sub", "mul", "int_floordiv", "eq", "ne", "ge", "gt", "le", "lt")


def remember() -> None:
    once = (_parse_functions_once, _read_signatures_once, _list_operators_once, _compute_sizes_once, _find_numbers_once)
    for part in (*once, _try_rules_where_they_can_match, _keep_no_sources):
        with suppress(ImportError, AttributeError):
            part()


def _parse_functions_once() -> None:
    """Each export would parse the source of 500 ONNX functions, which takes half a second."""
    from torch.onnx._internal._lazy_import import onnxscript_apis

    onnxscript_apis.get_torchlib_ops = cache(onnxscript_apis.get_torchlib_ops)


def _try_rules_where_they_can_match() -> None:
    """For each node of the graph, a rewrite rule with two outputs would list all nodes, also if the node has another operator."""
    from onnxscript.rewriter._basics import MatchResult
    from onnxscript.rewriter._matcher import SimplePatternMatcher

    match = SimplePatternMatcher.match

    @wraps(match)
    def tried(self: Any, model: Any, graph: Any, node: Any, **how: Any) -> Any:
        wanted = self.pattern.output_nodes[0].op_identifier()
        if wanted is not None and wanted[:2] != (node.domain, node.op_type):
            return MatchResult().fail("another operator", node)
        return match(self, model, graph, node, **how)

    SimplePatternMatcher.match = tried


def _compute_sizes_once() -> None:
    """Products, sums and comparisons of symbolic sizes: for every new tensor, sympy would derive the same ones again."""
    from torch.fx.experimental.proxy_tensor import get_proxy_mode
    from torch.fx.experimental.sym_node import _NO_HINT, SymNode

    def remembering(method: str, compute: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
        @wraps(compute)
        def computed(self: Any, other: Any) -> Any:
            env = self.shape_env
            if env is None or env._translation_validation_enabled or not isinstance(other, SymNode) or get_proxy_mode():
                return compute(self, other)
            one, two = (self._expr, self.pytype, self._hint), (other._expr, other.pytype, other._hint)
            key = method, env._replacements_version_counter, *one, self._optimized_summation, *two, other._optimized_summation
            known = env.__dict__.setdefault("remembered", {})
            if (found := known.get(key)) is None:
                result = compute(self, other)
                if type(result) is not SymNode or result.constant is not None:
                    return result
                hint = _NO_HINT if result._hint is None else result._hint
                known[key] = result._expr, result.pytype, hint, result._optimized_summation
                return result
            expr, pytype, hint, summation = found
            return SymNode(expr, env, pytype, hint, optimized_summation=summation)

        return computed

    for method in _PURE:
        setattr(SymNode, f"_{method}", remembering(method, getattr(SymNode, f"_{method}")))


def _find_numbers_once() -> None:
    """At each use of a size, sympy would look at all parts of a sum or product to see whether it is a number."""
    import sympy
    from torch.fx.experimental.sym_node import SymNode

    is_number, expression = sympy.Expr.is_number.fget, SymNode.expr.fget
    sympy.Expr.is_number = property(cache(is_number))

    def found(self: Any) -> Any:
        replaced = self.shape_env is None or self.shape_env._replacements_version_counter
        return expression(self) if replaced else self._expr

    SymNode.expr = property(found)


def _keep_no_sources() -> None:
    """The lines of source that made a node: `strip` in `export/graphs/torch_graph.py` removes them from the graph."""
    import torch.fx

    torch.fx.config.do_not_emit_stack_traces = True


def _read_signatures_once() -> None:
    """Each export would derive the signatures of 500 ONNX functions from their types."""
    from torch.onnx._internal.exporter import _schemas

    _schemas.op_signature_from_function = cache(_schemas.op_signature_from_function)


def _list_operators_once() -> None:
    """Several times in an export, torch would look for all operators of its library, to load those that were not loaded yet."""
    from torch._export import utils

    utils._materialize_cpp_cia_ops = cache(utils._materialize_cpp_cia_ops)
