"""Other names: methods of other libraries and papers, and the recipe or the line that does the same here."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class OtherName:
    """One method and its names elsewhere.

    Args:
        names: Names of the method. Case, spaces and punctuation are ignored: see `normalized`.
        origin: The library or the paper that uses these names.
        recipe: The recipe that does the same; with `lacking`, the nearest one; empty with `use`.
        lacking: The property of the method that no recipe has.
        use: A sentence with the line to write and its page, for methods that are not a recipe.
    """

    names: tuple[str, ...]
    origin: str
    recipe: str = ""
    lacking: str = ""
    use: str = ""

    def answer(self, name: str) -> str:
        """Return the error text for a user that wrote `name`, with the line to write."""
        if self.use:
            return f"{name} ({self.origin}) is not a recipe. {self.use}"
        if self.lacking:
            return f"{name} ({self.origin}) has no equivalent: {self.lacking}. The nearest recipe is {self.recipe}."
        return f"{name} ({self.origin}) is {self.recipe} here. Write that."

    @property
    def row(self) -> str:
        """The row of this method in the table of docs/reference/other-names.md."""
        names = ", ".join(f"`{name}`" for name in self.names)
        if self.use:
            return f"| {names} | {self.origin} | {self.use} |"
        if self.lacking:
            return f"| {names} | {self.origin} | nearest: `{self.recipe}`; {self.lacking} |"
        return f"| {names} | {self.origin} | `{self.recipe}` |"


_SHARDED = (
    'Shard the model with torch, and write attach(model, optimizer, recipe, mesh=mesh["replicate"]): the recipe runs '
    'between replicas ("Sharded models" in the documentation).'
)
_PIPELINE = (
    "Split the model with torch.distributed.pipelining; gossamer.parallel.boundary(codec, shape) compresses "
    'activations ("Pipeline stages" in the documentation), and attach(..., mesh=...) averages between replicas.'
)
_REMOTE = (
    "Write gossamer.parallel.remote(module, rank=1, optimizer=...) to run a layer on "
    'another rank ("Remote modules" in the documentation).'
)
_ELASTIC = (
    "Write gossamer run --workers 2:8 train.py: workers can fail or join at any time "
    '("Elastic runs" in the documentation).'
)
_BACKEND = "gossamer.init() selects the transport, so no recipe names it. Write a strategy, such as LocalSGD(8)."
_NO_LAMB = "its layerwise learning rates need norms that Adam's momentum does not have"

OTHER_NAMES = (
    # -- when workers communicate
    OtherName(
        ("DDP", "DistributedDataParallel", "DataParallel", "nn.DataParallel", "allreduce_hook"),
        "PyTorch",
        "EveryStep()",
    ),
    OtherName(("allreduce", "all-reduce", "BSP", "synchronous SGD", "sync SGD", "S-SGD"), "lock step", "EveryStep()"),
    OtherName(("Horovod", "hvd", "DistributedOptimizer"), "Horovod", "EveryStep()"),
    OtherName(
        ("MirroredStrategy", "MultiWorkerMirroredStrategy", "CollectiveAllReduceStrategy"), "TensorFlow", "EveryStep()"
    ),
    OtherName(("CentralStorageStrategy",), "TensorFlow", "ParameterServer('sync', shards=1)"),
    OtherName(
        ("OneDeviceStrategy",),
        "TensorFlow",
        use="Run the script alone, python train.py: with one worker, attach changes no bit of the training.",
    ),
    OtherName(
        ("TPUStrategy", "TPU", "XLA", "torch_xla", "jax.pmap", "pmap"),
        "TensorFlow, PyTorch/XLA and JAX",
        "EveryStep()",
        "Gossamer does not run on TPUs",
    ),
    OtherName(("gradient_allreduce",), "Bagua", "EveryStep()"),
    OtherName(("ring all-reduce",), "Baidu, NCCL", "EveryStep() + Ring()"),
    OtherName(("gradient accumulation", "accumulate"), "any loop", "EveryStep(accumulate=4)"),
    OtherName(("FSDP", "FSDP2", "FullyShardedDataParallel", "fully_shard", "HSDP"), "PyTorch", use=_SHARDED),
    OtherName(
        ("ZeRO", "ZeRO-1", "ZeRO-2", "ZeRO-3", "DeepSpeed", "ZeroRedundancyOptimizer"), "DeepSpeed", use=_SHARDED
    ),
    OtherName(
        ("TP", "tensor parallelism", "tensor parallel", "Megatron", "Megatron-LM", "DTensor"),
        "PyTorch and NVIDIA",
        use=_SHARDED,
    ),
    OtherName(
        ("pipeline", "pipeline parallelism", "GPipe", "PipeDream", "1F1B", "PP"),
        "Huang et al. 2019 and others",
        use=_PIPELINE,
    ),
    OtherName(
        ("RPC", "torch.distributed.rpc", "RemoteModule", "model parallelism", "split learning"), "PyTorch", use=_REMOTE
    ),
    OtherName(
        ("expert parallelism", "MoE", "context parallelism", "sequence parallelism"),
        "DeepSpeed and Megatron",
        "EveryStep()",
        "Gossamer does not distribute experts or sequences",
    ),
    OtherName(
        ("elastic", "torchelastic", "Elastic Horovod", "torchft", "fault tolerance"),
        "PyTorch and Horovod",
        use=_ELASTIC,
    ),
    OtherName(("MPI", "NCCL", "Gloo", "UCC", "backend"), "torch.distributed", use=_BACKEND),
    OtherName(("dist_device_sync",), "MXNet's KVStore", "ParameterServer('sync')"),  # other types are presets
    OtherName(("local_allreduce_device",), "MXNet's KVStore, one machine", "EveryStep()"),
    OtherName(
        ("local_update_cpu", "local_allreduce_cpu"),
        "MXNet's KVStore, one machine",
        "ParameterServer('sync', shards=1)",
    ),
    OtherName(("dist_device_async",), "MXNet's KVStore", "ParameterServer('async')"),
    OtherName(("KVStore", "ps", "ps-lite", "BytePS"), "ps-lite and its users", "ParameterServer('sync')"),
    OtherName(("ParameterServerStrategy",), "TensorFlow", "ParameterServer('async')"),
    OtherName(
        ("Downpour", "Downpour SGD", "A-SGD", "async SGD", "ASP"), "Dean et al. 2012", "ParameterServer('async')"
    ),
    OtherName(("SSP", "stale synchronous parallel"), "Ho et al. 2013", "ParameterServer('stale')"),
    OtherName(
        ("Hogwild", "Hogwild!"),
        "Recht et al. 2011",
        "ParameterServer('async')",
        "its workers write to one memory, and here each has its own",
    ),
    OtherName(("parallel SGD", "parallel restarted SGD"), "Stich 2018; Yu et al. 2019", "LocalSGD(period=8)"),
    OtherName(
        ("AdaComm", "adaptive period"), "Wang & Joshi 2019", "LocalSGD(period=8)", "its period changes while it trains"
    ),
    OtherName(
        ("Qsparse-local-SGD", "FedPAQ"), "Basu et al. 2019; Reisizadeh et al. 2020", "LocalSGD(period=8) + Int8()"
    ),
    OtherName(
        ("PostLocalSGDOptimizer", "PostLocalSGDState", "post_localSGD_hook"),
        "PyTorch",
        "PostLocalSGD(period=8, start=1000)",
    ),
    OtherName(("PeriodicModelAverager", "model averaging"), "PyTorch", "LocalSGD(period=8)"),
    OtherName(("HierarchicalModelAverager", "hierarchical SGD"), "PyTorch", "LocalSGD(period=8, per_site=4)"),
    OtherName(
        ("BMUF", "block momentum"), "Chen & Huo 2016", "DiLoCo(period=20, outer_learning_rate=1.0, outer_momentum=0.5)"
    ),
    OtherName(("SlowMo", "OpenDiLoCo"), "an outer momentum", "DiLoCo(period=20)"),
    OtherName(("Streaming DiLoCo",), "Douillard et al. 2025", "DiLoCo(period=100, fragments=4, delay=5)"),
    OtherName(
        ("SparseLoCo", "CCLoco"),
        "Sarfi et al. 2025",
        "DiLoCo(period=30, outer_learning_rate=1.0, outer_momentum=0.0) + "
        "Feedback(Chain(TopK(density=0.015625, chunk=4096), BinMeans(bits=2)), decay=0.95)",
        "its chunks of a matrix are squares of 64 x 64 entries, and here runs of 4,096 in memory order",
    ),
    OtherName(
        ("MuLoCo",),
        "Thérien et al. 2025",
        "DiLoCo(period=30)",
        "its inner optimizer is Muon: pass torch.optim.Muon to attach",
    ),
    OtherName(
        ("DES-LOC",),
        "Iacob et al. 2026",
        "LocalSGD(period=16, first_moment_period=48, second_moment_period=96)",
        "its periods are independent, and here those of moments are multiples of the parameters' period",
    ),
    OtherName(
        ("Local AMSGrad", "LocalAMSGrad"),
        "Chen et al. 2020",
        "LocalSGD(period=8, second_moment='amsgrad')",
    ),
    OtherName(
        ("asynchronous local SGD", "delayed Nesterov"),
        "Liu et al. 2024",
        "AsyncDiLoCo(period=50)",
        "its workers make local steps in proportion to their speed, and late contributions count in full",
    ),
    OtherName(
        ("Decoupled DiLoCo",),
        "Douillard et al. 2026",
        "AsyncDiLoCo(period=24, grace=2.0)",
        "its workers overwrite their steps since a message, and here they are kept; its mean is radial",
    ),
    OtherName(
        ("HALoS",), "Kim et al. 2025", "AsyncDiLoCo(period=8)", "its servers of a region send merges to a global server"
    ),
    OtherName(("GASLoC",), "arXiv:2606.11081", "AsyncDiLoCo(period=20)", "its outer step is gossip, without servers"),
    OtherName(
        ("SPARTA",),
        "EXO Labs 2025",
        "LocalSGD(period=1) + RandomK(density=0.005)",
        "its workers keep their own values of the entries that are not averaged",
    ),
    OtherName(
        ("EASGD", "elastic averaging SGD", "elastic averaging"),
        "Zhang et al. 2015",
        "LocalSGD(period=8)",
        "no elastic force draws each worker to a center",
    ),
    OtherName(("async_model_average", "overlap local SGD"), "Bagua; Wang et al. 2020", "DelayedAveraging(delay=4)"),
    OtherName(("DGA", "delayed gradient averaging"), "Zhu et al. 2021", "DelayedAveraging(delay=4)"),
    OtherName(
        ("Moshpit", "Moshpit SGD", "Moshpit All-Reduce", "hivemind"),
        "Ryabinin et al. 2021",
        "Gossip() + Groups(size=8)",
    ),
    OtherName(("delayed gradients", "pipe SGD", "one-step delay"), "Pipe-SGD", "EveryStep(delay=1)"),
    # -- federated learning
    OtherName(
        ("federated", "federated averaging", "federated learning"), "McMahan et al. 2017", "FedAvg(fraction=0.1)"
    ),
    OtherName(("FedSGD",), "McMahan et al. 2017", "FedAvg(fraction=1.0, local_steps=1)"),
    OtherName(("FedAvgM", "server momentum"), "Hsu et al. 2019", "FedOpt('torch.SGD', learning_rate=1.0, beta1=0.9)"),
    OtherName(("FedAdam",), "Reddi et al. 2021", "FedOpt('adam')"),
    OtherName(("FedYogi",), "Reddi et al. 2021", "FedOpt('yogi')"),
    OtherName(("FedAdagrad",), "Reddi et al. 2021", "FedOpt('adagrad')"),
    OtherName(("async FedAvg", "Papaya", "buffered aggregation"), "Nguyen et al. 2022", "FedBuff(buffer=10)"),
    OtherName(
        ("FedAsync",),
        "Xie et al. 2019",
        "FedBuff(buffer=1)",
        "its server mixes a device's whole parameters into its own, and here differences are added",
    ),
    OtherName(
        ("q-FedAvg", "q-FFL", "qFedAvg", "AFL", "agnostic federated learning"),
        "Li et al. 2020; Mohri et al. 2019",
        "FedAvg(fraction=0.1)",
        "devices are not weighted by their loss",
    ),
    OtherName(
        ("Ditto", "FedPer", "pFedMe", "personalization"),
        "Li et al. 2021 and others",
        "FedAvg(fraction=0.1)",
        "devices keep no model of their own between rounds",
    ),
    OtherName(
        ("Mime", "FedDC"),
        "Karimireddy et al. 2021 and others",
        "SCAFFOLD()",
        "its local step follows another rule",
    ),
    OtherName(("DP-FedAvg",), "McMahan et al. 2018", "FedAvg(privacy=CentralPrivacy(noise=1.0))"),
    OtherName(("FedDyn",), "Acar et al. 2021", "SCAFFOLD()", "it changes a device's loss by another rule"),
    OtherName(
        ("Krum",),
        "Blanchard et al. 2017",
        "FedAvg(aggregator=MultiKrum(outliers=0.2))",
        "it keeps one contribution, and MultiKrum averages several",
    ),
    OtherName(("coordinate-wise median", "FedMedian"), "Yin et al. 2018", "FedAvg(aggregator=Median())"),
    OtherName(("FedTrimmedAvg", "trimmed average"), "Flower", "FedAvg(aggregator=TrimmedMean(share=0.1))"),
    OtherName(
        ("Bulyan", "RFA", "geometric median"),
        "El Mhamdi et al. 2018; Pillutla et al. 2022",
        "FedAvg(aggregator=MultiKrum(outliers=0.2))",
        "its rule is another one",
    ),
    OtherName(
        ("SecAgg", "secure aggregation protocol"),
        "Bonawitz et al. 2017",
        "FedAvg(secure=SecureAggregation())",
    ),
    # -- topologies
    OtherName(
        ("decentralized", "decentralised", "D-PSGD", "decentralized SGD"), "Lian et al. 2017", "Gossip() + Ring()"
    ),
    OtherName(("low_precision_decentralized", "DCD-PSGD", "ECD-PSGD"), "Bagua", "Gossip() + Int8() + Ring()"),
    OtherName(
        ("CHOCO", "CHOCO-SGD", "CHOCO-gossip"), "Koloskova et al. 2019", "Gossip() + TopK(density=0.01) + Ring()"
    ),
    OtherName(
        ("SwarmSGD", "MATCHA", "GossipGraD", "BlueFog", "Prague"),
        "decentralized SGD on changing graphs",
        "Gossip() + RandomPeers()",
        "it selects the pairs of a round by another rule",
    ),
    OtherName(("AD-PSGD", "asynchronous gossip", "async gossip"), "Lian et al. 2018", "Gossip('pairwise')"),
    OtherName(
        ("SGP", "stochastic gradient push", "push-sum"), "Assran et al. 2019", "Gossip('push-sum') + Exponential()"
    ),
    # -- compressors
    OtherName(("none", "no compression", "fp32", "float32", "noop_hook"), "any", "Dense()"),
    OtherName(
        ("fp16_compress_hook", "fp16_compress_wrapper", "fp16", "float16", "half"), "PyTorch", "Dense('float16')"
    ),
    OtherName(("bf16_compress_hook", "bf16_compress_wrapper", "bf16", "bfloat16"), "PyTorch", "Dense('bfloat16')"),
    OtherName(("Compression.fp16",), "Horovod", "Dense('float16')"),
    OtherName(("PowerSGDState", "powerSGD_hook", "batched_powerSGD_hook"), "PyTorch", "PowerSGD(rank=1)"),
    OtherName(("quantization_pertensor_hook", "quantization_perchannel_hook", "8bit"), "PyTorch", "Int8()"),
    OtherName(("bytegrad",), "Bagua", "Int8()"),
    OtherName(("4bit", "fp4"), "four bits an entry", "Float4()"),
    OtherName(("2bit", "gradient_compression_2bit"), "MXNet", "TwoBit(threshold=0.5)"),
    OtherName(("ternary",), "Wen et al. 2017", "TernGrad()"),
    OtherName(("deep gradient compression",), "Lin et al. 2018", "DGC(density=0.001)"),
    OtherName(("1bit", "1bit-sgd", "onebit_sgd"), "Seide et al. 2014", "OneBit()"),
    OtherName(("EF-SGD", "EF-signSGD", "DoubleSqueeze", "MEM-SGD"), "error feedback", "Feedback(OneBit())"),
    OtherName(
        ("signSGD", "signum"),
        "Bernstein et al. 2018",
        "OneBit(feedback=False)",
        "workers do not vote for a sign, signs have a magnitude and their mean is taken",
    ),
    OtherName(
        ("signSGD with majority vote", "majority vote"),
        "Bernstein et al. 2019",
        "OneBit(feedback=False)",
        "workers do not vote for a sign, signs have a magnitude and their mean is taken",
    ),
    OtherName(("DRIVE",), "Vargaftik et al. 2021", "EDEN(bits=1)"),
    OtherName(
        ("DIANA", "MARINA"),
        "Mishchenko et al. 2019; Gorbunov et al. 2021",
        "Feedback(TopK(density=0.01), rule='ef21')",
        "it compresses differences of gradients without bias",
    ),
    OtherName(
        ("SketchedSGD", "FetchSGD", "count sketch"),
        "Ivkin et al. 2019; Rothchild et al. 2020",
        "ARCTopK(density=0.01)",
        "it sends a count sketch of all entries",
    ),
    OtherName(
        ("ATOMO", "GradZip", "low rank", "Dion", "LoRDO"),
        "low-rank gradients",
        "PowerSGD(rank=4)",
        "it factors the gradient or the momentum by another rule",
    ),
    OtherName(
        ("natural compression", "C_nat", "3LC", "SketchML", "NUQSGD"),
        "quantizers of few bits",
        "Float4()",
        "it rounds to other levels",
    ),
    OtherName(
        ("STC", "sparse ternary compression"),
        "Sattler et al. 2019",
        "Chain(TopK(density=0.01), OneBit())",
        "it has one magnitude per tensor and Golomb-coded positions",
    ),
    OtherName(
        ("CocktailSGD",),
        "Wang et al. 2023",
        "Chain(TopK(density=0.01), Float4())",
        "it selects among entries that were drawn at random before",
    ),
    OtherName(
        ("AdaComp", "ScaleCom"),
        "Chen et al. 2018; 2020",
        "TopK(density=0.01)",
        "it selects entries by another rule",
    ),
    OtherName(
        ("EF21-Muon",),
        "Gruntkowska et al. 2025",
        "Feedback(TopK(density=0.01), rule='ef21', momentum=0.1)",
        "it compresses downloads as well; pass torch.optim.Muon(..., momentum=0.0, nesterov=False) to attach",
    ),
    OtherName(("EF21",), "Richtarik et al. 2021", "Feedback(TopK(density=0.01), rule='ef21')"),
    OtherName(("gTopK", "Ok-Topk", "global top-k"), "sums of few entries", "SparseSum(TopK(density=0.01))"),
    OtherName(("sparsification", "MSTopK", "gradient dropping"), "few entries", "TopK(density=0.01)"),
    OtherName(
        ("L-GreCo", "layer-wise compression"),
        "Markov et al. 2024",
        "Adaptive(TopK(density=0.01))",
        "a square root of sizes and energies determines the entries per tensor, without a bound of the error",
    ),
    OtherName(("1bit-adam", "01-adam", "zero-one adam"), "DeepSpeed", "OneBitAdam(warmup=1000)"),
    OtherName(("1bit-lamb", "OneBitLamb"), "DeepSpeed", "OneBitAdam(warmup=1000)", _NO_LAMB),
    OtherName(("qadam", "QAdamOptimizer"), "Bagua", "OneBitAdam(warmup=1000, inner=Int8())"),
)


def normalized(name: str) -> str:
    """Return a name without irrelevant differences in spelling: "1-bit Adam" is "1bitadam"."""
    return "".join(letter for letter in name.lower() if letter.isalnum())


def table() -> str:
    """Return the table of docs/reference/other-names.md, as Markdown: a row for each method."""
    return "\n".join(["| there | of | here |", "|---|---|---|", *(other.row for other in OTHER_NAMES)])


BY_NAME = {normalized(name): other for other in OTHER_NAMES for name in other.names}
