"""Integrations: adapters that train inside other libraries' loops, each with an extra of its own and imported by name.

accelerate          attaches a model that an Accelerator prepares, in place of DistributedDataParallel
library_versions    refuses a library that is missing or older than what an adapter was tested with
lightning/          strategies of Lightning's Trainer and of Fabric
session_folder      saves and loads a session within a checkpoint that another library writes
trainer_recipes     refuses what a recipe and a Trainer's arguments contradict each other in
transformers        a Trainer whose model is trained together as a recipe says
ray                 Ray Train: a TorchTrainer's workers are Gossamer's; saves and loads by Ray's checkpoints
ray_group           starts a group of workers: addresses, a secret of its own and TLS, into their environments
session_numbers     adds up steps, bytes and seconds between two reports to another library
"""
