"""The comparison of Adaptive(TopK) with TopK: its lines through what was trained, and what it says of them."""

from __future__ import annotations

from math import sqrt

import pytest
from benchmarks.adaptive import Curve, Job, adaptive, jobs, key, options, page_part, summary, top_k
from benchmarks.training import Run

pytestmark = pytest.mark.nightly

CURVE = Curve(((100.0, 4.0), (400.0, 2.0), (1600.0, 2.0)))


def run(compressor: str, seed: int, sent: float, loss: float | None) -> Run:
    return {
        "task": "embeddings", "compressor": compressor, "resolved": "", "seed": seed, "steps": 10, "workers": 4,
        "seconds": 1.0, "curve": [(0, 0.0, 5.0), (10, 10 * sent, loss)], "held_out": loss,
    }  # fmt: skip


def kept(spread_loss: float | None = 2.0) -> dict[Job, Run]:
    runs = [
        run(text, seed, sent, loss)
        for seed in range(2)
        for text, sent, loss in [
            (top_k(0.01), 100.0, 4.0 + seed),
            (top_k(0.03), 400.0, 2.0 + seed),
            (adaptive(0.01), 100.0, None if spread_loss is None else spread_loss + seed),
        ]
    ]
    return {key(each): each for each in runs}


ARGS = options().parse_args(["--tasks", "embeddings", "--densities", "0.01", "--steps", "10"])


def test_between_two_densities_a_line_runs_through_logarithms() -> None:
    assert CURVE.loss_for(200.0) == pytest.approx(2 * sqrt(2))
    assert CURVE.bytes_for(2 * sqrt(2)) == pytest.approx(200.0)
    assert [CURVE.loss_for(sent) for sent in (100.0, 400.0, 800.0)] == pytest.approx([4.0, 2.0, 2.0])


def test_the_line_continues_beyond_its_ends_and_bytes_are_not_guessed_there() -> None:
    assert CURVE.loss_for(25.0) == pytest.approx(8.0)
    assert CURVE.bytes_for(1.9) is None
    assert CURVE.bytes_for(4.5) is None


def test_a_table_tells_losses_and_what_top_k_would_have_taken() -> None:
    text = page_part(kept(), ARGS)
    assert "| 0.01 | 4.500 ± 0.707 | 100 B | 2.500 ± 0.707 | 100 B | 0.556 | 4.00 times |" in text
    assert "less loss in 1 of 1 cases, between 0.556 and 0.556" in text


def test_it_reports_it_where_it_is_worse() -> None:
    assert "less loss in 0 of 1 cases, between 1.333 and 1.333" in summary(kept(5.5), ARGS)
    assert "less loss in 0 of 1 cases" in summary(kept(None), ARGS)  # diverged


def test_seeds_that_only_some_were_trained_with_are_left_out() -> None:
    runs = kept()
    del runs[Job("embeddings", top_k(0.01), 1, 10)]
    assert "| 0.01 | 4.000 | 100 B | 2.000 |" in page_part(runs, ARGS)


def test_both_are_trained_with_every_density_and_seed() -> None:
    wanted = jobs(ARGS)
    assert len(set(wanted)) == len(wanted)
    for seed in range(2):
        assert {Job("embeddings", text, seed, 10) for text in (top_k(0.01), adaptive(0.01), top_k(0.03))} < set(wanted)
