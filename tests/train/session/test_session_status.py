"""What print(session) shows: place, recipe as resolved, bytes, and where things go."""

from __future__ import annotations

from pathlib import Path

from support.sessions import sgd
from support.virtual_workers import Worker, cluster, network, train_step

from gossamer import TopK


def shown(recipe: object, world: int, steps: int, directory: Path | None = None) -> list[str]:
    def work(worker: Worker) -> str:
        model, optimizer, session = worker.start(network(0), sgd, recipe)
        session.status.record = "loss.json"
        for step in range(steps):
            train_step(model, optimizer, step, worker.rank)
        if directory is not None:
            session.save(directory)
        return repr(session)

    texts: list[str] = cluster(work, world)
    return texts


PARAMETERS = 6 * 16 + 16 + 16 * 16 + 16 + 16 * 3 + 3


def test_before_the_first_step_it_says_what_dense_would_send() -> None:
    first, second = shown(TopK(density=0.1), 2, 0)
    assert first.splitlines() == [
        "Session: rank 0 of 2, step 0",
        "  recipe: EveryStep() + Route(Feedback(TopK(density=0.1))) + Complete()",
        f"  sent: nothing yet; Dense() sends {PARAMETERS * 8 / 1000:.1f} kB a step",
        "  record: loss.json; checkpoint: none yet",
    ]
    assert second.startswith("Session: rank 1 of 2, step 0\n")


def test_what_is_sent_is_compared_with_dense(tmp_path: Path) -> None:
    sparse = shown(TopK(density=0.1), 2, 3, tmp_path)[0].splitlines()
    assert sparse[0] == "Session: rank 0 of 2, step 3"
    factor = float(sparse[2].split(", ")[1].split(" times less than Dense() (3.5 kB)")[0])
    assert 2 < factor < 10
    assert sparse[3] == f"  record: loss.json; checkpoint: {tmp_path}"


def test_dense_is_as_dense_but_for_its_reports() -> None:
    """Reports that end a step count as sent, and here they are as large as the gradients of a small model."""
    (_, _, sent, _) = shown(None, 2, 2)[0].splitlines()
    assert "less" not in sent


def test_a_world_of_one_sends_nothing() -> None:
    assert shown(None, 1, 2)[0].splitlines()[2] == "  sent: nothing, as a world of one"
