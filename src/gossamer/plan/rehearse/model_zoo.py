"""Model zoo: well-known models, layer by layer in forward order, from their published dimensions.

A layer has the shapes of its tensors, and its multiply-adds.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial


@dataclass(frozen=True, kw_only=True)
class Layer:
    """One layer of a model."""

    tensors: Mapping[str, tuple[int, ...]] = field(default_factory=dict)  # shapes by name
    multiply_adds: float  # of its forward pass, for one sample


def convolution(name: str, inputs: int, outputs: int, kernel: int, side: int, *, bias: bool = False) -> Layer:
    """A square kernel over channels; side: of the output image, in pixels."""
    tensors: dict[str, tuple[int, ...]] = {f"{name}.weight": (outputs, inputs, kernel, kernel)}
    if bias:
        tensors[f"{name}.bias"] = (outputs,)
    return Layer(tensors=tensors, multiply_adds=outputs * inputs * kernel**2 * side**2)


def linear(name: str, inputs: int, outputs: int, tokens: int = 1, *, bias: bool = True) -> Layer:
    tensors: dict[str, tuple[int, ...]] = {f"{name}.weight": (outputs, inputs)}
    if bias:
        tensors[f"{name}.bias"] = (outputs,)
    return Layer(tensors=tensors, multiply_adds=inputs * outputs * tokens)


def norm(name: str, channels: int, places: int) -> Layer:
    """A scale and a shift per channel; places: tokens or pixels."""
    tensors = {f"{name}.weight": (channels,), f"{name}.bias": (channels,)}
    return Layer(tensors=tensors, multiply_adds=channels * places)


def attention(channels: int, tokens: int, window: int, tensors: Mapping[str, tuple[int, ...]] | None = None) -> Layer:
    """Scores and their weighted sums, of each token over `window` tokens."""
    return Layer(tensors=tensors or {}, multiply_adds=2 * channels * tokens * window)


def resnet(blocks: tuple[int, int, int, int], *, bottleneck: bool) -> Iterator[Layer]:
    """He et al. 2016, on images of 224 pixels; strides of a bottleneck are in its 3 x 3, as in torchvision."""
    yield convolution("conv1", 3, 64, 7, 112)
    yield norm("bn1", 64, 112**2)
    channels, unit = 64, _bottleneck if bottleneck else _basic
    for stage, count in enumerate(blocks):
        width, side = 64 * 2**stage, 56 // 2**stage
        outputs = 4 * width if bottleneck else width
        for block in range(count):
            name, side_in = f"layer{stage + 1}.{block}", side * (2 if stage and not block else 1)
            yield from unit(name, channels, width, side_in, side)
            if channels != outputs:
                yield convolution(f"{name}.downsample.0", channels, outputs, 1, side)
                yield norm(f"{name}.downsample.1", outputs, side**2)
            channels = outputs
    yield linear("fc", channels, 1000)


def _basic(name: str, inputs: int, width: int, side_in: int, side: int) -> Iterator[Layer]:
    for number, channels in enumerate((inputs, width), start=1):
        yield convolution(f"{name}.conv{number}", channels, width, 3, side)
        yield norm(f"{name}.bn{number}", width, side**2)


def _bottleneck(name: str, inputs: int, width: int, side_in: int, side: int) -> Iterator[Layer]:
    table = ((inputs, width, 1, side_in), (width, width, 3, side), (width, 4 * width, 1, side))
    for number, (channels, outputs, kernel, side_out) in enumerate(table, start=1):
        yield convolution(f"{name}.conv{number}", channels, outputs, kernel, side_out)
        yield norm(f"{name}.bn{number}", outputs, side_out**2)


def swin(embed: int, depths: tuple[int, ...], heads: tuple[int, ...], window: int = 7) -> Iterator[Layer]:
    """Liu et al. 2021, on images of 224 pixels in patches of 4."""
    yield convolution("patch_embed.proj", 3, embed, 4, 56, bias=True)
    yield norm("patch_embed.norm", embed, 56**2)
    width, side = embed, 56
    for stage, (depth, count) in enumerate(zip(depths, heads, strict=True)):
        for block in range(depth):
            yield from _swin_block(f"layers.{stage}.blocks.{block}", width, count, side**2, window)
        if stage < len(depths) - 1:
            side //= 2
            yield norm(f"layers.{stage}.downsample.norm", 4 * width, side**2)
            yield linear(f"layers.{stage}.downsample.reduction", 4 * width, 2 * width, side**2, bias=False)
            width *= 2
    yield norm("norm", width, side**2)
    yield linear("head", width, 1000)


def _swin_block(name: str, width: int, heads: int, tokens: int, window: int) -> Iterator[Layer]:
    table = {f"{name}.attn.relative_position_bias_table": ((2 * window - 1) ** 2, heads)}
    yield norm(f"{name}.norm1", width, tokens)
    yield linear(f"{name}.attn.qkv", width, 3 * width, tokens)
    yield attention(width, tokens, window**2, table)
    yield linear(f"{name}.attn.proj", width, width, tokens)
    yield norm(f"{name}.norm2", width, tokens)
    yield linear(f"{name}.mlp.fc1", width, 4 * width, tokens)
    yield linear(f"{name}.mlp.fc2", 4 * width, width, tokens)


def gpt2(width: int, blocks: int, vocabulary: int = 50257, context: int = 1024) -> Iterator[Layer]:
    """Radford et al. 2019, on full contexts; the head shares the embedding, with its gradient complete at the end."""
    yield Layer(tensors={"wte.weight": (vocabulary, width)}, multiply_adds=context * width)
    yield Layer(tensors={"wpe.weight": (context, width)}, multiply_adds=context * width)
    for block in range(blocks):
        yield from _gpt2_block(f"h.{block}", width, context)
    yield norm("ln_f", width, context)
    yield Layer(multiply_adds=vocabulary * width * context)


def _gpt2_block(name: str, width: int, context: int) -> Iterator[Layer]:
    yield norm(f"{name}.ln_1", width, context)
    yield linear(f"{name}.attn.c_attn", width, 3 * width, context)
    yield attention(width, context, context)
    yield linear(f"{name}.attn.c_proj", width, width, context)
    yield norm(f"{name}.ln_2", width, context)
    yield linear(f"{name}.mlp.c_fc", width, 4 * width, context)
    yield linear(f"{name}.mlp.c_proj", 4 * width, width, context)


@dataclass(frozen=True, kw_only=True)
class Model:
    """A built-in model of rehearsals."""

    title: str  # exact variant, and similar variants
    layers: Callable[[], Iterator[Layer]]


BUILT_IN: Mapping[str, Model] = {
    "resnet18": Model(
        title="ResNet-18, 224 pixels, 1000 classes",
        layers=partial(resnet, (2, 2, 2, 2), bottleneck=False),
    ),
    "resnet50": Model(
        title="ResNet-50, 224 pixels, 1000 classes (the published 330 ms per step are of a variant with 24.46 M "
        "parameters)",
        layers=partial(resnet, (3, 4, 6, 3), bottleneck=True),
    ),
    "swin-large": Model(
        title="Swin-L, 224 pixels, window 7, 1000 classes (the published 940 ms per step are of a model with 98.20 M "
        "parameters, half as many)",
        layers=partial(swin, 192, (2, 2, 18, 2), (6, 12, 24, 48)),
    ),
    "gpt2-124m": Model(
        title="GPT-2 small, 1024 tokens, 50257 words, head tied to the embedding",
        layers=partial(gpt2, 768, 12),
    ),
}
