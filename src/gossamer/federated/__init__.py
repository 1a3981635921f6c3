"""Federated learning: a server and devices that keep their data, over scripts without sockets.

messages      what both tell each other beside tensors: tasks, reports, fates
model_state   what of a model travels, as one flat tensor
upload        a contribution in parts of bounded size
client        a device: the user's function, its hooks, feedback, and the device's script
population    devices unlike each other: speed, link, hours
round_forecast  what a round costs, before anything runs
script_file   the functions that a user's script marks
recipe_terms  the strategy and the compressors of a recipe's text
secure        masks that cancel in the sum: the server learns that, and nothing of a device
server        rounds: selection, admission, sums, the next version
deployment    a server and devices as processes that talk over TCP
"""

from gossamer.federated.client.functions import Round, Update, client, evaluate, model

__all__ = ["Round", "Update", "client", "evaluate", "model"]
