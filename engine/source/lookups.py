"""Look-ups of parameters and parts of a module with the methods of `torch.nn.Module`: ``self.get_parameter(name)``."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from engine.source.bindings import bindings
from engine.source.syntax import nodes_of, parents_of

__all__ = [
    "LOOKS_UP_PARTS",
    "LOOKS_UP_TENSORS",
    "fields_by_name",
    "literal_name",
    "reads_metadata_alone",
    "result_of_lookup",
]

_Function = ast.FunctionDef | ast.AsyncFunctionDef

LOOKS_UP_TENSORS = frozenset(
    "parameters named_parameters buffers named_buffers get_parameter get_buffer state_dict _parameters _buffers".split()
)
"""Methods and tables of a module that return or contain its parameters and buffers."""
LOOKS_UP_PARTS = frozenset(
    "modules named_modules children named_children get_submodule _modules __dict__ getattr vars".split()
)
"""Methods and tables that return or contain its parts, and functions that look up attributes by computed names."""

_NAMED = frozenset("named_parameters named_buffers named_modules named_children items".split())
_METADATA = frozenset(
    "dtype device requires_grad is_cuda is_cpu is_mps is_meta layout itemsize is_floating_point training".split()
)
_SETTERS = frozenset("train eval requires_grad_ zero_grad to half float double bfloat16 cuda cpu".split())
_VIEWS = frozenset("items values keys".split())
_PASSED_ON = frozenset("dict enumerate filter iter list next reversed set sorted tuple zip".split())
_TESTS = frozenset("callable hasattr id isinstance issubclass type".split())


def result_of_lookup(node: ast.AST, tree: ast.AST) -> ast.AST:
    """Return the call of a look-up method, or the table itself.

    Args:
        node: the attribute.
        tree: around it.
    """
    parent = parents_of(tree).get(node)
    return parent if isinstance(parent, ast.Call) and parent.func is node else node


def literal_name(lookup: ast.AST, tree: ast.AST) -> str | None:
    """Return the literal name that code looks up; None if it may look up anything.

    Args:
        lookup: the call, or the table.
        tree: around it.

    Example:
        >>> tree = ast.parse("self.get_submodule('a'), self.state_dict()['b.weight'], self._modules[key]")
        >>> [literal_name(node.value if isinstance(node, ast.Subscript) else node, tree)
        ...  for node in tree.body[0].value.elts]
        ['a', 'b.weight', None]
    """
    user = parents_of(tree).get(lookup)
    name: ast.expr | None = None
    if isinstance(lookup, ast.Call) and getattr(lookup.func, "attr", "").startswith("get_"):
        name = next((k.value for k in lookup.keywords), lookup.args[0] if lookup.args else None)
    elif isinstance(lookup, ast.Call) and isinstance(lookup.func, ast.Name) and len(lookup.args) > 1:
        name = lookup.args[1]
    elif isinstance(user, ast.Subscript) and user.value is lookup:
        name = user.slice
    return name.value if isinstance(name, ast.Constant) and isinstance(name.value, str) else None


def reads_metadata_alone(lookup: ast.AST, tree: ast.AST, calls: bool = False) -> bool:
    """Whether code only reads dtypes, devices and flags of the looked-up objects, or switches their mode.

    Args:
        lookup: the call, or the table.
        tree: of the function around it.
        calls: whether the code may also call the looked-up objects, or checkpoint such calls.

    Example:
        >>> tree = ast.parse("x.to(next(self.parameters()).dtype), sum(p.sum() for p in self.parameters())")
        >>> [reads_metadata_alone(node, tree) for node in ast.walk(tree)
        ...  if isinstance(node, ast.Call) and getattr(node.func, "attr", "") == "parameters"]
        [True, False]
    """
    return _Uses(tree, calls).are_harmless(lookup, getattr(getattr(lookup, "func", lookup), "attr", "") in _NAMED)


class _Uses:
    """The uses of an expression in a function.

    Args:
        tree, calls: as above.
    """

    def __init__(self, tree: ast.AST, calls: bool) -> None:
        self._tree, self._parents, self._calls = tree, parents_of(tree), calls
        self._followed = set[str]()

    def are_harmless(self, node: ast.AST, named: bool) -> bool:
        """Whether no use of an expression depends on numbers.

        Args:
            node: the expression.
            named: whether its items are pairs of a name or number and an object.
        """
        parent = self._parents.get(node)
        if isinstance(parent, ast.Expr):
            return True
        if isinstance(parent, ast.Attribute):
            return self._is_harmless_attribute(parent, named)
        if isinstance(parent, (ast.Subscript, ast.Starred, ast.Tuple, ast.List)):
            return getattr(parent, "slice", None) is not node and self.are_harmless(parent, named)
        if isinstance(parent, ast.Call):
            return self._is_harmless_call(parent, node, named)
        if isinstance(parent, (ast.For, ast.comprehension)) and parent.iter is node:
            return self._all(self._targets(parent.target, named), named)
        if isinstance(parent, ast.Assign) and all(isinstance(target, ast.Name) for target in parent.targets):
            return self._all((target.id for target in parent.targets), named)  # type: ignore[attr-defined]
        if isinstance(parent, ast.Compare):
            return all(isinstance(operator, (ast.Is, ast.IsNot)) for operator in parent.ops)
        if isinstance(parent, ast.UnaryOp):
            return isinstance(parent.op, ast.Not)
        return getattr(parent, "test", None) is node

    def _is_harmless_attribute(self, attribute: ast.Attribute, named: bool) -> bool:
        if isinstance(attribute.ctx, ast.Store):
            return attribute.attr in ("requires_grad", "training", "grad")
        user = self._parents.get(attribute)
        if isinstance(user, ast.Call) and user.func is attribute:
            if attribute.attr in _VIEWS:
                return self.are_harmless(user, attribute.attr == "items")
            if attribute.attr in _SETTERS:
                return self.are_harmless(user, named)
            return attribute.attr in _METADATA
        return attribute.attr in _METADATA or self.are_harmless(attribute, named)

    def _is_harmless_call(self, call: ast.Call, node: ast.AST, named: bool) -> bool:
        name = getattr(call.func, "attr", getattr(call.func, "id", ""))
        if call.func is node or "checkpoint" in name:
            return self._calls
        if isinstance(call.func, ast.Name) and name in _PASSED_ON:
            return self.are_harmless(call, named or name == "enumerate")
        return name in _TESTS

    def _targets(self, target: ast.expr, named: bool) -> Iterator[str]:
        items = target.elts[1:] if named and isinstance(target, ast.Tuple) else [target]
        yield from (node.id for item in items for node in ast.walk(item) if isinstance(node, ast.Name))

    def _all(self, variables: Iterator[str], named: bool) -> bool:
        new = set(variables) - self._followed
        self._followed |= new
        names = (n for n in nodes_of(self._tree, ast.Name) if n.id in new and isinstance(n.ctx, ast.Load))
        return all(self.are_harmless(name, named) for name in names)


def fields_by_name(tree: _Function) -> Iterator[tuple[ast.expr, ast.expr]]:
    """Yield look-ups, by a computed name, of attributes of a variable's or a call's value, each with the name.

    Names of parts and methods of the module, and those of functions of a namespace, are followed by other analyses,
    unless the function itself sets attributes under computed names. A loop over a table of names is no such look-up,
    because it visits all of them (``for name in self.defaults``).

    Example:
        >>> text = "def f(self, t, k): return getattr(t, k), getattr(self.t, k), getattr(t, 'k'), vars(t)[k]"
        >>> [ast.unparse(pick) for pick, _ in fields_by_name(ast.parse(text).body[0])]
        ['getattr(t, k)', 'vars(t)[k]']
    """
    sets = [c for c in nodes_of(tree, ast.Call) if getattr(c.func, "id", "") == "setattr" and len(c.args) > 1]
    is_set = any(not isinstance(call.args[1], ast.Constant) for call in sets)
    own = {*bindings(tree), *(argument.arg for argument in (*tree.args.args[1:], *tree.args.kwonlyargs))}
    methods = {call.func for call in nodes_of(tree, ast.Call)}  # whose results are those of unknown functions
    all_names = set(_loop_variables(tree))
    for node in ast.walk(tree):
        match node:
            case (
                ast.Call(func=ast.Name(id="getattr"), args=[holder, name, *_])
                | ast.Subscript(value=ast.Call(func=ast.Name(id="vars"), args=[holder]), slice=name)
                | ast.Subscript(value=ast.Attribute(value=holder, attr="__dict__"), slice=name)
            ) if node not in methods and not isinstance(name, ast.Constant):
                if name in all_names:
                    continue
                if is_set or isinstance(holder, ast.Call) or isinstance(holder, ast.Name) and holder.id in own:
                    yield node, name


def _loop_variables(tree: _Function) -> Iterator[ast.Name]:
    """Yield the loop variables over the keys or items of a table in an attribute, where they are read inside the loop.

    Example:
        >>> text = "def f(self):\\n  for a in self.kept.keys(): a\\n  for b in self.picked(): b\\n  return a"
        >>> [(name.id, name.lineno) for name in _loop_variables(ast.parse(text).body[0])]
        [('a', 2)]
    """
    parents = parents_of(tree)
    for loop in nodes_of(tree, ast.For, ast.comprehension):
        match loop.iter:
            case ast.Attribute() | ast.Call(func=ast.Attribute(value=ast.Attribute(), attr="items" | "keys"), args=[]):
                targets = {node.id for node in ast.walk(loop.target) if isinstance(node, ast.Name)}
                whole = loop if isinstance(loop, ast.For) else parents[loop]
                names = (node for node in ast.walk(whole) if isinstance(node, ast.Name) and node.id in targets)
                yield from (name for name in names if isinstance(name.ctx, ast.Load))
