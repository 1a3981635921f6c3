import json
from itertools import pairwise

import pytest

from gossamer.plan.rehearse.model_shapes import Gradient, Shapes, ShapesError, appearing, find_shapes
from gossamer.plan.rehearse.model_zoo import BUILT_IN, Layer

SCRIPT = """
import sys
import gossamer, torch
width = int(sys.argv[1])
model = torch.nn.Sequential(torch.nn.Linear(4, width), torch.nn.Linear(width, 3))
gossamer.attach(model, torch.optim.SGD(model.parameters(), lr=0.1), "TopK(density=0.1)")
raise AssertionError("attached")
"""


def test_gradients_appear_from_the_last_layer_to_the_first_as_work_passes():
    layers = [
        Layer(tensors={"a.weight": (2, 3), "a.bias": (2,)}, multiply_adds=5),
        Layer(multiply_adds=1),
        Layer(tensors={"b.weight": (4,)}, multiply_adds=4),
    ]
    assert appearing(layers) == (
        Gradient("a.weight", (2, 3), 1.0),
        Gradient("a.bias", (2,), 1.0),
        Gradient("b.weight", (4,), 0.4),
    )


@pytest.mark.parametrize("name", BUILT_IN)
def test_the_first_layer_of_a_built_in_model_is_the_last_to_be_done(name):
    shares = [gradient.share for gradient in find_shapes(name).gradients]
    assert shares[0] == 1.0
    assert all(before >= after > 0 for before, after in pairwise(shares))


def test_a_tied_head_delays_everything_else():
    """The embedding's gradient is complete where its first use is; the head alone has a quarter of the work."""
    gradients = find_shapes("gpt2-124m").gradients
    assert (gradients[0].name, gradients[0].share) == ("wte.weight", 1.0)
    assert gradients[-1].name == "ln_f.bias"
    assert gradients[-1].share == pytest.approx(50257 * 768 * 1024 / 145.85e9, rel=0.01)


def test_a_file_says_what_was_written_into_it(tmp_path):
    shapes = Shapes("mine", (Gradient("first", (3, 4), 1.0), Gradient("scalar", (), 0.25)))
    (tmp_path / "mine.json").write_text(shapes.to_json())
    found = find_shapes(str(tmp_path / "mine.json"))
    assert (found.gradients, found.parameters) == (shapes.gradients, 13)
    assert found.title.endswith("mine.json")


def test_a_script_shows_the_model_it_attaches(tmp_path):
    (tmp_path / "train.py").write_text(SCRIPT)
    found = find_shapes(str(tmp_path / "train.py"), ["5"])
    assert [(gradient.name, gradient.shape) for gradient in found.gradients] == [
        ("0.weight", (5, 4)),
        ("0.bias", (5,)),
        ("1.weight", (3, 5)),
        ("1.bias", (3,)),
    ]
    assert [gradient.share for gradient in found.gradients] == [1.0, 23 / 43, 18 / 43, 3 / 43]


@pytest.mark.parametrize(
    ("content", "ops"),
    [
        ("[[", "not JSON"),
        ('{"a": 1}', "not a list"),
        ("[]", "has no tensors"),
        ('[["a", [3]]]', r'\["a", \[3\]\] is not \[name, shape, share\]'),
        ('[["a", [3], "soon"]]', "is not"),
        ('[["a", [0], 1.0]]', "positive whole numbers"),
        ('[["a", [2.5], 1.0]]', "positive whole numbers"),
        ('[["a", [3], 1.5]]', "in .0, 1."),
        ('[["a", [3], NaN]]', "in .0, 1."),
        ('[["a", [true], 1.0]]', "positive whole numbers"),
        ('[["a", [3], true]]', "is not"),
        pytest.param(f'[["a", [1{"0" * 30}], 1.0]]', "more elements than any memory", id="huge"),
        pytest.param(f'[["a", [3], 1{"0" * 400}]]', "is not", id="huge share"),
        pytest.param("[" * 100000, "not JSON", id="deep"),
        ('[["", [3], 1.0]]', "needs a name"),
        ('[["a", [3], 1.0], ["a", [4], 0.5]]', "several tensors named a"),
    ],
)
def test_nonsense_in_a_file_is_refused(tmp_path, content, ops):
    (tmp_path / "bad.json").write_text(content)
    with pytest.raises(ShapesError, match=ops):
        find_shapes(str(tmp_path / "bad.json"))


def test_an_unknown_name_is_told_the_known_ones_and_how_to_write_a_file():
    with pytest.raises(ShapesError) as refused:
        find_shapes("resnet19")
    assert all(name in str(refused.value) for name in BUILT_IN)
    example = str(refused.value).partition("write a file: ")[2]
    assert [Gradient(name, tuple(shape), share) for name, shape, share in json.loads(example)]
