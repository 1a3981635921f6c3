"""Federated learning: a server and devices that keep their data, over scripts without sockets.

messages      what both tell each other beside tensors: tasks, reports, fates
model_state   what of a model travels, as one flat tensor
upload        a contribution in parts of bounded size
client        a device: the user's function, its hooks, feedback, and the device's script
population    devices unlike each other: speed, link, hours
script_file   the functions that a user's script marks
flower        Flower: its programs on devices of ours, our compression in its programs (extra `flower`)
server        rounds: selection, admission, sums, the next version
"""

from gossamer.federated.client.functions import Round, Update, client, evaluate, model

__all__ = ["Round", "Update", "client", "evaluate", "model"]
