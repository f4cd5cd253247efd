"""Model and engine configuration.

`ModelConfig` is what a checkpoint's `config.json` says, in one vocabulary for both families and all spellings; `LayerPlan`
is what one layer does. `EngineConfig` holds every option of the engine; the command line and the environment derive from it.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import PurePath
from typing import Any, Literal

from abyssal.errors import ConfigError
from abyssal.options import build, check_environment, check_options, option

Family = Literal["v4", "v41"]


@dataclass(frozen=True, slots=True)
class YarnConfig:
    """YaRN as DeepSeek uses it: frequencies only, attention factor 1 (V4 spec 2.6)."""

    factor: float
    original_max_position: int
    beta_fast: float
    beta_slow: float


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """One rotary table. `dim` trailing dimensions rotate in interleaved pairs."""

    dim: int
    base: float
    yarn: YarnConfig | None


@dataclass(frozen=True, slots=True)
class QuantConfig:
    """How quantised linear weights are stored; None in `ModelConfig` means that nothing is quantised."""

    weight_block: tuple[int, int]  # rows, columns that share one scale in FP8 weights
    expert_dtype: Literal["fp4", "fp8"]


@dataclass(frozen=True, slots=True)
class EngramConfig:
    """V4.1's n-gram tables (V4.1 spec 1.2)."""

    layer_ids: tuple[int, ...]
    num_embeddings: tuple[int, ...]  # rows, one per entry of layer_ids
    max_ngram_size: int
    vocab_size: int
    n_heads: int
    head_dim: int
    pad_token_id: int
    compressed_vocab_size: int

    @property
    def columns(self) -> int:
        """Rows that one token reads: one per n-gram size and head."""
        return (self.max_ngram_size - 1) * self.n_heads


@dataclass(frozen=True, slots=True)
class LayerPlan:
    """What one decoder layer owns, reads and computes."""

    layer: int
    ratio: int  # tokens per compressed entry; 0 = window only
    rope: Literal["main", "compress"]
    kv_source: int | None  # layer whose compressed KV (and index keys) this one reads; == layer: it owns a compressor
    selection: Literal["none", "all", "topk"]  # which compressed entries a query attends to
    index_source: int | None  # layer whose top-k this one uses; == layer: it runs an indexer
    index_keys: Literal[
        "none", "pooled", "latent"
    ]  # keys made here: by a compressor of their own (V4), from the KV latent (V4.1)
    candidates: Literal["none", "publish", "use"]  # two-level selection of V4.1
    router: Literal["hash", "scored"]
    engram: int | None  # index into EngramConfig.layer_ids
    hc_order: Literal["own", "previous"]  # whose `pre` mix collapses the streams: this site's (V4), the previous site's (V4.1)

    @property
    def owns_compressor(self) -> bool:
        return self.kv_source == self.layer

    @property
    def owns_indexer(self) -> bool:
        return self.index_source == self.layer


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """One model, in the names of this project. Sizes are counts unless a comment says otherwise."""

    family: Family
    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    head_dim: int
    q_lora_rank: int
    o_groups: int
    o_lora_rank: int
    num_experts: int
    num_experts_per_token: int
    num_shared_experts: int
    moe_intermediate_size: int
    routed_scaling_factor: float
    gate_temperature: float
    swiglu_limit: float
    index_heads: int
    index_head_dim: int
    index_topk: int
    candidate_topk_blocks: int | None
    candidate_block_size: int | None
    sliding_window: int
    hc_mult: int
    hc_sinkhorn_iters: int
    hc_eps: float
    rms_eps: float
    rope_main: RopeConfig
    rope_compress: RopeConfig
    max_position: int
    bos_token_id: int
    eos_token_ids: tuple[int, ...]
    quant: QuantConfig | None
    engram: EngramConfig | None
    layers: tuple[LayerPlan, ...]
    draft: Literal["none", "mtp", "dspark"]  # what `mtp.*` holds, if present
    image_token_id: int | None  # stands for a part of an image in a prompt; None: the model reads text only

    @property
    def query_norm(self) -> bool:
        """Whether every query head is normalised, without weight, before RoPE (V4 spec 2.5; not in V4.1)."""
        return self.family == "v4"

    @property
    def hadamard(self) -> bool:
        """Whether index queries and keys are rotated by a Hadamard matrix (V4 spec 2.10; not in V4.1)."""
        return self.family == "v4"


MOST_ENGINES = 1024  # of a server; more is a slip of the keyboard


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """Every option of the engine. Build it directly or with `from_sources`; `resolve` replaces each `auto`.

    Raises:
        ConfigError: a value is not allowed.
    """

    model: str = option("tiny", "checkpoint folder or Hugging Face name; tiny is the embedded model")
    device: str = option("auto", "where the model runs", choices=("auto", "cpu", "cuda"))
    dtype: str = option("auto", "run-time precision; float32 is plain mathematics", choices=("auto", "float32", "bfloat16"))
    kv_layout: str = option("auto", "record format of window KV", choices=("auto", "fp32", "bf16", "v4", "v41"))
    compressed_kv_layout: str = option(
        "auto",
        "record format of compressed KV; fp4 goes with kv_layout v41 only, fp8 with none yet: v4 and v41 hold FP8 with same",
        choices=("auto", "same", "fp8", "fp4"),
    )
    index_layout: str = option("auto", "record format of index keys", choices=("auto", "fp32", "bf16", "fp8", "fp4"))
    backend: str = option("auto", "which implementation of the ops runs", choices=("auto", "reference", "triton", "hopper"))
    block_size: int = option(256, "tokens per block of the cache; layouts and kernels are built for 256", low=256, high=256)
    max_num_batched_tokens: int = option(
        4096, "most tokens in one engine step; more: prompts are done sooner, but what decodes beside them waits longer", low=1
    )
    max_num_seqs: int = option(64, "most sequences running at a time", low=1)
    gpu_memory_utilization: float = option(0.9, "part of the GPU's memory to use", above=0, high=1)
    kv_cache_bytes: int | None = option(
        None, "size of the cache, such as 8GiB; overrides gpu_memory_utilization; 4GiB on CPU", low=1, in_bytes=True
    )
    swap_bytes: int = option(
        4 << 30,
        "host memory for the caches of sequences that gave up their pages; 0: they are always computed again",
        low=0,
        in_bytes=True,
    )
    engram_cache_bytes: int = option(
        256 << 20,
        "host memory for V4.1's n-gram tables, all together: what fits (190GiB) is locked there for the GPU, others are read by row",
        low=0,
        in_bytes=True,
    )
    max_model_len: int | None = option(None, "most tokens of a sequence; default: what model and cache allow", low=1)
    enable_prefix_caching: bool = option(True, "reuse the cache of common prompt prefixes")
    enable_cuda_graphs: bool | None = option(
        None, "replay steps as CUDA graphs, decode steps as one, others in pieces; default: where the ops are kernels and tp is 1"
    )
    batch_invariant: bool = option(
        False,
        "a sequence's numbers do not depend, bit for bit, on what else is in a step; slower; needs kernels, one rank per replica",
    )
    seed: int = option(0, "seed of requests that bring none", low=0, high=2**63 - 1)
    served_model_name: str | None = option(None, "name of the model in the API; default: its folder's name")
    num_threads: int | None = option(
        None, "CPU threads of PyTorch, of which the smallest steps use one; default: PyTorch's choice", low=1
    )
    dp: int = option(
        1,
        "replicas that share out requests, each with a cache of its own; one process and device per rank",
        low=1,
        high=MOST_ENGINES,
    )
    tp: int = option(
        1, "ranks of a replica, which share out heads, groups of the output and the vocabulary", low=1, high=MOST_ENGINES
    )
    ep: int | None = option(None, "ranks that share out the experts: tp, or several replicas together; default: tp", low=1)

    def __post_init__(self) -> None:
        check_options(self)

    @property
    def record_layouts(self) -> tuple[str, str, str]:
        """Record layouts of window KV, compressed KV and index keys, once resolved."""
        compressed = {"same": self.kv_layout, "fp4": "v41_fp4"}[self.compressed_kv_layout]
        index = {"fp4": "mxfp4"}.get(self.index_layout, self.index_layout)
        return self.kv_layout, compressed, f"index_{index}"


@dataclass(frozen=True, slots=True)
class ServerConfig:
    """Every option of the HTTP server beside the engine's."""

    host: str = option("127.0.0.1", "address to listen on")
    port: int = option(8000, "port to listen on; 0 picks a free one", low=0, high=65535)
    api_key: str | None = option(None, "key that requests must bring; default: none needed", secret=True)
    root_path: str | None = option(None, "path prefix that a proxy in front removes")
    thinking: str = option(
        "auto", "thinking when a request does not say; auto asks the checkpoint", choices=("auto", "on", "off")
    )
    prefill_engines: int = option(
        0,
        "engines, a GPU each, that compute prompts only and hand them to decode_engines; 0: one engine does both",
        low=0,
        high=MOST_ENGINES,
    )
    decode_engines: int = option(1, "engines, a GPU each, beside prefill_engines", low=1, high=MOST_ENGINES)
    transfer_backend: str = option(
        "auto",
        "how caches go from prefill to decode engines; auto: NCCL between GPUs, gloo on CPU, NIXL with ray",
        choices=("auto", "nixl"),
    )
    ray: bool = option(
        False,
        "run the engines on a Ray cluster, as replicas or prefill apart: the one that RAY_ADDRESS names, or one of this machine",
    )
    replicas: int = option(1, "engines on the Ray cluster, each of dp*tp GPUs of one node", low=1, high=MOST_ENGINES)

    def __post_init__(self) -> None:
        check_options(self)
        if self.replicas > 1 and not self.ray:
            raise ConfigError(f"replicas={self.replicas} needs ray; on this machine alone dp does the same")
        if self.replicas > 1 and self.prefill_engines:
            raise ConfigError(f"replicas={self.replicas} do not go with prefill_engines, which are one server's; leave one out")
        if self.transfer_backend != "auto" and self.prefill_engines == 0:
            raise ConfigError(f"transfer_backend={self.transfer_backend} needs prefill_engines of at least 1")
        if self.decode_engines > 1 and self.prefill_engines == 0:
            raise ConfigError(f"decode_engines={self.decode_engines} needs prefill_engines of at least 1")


# What `auto` means, by device and family. Compressed and index layouts follow from the KV layout.
AUTO_KV_LAYOUT = {("cpu", "v4"): "fp32", ("cpu", "v41"): "fp32", ("cuda", "v4"): "v4", ("cuda", "v41"): "v41"}
AUTO_COMPRESSED = {("v41", "v41"): "fp4"}  # (KV layout, family); all others: same
AUTO_INDEX = {("v4", "v4"): "fp8", ("v4", "v41"): "fp8", ("v41", "v4"): "fp8", ("v41", "v41"): "fp4"}  # others: the KV layout
PACKED_DIMS = (512, 128)  # values of a KV entry and of an index key: packed records exist for the released widths only
ALLOWED_KV = {("fp32", "same"), ("bf16", "same"), ("v4", "same"), ("v41", "same"), ("v41", "fp4")}

# Triton releases whose Gluon the Hopper kernels are tested with: its interface moves between releases.
GLUON_RELEASES = ("3.6",)
CPU_KV_CACHE_BYTES = 4 * 2**30


def is_gluon_release(triton: str) -> bool:
    """Whether the Hopper kernels are written for this version of Triton."""
    return ".".join(triton.split(".")[:2]) in GLUON_RELEASES


def from_sources(cli: Mapping[str, Any], env: Mapping[str, str]) -> EngineConfig:
    """The engine's options: `cli` first (None = not given, text is parsed), then `ABYSSAL_NAME` variables, then defaults.

    Raises:
        ConfigError: an option, an `ABYSSAL_` variable or a value is unknown.
    """
    check_environment(env, (EngineConfig, ServerConfig))
    return build(EngineConfig, cli, env)


def server_from_sources(cli: Mapping[str, Any], env: Mapping[str, str]) -> ServerConfig:
    """The server's options, as `from_sources`."""
    check_environment(env, (EngineConfig, ServerConfig))
    return build(ServerConfig, cli, env)


@dataclass(frozen=True, slots=True)
class Gpu:
    """What decides which kernels a CUDA device can run."""

    capability: tuple[int, int]
    triton: str | None  # release, such as 3.6.0; None: not installed

    @property
    def why_no_kernels(self) -> str | None:
        if self.capability < (8, 0):
            return f"compute capability {self.capability[0]}.{self.capability[1]} is below 8.0"
        return "triton is not installed" if self.triton is None else None

    @property
    def why_not_hopper(self) -> str | None:
        if self.capability != (9, 0):
            return f"compute capability {self.capability[0]}.{self.capability[1]} is not 9.0"
        if self.triton is None or not is_gluon_release(self.triton):
            return f"triton {self.triton} is not among the tested releases: {', '.join(GLUON_RELEASES)}"
        return None


def resolve(config: EngineConfig, model_config: ModelConfig, device_available: bool, gpu: Gpu | None = None) -> EngineConfig:
    """A new config without `auto`, checked against the model and the machine.

    What depends on the size of the cache stays None for the engine to fill: `max_model_len`, and on CUDA `kv_cache_bytes`.

    Args:
        config: as given by the user.
        model_config: the model that will run.
        device_available: whether a CUDA device can be used.
        gpu: that device; None: unknown, no kernel is sure to run.

    Raises:
        ConfigError: an option asks for what the model, the machine or this version cannot do.
    """
    device = _resolve_device(config.device, device_available)
    if config.num_threads is not None and config.num_threads > (cores := os.cpu_count() or 1):
        raise ConfigError(
            f"num_threads={config.num_threads} is more than the {cores} processors of this machine; lower it or leave it out"
        )
    kv, compressed, index = _resolve_layouts(config, device, model_config)
    ep = resolve_ranks(config, model_config)
    dtype = {"cpu": "float32", "cuda": "bfloat16"}[device] if config.dtype == "auto" else config.dtype
    backend = _resolve_backend(config.backend, device, dtype, (kv, compressed, index), model_config, gpu)
    if config.max_model_len is not None and config.max_model_len > model_config.max_position:
        raise ConfigError(
            f"max_model_len={config.max_model_len} exceeds the model's max_position_embeddings={model_config.max_position}; "
            "lower it or leave it out"
        )
    remedy = "choose another backend or leave the option out" if device == "cuda" else "leave it out, or run on a CUDA device"
    graphs = backend != "reference" and config.tp == 1 if config.enable_cuda_graphs is None else config.enable_cuda_graphs
    if graphs and backend == "reference":
        raise ConfigError(f"enable_cuda_graphs=true needs kernels, but backend is reference on device={device}; {remedy}")
    if config.batch_invariant and backend == "reference":
        raise ConfigError(
            f"batch_invariant=true needs kernels, but backend is reference on device={device}: the order of PyTorch's sums follows the "
            f"size of a step; {remedy}"
        )
    if config.batch_invariant and config.tp > 1:
        raise ConfigError(
            f"batch_invariant=true: tp={config.tp} ranks add up parts of sums, in an order that follows the size of a step; set tp=1 or leave "
            "the option out"
        )
    default_bytes = CPU_KV_CACHE_BYTES if device == "cpu" else None
    return replace(
        config,
        device=device,
        dtype=dtype,
        kv_layout=kv,
        compressed_kv_layout=compressed,
        index_layout=index,
        backend=backend,
        enable_cuda_graphs=graphs,
        kv_cache_bytes=default_bytes if config.kv_cache_bytes is None else config.kv_cache_bytes,
        served_model_name=config.served_model_name or _model_name(config.model),
        ep=ep,
    )


def _resolve_device(device: str, cuda: bool) -> str:
    if device == "cuda" and not cuda:
        raise ConfigError("device='cuda', but PyTorch finds no usable CUDA device; choose cpu or auto")
    return ("cuda" if cuda else "cpu") if device == "auto" else device


def resolve_ranks(config: EngineConfig, model: ModelConfig) -> int:
    """`ep` as a number; refuses ranks among which the model's dimensions cannot be shared out."""
    shared = model.moe_intermediate_size * model.num_shared_experts
    dims = {"heads": model.num_heads, "output groups": model.o_groups, "tokens of vocabulary": model.vocab_size}
    dims |= {"experts": model.num_experts, "columns of the shared expert": shared}
    if (common := math.gcd(*dims.values())) % config.tp:
        sizes = ", ".join(f"{size} {name}" for name, size in dims.items() if size % config.tp)
        raise ConfigError(f"tp={config.tp} does not divide this model's {sizes}; choose one of {divisors(common)}")
    ranks = config.dp * config.tp
    fitting = [ep for ep in divisors(math.gcd(ranks, model.num_experts)) if ep % config.tp == 0]
    if config.ep is not None and config.ep not in fitting:
        raise ConfigError(
            f"ep={config.ep} does not go with dp={config.dp}, tp={config.tp} and {model.num_experts} experts: it must be a multiple "
            f"of tp that divides dp*tp and the experts; choose one of {fitting}"
        )
    return config.tp if config.ep is None else config.ep


def divisors(number: int) -> list[int]:
    """All of them, the smallest first."""
    smaller = [part for part in range(1, math.isqrt(number) + 1) if number % part == 0]
    return sorted({*smaller, *(number // part for part in smaller)})


def _resolve_layouts(config: EngineConfig, device: str, model: ModelConfig) -> tuple[str, str, str]:
    family = model.family
    kv, compressed, index = config.kv_layout, config.compressed_kv_layout, config.index_layout
    if kv == "auto":
        kv = AUTO_KV_LAYOUT[device, family]
        if (model.head_dim, model.index_head_dim) != PACKED_DIMS and kv != "fp32":
            kv = "bf16"
    if compressed == "auto":
        compressed = AUTO_COMPRESSED.get((kv, family), "same")
    if index == "auto":
        index = AUTO_INDEX.get((kv, family), kv)
    if (kv, compressed) not in ALLOWED_KV:
        allowed = ", ".join(sorted(pair[1] for pair in ALLOWED_KV if pair[0] == kv))
        raise ConfigError(f"compressed_kv_layout={compressed!r} does not go with kv_layout={kv!r}; allowed with it: {allowed}")
    return kv, compressed, index


def _resolve_backend(
    asked: str, device: str, dtype: str, layouts: tuple[str, str, str], model: ModelConfig, gpu: Gpu | None
) -> str:
    if asked == "reference":
        return asked
    why = None
    if device != "cuda":
        why = "kernels need device=cuda"
    elif gpu is None:
        why = "the CUDA device is not known"
    elif dtype != "bfloat16":
        why = f"kernels compute in bfloat16, not dtype={dtype}"
    elif (model.head_dim, model.index_head_dim) != PACKED_DIMS:
        why = (
            f"kernels take head_dim={PACKED_DIMS[0]} and index_head_dim={PACKED_DIMS[1]}, this model has {model.head_dim} and "
            f"{model.index_head_dim}"
        )
    elif "fp32" in layouts:
        why = "kernels read no fp32 records; choose bf16 or a packed kv_layout and index_layout"
    else:
        why = gpu.why_no_kernels
    if asked == "auto":
        if why is not None or gpu is None:
            return "reference"
        return "hopper" if gpu.why_not_hopper is None else "triton"
    if why is None and gpu is not None and asked == "hopper":
        why = gpu.why_not_hopper
    if why is not None:
        raise ConfigError(f"backend {asked!r} cannot run: {why}; choose auto or reference")
    return asked


def _model_name(model: str) -> str:
    return "tiny-v4" if model == "tiny" else PurePath(model).name or model
