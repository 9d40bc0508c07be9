"""Parameters that are spread over processes: gathering, spreading and exchanging them, and models without their data.

Every use of torch's private names for FSDP2 is in this file; `owners` refuses a version of torch that lacks them.
"""

from __future__ import annotations

import functools
import inspect
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Replicate
from torch.utils import swap_tensors

from engine.errors import PlanError
from engine.program.stored import distinct_modules

__all__ = [
    "Resized",
    "gathered_from",
    "has_shards",
    "is_spread",
    "local",
    "owners",
    "parts",
    "placeholders",
    "precision",
    "resharded",
    "spread",
    "stand_in",
    "whole",
]

_WRAPPED: dict[type, type] = {}

Owners = Mapping[int, tuple[Any, int]]
"""For each parameter that FSDP2 shards, by id: the group that communicates it, and its position in the group."""


def has_shards(model: nn.Module) -> bool:
    """Whether a parameter of a model is spread over processes.

    Example:
        >>> has_shards(nn.Linear(2, 2))
        False
    """
    return any(map(is_spread, model.parameters()))


def is_spread(tensor: Tensor) -> bool:
    """Whether a tensor is spread over processes.

    Example:
        >>> is_spread(torch.ones(2))
        False
    """
    return isinstance(tensor, DTensor)


def whole(tensor: Tensor) -> Tensor:
    """Return a whole tensor; every process that holds a part of it has to call this.

    Example:
        >>> whole(torch.ones(2))
        tensor([1., 1.])
    """
    if not isinstance(tensor, DTensor):
        return tensor
    return tensor.full_tensor().detach()


def gathered_from(model: nn.Module) -> Callable[[str], Tensor]:
    """Return a function from a name to the whole parameter of a model; all processes have to call it in the same order.

    Example:
        >>> gathered_from(nn.Linear(2, 2))("bias").shape
        torch.Size([2])
    """
    return lambda name: whole(model.get_parameter(name))


def spread(full: Tensor, like: Tensor) -> Tensor:
    """Spread a tensor in the same way as another one; every process has all of it, so nothing is communicated.

    Args:
        full: the whole tensor.
        like: a tensor that is spread in the desired way; if it is not spread, ``full`` is returned.

    Example:
        >>> spread(torch.ones(2), torch.zeros(5))
        tensor([1., 1.])
    """
    if not isinstance(like, DTensor):
        return full
    mesh = like.device_mesh
    copies = DTensor.from_local(full.contiguous(), mesh, [Replicate()] * mesh.ndim, run_check=False)
    return copies.redistribute(mesh, like.placements)


def local(tensor: Tensor) -> Tensor:
    """Return the part of a tensor that this process holds, sharing its memory.

    Example:
        >>> local(torch.ones(2))
        tensor([1., 1.])
    """
    if not isinstance(tensor, DTensor):
        return tensor
    part: Tensor = tensor._local_tensor
    return part.detach()


# ---------------------------------------------------------------- a model without data


@contextmanager
def placeholders(model: nn.Module, runs: bool = True, device: torch.device | None = None) -> Iterator[None]:
    """Make a model whole and free of data inside the context: on the meta device, with plain classes, without FSDP.

    Parameters and hooks that are registered inside are dropped at the end; other changes of classes and attributes
    stay.

    Args:
        model: a model, some of whose parameters are spread over processes.
        runs: whether the model can run inside: then its buffers and other tensors have no data either, and nothing
            gathers parameters. Otherwise only parameters have no data, and changes of buffers and hooks persist.
        device: if given, spread parameters are zeros without memory on this device, and everything else keeps its data.
    """
    modules = list(distinct_modules(model).values())
    resharded(model)
    metas: dict[int, Any] = {}
    saved: list[tuple[nn.Module, type, dict[str, Any]]] = []
    try:
        for module in modules:
            saved.append((module, type(module), _set_aside(module, runs)))
            _empty(module, saved[-1][2], metas, device)
        yield
    finally:
        for module, kind, tables in saved:
            vars(module).update(tables)
            module.__class__ = _wrapped(kind, type(module))


def _set_aside(module: nn.Module, runs: bool) -> dict[str, Any]:
    """Return the attributes of a module that hold data, or that torch's strategies have set."""
    own = vars(module)
    names = {"_parameters"}
    if runs:
        names |= {"_buffers"} | {name for name in own if name.endswith("_hooks")}
        names |= {name for name, value in own.items() if isinstance(value, Tensor) or _is_state(value)}
        names |= {"_device"} & {name for name, value in own.items() if isinstance(value, torch.device)}  # Lightning's
    return {name: value for name, value in own.items() if name in names}


def _empty(module: nn.Module, tables: Mapping[str, Any], metas: dict[int, Any], device: torch.device | None) -> None:
    own = vars(module)
    for name, table in tables.items():
        if name in ("_parameters", "_buffers"):
            own[name] = {key: _empty_once(tensor, metas, device) for key, tensor in table.items()}
        elif name.endswith("_hooks"):
            own[name] = OrderedDict((key, hook) for key, hook in table.items() if not _of_torch(hook))
        elif name == "_device":
            own[name] = device or torch.device("meta")
        elif isinstance(table, Tensor):
            own[name] = _empty_once(table, metas, device)
        else:
            del own[name]
    module.__class__ = _plain(type(module))


def _is_state(value: Any) -> bool:
    """Whether a value is the state that one of torch's strategies keeps for a module."""
    values = list(value.values()) if isinstance(value, OrderedDict) else [value]
    return any(type(item).__module__.startswith("torch.distributed.") for item in values)


def _empty_once(tensor: Tensor | None, metas: dict[int, Any], device: torch.device | None) -> Any:
    if tensor is None or (device is not None and not is_spread(tensor)):
        return tensor
    if id(tensor) not in metas:
        metas[id(tensor)] = stand_in(tensor, device)
    return metas[id(tensor)]


def stand_in(tensor: Tensor, device: torch.device | None = None) -> Tensor:
    """Return a tensor or parameter of the same shape without memory: on the meta device, or zeros on another one.

    Example:
        >>> stand_in(torch.ones(2, 3)).shape
        torch.Size([2, 3])
    """
    empty = torch.zeros((), dtype=tensor.dtype, device=device or "meta").expand(tensor.shape)
    return nn.Parameter(empty, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else empty


def _of_torch(hook: Any) -> bool:
    """Whether a hook belongs to torch's strategies: it gathers or frees parameters, or changes the layout of inputs."""
    function = hook.func if isinstance(hook, functools.partial) else hook
    function = inspect.unwrap(getattr(function, "__func__", function))
    return str(getattr(function, "__module__", "")).startswith("torch.distributed.")


def _plain(kind: type) -> type:
    if not issubclass(kind, FSDPModule):
        return kind
    return kind.__mro__[kind.__mro__.index(FSDPModule) + 1]


def _wrapped(before: type, now: type) -> type:
    """Return the class to restore for a module of class ``before`` whose plain class has become ``now``."""
    if not issubclass(before, FSDPModule) or _plain(before) is now:
        return before if issubclass(before, FSDPModule) else now
    if now not in _WRAPPED:
        _WRAPPED[now] = type(f"FSDP{now.__name__}", (FSDPModule, now), {"__deepcopy__": before.__deepcopy__})  # type: ignore[attr-defined]
    return _WRAPPED[now]


def resharded(model: nn.Module) -> None:
    """Make modules hold their shards again instead of the parameters that the last forward pass gathered."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


# ---------------------------------------------------------------- exchanging a parameter


def owners(model: nn.Module) -> Owners:
    """Return the group that gathers each parameter of a model; parameters that FSDP2 does not shard are omitted.

    Raises:
        PlanError: if this version of torch stores it in another way.
    """
    table: dict[int, tuple[Any, int]] = {}
    try:
        for module in model.modules():
            if isinstance(module, FSDPModule):
                state: Any = module._get_fsdp_state()
                for group in getattr(state, "_fsdp_param_groups", None) or [state._fsdp_param_group]:
                    shards = [] if group is None else group.fsdp_params
                    table |= {id(shard.sharded_param): (group, number) for number, shard in enumerate(shards)}
    except AttributeError as error:
        raise PlanError(
            f"torch {torch.__version__} stores the shards of FSDP2 in a way unknown to this package ({error}). Compact "
            "the checkpoint after the fit (`lightning_compress.compact_checkpoint`), or update the package."
        ) from error
    return table


def parts(parameter: Tensor, shard_owners: Owners) -> dict[int, int]:
    """Return the number of parts into which tensor parallelism splits each dimension of a parameter.

    Args:
        parameter: a parameter of a model; shards of FSDP2 do not count, because they are gathered before a module runs.
        shard_owners: what `owners` says of the model.

    Example:
        >>> parts(torch.ones(2), {})
        {}
    """
    group, number = shard_owners.get(id(parameter), (None, 0))
    spec: Any = getattr(parameter, "_spec", None) if group is None else _split(group.fsdp_params[number])
    sizes: dict[int, int] = {}
    for placement, size in () if spec is None else zip(spec.placements, spec.mesh.shape, strict=True):
        if placement.is_shard() and size > 1:
            sizes[placement.dim] = sizes.get(placement.dim, 1) * size
    return sizes


def precision(model: nn.Module) -> torch.dtype:
    """Return the narrowest floating dtype in which parameters are used; FSDP2 may round them.

    Example:
        >>> precision(nn.Linear(2, 2))
        torch.float32
    """
    kinds = {parameter.dtype for parameter in model.parameters() if parameter.is_floating_point()}
    kinds |= {group.fsdp_params[number].mp_policy.param_dtype for group, number in owners(model).values()} - {None}
    return min(kinds, key=lambda kind: torch.finfo(kind).bits)


def _split(shard: Any) -> Any:
    """Return how tensor parallelism splits a parameter that FSDP2 shards; None if it does not."""
    if not shard.is_dtensor:
        return None
    return shard._tp_spec if hasattr(shard, "_tp_spec") else shard._unsharded_dtensor_spec


@dataclass
class Resized:
    """A prepared change of a parameter to other values in another shape, spread as before.

    Attributes:
        parameter: the parameter, which stays the same object.
        other: holds the new values; after `exchange`, the old ones.
        group: FSDP2's group of parameters that are communicated together; None if it does not shard the parameter.
        number: the parameter's place in the group.
        shard: FSDP2's record of the new parameter; after `exchange`, that of the old one.
    """

    parameter: nn.Parameter
    other: nn.Parameter
    group: Any = None
    number: int = 0
    shard: Any = None

    @classmethod
    def of(cls, parameter: nn.Parameter, full: Tensor, gradient: Tensor | None, shard_owners: Owners) -> Resized:
        """Prepare a change to new values.

        Args:
            parameter: a parameter of a model.
            full: all new values, on every process.
            gradient: the whole new gradient, or None.
            shard_owners: what `owners` says of the model.
        """
        if id(parameter) not in shard_owners:
            change = cls(parameter, nn.Parameter(spread(full, parameter), parameter.requires_grad))
        else:
            group, number = shard_owners[id(parameter)]
            shard = _shard(group.fsdp_params[number], group, full, parameter.requires_grad)
            change = cls(parameter, shard.sharded_param, group, number, shard)
        if gradient is not None:
            change.other.grad = spread(gradient, change.other)
        return change

    def exchange(self) -> None:
        """Exchange the new values for the old ones; a second call undoes it."""
        swap_tensors(self.parameter, self.other)
        if self.group is None:
            return
        old, new = self.group.fsdp_params[self.number], self.shard
        old.sharded_param, new.sharded_param = self.other, self.parameter
        old._post_load_hook_handle.remove()
        new._post_load_hook_handle.remove()
        new._post_load_hook_handle = new._module_info.module.register_load_state_dict_post_hook(
            lambda *args, **kwargs: new.reset_sharded_param()
        )
        self.group.fsdp_params[self.number], self.shard = new, old
        new._setattr_on_modules(self.parameter)

    def drop(self) -> None:
        """Release the values that are not in use."""
        if self.shard is not None:
            self.shard._post_load_hook_handle.remove()


def _shard(old: Any, group: Any, full: Tensor, requires_grad: bool) -> Any:
    """Create FSDP2's record of a new parameter that replaces another one, which stays registered."""
    spec = _split(old)
    if spec is not None:
        split = DTensor.from_local(full.contiguous(), spec.mesh, [Replicate()] * spec.mesh.ndim, run_check=False)
        full = split.redistribute(spec.mesh, spec.placements)
    new_parameter = nn.Parameter(full.contiguous(), requires_grad)
    try:
        new = type(old)(
            new_parameter,
            old._module_info,
            old.mesh_info,
            old.post_forward_mesh_info,
            old.device,
            lambda parameter: old.fsdp_placement,
            old.mp_policy,
            group.offload_policy,
        )
    finally:
        old._setattr_on_modules(old.sharded_param)
    new._param_fqn = old._param_fqn
    if hasattr(old, "param_dtype"):  # FSDP2 has seen a forward pass already
        new.init_dtype_attrs(new.mp_policy)
    return new
