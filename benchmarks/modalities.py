"""Random inputs for a model of transformers: one for each kind of data that it reads.

A model that reads text beside pictures, videos or sound takes the features of these in the place of tokens, as many
tokens as there are features. How many there are is known once it runs: it says so where the numbers differ.
"""

from __future__ import annotations

import contextlib
import inspect
import itertools
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import PretrainedConfig

from engine.program.trees import tensors_in

__all__ = ["Inputs", "NotRun", "Wide", "accepted", "is_fed", "outputs", "small_identifier"]

Inputs = dict[str, Any]

PLACEHOLDERS = {"image": 91, "video": 92, "audio": 93}
"""The token in whose place features of a kind of data stand; random tokens are below 80."""

OTHERS = 90
"""All other tokens with a meaning: the start and the end of a text or of a picture, padding."""

MOST_TOKENS = 600
"""Tokens for features in a text."""


class NotRun(Exception):
    """Transformers does not build or run the model."""


def small_identifier(name: str, value: int) -> int:
    """Return a small number for the token with a meaning that a field of a configuration names.

    Example:
        >>> small_identifier("image_token_id", 32_000), small_identifier("eos_token_id", 50_256)
        (91, 90)
    """
    kind = re.fullmatch(r"(image|img|video|audio|speech)_(token|context_token|pad_token)_?(id|index)", name)
    if kind:
        return PLACEHOLDERS[{"img": "image", "speech": "audio"}.get(kind[1], kind[1])]
    return min(value, OTHERS)


# ---------------------------------------------------------------- what may be passed


def number(config: PretrainedConfig, *names: str, default: int) -> int:
    """Return the first of some fields that a configuration, or a part of it, has as a positive number."""
    parts = [config, *(v for v in vars(config).values() if isinstance(v, PretrainedConfig))]
    for name, part in itertools.product(names, parts):
        value = getattr(part, name, None)
        value = value[0] if isinstance(value, (list, tuple)) and value else value
        if type(value) is int and value > 0:
            return value
    return default


def pool(config: PretrainedConfig, batch: int) -> dict[str, list[Tensor]]:
    """Return what may be passed to a model, by the name of the argument."""
    g = torch.Generator().manual_seed(batch)
    side = number(config, "image_size", default=32)
    channels = number(config, "num_channels", "in_channels", "in_chans", default=3)
    frames = number(config, "num_frames", default=4)
    mel = number(config, "num_mel_bins", "input_feat_per_channel", "feature_size", default=80)
    length = 2 * number(config, "max_source_positions", default=32)
    patch = number(config, "patch_size", default=16) ** 2 * number(config, "temporal_patch_size", default=1)

    def noise(*shape: int) -> Tensor:
        return torch.randn(batch, *shape, generator=g, dtype=torch.float64)

    def tokens(*shape: int) -> Tensor:
        return torch.randint(3, 80, (batch, *shape), generator=g)

    def same(*values: Any) -> Tensor:
        return torch.tensor([values] * batch)

    edge = number(config, "patch_size", default=16)
    patches, squares = noise(16, channels * patch).flatten(0, 1), noise(16, channels, edge, edge).flatten(0, 1)
    pictures = [noise(*count, channels, side, side) for count in ((), (frames,), (1,), (3,))]
    places = torch.cartesian_prod(torch.arange(4), torch.arange(4)).expand(batch, 16, 2)
    grid = same(1, 4, 4)
    return {
        "input_ids": [tokens(8)],
        "pixel_values": [*pictures, patches, squares, noise(16, channels * patch)],
        "pixel_values_videos": [noise(frames, channels, side, side), patches],
        "input_values": [noise(2000), noise(1, 2000), noise(64, mel), noise(1024, 128)],
        "input_features": [noise(mel, length), noise(64, mel), noise(1, 64, mel), noise(mel, 200)],
        "decoder_input_ids": [tokens(6)],
        "bbox": [tokens(8, 4).sort(-1).values],
        "hidden_states": [noise(16, channels * patch).flatten(0, 1)],
        "grid_thw": [grid],
        "image_grid_thw": [grid],
        "video_grid_thw": [grid],
        "image_sizes": [same(side, side)],
        "spatial_shapes": [same(4, 4)],
        "target_sizes": [same(4, 4)],
        "image_position_ids": [places],
        "pixel_position_ids": [places],
        "input_features_mask": [torch.ones(batch, 64, dtype=torch.bool), torch.ones(batch, length, dtype=torch.bool)],
        "feature_attention_mask": [torch.ones(batch, length, dtype=torch.long)],
    }


GO_WITH = {
    "image_grid_thw": "pixel_values",
    "image_sizes": "pixel_values",
    "image_position_ids": "pixel_values",
    "pixel_position_ids": "pixel_values",
    "spatial_shapes": "pixel_values",
    "target_sizes": "pixel_values",
    "video_grid_thw": "pixel_values_videos",
    "grid_thw": "hidden_states",
    "input_features_mask": "input_features",
    "feature_attention_mask": "input_features",
}
"""What says how another input is laid out, and which one that is."""

Choice = dict[str, int]
"""The arguments that a model is given: which of the possible values each has."""


def smallest(names: Sequence[str], pools: Mapping[str, Sequence[Tensor]]) -> Iterator[Choice]:
    """Yield choices of arguments, the fewest first."""
    for count in range(1, len(names) + 1):
        for chosen in itertools.combinations(names, count):
            yield from choices(chosen, pools)


def additions(name: str, names: Sequence[str], pools: Mapping[str, Sequence[Tensor]]) -> Iterator[Choice]:
    """Yield choices for an argument, first with all that say how it is laid out, at last with none."""
    layout = [other for other in names if GO_WITH.get(other) == name]
    for count in range(len(layout), -1, -1):
        for chosen in itertools.combinations(layout, count):
            yield from choices((name, *chosen), pools)


def choices(names: Sequence[str], pools: Mapping[str, Sequence[Tensor]]) -> Iterator[Choice]:
    """Yield all values that some arguments may have together."""
    for places in itertools.product(*(range(len(pools[name])) for name in names)):
        yield dict(zip(names, places, strict=True))


# ---------------------------------------------------------------- running the model


class Wide(TorchDispatchMode):
    """Stays in float64 where a model converts to less."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        dtype = kwargs.get("dtype")
        if isinstance(dtype, torch.dtype) and dtype.is_floating_point:
            if any(t.dtype == torch.float64 for t in tensors_in((args, kwargs))):
                kwargs["dtype"] = torch.float64
        return func(*args, **kwargs)


def outputs(model: nn.Module, inputs: Inputs) -> list[Tensor]:
    """Return the outputs of a model in float64, with the same random numbers each time."""
    torch.manual_seed(0)
    with torch.no_grad(), Wide():
        return [t for t in tensors_in(model(**inputs)) if t.is_floating_point()]


def with_placeholders(inputs: Inputs, counts: Mapping[str, int], takes: Mapping[str, Any]) -> Inputs:
    """Return inputs with tokens in whose place features stand, in the middle of the text.

    Args:
        inputs: with ``input_ids`` (batch, tokens).
        counts: features of each kind of data in an entry of the batch.
        takes: the arguments of the model.
    """
    text = inputs["input_ids"]
    parts, kinds = [text[:, :2]], [torch.zeros_like(text[:, :2])]
    for kind, count in counts.items():
        tokens = torch.tensor([OTHERS, *[PLACEHOLDERS[kind]] * count, OTHERS]).expand(len(text), -1)
        parts.append(tokens)
        kinds.append((tokens != OTHERS) * (1 + list(PLACEHOLDERS).index(kind)))
    parts.append(text[:, 2:])
    kinds.append(torch.zeros_like(text[:, 2:]))
    types = {"mm_token_type_ids": torch.cat(kinds, 1)} if "mm_token_type_ids" in takes else {}
    return {**inputs, "input_ids": torch.cat(parts, 1), **types}


def fed(model: nn.Module, inputs: Inputs) -> Inputs:
    """Return inputs that a model runs on, with as many tokens for features as it asks for.

    Raises:
        Exception: what the model raises on them, whatever that is.
    """
    counts: dict[str, int] = {}
    takes = inspect.signature(model.forward).parameters
    for _ in range(4):
        current = with_placeholders(inputs, counts, takes) if counts else inputs
        try:
            if not outputs(model, current):
                raise NotRun("it has no output")
            return current
        except Exception as error:  # the model may say how many tokens it wants
            asked = re.search(r"(?i)(image|video|audio|multimodal|placeholder).*features\D{0,4}(\d+)", str(error))
            kind = asked[1].lower() if asked else ""
            if not asked or "input_ids" not in inputs:
                raise
            if kind not in PLACEHOLDERS:
                kind = "audio" if "input_features" in inputs else "image"
            count = int(asked[2]) // len(inputs["input_ids"])
            if counts.get(kind) == count:  # it counts the entries of the features
                count //= number(model.config, "hidden_size", default=count + 1)  # type: ignore[arg-type]
            if not 0 < count <= MOST_TOKENS:
                raise
            counts[kind] = count
    raise NotRun(f"it asks for other numbers of features each time, last {counts}")


def reads_all(model: nn.Module, inputs: Inputs) -> bool:
    """Whether the outputs depend on each input that holds data."""
    before = outputs(model, inputs)
    for name, value in inputs.items():
        if isinstance(value, Tensor) and value.is_floating_point():
            after = outputs(model, {**inputs, name: value.flip(-1) + 0.1})
            if all(a.shape == b.shape and torch.equal(a, b) for a, b in zip(before, after, strict=True)):
                return False
    return True


def is_fed(model: nn.Module, inputs: Inputs) -> bool:
    """Whether a model is given each kind of data that it takes: text, pictures or videos, sound.

    Example:
        >>> class Net(nn.Module):
        ...     def forward(self, input_ids, pixel_values=None): ...
        >>> is_fed(Net(), {"input_ids": 1}), is_fed(Net(), {"input_ids": 1, "pixel_values": 1})
        (False, True)
    """
    takes = inspect.signature(model.forward).parameters
    kinds = (("input_ids",), ("pixel_values", "pixel_values_videos"), ("input_features",), ("input_values",))
    return all(any(name in inputs for name in kind) or not any(name in takes for name in kind) for kind in kinds)


def accepted(model: nn.Module) -> tuple[Inputs, Inputs]:
    """Return inputs of two batch sizes that a model runs on: the fewest, and whatever else it takes and reads.

    Raises:
        NotRun: with what it says of the fewest inputs, where it runs on none.
    """
    takes = inspect.signature(model.forward).parameters
    pools = [pool(model.config, batch) for batch in (1, 2)]  # type: ignore[arg-type]
    main = str(getattr(model, "main_input_name", "input_ids"))
    names = [n for n in dict.fromkeys((main, *takes)) if n in pools[0] and n in takes] or [main] * (main in pools[0])
    more: Inputs = {"use_cache": False} if "use_cache" in takes else {}

    def attempt(choice: Choice) -> tuple[Inputs, Inputs]:
        one, two = (fed(model, {n: own[n][place] for n, place in choice.items()} | more) for own in pools)
        return one, two

    error: Exception | None = None
    for choice in smallest(names, pools[0]):
        try:
            pair = attempt(choice)
            break
        except Exception as other:  # more inputs may do, or other shapes
            error = error or other
    else:
        raise NotRun("no input fits" if error is None else f"{type(error).__name__}: {error}")
    for name in names:
        if name in choice or name in GO_WITH:
            continue
        for addition in additions(name, names, pools[0]):
            with contextlib.suppress(Exception):  # another shape may do
                new = attempt(choice | addition)
                if reads_all(model, new[0]):
                    choice, pair = choice | addition, new
                    break
    return pair
