"""Integrations: adapters that train inside other libraries' loops, each with an extra of its own and imported by name.

accelerate        attaches a model that an Accelerator prepares, in place of DistributedDataParallel
lightning/        strategies of Lightning's Trainer and of Fabric
transformers      a Trainer whose model is trained together as a recipe says
jax/              JAX: sessions of pytrees and an optax transformation, behind `gossamer.jax`
ray               Ray Train: a TorchTrainer's workers are Gossamer's; saves and loads by Ray's checkpoints
ray_group         starts a group of workers, without importing Ray; adds up their steps between two reports
library_versions  refuses a library that is missing or older than what an adapter was tested with
"""
