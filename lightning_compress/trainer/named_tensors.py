"""Tensors that a hook may read, judging by the names in its code; for hooks that cannot be run."""

from __future__ import annotations

import dis
from collections.abc import Iterator
from types import CodeType, FunctionType
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from lightning_compress.trainer.packages import DATA_MODULES, LIGHTNING_MODULES

if TYPE_CHECKING:
    from pytorch_lightning import LightningModule

__all__ = ["codes_of", "named_tensors"]

_ALL = {"apply", "buffers", "children", "lightning_module", "model", "modules", "named_buffers", "named_children"}
_ALL |= {"named_modules", "named_parameters", "optimizers", "parameters", "state_dict"}
"""Names by which all parameters can be reached."""

_ATTRIBUTES = ("LOAD_ATTR", "LOAD_METHOD", "LOAD_SUPER_ATTR", "STORE_ATTR")


def named_tensors(hook: Any, owner: Any, pl_module: LightningModule) -> list[Tensor]:
    """Return the parameters and buffers that a hook may read, by the names in its code and in methods that it names.

    Args:
        hook: a function.
        owner: the owner of the hook: the LightningModule, a callback, or a data module.
        pl_module: the LightningModule.

    Example:
        >>> from pytorch_lightning import LightningModule
        >>> class Reading(LightningModule):
        ...     def on_train_epoch_end(self):
        ...         raise ValueError(self.fc.weight)
        >>> module = Reading()
        >>> module.fc, module.other = nn.Linear(2, 3), nn.Linear(2, 3)
        >>> [tensor.shape for tensor in named_tensors(Reading.on_train_epoch_end, module, module)]
        [torch.Size([3, 2])]
    """
    codes = list(_reached(hook, (owner, pl_module)))
    names = {name for code in codes for name in code.co_names}
    modules = {code.co_varnames[0] for code in codes if code.co_argcount} - {".0"}  # that of a comprehension
    is_callback = owner is not pl_module and not isinstance(owner, DATA_MODULES)
    modules |= set(codes[0].co_varnames[1:3] if codes and is_callback else ())  # the Trainer and the LightningModule
    if names & _ALL - vars(pl_module)["_modules"].keys() or any(_passes_on(code, modules) for code in codes):
        read = [*pl_module.parameters(), *pl_module.buffers()]
    else:
        read = list(_below(pl_module, names))
    return [tensor.detach() for tensor in {id(tensor): tensor for tensor in read}.values()]


def codes_of(function: Any) -> Iterator[CodeType]:
    """Yield the code of a function, and of the functions in it.

    Args:
        function: any object; one without code has none.
    """
    function = function.fget if isinstance(function, property) else getattr(function, "__wrapped__", function)
    if isinstance(function, FunctionType):
        yield from _nested(function.__code__)


def _nested(code: CodeType) -> Iterator[CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _nested(constant)


def _reached(hook: Any, owners: tuple[Any, ...]) -> Iterator[CodeType]:
    """Yield the code of a hook, and of methods of the owners that it names."""
    own = {base for kind in (*LIGHTNING_MODULES, *DATA_MODULES) for base in kind.__mro__}
    waiting, seen = [hook], set()
    while waiting:
        for code in codes_of(waiting.pop()):
            if code not in seen:
                seen.add(code)
                yield code
                kinds = [kind for owner in owners for kind in type(owner).__mro__ if kind not in own]
                waiting += [vars(kind)[name] for kind in kinds for name in code.co_names if name in vars(kind)]


def _passes_on(code: CodeType, modules: set[str]) -> bool:
    """Whether code does anything with variables of these names other than reading their attributes."""
    instructions = list(dis.get_instructions(code))
    following = zip(instructions, instructions[1:], strict=False)
    return any(_loads(one, modules) and two.opname not in _ATTRIBUTES for one, two in following)


def _loads(instruction: dis.Instruction, modules: set[str]) -> bool:
    names = instruction.argval if isinstance(instruction.argval, tuple) else (instruction.argval,)
    return instruction.opname.startswith(("LOAD_FAST", "LOAD_DEREF")) and not modules.isdisjoint(names)


def _below(module: nn.Module, names: set[str]) -> Iterator[Tensor]:
    """Yield the named tensors in a module, and all tensors of the innermost named modules."""
    for key, child in module.named_children():
        if key in names:
            inner = list(_below(child, names))
            yield from inner or [*child.parameters(), *child.buffers()]
    for table in (module._parameters, module._buffers):
        yield from (tensor for key, tensor in table.items() if tensor is not None and key in names)
