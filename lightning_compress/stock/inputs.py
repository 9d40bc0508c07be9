"""Random inputs for networks whose arguments have common names."""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from typing import Any

import torch
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor, nn

from engine.errors import InputError
from engine.running import seeded
from lightning_compress.stock.fields import numbers

__all__ = ["random_image", "random_like", "seeded_on", "sensible_inputs"]

_TOKENS = 8


def sensible_inputs(model: nn.Module, config: Mapping[str, Any]) -> dict[str, Any]:
    """Return two random samples that a model accepts, chosen by the names of its arguments.

    Args:
        model: the model in eval mode.
        config: its configuration.

    Raises:
        InputError: if it accepts none; the message says what to pass instead.
    """
    errors: list[str] = []
    for inputs in _candidates(model, config):
        try:
            with torch.no_grad():
                model(**inputs)
        except Exception as error:  # the model may raise anything; other inputs may work
            errors.append(f"{type(error).__name__}: {error}")
            continue
        return inputs
    raise InputError(
        f"{type(model).__name__} accepts none of the random inputs tried "
        f"({errors[0] if errors else 'no argument has a usual name'}). Pass `example_input=`."
    )


def seeded_on(model: nn.Module) -> AbstractContextManager[None]:
    """Seed the random states inside the context, including those of a model's devices, and restore them afterwards.

    Example:
        >>> with seeded_on(nn.Linear(1, 1)):
        ...     one = torch.rand(1)
        >>> with seeded_on(nn.Linear(1, 1)):
        ...     print(torch.equal(torch.rand(1), one))
        True
    """
    return seeded(sorted({p.device.index for p in model.parameters() if p.device.type == "cuda"}))


def random_image(model: nn.Module, shape: Iterable[int]) -> Tensor:
    """Return a batch of one random image of a shape, in the model's dtype."""
    generator = torch.Generator().manual_seed(0)
    return torch.randn([1, *shape], generator=generator).to(next(model.parameters()))


def random_like(example: Any, seed: int, integers: bool) -> Any:
    """Return random inputs of the same shapes.

    Args:
        example: example input of the model.
        seed: seed of the numbers.
        integers: whether to permute integers, too, which may be sizes.

    Example:
        >>> random_like({"x": torch.zeros(1), "ids": torch.tensor([[1, 2, 3]])}, 1, False)["ids"]
        tensor([[1, 2, 3]])
    """
    generator = torch.Generator().manual_seed(seed)

    def other(tensor: Tensor) -> Tensor:
        if tensor.is_floating_point():
            return torch.randn(tensor.shape, generator=generator).to(tensor)
        if not integers or tensor.dtype == torch.bool:
            return tensor
        order = torch.randperm(tensor.numel(), generator=generator).to(tensor.device)
        return tensor.flatten()[order].view(tensor.shape)

    return apply_to_collection(example, Tensor, other)


def _candidates(model: nn.Module, config: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    takes = inspect.signature(model.forward).parameters
    pool = _pool(config, model)
    main = str(getattr(model, "main_input_name", "input_ids"))
    names = [name for name in dict.fromkeys((main, *takes)) if name in pool and (name in takes or name == main)]
    for count in range(len(names), 0, -1):
        for chosen in itertools.combinations(names, count):
            for values in itertools.product(*(pool[name] for name in chosen)):
                inputs: dict[str, Any] = dict(zip(chosen, values, strict=True))
                yield inputs | ({"use_cache": False} if "use_cache" in takes else {})


def _number(config: Mapping[str, Any], *names: str, default: int) -> int:
    values = numbers(config)
    for name in names:
        for path, value in values.items():
            if path[-1] == name and isinstance(value, int) and value > 0:
                return value
    return default


def _pool(config: Mapping[str, Any], model: nn.Module) -> dict[str, list[Tensor]]:
    """Return candidate tensors by the name of the argument."""
    generator = torch.Generator().manual_seed(0)
    parameter = next(model.parameters())
    side, channels = (
        _number(config, "image_size", default=32),
        _number(config, "num_channels", "in_channels", default=3),
    )
    frames, mel = _number(config, "num_frames", default=4), _number(config, "num_mel_bins", "feature_size", default=80)
    length = 2 * _number(config, "max_source_positions", default=32)
    words = min(_number(config, "vocab_size", default=80), 30_000)

    def noise(*shape: int) -> Tensor:
        return torch.randn(2, *shape, generator=generator).to(parameter)

    def tokens(*shape: int) -> Tensor:
        low = min(3, words - 1)  # the first are usually special
        return torch.randint(low, words, (2, *shape), generator=generator).to(parameter.device)

    sample = _number(config, "sample_size", default=8)
    width = _number(config, "cross_attention_dim", "joint_attention_dim", "caption_channels", default=32)
    pooled = _number(config, "pooled_projection_dim", default=32)
    return {
        "input_ids": [tokens(_TOKENS)],
        "decoder_input_ids": [tokens(_TOKENS - 2)],
        "pixel_values": [noise(channels, side, side), noise(frames, channels, side, side)],
        "pixel_values_videos": [noise(frames, channels, side, side)],
        "input_values": [noise(2000), noise(1, 2000), noise(64, mel), noise(1024, 128)],
        "input_features": [noise(mel, length), noise(64, mel), noise(1, 64, mel)],
        "sample": [noise(channels, sample, sample)],
        "hidden_states": [noise(channels, sample, sample), noise(16, channels)],
        "timestep": [torch.tensor([1, 10]).to(parameter.device)],
        "encoder_hidden_states": [noise(_TOKENS, width)],
        "pooled_projections": [noise(pooled)],
        "class_labels": [torch.tensor([0, 1]).to(parameter.device)],
    }
