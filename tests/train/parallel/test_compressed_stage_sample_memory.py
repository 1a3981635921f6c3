"""What is known of each sample: whose it is, how much there may be of it, and whether both sides know the same."""

import pytest
import torch
from torch import Tensor

from gossamer.errors import CheckpointError, LoopError
from gossamer.train.parallel.compressed_stage import SampleMemory


def ids(*numbers: int) -> Tensor:
    return torch.tensor(numbers)


def test_each_sample_has_its_own() -> None:
    memory = SampleMemory(5, (2,), torch.float32)
    memory.remember(ids(3, 1), torch.tensor([[3.0, 3.0], [1.0, 1.0]]))
    assert memory.recall(ids(1, 2, 3), torch.device("cpu")).tolist() == [1, 1, 0, 0, 3, 3]
    assert memory.visits.tolist() == [0, 1, 0, 1, 0]


def test_narrow_numbers_are_recalled_in_float32() -> None:
    memory = SampleMemory(5, (2,), torch.bfloat16)
    assert memory.recall(ids(1), torch.device("cpu")).dtype == torch.float32
    assert memory.known.dtype == torch.bfloat16


def test_fingerprints_tell_samples_and_visits_apart() -> None:
    mine, other = SampleMemory(5, (2,), torch.float32), SampleMemory(5, (2,), torch.float32)
    assert mine.fingerprint(ids(1, 2)) == other.fingerprint(ids(1, 2)) != 0
    assert mine.fingerprint(ids(1, 2)) != mine.fingerprint(ids(2, 1))
    mine.remember(ids(2), torch.ones(1, 2))
    assert mine.fingerprint(ids(1, 2)) != other.fingerprint(ids(1, 2))
    assert mine.fingerprint(ids(1, 3)) == other.fingerprint(ids(1, 3))


@pytest.mark.parametrize(
    ("samples", "reason"),
    [
        (ids(0, 1, 2), "ids of shape"),
        (torch.zeros(2, 1), "ids of shape"),
        (ids(0, 5), "samples=6"),
        (ids(-1, 0), "number samples from 0"),
        (ids(3, 3), "twice"),
    ],
)
def test_ids_that_name_no_sample_are_refused(samples: Tensor, reason: str) -> None:
    with pytest.raises(LoopError, match=reason):
        SampleMemory(5, (2,), torch.float32).checked(samples, due=2)


def test_ids_may_come_in_any_integer_type() -> None:
    found = SampleMemory(5, (2,), torch.float32).checked(torch.tensor([4, 0], dtype=torch.int32), due=2)
    assert found.dtype == torch.int64


def test_a_checkpoint_of_other_data_is_refused() -> None:
    memory = SampleMemory(5, (2,), torch.float32)
    with pytest.raises(CheckpointError, match=r"\(5, 2\), but that of the checkpoint is \(6, 2\)"):
        memory.load_state_dict(SampleMemory(6, (2,), torch.float32).state_dict())
    with pytest.raises(CheckpointError, match="nothing"):
        memory.load_state_dict({})
