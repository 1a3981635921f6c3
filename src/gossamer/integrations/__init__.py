"""Integrations: adapters that train inside other libraries' loops, each with an extra of its own and imported by name.

library_versions    refuses a library that is missing or older than what an adapter was tested with
ray                 Ray Train: a TorchTrainer's workers are Gossamer's; saves and loads by Ray's checkpoints
ray_group           starts a group of workers: addresses, a secret of its own and TLS, into their environments
session_numbers     adds up steps, bytes and seconds between two reports to another library
"""
