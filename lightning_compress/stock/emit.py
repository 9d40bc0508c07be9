"""Python source of an exported program."""

from __future__ import annotations

import math
import operator
import textwrap
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils._pytree import TreeSpec

from engine.errors import InputError

__all__ = ["source_of"]

_WIDTH = 100
_CHECKS = ("_assert", "sym_constrain", "_guards")  # checks of conditions at export time
_OPERATORS = {
    operator.add: "+",
    operator.sub: "-",
    operator.mul: "*",
    operator.floordiv: "//",
    operator.truediv: "/",
    operator.mod: "%",
}

_HEAD = '''"""{kind}, exported by lightning-compress; the weights are in the safetensors file beside this file.

    from safetensors.torch import load_file

    network = Network()
    network.load_state_dict(load_file("network.safetensors"))
"""

import torch
from torch import nn

PARAMETERS = {{
{parameters}}}

BUFFERS = {{
{buffers}}}


class Network(nn.Module):
    """{kind} in eval mode."""

    def __init__(self):
        super().__init__()
        for name, (shape, dtype) in PARAMETERS.items():
            owner, key = self._place(name)
            owner.register_parameter(key, nn.Parameter(torch.empty(shape, dtype=dtype), dtype.is_floating_point))
        for name, (shape, dtype) in BUFFERS.items():
            owner, key = self._place(name)
            owner.register_buffer(key, torch.empty(shape, dtype=dtype))

    def _place(self, name):
        """Return the module that owns a tensor, and the tensor's name in that module."""
        *path, key = name.split(".")
        owner = self
        for part in path:
            if part not in owner._modules:
                owner.add_module(part, nn.Module())
            owner = owner._modules[part]
        return owner, key

    def forward(self, {arguments}):
        """Return the output of the network."""
{body}'''


def source_of(program: torch.export.ExportedProgram, kind: str) -> tuple[str, dict[str, Tensor]]:
    """Return a Python file with a class ``Network``, and the tensors that it loads.

    Args:
        program: program exported in eval mode.
        kind: name of the network's class.

    Raises:
        InputError: if the program calls anything but ops of torch, or returns anything but collections of tensors.

    Example:
        >>> program = torch.export.export(torch.nn.Linear(2, 3), (torch.zeros(4, 2),))
        >>> text, tensors = source_of(program, "Linear")
        >>> "torch.ops.aten.linear.default(x, self.weight, self.bias)" in text.replace("input", "x"), list(tensors)
        (True, ['weight', 'bias'])
    """
    signature = program.graph_signature
    held = {**signature.inputs_to_parameters, **signature.inputs_to_buffers}
    held |= getattr(signature, "inputs_to_lifted_tensor_constants", {})
    used = [node for node in program.graph.nodes if node.op == "placeholder" and node.name in held and node.users]
    tensors = {held[node.name]: _tensor(program, held[node.name]) for node in used}
    names = {node: _attribute(held[node.name]) for node in used}
    parameters = set(signature.inputs_to_parameters.values())
    tables = [_table({n: t for n, t in tensors.items() if (n in parameters) is kept}) for kept in (True, False)]
    arguments = [node.name for node in program.graph.nodes if node.name in signature.user_inputs]
    device = f"{arguments[0]}.device"
    body = "\n".join(_body(program, names, device))
    text = _HEAD.format(
        kind=kind,
        parameters=tables[0],
        buffers=tables[1],
        arguments=", ".join(arguments),
        body=textwrap.indent(body, " " * 8) + "\n",
    )
    return text, tensors


def _tensor(program: torch.export.ExportedProgram, name: str) -> Tensor:
    value = program.state_dict.get(name)
    value = program.constants[name] if value is None else value
    assert isinstance(value, Tensor)
    return value


def _attribute(name: str) -> str:
    """Return the expression of a tensor of the network.

    Example:
        >>> _attribute("layers.0.weight")
        'getattr(self.layers, "0").weight'
    """
    text = "self"
    for part in name.split("."):
        text = f"{text}.{part}" if part.isidentifier() else f'getattr({text}, "{part}")'
    return text


def _table(tensors: Mapping[str, Tensor]) -> str:
    return "".join(f'    "{name}": ({tuple(tensor.shape)}, {tensor.dtype}),\n' for name, tensor in tensors.items())


def _body(program: torch.export.ExportedProgram, names: Mapping[fx.Node, str], device: str) -> Iterator[str]:
    """Yield the lines of the forward, with ``del`` statements after the last use of each value."""
    live = _live(program.graph)
    last = _last_uses(live)
    for node in live:
        if node.op == "call_function":
            yield from _broken(f"{node.name} = ", _call(node, names, device))
        elif node.op == "output":
            yield f"return {_output(program, node, names)}"
        elif node.op != "placeholder" and node.op != "call_function":
            raise InputError(f"The program reads its part {node.target!r}, which cannot be written as plain source.")
        gone = [used.name for used in last.get(node, ()) if used.op == "call_function" and node.op == "call_function"]
        if gone:
            yield f"del {', '.join(gone)}"


def _live(graph: fx.Graph) -> list[fx.Node]:
    """Return the nodes that the output depends on, and those that write to a tensor."""
    live: set[fx.Node] = set()
    for node in reversed(graph.nodes):
        schema = getattr(node.target, "_schema", None)
        writes = schema is not None and schema.is_mutable
        if (node in live or writes or node.op == "output") and not any(c in str(node.target) for c in _CHECKS):
            live |= {node, *node.all_input_nodes}
    return [node for node in graph.nodes if node in live]


def _last_uses(nodes: Iterable[fx.Node]) -> dict[fx.Node, list[fx.Node]]:
    """Return the values that each node uses for the last time; an unused value counts as used by its own node."""
    last: dict[fx.Node, fx.Node] = {}
    for node in nodes:
        for used in (node, *node.all_input_nodes):
            last[used] = node
    users: dict[fx.Node, list[fx.Node]] = {}
    for used, node in last.items():
        users.setdefault(node, []).append(used)
    return users


def _call(node: fx.Node, names: Mapping[fx.Node, str], device: str) -> tuple[str, list[str], str]:
    """Return the text before the arguments of a call, the arguments, and the text after them."""
    args = [_text(value, names, device) for value in node.args]
    args += [f"{name}={_text(value, names, device)}" for name, value in node.kwargs.items()]
    if node.target in _OPERATORS:
        return "", [f" {_OPERATORS[node.target]} ".join(args)], ""  # type: ignore[index]
    if node.target is operator.getitem:
        return f"{args[0]}[", args[1:], "]"
    if isinstance(node.target, torch._ops.OpOverload):
        return f"torch.ops.{node.target}(", args, ")"
    if getattr(torch, getattr(node.target, "__name__", ""), None) is node.target:
        return f"torch.{node.target.__name__}(", args, ")"  # type: ignore[union-attr]
    raise InputError(f"The program calls {node.target}, which cannot be written as plain source.")


def _broken(start: str, call: tuple[str, list[str], str]) -> Iterator[str]:
    """Yield a call on one line, or with one argument per line."""
    before, args, after = call
    line = f"{start}{before}{', '.join(args)}{after}"
    if len(line) <= _WIDTH or not after:
        yield line
        return
    yield f"{start}{before}"
    yield from (f"    {argument}," for argument in args)
    yield after


def _text(value: Any, names: Mapping[fx.Node, str], device: str) -> str:
    """Return an argument as source; devices follow the input."""
    if isinstance(value, fx.Node):
        return names.get(value, value.name)
    if isinstance(value, (list, tuple)):
        items = ", ".join(_text(item, names, device) for item in value)
        return f"[{items}]"
    if isinstance(value, torch.device):
        return device
    if isinstance(value, float) and not math.isfinite(value):
        return f'float("{value}")'
    if isinstance(value, (bool, int, float, str, type(None), torch.dtype, torch.layout, torch.memory_format)):
        return f'"{value}"' if isinstance(value, str) else repr(value)
    raise InputError(f"The program passes {value!r}, which cannot be written as plain source.")


def _output(program: torch.export.ExportedProgram, node: fx.Node, names: Mapping[fx.Node, str]) -> str:
    flat = iter([_text(value, names, "") for value in node.args[0]])  # type: ignore[union-attr]
    return _tree(program.call_spec.out_spec, flat)


def _tree(spec: TreeSpec, flat: Iterator[str]) -> str:
    if spec.is_leaf():
        return next(flat)
    items = [_tree(child, flat) for child in spec.children()]
    if spec.type is tuple:
        return f"({', '.join(items)}{',' * (len(items) == 1)})"
    if spec.type is list:
        return f"[{', '.join(items)}]"
    if issubclass(spec.type, dict):  # type: ignore[arg-type]
        pairs = zip(spec.context[1] if spec.type.__name__ == "defaultdict" else spec.context, items, strict=True)
        return "{" + ", ".join(f'"{key}": {item}' for key, item in pairs) + "}"
    raise InputError(f"The network returns a {spec.type.__name__}; let it return tensors, tuples, lists or mappings.")  # type: ignore[union-attr]
