"""Integrations: adapters for the training loops of other libraries. Each has its own extra and is imported by name.

accelerate        attaches a model that an Accelerator prepares, in place of DistributedDataParallel
lightning/        strategies of Lightning's Trainer and of Fabric
transformers      a Trainer that averages with the other workers by a recipe
jax/              JAX: sessions of pytrees and an optax transformation, behind `gossamer.jax`
ray               Ray Train: runs a TorchTrainer's workers as Gossamer workers; saves and loads Ray checkpoints
ray_group         starts a group of workers, without importing Ray; adds up their steps between two reports
library_versions  rejects a library that is missing or older than the tested versions
"""
