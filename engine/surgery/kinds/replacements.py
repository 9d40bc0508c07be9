"""Modules narrowed by a user's function: their entry in the plan, and the call of the function."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from engine.errors import InputError, PlanError
from engine.program.defaults import callers_defaults
from engine.program.graph import Value
from engine.program.stored import copied
from engine.recording.recorder import MODULE
from engine.running.opaque_modules import is_kind
from engine.running.probe import channel_inputs, channel_outputs
from engine.surgery.exchange import Change, Decision, Exchange, Replace, Undo

__all__ = ["Replacement", "check_functions", "opaque_names", "places", "replaced_by", "shapes_of"]


@dataclass(frozen=True, eq=False)
class Replacement(Exchange):
    """A module to be replaced; the function that does it is not part of the plan.

    Attributes:
        class_name: name of the module's class.
        inputs, outputs: for each tensor that it takes or returns, which entries are kept, compact bool of the rank of
            the tensor, and the recorded shape.
        weights: parameter name in the module -> which entries the user's mask keeps; compact bool.
        stored: shapes of its parameters and buffers before.
    """

    kind = "replacement"
    title = "Replaced"
    stage = 3

    class_name: str
    inputs: tuple[tuple[Tensor, tuple[int, ...]], ...]
    outputs: tuple[tuple[Tensor, tuple[int, ...]], ...]
    weights: Mapping[str, Tensor]
    stored: Mapping[str, tuple[int, ...]]

    @classmethod
    def planned(cls, decision: Decision) -> Iterator[Replacement]:
        """Yield opaque modules that lose channels."""
        graph = decision.graph
        for name in graph.opaque:
            calls = [node for node in graph.nodes if node.module == name and node.op == MODULE]
            values = [value for node in calls for value in (*channel_inputs(node), *node.outputs)]
            if any(decision.mask(value) is not None for value in values):
                module = calls[0].args["module"]
                names = {n: graph.aliases[f"{name}.{n}"] for n, _ in module.named_parameters()}
                yield cls(
                    name,
                    graph.types[name].__name__,
                    inputs=tuple(_side(channel_inputs(calls[0]), decision)),
                    outputs=tuple(_side(channel_outputs(calls[0]), decision)),
                    weights={n: decision.masks[c] for n, c in names.items() if c in decision.masks},
                    stored=shapes_of(module),
                )

    def state_dict(self) -> dict[str, Any]:
        """Return the replacement as primitives and tensors."""
        return {
            **super().state_dict(),
            "inputs": [[kept, list(shape)] for kept, shape in self.inputs],
            "outputs": [[kept, list(shape)] for kept, shape in self.outputs],
            "weights": dict(self.weights),
            "stored": {name: list(shape) for name, shape in self.stored.items()},
        }

    @classmethod
    def from_state_dict(cls, state: Mapping[str, Any]) -> Replacement:
        """Load a state written by `state_dict`."""
        inputs, outputs = (
            tuple((kept.bool(), _ints(shape)) for kept, shape in state[side]) for side in ("inputs", "outputs")
        )
        weights = {str(name): mask.bool() for name, mask in state["weights"].items()}
        stored = {str(name): _ints(shape) for name, shape in state["stored"].items()}
        return cls(str(state["module"]), str(state["class_name"]), inputs, outputs, weights, stored)

    @property
    def masked(self) -> Iterable[str]:
        """Names of the parameters whose masks the function gets."""
        return [f"{self.module}.{name}" for name in self.weights]

    @property
    def notes(self) -> tuple[str, ...]:
        """What is needed to load the weights into a fresh model."""
        return (f"{self.module!r} ({self.class_name}) is replaced; a fresh model needs the same replacement.",)

    def __str__(self) -> str:
        return f"{self.module} ({self.class_name}), by a function of the user"

    def structure(self) -> Replacement:
        """Return the replacement without masks of weights."""
        return replace(self, weights={})

    def then(self, later: Replacement) -> Replacement:
        """Return this replacement: its module is of another class afterwards."""
        return self

    @property
    def permanent(self) -> str:
        """Why it is permanent: the old module is not stored."""
        return f"{self.module!r} was replaced by a function, which cannot be undone. Build a new instance of the model."

    def prepare(self, change: Change) -> None:
        """Have the user's function narrow the module, and put the result in every place of the module.

        Raises:
            PlanError: if an optimizer would lose the module's parameters, or the function is missing or fails.
        """
        if change.trained:
            raise PlanError(
                f"{self.module!r} is to be replaced by `customized_replace_func`, and the optimizer would continue "
                "with the old one. Compact without the optimizer, and create a new one afterwards."
            )
        old = change.module(self.module)
        new = replaced_by(self, old, change.functions, change.device)
        for table, name in places(change.model, old) if new is not None else ():
            change.add(functools.partial(_put, table, name, new, old))

    def masks(self, module: nn.Module, device: torch.device) -> tuple[Any, Any, dict[str, Tensor]]:
        """Return the masks to pass to the function: floats in full shape; several inputs or outputs as a tuple."""
        sides = [[s.expand(shape).float().to(device) for s, shape in side] for side in (self.inputs, self.outputs)]
        input_masks, output_masks = (side[0] if len(side) == 1 else tuple(side) for side in sides)
        weights = {
            name: self.weights.get(name, torch.ones(1, dtype=torch.bool)).expand(p.shape).float().to(device)
            for name, p in module.named_parameters()
        }
        return input_masks, output_masks, weights

    def done(self, module: nn.Module) -> bool:
        """Whether the module has been replaced already, by one of another class or with other shapes."""
        return not is_kind(module, self.class_name) or shapes_of(module) != dict(self.stored)


def _side(values: Iterable[Value], decision: Decision) -> Iterator[tuple[Tensor, tuple[int, ...]]]:
    for value in values:
        mask = decision.mask(value)
        yield torch.ones([1] * value.ndim, dtype=torch.bool) if mask is None else mask, value.shape


def _put(table: dict[str, nn.Module | None], name: str, new: nn.Module | None, old: nn.Module) -> Undo:
    table[name] = new
    return functools.partial(table.__setitem__, name, old)


def _ints(numbers: Iterable[Any]) -> tuple[int, ...]:
    return tuple(int(n) for n in numbers)


def shapes_of(module: nn.Module) -> dict[str, tuple[int, ...]]:
    """Return the shapes of a module's parameters and buffers by name."""
    stored = (*module.named_parameters(), *module.named_buffers())
    return {name: tuple(tensor.shape) for name, tensor in stored}


def check_functions(functions: Any) -> Replace:
    """Validate functions by class name; None means no functions.

    Raises:
        InputError: if it is not such a mapping.
    """
    class_functions = {} if functions is None else functions
    if not isinstance(class_functions, Mapping) or not all(
        isinstance(k, str) and callable(f) for k, f in class_functions.items()
    ):
        raise InputError(
            "`customized_replace_func` maps names of classes to functions of (module, masks) that return a module; "
            f"got {functions!r}."
        )
    return class_functions


def opaque_names(model: nn.Module, functions: Replace) -> tuple[str, ...]:
    """Return the names of the modules that the functions apply to, outermost ones only.

    Raises:
        InputError: naming a class without instances in the model.
    """
    all_names: list[str] = []
    for kind in functions:
        names = [name for name, module in model.named_modules() if is_kind(module, kind)]
        if not names:
            raise InputError(f"`customized_replace_func` names the class {kind!r}, of which the model has no module.")
        all_names += names
    return tuple(
        n for n in dict.fromkeys(all_names) if not any(n != o and (not o or n.startswith(o + ".")) for o in all_names)
    )


def _function(module: nn.Module, functions: Replace) -> Callable[..., Any] | None:
    """Return the function for the module's class, or for its nearest base class."""
    return next((functions[base.__name__] for base in type(module).__mro__ if base.__name__ in functions), None)


def replaced_by(plan: Replacement, module: nn.Module, functions: Replace, device: torch.device) -> nn.Module | None:
    """Return the module that the user's function returns; None if the module has been replaced already.

    The function gets a copy with masked parameters, so that nothing it does needs to be undone.

    Raises:
        PlanError: if there is no function for it, or it fails, or returns anything but a module.
    """
    if plan.done(module):
        return None
    function = _function(module, functions)
    what = f"{plan.module!r} ({type(module).__name__})"
    if function is None:
        raise PlanError(
            f"{what} was narrowed by a function, which a plan does not contain. Pass the same "
            "`customized_replace_func` again, or put the narrowed module in place first."
        )
    device = next((t.device for t in module.parameters()), device)
    masks = plan.masks(module, torch.device("cpu") if device.type == "meta" else device)  # masks need data
    try:
        masked_copy = copied(module)
        with torch.no_grad():
            for name, parameter in masked_copy.named_parameters():
                parameter.mul_(masks[2][name].to(parameter))
            with callers_defaults():
                replacement = function(masked_copy, masks)
    except Exception as error:
        raise PlanError(f"`customized_replace_func` failed at {what}: {type(error).__name__}: {error}") from error
    if not isinstance(replacement, nn.Module):
        raise PlanError(f"`customized_replace_func` returned a {type(replacement).__name__} for {what}, not a module.")
    return replacement.train(module.training)


def places(model: nn.Module, module: nn.Module) -> Iterator[tuple[dict[str, nn.Module | None], str]]:
    """Yield every place where a module is registered."""
    for parent in model.modules():
        yield from ((parent._modules, name) for name, child in parent._modules.items() if child is module)
