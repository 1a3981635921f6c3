"""Methods under the names of other libraries and papers, and misspelled names."""

import re

import pytest
from support.paths import ROOT

from gossamer.algorithms.recipes.catalog import NOUNS, PRESETS
from gossamer.algorithms.recipes.other_names import BY_NAME, OTHER_NAMES, OtherName, normalized, table
from gossamer.algorithms.recipes.recipe import resolve
from gossamer.errors import RecipeError

FIELD_NAMES = (
    "DDP, DataParallel, FSDP, FSDP2, HSDP, ZeRO, ZeRO-3, DeepSpeed, Megatron, DTensor, RPC, pipeline, GPipe, "
    "PipeDream, tensor parallelism, MPI, NCCL, Gloo, Horovod, Elastic Horovod, torchft, MirroredStrategy, "
    "TPUStrategy, MultiWorkerMirroredStrategy, ParameterServerStrategy, CentralStorageStrategy, "
    "OneDeviceStrategy, KVStore, BytePS, dist_device_sync, ps-lite, Downpour, Hogwild, "
    "EASGD, SSP, hivemind, Moshpit, Moshpit SGD, DGA, SparseLoCo, MuLoCo, DES-LOC, SPARTA, OpenDiLoCo, "
    "Streaming DiLoCo, Decoupled DiLoCo, Dion, EF21-Muon, DRIVE, DIANA, MARINA, FetchSGD, ATOMO, STC, "
    "CocktailSGD, ScaleCom, signSGD, SwarmSGD, MATCHA, BlueFog, AD-PSGD, Krum, Bulyan, SecAgg, Mime, Ditto, "
    "FedDyn, FedAdam, q-FedAvg"
)


def refusal(text):
    with pytest.raises(RecipeError) as refused:
        resolve(text)
    return str(refused.value)


@pytest.mark.parametrize("other", OTHER_NAMES, ids=lambda other: other.names[0])
def test_every_recipe_of_the_table_can_be_written(other: OtherName):
    assert bool(other.recipe) != bool(other.use)
    if other.recipe:
        for workers in (None, 2, 8):
            resolve(other.recipe, workers)


def test_no_name_of_the_table_hides_another_or_a_term_of_ours():
    names = [normalized(name) for other in OTHER_NAMES for name in other.names]
    ours = {normalized(name): name for name in (*NOUNS, *PRESETS)}
    doubled = {other.names for other in OTHER_NAMES for name in other.names if BY_NAME[normalized(name)] is not other}
    assert not doubled
    assert all(names)
    assert {name for name in names if name in ours} == set()


@pytest.mark.parametrize("other", OTHER_NAMES, ids=lambda other: other.names[0])
def test_every_name_is_answered_with_its_recipe(other: OtherName):
    for name in other.names:
        said = refusal(name)
        assert other.origin in said
        assert (other.recipe or other.use) in said
        assert ("has no equivalent" in said) == bool(other.lacking)
        assert ("is not a recipe" in said) == bool(other.use)


def test_the_page_has_the_table_of_the_command():
    page = (ROOT / "docs" / "reference" / "other-names.md").read_text()
    assert table() in page, "the page has another table: paste the output of other_names.table()"


@pytest.mark.parametrize("other", [each for each in OTHER_NAMES if each.use], ids=lambda other: other.names[0])
def test_lines_to_write_name_pages_that_exist(other: OtherName):
    for page in re.findall(r"docs/[a-z/-]+\.md", other.use):
        assert (ROOT / page).is_file()


@pytest.mark.parametrize("name", FIELD_NAMES.split(", "))
def test_names_of_the_field_are_known(name: str):
    said = refusal(name)
    assert "There is no" not in said
    assert f"{name} (" in said


@pytest.mark.parametrize(
    ("text", "ops"),
    [
        (
            "dist_device_sync",
            ["dist_device_sync (MXNet's KVStore) is ParameterServer('sync') here. Write that.", "^ character 1"],
        ),
        ("DIST-ASYNC", ["Write one of: dist_async."]),
        ("BlockMeen(8)", ["Write one of: DiLoCo(period=20, outer_learning_rate=1.0, outer_momentum=0.5).\n"]),
        ("deepspeeed", ["There is no deepspeeed in", "DeepSpeed (", "is not a recipe. Shard the model with torch"]),
        ("1bit-adam", ["1bit-adam (DeepSpeed) is OneBitAdam(warmup=1000) here"]),
        ("1-bit Adam(warmup=5)", ["OneBitAdam(warmup=1000)"]),
        ("Ring() + EF-SGD", ["Feedback(OneBit())", "^ character 10"]),
        ("LocalSGD(8) +  1bit-adam", ["OneBitAdam", "^ character 16"]),
        (
            "Feedback(signsgd)",
            ["signsgd (Bernstein et al. 2018) has no equivalent", "OneBit(feedback=False)", "^ character 10"],
        ),
        ("FedAvg(period=10)", ["FedAvg takes no argument period. Write FedAvg(fraction=0.1, "]),
        ("FedAdam", ["FedAdam (Reddi et al. 2021) is FedOpt('adam') here. Write that."]),
        (
            "q-FedAvg",
            [
                "has no equivalent",
                "not weighted by their loss",
                "The nearest recipe is FedAvg(fraction=0.1).",
            ],
        ),
        ("FedSGD() + Int8()", ["FedAvg(fraction=1.0, local_steps=1)"]),
        (
            "FSDP",
            ["is not a recipe", 'attach(model, optimizer, recipe, mesh=mesh["replicate"])', "Sharded models"],
        ),
        ("Krum", ["has no equivalent", "it keeps one contribution"]),
        ("Moshpit", ["Gossip() + Groups(size=8)"]),
    ],
)
def test_answers(text, ops):
    said = refusal(text)
    for op in ops:
        assert op in said


@pytest.mark.parametrize(
    ("text", "near"),
    [
        ("local sgd", "LocalSGD(period, "),
        ("local_sgd(8)", "LocalSGD(period, "),
        ("power-sgd", "PowerSGD(rank=4, feedback=True)."),
        ("LocalSDG(8)", "LocalSGD(period, "),
        ("FedAvgg", "FedAvg(fraction=0.1, "),
        ("scafold", "SCAFFOLD(server_learning_rate=1.0, "),
        ("Paramter_Server", "ParameterServer(mode='async'"),
        ("dgc", "DGC(density=0.001, "),
    ],
)
def test_a_near_miss_is_answered_with_the_nearest(text, near):
    said = refusal(text)
    assert near in said
    assert "There is no" in said


@pytest.mark.parametrize("name", ["frobnicate(3)", "nope", "DGX", "MPX", "tree"])
def test_a_name_like_nothing_has_no_guess(name: str):
    said = refusal(name)
    assert "`gossamer recipes`" in said
    assert sum(noun in said for noun in NOUNS) <= 3
