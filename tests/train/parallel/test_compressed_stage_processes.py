"""Two processes, torch's own schedules and Gloo: the same bits as in one process, and fewer bytes."""

import pytest
import torch
from support import interleaved_worker, pipeline_worker
from support.nightly import nightly
from support.pipeline_worker import BATCH, IDS, INPUTS, MICROBATCHES, STEPS, TARGETS, WIDTH, digest, edge_of
from support.processes import findings, succeed
from support.two_stages import GPIPE, ONE_F_ONE_B, TwoStages, halves

PRELOAD = ["torch.distributed.pipelining"]
ORDERS = {"ScheduleGPipe": GPIPE, "Schedule1F1B": ONE_F_ONE_B}


@pytest.mark.processes
@pytest.mark.parametrize(
    ("codec", "feedback", "schedule"),
    [("TopK(0.1)", "difference", "Schedule1F1B"), *nightly(("Int8()", "none", "ScheduleGPipe"))],
)
def test_torchs_pipelining_over_gloo_sends_few_bytes_and_trains_the_same_bits(
    codec: str, feedback: str, schedule: str
) -> None:
    words = [pipeline_worker.__file__, codec, feedback, schedule]
    first, second = (findings(said)[0] for said in succeed(words, 2, preload=PRELOAD))
    edge = edge_of(codec, feedback)
    assert edge is not None
    stages = TwoStages(*halves(width=WIDTH), edge)
    ids = IDS if feedback != "none" else None
    loss = [stages.step(INPUTS, TARGETS, ids, ORDERS[schedule]) for _ in range(STEPS)][-1]
    for said, module in ((first, stages.first.module), (second, stages.second.module)):
        assert said["gradients"] == digest(parameter.grad for parameter in module.parameters())
    assert sum(second["losses"]) / MICROBATCHES == pytest.approx(loss)
    assert len(first["sent_bytes"]) == (STEPS + 1) * MICROBATCHES  # activations, also those of the evaluation
    assert len(second["sent_bytes"]) == STEPS * MICROBATCHES  # gradients
    carrier = 4 * edge.carrier().numel()
    dense = 4 * BATCH // MICROBATCHES * WIDTH
    assert {*first["sent_bytes"], *second["sent_bytes"]} == {carrier}
    assert carrier < dense / 3
    with torch.no_grad():
        known = [None] * MICROBATCHES if ids is None else ids.chunk(MICROBATCHES)
        answers = [stages.forward(*each)[2] for each in zip(INPUTS.chunk(MICROBATCHES), known, strict=True)]
    assert torch.equal(torch.tensor(second["answers"]), torch.cat(answers))


@pytest.mark.processes
def test_several_stages_a_rank_train_the_same_bits() -> None:
    said = "".join(succeed([interleaved_worker.__file__], 2, preload=PRELOAD))
    for schedule, places in interleaved_worker.PLACES.items():
        assert all(f"equal {schedule} {one} {other}\n" in said for one, other in places)
