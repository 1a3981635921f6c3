from math import prod

import pytest

from gossamer.plan.rehearse.model_zoo import BUILT_IN, Layer, convolution, gpt2, linear, resnet, swin


def tensors(layers) -> dict[str, tuple[int, ...]]:
    return {name: shape for layer in layers for name, shape in layer.tensors.items()}


def parameters(layers) -> int:
    return sum(prod(shape) for layer in layers for shape in layer.tensors.values())


@pytest.mark.parametrize(
    ("name", "total", "count"),
    [
        ("resnet18", 11_689_512, 62),
        ("resnet50", 25_557_032, 161),
        ("swin-large", 196_532_476, 329),
        ("gpt2-124m", 124_439_808, 148),
    ],
)
def test_built_in_models_have_the_published_numbers_of_parameters(name, total, count):
    assert parameters(BUILT_IN[name].layers()) == total
    assert len(tensors(BUILT_IN[name].layers())) == count


@pytest.mark.parametrize(
    ("layers", "total"),
    [
        (resnet((3, 4, 6, 3), bottleneck=False), 21_797_672),
        (resnet((3, 4, 23, 3), bottleneck=True), 44_549_160),
        (swin(96, (2, 2, 6, 2), (3, 6, 12, 24)), 28_288_354),
        (swin(96, (2, 2, 18, 2), (3, 6, 12, 24)), 49_606_258),
        (gpt2(1024, 24), 354_823_168),
    ],
    ids=["resnet34", "resnet101", "swin-tiny", "swin-small", "gpt2-medium"],
)
def test_their_relatives_do_too(layers, total):
    """What was fitted to one total would miss these."""
    assert parameters(layers) == total


@pytest.mark.parametrize(
    ("name", "multiply_adds"), [("resnet18", 1.81e9), ("resnet50", 4.09e9), ("swin-large", 34.5e9)]
)
def test_work_is_as_published(name, multiply_adds):
    assert sum(layer.multiply_adds for layer in BUILT_IN[name].layers()) == pytest.approx(multiply_adds, rel=0.01)


def test_names_and_shapes_are_the_usual_ones():
    resnet50 = tensors(BUILT_IN["resnet50"].layers())
    assert resnet50["layer2.0.downsample.0.weight"] == (512, 256, 1, 1)
    assert resnet50["layer4.2.conv2.weight"] == (512, 512, 3, 3)
    assert list(resnet50)[:3] == ["conv1.weight", "bn1.weight", "bn1.bias"]
    assert list(resnet50)[-2:] == ["fc.weight", "fc.bias"]
    swin_large = tensors(BUILT_IN["swin-large"].layers())
    assert swin_large["layers.3.blocks.1.attn.relative_position_bias_table"] == (169, 48)
    assert swin_large["layers.2.downsample.reduction.weight"] == (1536, 3072)


def test_a_layer_counts_its_work():
    assert convolution("c", 3, 8, 5, 10) == Layer(tensors={"c.weight": (8, 3, 5, 5)}, multiply_adds=60_000)
    assert linear("l", 4, 6, 10) == Layer(tensors={"l.weight": (6, 4), "l.bias": (6,)}, multiply_adds=240)
