"""Lightning: strategies of its Trainer and of Fabric that train with a recipe. Importing it registers "gossamer".

    trainer = lightning.Trainer(strategy=GossamerStrategy("DiLoCo(period=50)"))
    fabric = lightning.Fabric(strategy=GossamerFabricStrategy("TopK(density=0.01)"))

trainer_strategy.py  GossamerStrategy: attaches a LightningModule before its first batch, or rejects the recipe
fabric_strategy.py   GossamerFabricStrategy: attaches the models and optimizers of fabric.setup
joined_strategy.py   their base class: the job that a launcher started, this worker's rank and device, collective calls
collectives.py       reduce, all_gather, broadcast and barrier, on the group of the open session
session_files.py     each rank's part of a checkpoint, next to Lightning's file, and the merged model
"""

from gossamer.integrations.library_versions import require_library

require_library("lightning", "2.6", extra="lightning")

from lightning.fabric.strategies import STRATEGY_REGISTRY  # noqa: E402  # not before its version is known
from lightning.pytorch.strategies import StrategyRegistry  # noqa: E402

from gossamer.integrations.lightning.fabric_strategy import GossamerFabricStrategy  # noqa: E402
from gossamer.integrations.lightning.trainer_strategy import GossamerStrategy  # noqa: E402

__all__ = ["GossamerFabricStrategy", "GossamerStrategy"]

_ABOUT = "Gossamer: any communication scheme with any compression"
StrategyRegistry.register("gossamer", GossamerStrategy, description=_ABOUT, override=True)
STRATEGY_REGISTRY.register("gossamer", GossamerFabricStrategy, description=_ABOUT, override=True)
