"""The Trainer and Accelerate: with two workers, in one launch; a Trainer alone, in this process."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers")
pytest.importorskip("accelerate")

from accelerate.state import AcceleratorState
from safetensors.torch import load_file
from support.paths import ROOT
from support.processes import findings, succeed
from support.tiny_gpt2 import arguments, digest, texts, tiny_gpt2
from transformers import Trainer, TrainerCallback

from gossamer import events
from gossamer.errors import AttachError, CheckpointError
from gossamer.integrations.transformers import GossamerTrainer


@pytest.fixture(autouse=True)
def fresh_accelerate() -> Iterator[None]:
    yield
    AcceleratorState._reset_state(reset_partial_state=True)


@pytest.mark.processes
@pytest.mark.timeout(500)  # most of it imports, which take minutes where twenty others do the same
def test_two_workers(tmp_path: Path) -> None:
    program = str(ROOT / "tests" / "support" / "hugging_face_worker.py")
    said = succeed([program, str(tmp_path)], 2, preload=["gossamer.integrations.transformers"], timeout_seconds=480)
    first, second = (_together(findings(text)) for text in said)

    trainer, other = first["by_trainer"], second["by_trainer"]
    assert [trainer["ranks"], other["ranks"]] == [[2, 0], [2, 1]]
    assert not trainer["wrapped"]
    assert not {*trainer["batches"]} & {*other["batches"]}  # sums of words: each rank has its own part
    assert trainer["trainer"] == trainer["plain loop"] == other["trainer"]
    assert trainer["trainer"] != trainer["not clipped"]

    apart = first["resumed"]
    assert apart["at once"] == apart["from the middle"]
    assert apart["at once"] == second["resumed"]["at once"]  # all end with what they agree on
    assert apart["at once"] != apart["forgetful"]
    assert apart["eval losses"] == second["resumed"]["eval losses"]
    assert apart["loss of the saved model"] == apart["eval losses"][0]  # what is evaluated and saved is what is merged
    assert "it was written without Gossamer" in apart["without a folder"]

    assert any("6 steps have 2 rounds of 3 steps" in text for text in first["noticed"])
    assert not any("rounds of" in text for text in second["noticed"])

    best = first["best"]
    assert best["best"] == 1
    assert best["loaded"] == best["in its file"] == second["best"]["loaded"]

    assert any("momentum of 10 tensors moved" in text for text in first["with_momentum"])
    assert not any("gradients were changed" in text for text in first["with_momentum"])

    scaled = first["scaled"]
    assert scaled == second["scaled"]
    assert scaled["scale"] < 2.0**127  # the first step overflowed, and was skipped on both
    assert scaled["model"] != scaled["untrained"]

    loop, other = first["by_accelerate"], second["by_accelerate"]
    assert loop["accelerated"] == loop["plain loop"] == other["accelerated"]
    assert loop["gathered"] == [0, 1]
    assert (loop["at once"], other["at once"]) == (loop["from the middle"], other["from the middle"])
    assert loop["at once"] != loop["forgetful"]
    assert "above accelerator.prepare(...)" in loop["late"]


def _together(said: list[dict[str, Any]]) -> dict[str, Any]:
    return {name: what for each in said for name, what in each.items()}


def trainer(tmp_path: Path, recipe: str, *callbacks: TrainerCallback, **options: Any) -> GossamerTrainer:
    return GossamerTrainer(
        tiny_gpt2(), arguments(tmp_path, **options), train_dataset=texts(), callbacks=[*callbacks], recipe=recipe
    )


def test_alone_it_trains_and_resumes_to_the_same_bits(tmp_path: Path) -> None:
    at_once = trainer(tmp_path, "TopK(0.1)", save_strategy="steps", save_steps=3)
    at_once.train()
    resumed = trainer(tmp_path, "TopK(0.1)")
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-3"))
    assert digest(at_once.model) == digest(resumed.model)
    assert at_once.session is None
    last = load_file(tmp_path / "checkpoint-6" / "model.safetensors")
    assert last["transformer.wte.weight"].equal(at_once.model.transformer.wte.weight)


def test_true_resumes_from_the_last_checkpoint(tmp_path: Path) -> None:
    trainer(tmp_path, "Dense()", save_strategy="steps", save_steps=3, max_steps=3).train()
    resumed = trainer(tmp_path, "Dense()")
    assert resumed.train(resume_from_checkpoint=True).global_step == 6


class _Upload(TrainerCallback):  # type: ignore[misc]
    """Looks at a checkpoint as a callback that copies it would."""

    def __init__(self) -> None:
        self.seen: list[bool] = []

    def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.seen.append((Path(args.output_dir) / f"checkpoint-{state.global_step}" / "gossamer").is_dir())


def test_callbacks_receive_a_checkpoint_with_its_session(tmp_path: Path) -> None:
    upload = _Upload()
    trainer(tmp_path, "Dense()", upload, save_strategy="steps", save_steps=3).train()
    assert upload.seen == [True, True]


def test_a_trial_of_a_search_keeps_its_session_in_its_own_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Trainer, "_get_output_dir", lambda self, trial: str(tmp_path / "run-7"))
    trainer(tmp_path, "Dense()", save_strategy="steps", save_steps=3, max_steps=3).train()
    assert (tmp_path / "run-7" / "checkpoint-3" / "gossamer").is_dir()
    assert not (tmp_path / "checkpoint-3").exists()


def test_a_checkpoint_without_the_session_is_refused(tmp_path: Path) -> None:
    trainer(tmp_path, "Dense()", save_strategy="steps", save_steps=3, save_only_model=True).train()
    with pytest.raises(CheckpointError, match="has no folder 'gossamer'"):
        trainer(tmp_path, "Dense()").train(resume_from_checkpoint=str(tmp_path / "checkpoint-3"))


class _OfAnotherLibrary(Trainer):  # type: ignore[misc]
    """A trainer such as SFTTrainer."""

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        self.steps_made = getattr(self, "steps_made", 0) + 1
        return super().training_step(*args, **kwargs)


class _Both(GossamerTrainer, _OfAnotherLibrary):
    """As the class's docstring says."""


def test_another_librarys_trainer_trains_with_a_recipe(tmp_path: Path) -> None:
    both = _Both(tiny_gpt2(), arguments(tmp_path), train_dataset=texts(), recipe="TopK(0.1)")
    both.train()
    alone = trainer(tmp_path, "TopK(0.1)")
    alone.train()
    assert both.steps_made == 6
    assert digest(both.model) == digest(alone.model)


@pytest.mark.parametrize(
    ("recipe", "options", "line"),
    [
        ("EveryStep(accumulate=2)", {}, "gradient_accumulation_steps=2"),
        ("Gossip('pairwise')", {}, r"DiLoCo\(period=50\)"),
        ("ParameterServer()", {}, r"DiLoCo\(period=50\)"),
        ("DGC(0.1)", {"optim": "sgd"}, r"max_grad_norm=0\).*clip=1.0"),
    ],
)
def test_a_recipe_that_the_loop_contradicts_is_refused(
    tmp_path: Path, recipe: str, options: dict[str, Any], line: str
) -> None:
    refused = trainer(tmp_path, recipe, **options)
    with pytest.raises(AttachError, match=line):
        refused.train()
    assert refused.session is None  # closed, so that the next training can begin
    assert refused.state.global_step == 0


def test_tokens_are_counted_on_each_worker_where_workers_train_apart(tmp_path: Path) -> None:
    alike, apart = trainer(tmp_path, "Dense()"), trainer(tmp_path, "DiLoCo(period=2)")
    alike.train()
    apart.train()
    assert (alike.args.average_tokens_across_devices, apart.args.average_tokens_across_devices) == (True, False)


class _Asks(TrainerCallback):  # type: ignore[misc]
    """Asks the session to stop after the second step."""

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step == 1:
            self.trainer.session.request_stop()


@pytest.mark.parametrize(("steps", "strategy"), [(3, "EveryStep()"), (500, "LocalSGD(period=8)")])
def test_auto_knows_the_steps_of_the_training(tmp_path: Path, steps: int, strategy: str) -> None:
    begun: list[str] = []

    class StopsAtOnce(TrainerCallback):  # type: ignore[misc]
        def on_step_end(self, args: Any, state: Any, control: Any, **more: Any) -> None:
            assert trainer.session is not None
            begun.append(repr(trainer.session.recipe.strategy))
            control.should_training_stop = True

    given = arguments(tmp_path, max_steps=steps)
    trainer = GossamerTrainer(tiny_gpt2(), given, train_dataset=texts(), recipe="auto", callbacks=[StopsAtOnce()])
    trainer.train()
    assert begun == [strategy]


def test_a_session_that_stops_ends_the_training(tmp_path: Path) -> None:
    asks = _Asks()
    asks.trainer = stopped = trainer(tmp_path, "Dense()", asks)
    assert stopped.train().global_step < 6


def test_what_is_logged_is_in_the_record(tmp_path: Path) -> None:
    told: list[dict[str, float]] = []
    end = events.subscribe(lambda event: told.append(dict(event.values)) if isinstance(event, events.Logged) else None)
    trainer(tmp_path, "Dense()", logging_steps=2).train()
    end()
    assert [entry for entry in told if "loss" in entry and "grad_norm" in entry]
    assert not [name for entry in told for name in entry if name.endswith(("_runtime", "_per_second"))]
