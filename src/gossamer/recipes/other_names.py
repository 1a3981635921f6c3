"""Other names: what other libraries and papers call a method, and the recipe that it is here."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class OtherName:
    """Names of one method elsewhere. Where `lacking` says what it has that no recipe has, `recipe` is the nearest."""

    names: tuple[str, ...]  # case, spaces and marks do not count: see `normalized`
    origin: str
    recipe: str
    lacking: str = ""

    def answer(self, name: str) -> str:
        if self.lacking:
            return f"{name} ({self.origin}) is not here: {self.lacking}. The nearest is {self.recipe}."
        return f"{name} ({self.origin}) is {self.recipe} here. Write that."


_SHARDED_MODEL = "it divides a model that one worker cannot hold, and here each worker holds all of it"
_NO_LAMB = "its layerwise learning rates would need what Adam's momentum leaves out"

OTHER_NAMES = (
    # -- when workers talk
    OtherName(("DDP", "DistributedDataParallel", "allreduce_hook"), "PyTorch", "EveryStep()"),
    OtherName(("allreduce", "all-reduce", "BSP", "synchronous SGD", "sync SGD", "S-SGD"), "lock step", "EveryStep()"),
    OtherName(("Horovod", "hvd", "DistributedOptimizer"), "Horovod", "EveryStep()"),
    OtherName(
        ("MirroredStrategy", "MultiWorkerMirroredStrategy", "CollectiveAllReduceStrategy"), "TensorFlow", "EveryStep()"
    ),
    OtherName(("gradient_allreduce",), "Bagua", "EveryStep()"),
    OtherName(("ring all-reduce",), "Baidu, NCCL", "EveryStep() + Ring()"),
    OtherName(("gradient accumulation", "accumulate"), "any loop", "EveryStep(accumulate=4)"),
    OtherName(("FSDP", "FullyShardedDataParallel", "fully_shard"), "PyTorch", "EveryStep()", _SHARDED_MODEL),
    OtherName(("ZeRO", "ZeRO-1", "ZeRO-2", "ZeRO-3", "DeepSpeed"), "DeepSpeed", "EveryStep()", _SHARDED_MODEL),
    OtherName(("dist_sync", "dist_device_sync", "dist_sync_device"), "MXNet's KVStore", "ParameterServer('sync')"),
    OtherName(("dist_async", "dist_device_async"), "MXNet's KVStore", "ParameterServer('async')"),
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
    OtherName(("parallel SGD", "local"), "Stich 2018", "LocalSGD(period=8)"),
    OtherName(
        ("PostLocalSGDOptimizer", "PostLocalSGDState", "post_localSGD_hook"),
        "PyTorch",
        "PostLocalSGD(period=8, start=1000)",
    ),
    OtherName(("PeriodicModelAverager", "model averaging"), "PyTorch", "LocalSGD(period=8)"),
    OtherName(("HierarchicalModelAverager", "HSDP"), "PyTorch", "LocalSGD(period=8, per_site=4)"),
    OtherName(
        ("BMUF", "block momentum"), "Chen & Huo 2016", "DiLoCo(period=20, outer_learning_rate=1.0, outer_momentum=0.5)"
    ),
    OtherName(("SlowMo", "OpenDiLoCo"), "an outer momentum", "DiLoCo(period=20)"),
    OtherName(("Streaming DiLoCo",), "Douillard et al. 2025", "DiLoCo(period=100, fragments=4, delay=5)"),
    OtherName(
        ("EASGD", "elastic averaging SGD", "elastic averaging"),
        "Zhang et al. 2015",
        "LocalSGD(period=8)",
        "no spring draws each worker to a center",
    ),
    OtherName(("async_model_average", "Moshpit", "overlap local SGD"), "Bagua and others", "DelayedAveraging(delay=4)"),
    OtherName(("delayed gradients", "pipe SGD", "one-step delay"), "Pipe-SGD", "EveryStep(delay=1)"),
    # -- devices that keep their data
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
        "nothing weighs devices by their loss, so that the worst off would count more",
    ),
    OtherName(("FedDyn",), "Acar et al. 2021", "SCAFFOLD()", "it changes a device's loss by another rule"),
    OtherName(("Krum",), "Blanchard et al. 2017", "FedAvg(aggregator=MultiKrum(outliers=0.2))"),
    OtherName(("coordinate-wise median", "FedMedian"), "Yin et al. 2018", "FedAvg(aggregator=Median())"),
    OtherName(("FedTrimmedAvg", "trimmed average"), "Flower", "FedAvg(aggregator=TrimmedMean(share=0.1))"),
    OtherName(
        ("Bulyan", "RFA", "geometric median"),
        "El Mhamdi et al. 2018; Pillutla et al. 2022",
        "FedAvg(aggregator=MultiKrum(outliers=0.2))",
        "its rule is another one",
    ),
    OtherName(("SecAgg",), "Bonawitz et al. 2017", "FedAvg(secure=SecureAggregation())"),
    # -- with whom
    OtherName(
        ("decentralized", "decentralised", "D-PSGD", "decentralized SGD"), "Lian et al. 2017", "Gossip() + Ring()"
    ),
    OtherName(("low_precision_decentralized", "DCD-PSGD", "ECD-PSGD"), "Bagua", "Gossip() + Int8() + Ring()"),
    OtherName(
        ("CHOCO", "CHOCO-SGD", "CHOCO-gossip"), "Koloskova et al. 2019", "Gossip() + TopK(density=0.01) + Ring()"
    ),
    OtherName(("AD-PSGD", "asynchronous gossip", "async gossip"), "Lian et al. 2018", "Gossip('pairwise')"),
    OtherName(
        ("SGP", "stochastic gradient push", "push-sum"), "Assran et al. 2019", "Gossip('push-sum') + Exponential()"
    ),
    # -- what travels
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
    OtherName(("EF21",), "Richtarik et al. 2021", "Feedback(TopK(density=0.01), rule='ef21')"),
    OtherName(("gTopK", "Ok-Topk", "global top-k"), "sums of few entries", "SparseSum(TopK(density=0.01))"),
    OtherName(("sparsification", "MSTopK", "gradient dropping"), "few entries", "TopK(density=0.01)"),
    OtherName(
        ("L-GreCo", "layer-wise compression"),
        "Markov et al. 2024",
        "Adaptive(TopK(density=0.01))",
        "a square root of sizes and energies says how many entries of each tensor travel, no bound of an error",
    ),
    OtherName(("1bit-adam", "01-adam", "zero-one adam"), "DeepSpeed", "OneBitAdam(warmup=1000)"),
    OtherName(("1bit-lamb", "OneBitLamb"), "DeepSpeed", "OneBitAdam(warmup=1000)", _NO_LAMB),
    OtherName(("qadam", "QAdamOptimizer"), "Bagua", "OneBitAdam(warmup=1000, inner=Int8())"),
)


def normalized(name: str) -> str:
    """A name without what people write differently: "1-bit Adam" is "1bitadam"."""
    return "".join(letter for letter in name.lower() if letter.isalnum())


BY_NAME = {normalized(name): other for other in OTHER_NAMES for name in other.names}
