"""Byte models: guess what follows in a text, without attention, from the windows of examples/bytelm.py."""

from torch import Tensor, nn
from torch.nn.functional import cross_entropy


class ByteLSTM(nn.Module):
    """How surprising is each next byte, to a recurrent network? 0.26 million parameters."""

    def __init__(self, width: int = 64, state: int = 192) -> None:
        super().__init__()
        self.byte, self.guess = nn.Embedding(256, width), nn.Linear(state, 256)
        self.past = nn.LSTM(width, state, batch_first=True)

    def forward(self, text: Tensor) -> Tensor:
        seen, following = text[:, :-1].long(), text[:, 1:].long()
        states, _ = self.past(self.byte(seen))
        return cross_entropy(self.guess(states).flatten(0, 1), following.flatten())


class ByteMLP(nn.Module):
    """How surprising is each byte after the `past` before it, to two layers over their embeddings? 0.21 million
    parameters. (batch, bytes) -> mean cross entropy in nats.

    source: Bengio et al. 2003, JMLR (a neural probabilistic language model)
    """

    def __init__(self, past: int = 8, width: int = 64, hidden: int = 256) -> None:
        super().__init__()
        self.past = past
        self.byte, self.think = nn.Embedding(256, width), nn.Linear(past * width, hidden)
        self.guess = nn.Linear(hidden, 256)

    def forward(self, text: Tensor) -> Tensor:
        seen, following = text[:, :-1].long().unfold(1, self.past, 1), text[:, self.past :].long()
        x = self.byte(seen).flatten(2)
        return cross_entropy(self.guess(self.think(x).relu()).flatten(0, 1), following.flatten())
