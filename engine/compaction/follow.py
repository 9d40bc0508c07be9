"""Let a model take the shapes of the state dict that it loads: compacted, un-compacted, or compacted otherwise.

One mechanism serves every way of loading, a ``load_state_dict`` pre-hook: it runs before any weight is copied, knows
from the state dict's metadata what was done to the model that the weights are of, does the same to this one, and
refuses what does not fit before anything is changed.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from engine.compaction.compact import Compaction
from engine.compaction.history import KEY, VERSION, Entry, history, is_compacted, same_steps
from engine.compaction.plan import Plan
from engine.compaction.slices import Unpacked
from engine.errors import CheckpointError, EngineError, PlanError
from engine.program.stored import stored_tensors

__all__ = ["Shapes", "compactable", "entries", "follow", "is_compactable", "joined_entries", "reshape", "shapes_in"]

Shapes = Mapping[str, tuple[int, ...]]
Queue = list[Callable[[], Compaction]]

_ADVICE = "Load the compacted checkpoint to keep it small; a new optimizer is needed to train on."
_MOST = 10_000  # compacted modules of which a checkpoint may tell


def compactable(model: nn.Module) -> nn.Module:
    """Let a model take the shapes of whatever state dict it loads, compacted or not.

    ``model.load_state_dict(small.state_dict())`` then first removes from ``model`` what was removed from ``small``. A
    compacted model is compactable by itself: weights of before its compaction let it grow back, with a warning.

    Args:
        model: any module, for instance a LightningModule with the compacted model inside.

    Returns:
        The model.

    Raises:
        CheckpointError: by ``load_state_dict``, where what is loaded is of another model; nothing is changed then.

    Example:
        >>> import engine
        >>> def net():
        ...     return nn.Sequential(nn.Conv2d(1, 4, 1), nn.Conv2d(4, 2, 1))
        >>> small, fresh, mask = net(), engine.compactable(net()), torch.tensor([1, 0, 1, 0])
        >>> masks = {"0": {"weight": mask.view(4, 1, 1, 1), "bias": mask}}
        >>> _ = engine.ModelSpeedup(small, torch.randn(2, 1, 4, 4), masks).speedup_model()
        >>> fresh.load_state_dict(small.state_dict())
        <All keys matched successfully>
        >>> fresh[0]
        Conv2d(1, 2, kernel_size=(1, 1), stride=(1, 1))
    """
    if not is_compactable(model):
        model.register_load_state_dict_pre_hook(follow)
    return model


def is_compactable(model: nn.Module) -> bool:
    """Whether `compactable` was called with the model, or the model was compacted."""
    return any(getattr(hook, "hook", None) is follow for hook in model._load_state_dict_pre_hooks.values())


def follow(
    module: nn.Module,
    state_dict: Mapping[str, Any],
    prefix: str,
    local_metadata: Mapping[str, Any],
    *rest: Any,
    advice: str = _ADVICE,
) -> None:
    """Reshape a module for a state dict that it is about to load; a hook of ``load_state_dict``.

    Args:
        module: the module that loads.
        state_dict: what it loads.
        prefix: of its names in the state dict.
        local_metadata: the module's own.
        rest: what else torch hands to such a hook.
        advice: what to do where the module grows back, for the warning.

    Raises:
        CheckpointError: where the state dict does not fit; the module is then as it was.
    """
    everything = getattr(state_dict, "_metadata", None) or {prefix[:-1]: local_metadata}
    found = {name: content for name, meta in everything.items() if (content := meta.get(KEY)) is not None}
    inside = {
        f"{name}.".removeprefix(prefix).removesuffix("."): content
        for name, content in found.items()
        if f"{name}.".startswith(prefix)
    }
    wanted = joined_entries(inside)
    reshape(module, shapes_in(state_dict, prefix), wanted if inside else None, advice)


def shapes_in(state_dict: Mapping[str, Any], prefix: str = "") -> dict[str, tuple[int, ...]]:
    """Return the shapes of the tensors in a state dict whose names begin with a prefix, without it."""
    return {
        name.removeprefix(prefix): tuple(value.shape)
        for name, value in state_dict.items()
        if name.startswith(prefix) and isinstance(value, Tensor)
    }


def _joined(prefix: str, name: str) -> str:
    return ".".join(part for part in (prefix, name) if part)


def entries(content: Any) -> dict[str, Entry]:
    """Return what a checkpoint's own key says of each compacted module, by its path; reads every version.

    Raises:
        CheckpointError: where it is damaged, or newer than this version.
    """
    version = content.get("version") if isinstance(content, Mapping) else None
    if type(version) is not int or version < 1:
        raise CheckpointError("It holds no compaction plan: it was not written by `ModelCompaction`.")
    if version > VERSION:
        raise CheckpointError(
            f"Its format {version} is newer than format {VERSION}, the newest that this version of lightning_compress "
            "reads. Install a newer version."
        )
    try:
        if version == 1:
            plans = [] if content["plan"] is None else [content["plan"]]
            return {str(content["target"]): {"plans": plans, "certificates": [content["certificate"]][: len(plans)]}}
        return {
            str(path): {"plans": _listed(entry["plans"]), "certificates": _listed(entry["certificates"])}
            for path, entry in content["compacted"].items()
        }
    except (KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"It is damaged: its compaction plan is incomplete ({error!s}).") from error


def _listed(items: Any) -> list[Any]:
    if not isinstance(items, (list, tuple)):  # a tensor of a billion entries, say
        raise TypeError(f"a {type(items).__name__} in the place of a list")
    return list(items)


def joined_entries(contents: Mapping[str, Any]) -> dict[str, Entry]:
    """Return the compactions that the parts of a model tell of, by path in the model.

    Args:
        contents: by path of the part, what `entries` reads.

    Raises:
        CheckpointError: where they are damaged, or more than a model has modules.
    """
    found: dict[str, Entry] = {}
    for name, content in contents.items():
        found |= {_joined(name, path): entry for path, entry in entries(content).items()}
        if len(found) > _MOST:
            raise CheckpointError(f"It is damaged: it tells of more than {_MOST} compacted modules.")
    return found


def reshape(
    model: nn.Module, shapes: Shapes, wanted: Mapping[str, Entry] | None, advice: str = _ADVICE
) -> Callable[[], None]:
    """Bring a model to the shapes of weights; all or nothing.

    Args:
        model: compacted or not.
        shapes: of the weights that it is to take, by name.
        wanted: by path in the model, the compactions that the weights went through; None where nothing is known of
            them: the model is then left alone or, where it was compacted and they do not fit, grows back.
        advice: what to do where it grows back, for the warning.

    Returns:
        A function that takes it back.

    Raises:
        CheckpointError: where they do not fit; the model is then as it was.
    """
    if wanted is None:
        if not is_compacted(model) or _misfit(model, shapes) is None:
            return lambda: None
    before = {name: tensor.shape for name, tensor in stored_tensors(model).items() if not is_lazy(tensor)}
    made: list[Compaction] = []

    def undo() -> None:
        for change in reversed(made):
            change.rollback()

    try:
        _in_turn(_growths(model, wanted or {}), made)
        _in_turn(_compactions(model, wanted or {}), made)
        wrong = _misfit(model, shapes)
        if wrong is not None:
            raise CheckpointError(f"The weights do not fit {type(model).__name__}: {wrong}")
    except (EngineError, AttributeError, LookupError, TypeError, ValueError, RuntimeError) as error:
        undo()
        if isinstance(error, CheckpointError):
            raise
        raise CheckpointError(f"The weights are of another model than {type(model).__name__}: {error}") from error
    except BaseException:
        undo()
        raise
    _warn_of_growth(model, before, advice)
    return undo


def _in_turn(queues: list[Queue], made: list[Compaction]) -> None:
    """Make changes of modules, each module's in order; one may lie in another, so of several whichever fits next."""
    while queues := [queue for queue in queues if queue]:
        failures: list[PlanError] = []
        for queue in queues:
            try:
                change = queue[0]()
            except PlanError as error:
                failures.append(error)
                continue
            made.append(change)
            change.commit()
            queue.pop(0)
        if len(failures) == len(queues):
            raise failures[0]


def _growths(model: nn.Module, wanted: Mapping[str, Entry]) -> list[Queue]:
    """What takes back those compactions of each module that are not the first of those wanted."""

    def grow(module: nn.Module) -> Compaction:
        change = Compaction(module)
        change.add_growth()
        return change

    queues: list[Queue] = []
    for path, module in model.named_modules():
        steps = history(module)
        stays = same_steps(steps, wanted[path]["plans"]) if path in wanted else 0
        queues.append([lambda m=module: grow(m)] * (len(steps) - stays))  # type: ignore[misc]
    return queues


def _compactions(model: nn.Module, wanted: Mapping[str, Entry]) -> list[Queue]:
    """What compacts each module as wanted, from where it is."""
    queues: list[Queue] = []
    unpacked = Unpacked()
    for path, entry in wanted.items():
        module = _submodule(model, path)
        plans = [Plan.from_state_dict(state, unpacked).structure() for state in entry["plans"]]
        certificates = entry["certificates"]
        queues.append(
            [
                lambda m=module, p=plan, c=certificate: _certified(p, m, c)  # type: ignore[misc]
                for plan, certificate in list(zip(plans, certificates, strict=True))[len(history(module)) :]
            ]
        )
    return queues


def _certified(plan: Plan, module: nn.Module, certificate: Mapping[str, Any] | None) -> Compaction:
    change = plan.prepare(module)
    change.add_history(plan.state_dict(), certificate)
    return change


def _submodule(model: nn.Module, path: str) -> nn.Module:
    try:
        return model.get_submodule(path)
    except AttributeError as error:
        raise PlanError(f"The plan is of another model: {type(model).__name__} has no module {path!r}.") from error


def _misfit(model: nn.Module, shapes: Shapes) -> str | None:
    """Return what does not fit, as a sentence."""
    for name, tensor in stored_tensors(model).items():
        given = None if is_lazy(tensor) else shapes.get(name, tuple(tensor.shape))
        if given is not None and given != tuple(tensor.shape):
            return f"{name!r} has shape {given} in the state dict, and {tuple(tensor.shape)} in the model."
    return None


def _warn_of_growth(model: nn.Module, before: Mapping[str, Any], advice: str) -> None:
    now = stored_tensors(model)
    grown = [name for name, shape in before.items() if name in now and now[name].numel() > shape.numel()]
    if grown:
        name = grown[0]
        warnings.warn(
            f"The weights to be loaded are from before a compaction of {type(model).__name__}: it grows back for them "
            f"({name!r} from {list(before[name])} to {list(now[name].shape)}, and {len(grown) - 1} more). {advice}",
            stacklevel=2,
        )
