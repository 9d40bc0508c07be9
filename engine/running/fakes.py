"""Tensors without data, and ops on them: a `FakeTensorMode` that caches the effects of ops on sizes.

Most calls of ops in a model repeat earlier ones with the same sizes, because the blocks of a network repeat. Then the
layout of the result is known, and only new tensors have to be created. Ops are cached if their outputs are new memory,
or arguments that were passed in; all others (views, data-dependent ops, ops on constants) run in the mode each time.
For elementwise ops, one cached call serves all sizes.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch._decomp.decompositions import one_layer_lstm
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, in_kernel_invocation_manager

from engine.program.storages import storage_of

__all__ = ["Fakes", "Layout"]

_LIMIT = 20_000
_SCALARS = (bool, int, float, complex, str, type(None))
_TOKENS = (torch.dtype, torch.device, torch.layout, torch.memory_format)
_PLAIN = frozenset({*_SCALARS, *_TOKENS})


class Layout(NamedTuple):
    """Sizes, strides, dtype and device of a tensor with its own memory.

    Example:
        >>> Layout.of(torch.zeros(2, 3)) == Layout.contiguous((2, 3), torch.ones(1))
        True
    """

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device

    @classmethod
    def of(cls, tensor: Tensor) -> Layout:
        """Return the layout of a tensor."""
        return cls(tuple(tensor.shape), tensor.stride(), tensor.dtype, tensor.device)

    @classmethod
    def contiguous(cls, shape: tuple[int, ...], like: Tensor) -> Layout:
        """Return the layout of a contiguous tensor of these sizes, with the dtype and the device of another one."""
        return cls(shape, _usual_stride(shape), like.dtype, like.device)


@functools.lru_cache(maxsize=4096)
def _usual_stride(shape: tuple[int, ...]) -> tuple[int, ...]:
    return torch.empty(shape, device="meta").stride()


class _Argument(NamedTuple):
    """An output that is one of the tensors among the arguments."""

    position: int


class _Recipe(NamedTuple):
    """How to create the outputs of an op; ``container`` is None for a single tensor."""

    container: type | None
    parts: tuple[Layout | _Argument, ...]


LayoutOf = Callable[[Any, tuple[Any, ...], Mapping[str, Any]], Layout | None]

_COMPOSITE = torch._C.DispatchKey.CompositeImplicitAutograd
_RECIPES: dict[Any, _Recipe | None] = {}
_RECIPES_BY_ELEMENT: dict[Any, _Recipe | None] = {}


class _Mode(FakeTensorMode):
    """The mode, which checks for other devices once; torch checks twice per op, which loads the driver's library."""

    @functools.cached_property
    def avoid_device_init(self) -> bool:  # type: ignore[override]
        """Whether tensors of other devices must not initialise these."""
        return bool(super().avoid_device_init)


class _NoKey(Exception):
    """Raised for an argument that cannot be part of a key."""


@functools.cache
def _states_keep_their_shape() -> bool:
    """Whether torch's LSTM in Python, used here, returns states in their input shape; that of torch 2.6 does not."""
    state, weights = torch.zeros(2, 1), [torch.zeros(4, 1), torch.zeros(4, 1), torch.zeros(4), torch.zeros(4)]
    _, (last, _) = one_layer_lstm(torch.zeros(1, 2, 1), (state, state), weights, True)
    shape: torch.Size = last.shape
    return shape == state.shape


def _no_layout(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
    """Leave the layouts of all results to the mode."""


class Fakes:
    """Creates tensors without data, and runs ops on them. The cache of ops is shared in the process.

    Args:
        layout_of: returns the layout of a call's result; None leaves it to the mode.

    Attributes:
        mode: the mode that knows all ops.

    Example:
        >>> fakes = Fakes()
        >>> x = fakes.of(torch.zeros(2, 3))
        >>> with fakes.mode:
        ...     y = x @ x.mT
        >>> y.shape, y.device
        (torch.Size([2, 2]), device(type='cpu'))
    """

    def __init__(self, layout_of: LayoutOf = _no_layout) -> None:
        self._layout_of = layout_of
        self.mode: FakeTensorMode = _Mode(allow_non_fake_inputs=True)
        self.mode.cache_enabled = False  # of its own memory: to fill it takes longer than the parts of an op save
        self._memory: dict[int, torch.UntypedStorage] = {}
        self._stored: dict[int, tuple[Tensor, Tensor]] = {}
        self._attributes: dict[torch.device, dict[str, Any]] = {}
        unsafe = self.mode._allow_unsafe_data_ptr_access
        pointers = torch._C._set_warn_deprecated_on_mutable_data_ptr, torch._C._set_throw_on_mutable_data_ptr
        self._guard = pointers[0] if unsafe else pointers[1]

    def of_stored(self, tensor: Tensor) -> Tensor:
        """Return a parameter or buffer without data, the same in each run unless a run has changed its sizes."""
        before = self._stored.get(id(tensor))
        if before is not None and before[0] is tensor and tensor.ndim and Layout.of(before[1]) == Layout.of(tensor):
            return before[1]
        fake = self.of(tensor)
        self._stored[id(tensor)] = (tensor, fake)
        return fake

    def of(self, tensor: Tensor) -> Tensor:
        """Return a fake of a tensor. Fakes of tensors that share memory share it, too; keep the tensors alive."""
        with torch.inference_mode(False):
            plain = type(tensor) in (Tensor, nn.Parameter) and tensor.layout is torch.strided and not tensor.is_meta
            if not plain or tensor.is_conj() or tensor.is_neg() or tensor.is_quantized:
                other: Tensor = self.mode.from_tensor(tensor)
                return other
            storage = tensor.untyped_storage()
            memory = self._memory.get(storage._cdata)
            if memory is None and tensor.ndim and storage.nbytes() == tensor.nbytes and tensor.is_contiguous():
                meta = torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
                self._memory[storage._cdata] = meta.untyped_storage()
                return self._fake(meta, tensor.device)
            if memory is None and tensor.ndim:
                size = tensor.untyped_storage().nbytes()
                memory = torch.empty(size, dtype=torch.uint8, device="meta").untyped_storage()
            if memory is None:  # the mode remembers the number in a scalar
                fake: Tensor = self.mode.from_tensor(tensor)
            else:
                meta = torch.empty(0, dtype=tensor.dtype, device="meta")
                meta.set_(memory, tensor.storage_offset(), tensor.shape, tensor.stride())  # type: ignore[call-overload]
                fake = self._fake(meta, tensor.device)
            self._memory.setdefault(storage_of(tensor), fake.untyped_storage())
        return fake

    def like(self, tensor: Tensor) -> Tensor:
        """Return a new tensor of the sizes and the layout of a fake one."""
        return self._fresh(Layout.of(tensor))

    def run(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Return the result of an op whose tensor arguments are all fake."""
        layout = self._layout_of(func, args, kwargs)
        if layout is not None:
            return self._fresh(layout)
        inputs: list[Tensor] = []
        try:
            key = (func, torch.get_default_dtype(), _key(args, inputs), _key(tuple(kwargs.items()), inputs))
        except _NoKey:
            return self._run(func, args, kwargs)
        if key in _RECIPES:
            recipe = _RECIPES[key]
            if recipe is not None and not self._holds_constants():
                return self._outputs_from(recipe, inputs)
            return self._view(func, args, kwargs, inputs) if recipe is None else self._run(func, args, kwargs)
        same = _by_element(func, args, kwargs, inputs)
        recipe = None if same is None else _RECIPES_BY_ELEMENT.get(same)
        if recipe is not None and not self._holds_constants():
            _remember(_RECIPES, key, recipe := _resized(recipe, inputs[0]))
            return self._outputs_from(recipe, inputs)
        before = [Layout.of(t) for t in inputs]
        out = self._run(func, args, kwargs)
        _remember(_RECIPES, key, recipe := _recipe(func, out, inputs, before))
        if same is not None and recipe is not None and _resized(recipe, inputs[0]) == recipe:
            _remember(_RECIPES_BY_ELEMENT, same, recipe)
        return out

    def _run(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        with self.mode:
            several = len(func._schema.returns) > 1  # where there may be states
            if several and _COMPOSITE in func.py_kernels and not _states_keep_their_shape():
                return func._op_dk(_COMPOSITE, *args, **kwargs)  # what runs, and not what Python makes of it
            return func(*args, **kwargs)

    def _holds_constants(self) -> bool:
        """Whether the mode knows the numbers in some tensors, which it has to forget when they are written to."""
        return bool(self.mode.fake_tensor_converter.constant_storage_mapping)

    def _fresh(self, what: Layout) -> Tensor:
        meta = torch.empty_strided(what.shape, what.stride, dtype=what.dtype, device="meta")
        return self._fake(meta, what.device)

    def _fake(self, meta: Tensor, device: torch.device) -> Tensor:
        """Return a fake tensor like the constructor, which takes longer than everything else for most ops.

        All new ones of a device have the same attributes; the constructor runs for the first.
        """
        attributes = self._attributes.get(device)
        if attributes is None:
            fake: Tensor = FakeTensor(self.mode, meta, device)
            self._attributes[device] = dict(vars(fake))
            return fake
        fake = Tensor._make_subclass(  # type: ignore[attr-defined]
            FakeTensor, meta, meta.requires_grad, dispatch_device=True, device_for_backend_keys=device
        )
        self._guard(fake)
        vars(fake).update(attributes)
        return fake

    def _outputs_from(self, recipe: _Recipe, inputs: list[Tensor]) -> Any:
        outputs = [inputs[p.position] if isinstance(p, _Argument) else self._fresh(p) for p in recipe.parts]
        return outputs[0] if recipe.container is None else recipe.container(outputs)

    def _view(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], inputs: list[Tensor]) -> Any:
        """Compute a plain view directly, on the memory of the tensors."""
        elsewhere = "device" in kwargs or any(isinstance(a, torch.device) for a in args)
        if len(inputs) != 1 or not func.is_view or elsewhere or self._holds_constants():
            return self._run(func, args, kwargs)
        with in_kernel_invocation_manager(self.mode):
            out = func(*args, **kwargs)
        device = inputs[0].device
        if isinstance(out, (list, tuple)):
            return type(out)([self._fake(t, device) for t in out])
        return out if out is inputs[0] else self._fake(out, device)


def _key(tree: Any, inputs: list[Tensor]) -> Any:
    """Return everything about an argument that may affect sizes, and collect its tensors.

    Raises:
        _NoKey: for an argument of another type, which may affect sizes in unknown ways.
    """
    kind = type(tree)
    if kind in _PLAIN:
        return kind, tree  # 1, 1.0 and True are equal, but their types decide dtypes
    if isinstance(tree, Tensor):
        if type(tree) is not FakeTensor or tree.constant is not None or tree.layout is not torch.strided:
            raise _NoKey
        inputs.append(tree)
        return (*Layout.of(tree), tree.storage_offset() == 0)
    if isinstance(tree, (list, tuple)):
        return kind, tuple([_key(item, inputs) for item in tree])
    if isinstance(tree, (*_SCALARS, *_TOKENS)):
        return kind, tree
    raise _NoKey


def _by_element(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], inputs: Sequence[Tensor]) -> Any:
    """Return a key for the outputs of an op that is independent of sizes; None if outputs depend on sizes.

    Each element of the output depends on the same element of each input, so sizes and memory order of the output are
    those of the inputs, if these agree and their order is unambiguous. What remains is the dtype.
    """
    if torch.Tag.pointwise not in func.tags or not inputs:
        return None
    shape, usual = inputs[0].shape, Layout.contiguous(tuple(inputs[0].shape), inputs[0]).stride
    if not len(shape) or not shape.numel() or any(t.shape != shape or t.stride() != usual for t in inputs):
        return None
    order = {position: number for number, position in enumerate(dict.fromkeys(map(id, inputs)))}
    leaves = [(name, leaf) for name, leaf in (*enumerate(args), *kwargs.items())]
    if not all(isinstance(leaf, (Tensor, *_SCALARS, torch.dtype, torch.device)) for _, leaf in leaves):
        return None
    parts = (
        (name, order[id(leaf)], leaf.dtype, leaf.device) if isinstance(leaf, Tensor) else (name, type(leaf), leaf)
        for name, leaf in leaves
    )
    return func, torch.get_default_dtype(), *parts


def _resized(recipe: _Recipe, like: Tensor) -> _Recipe:
    """Return a recipe for outputs of the size of a contiguous tensor."""
    shape, stride = tuple(like.shape), like.stride()
    parts = (p._replace(shape=shape, stride=stride) if isinstance(p, Layout) else p for p in recipe.parts)
    return recipe._replace(parts=tuple(parts))


def _remember(recipes: dict[Any, _Recipe | None], key: Any, recipe: _Recipe | None) -> None:
    if len(recipes) > _LIMIT:
        recipes.clear()
    recipes[key] = recipe


def _recipe(func: Any, out: Any, inputs: list[Tensor], before: list[Layout]) -> _Recipe | None:
    """Return how to create these outputs again; None if they are views, or if an argument was changed.

    An op that returns what it writes to has a recipe only if it returned an argument: for a broken copy of a fake
    tensor, it may return another object, and recipes outlive the run.
    """
    single = isinstance(out, Tensor)
    outputs = [out] if single else list(out) if type(out) in (list, tuple) else []
    if not outputs or not all(isinstance(t, FakeTensor) and t.constant is None for t in outputs):
        return None
    if [Layout.of(t) for t in inputs] != before:
        return None
    returns_written = any(r.alias_info is not None and r.alias_info.is_write for r in func._schema.returns)
    parts: list[Layout | _Argument] = []
    taken = {storage_of(t) for t in inputs}
    for tensor in outputs:
        position = next((i for i, t in enumerate(inputs) if t is tensor), None)
        is_new = not (returns_written or storage_of(tensor) in taken or tensor.storage_offset())
        if position is None and not (is_new and _is_plain(tensor)):
            return None
        taken.add(storage_of(tensor))
        parts.append(Layout.of(tensor) if position is None else _Argument(position))
    return _Recipe(None if single else type(out), tuple(parts))


def _is_plain(tensor: Tensor) -> bool:
    """Whether a tensor fills its memory, without bits for conjugation or sign."""
    size = 1 + sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True)) if tensor.numel() else 0
    whole = tensor.untyped_storage().nbytes() == size * tensor.element_size()
    return tensor.layout is torch.strided and whole and not tensor.is_conj() and not tensor.is_neg()
