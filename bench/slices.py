"""Slices of the released models: some of their layers with their real plans and sizes, and random weights.

A slice is a folder with `config.json`, and for V4.1 a made-up tokenizer and a small n-gram table. Its weights are never stored:
`random_weights` stands in for the loader and makes them on the device, in the released formats.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers
import torch
from safetensors.numpy import save_file
from torch import Tensor

import abyssal
from abyssal.checkpoint.expected import TensorSpec, expected_tensors
from abyssal.checkpoint.files import CheckpointFiles
from abyssal.checkpoint.loader import Weights, local_shape
from abyssal.checkpoint.match import FP4_BLOCK, ROWS_BLOCK
from abyssal.checkpoint.rows import RowTable
from abyssal.config import ModelConfig
from abyssal.model_config import parse_model_config
from abyssal.ops.linear import E2M1_VALUES, LinearWeight
from abyssal.ops.ngram_hash import bucket_primes
from abyssal.parallel.mesh import ONE_RANK, Mesh

PRESETS = Path(abyssal.__file__).parent / "assets" / "presets"
ENGRAM_BUCKET = 16_000  # rows per hash bucket, a thousandth of the released ones; 24 buckets of 264-byte rows: 0.10 GB
SCALE_BIAS = 127  # of e8m0
FP8_RMS = 0.6  # of bytes with exponent fields 0 to 7, as made below
FP4_RMS = math.sqrt(sum(v * v for v in E2M1_VALUES) / len(E2M1_VALUES))
TABLE_BLOCK = 1 << 16  # rows of an n-gram table that are made at a time


@dataclass(frozen=True, slots=True)
class Slice:
    """Consecutive layers of a released model."""

    preset: str
    first: int
    layers: int


SLICES = {"v4-flash": Slice("v4-flash", 0, 20), "v4.1-flash": Slice("v4.1-flash", 14, 16)}


def slice_config(part: Slice, **changes: Any) -> dict[str, Any]:
    """`config.json` of a slice; `changes` to the model's own keys scale it down for tests.

    Layers keep their ratios, routers and sources. A source before the slice becomes none: a slice begins with a layer that
    owns what it reads.
    """
    raw = json.loads((PRESETS / f"{part.preset}.json").read_text())
    text = raw.get("text_config", raw)
    end = part.first + part.layers
    text["compress_ratios"] = text["compress_ratios"][part.first : end]
    text["num_hidden_layers"] = part.layers
    text["num_nextn_predict_layers"] = 0
    if "text_config" in raw:
        for name in ("kv_source_layer_ids", "index_source_layer_ids", "engram_layer_ids"):
            text[name] = [layer - part.first for layer in text[name] if part.first <= layer < end]
        source = text["candidate_source_layer_id"]
        text["candidate_source_layer_id"] = source - part.first if part.first <= source < end else -1
        text["engram_vocab_size"] = ENGRAM_BUCKET
        text["engram_num_embeddings"] = [1] * len(text["engram_layer_ids"])  # follow from the other sizes, below
        text["engram_compressed_vocab_size"] = text["vocab_size"]
        text |= {"dspark_target_layer_ids": [], "dspark_noise_token_id": 0}  # no drafts, no images
        del raw["vision_config"], raw["image_token_id"]
    else:
        text["num_hash_layers"] = max(0, min(part.layers, text["num_hash_layers"] - part.first))
    unknown = changes.keys() - text.keys() - raw.keys()
    assert not unknown, f"no key of this model: {unknown}"
    (text if changes.keys() <= text.keys() else raw).update(changes)
    if (engram := parse_model_config(raw).engram) is not None:
        text["engram_num_embeddings"] = bucket_primes(engram).sum((1, 2)).tolist()
    return raw


def write_slice(folder: Path, raw: dict[str, Any]) -> Path:
    """The files of a slice without its weights."""
    (folder / "config.json").write_text(json.dumps(raw))
    config = parse_model_config(raw)
    if config.engram is not None:
        _write_tokenizer(folder / "tokenizer.json", config.vocab_size)
        _write_tables(folder / "model.safetensors", config)
    return folder


def _write_tokenizer(file: Path, size: int) -> None:
    """One whose tokens all have different texts, so that n-grams are told apart by their ids."""
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE({f"t{i:x}": i for i in range(size)}, []))
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    tokenizer.save(str(file))


def _write_tables(file: Path, config: ModelConfig) -> None:
    engram = config.engram
    assert engram is not None
    rng, tensors = np.random.default_rng(0), {}
    for layer, rows in zip(engram.layer_ids, engram.num_embeddings, strict=True):
        block = rng.integers(0, 256, (min(rows, TABLE_BLOCK), engram.head_dim), np.uint8) & 0xBF
        codes = np.resize(block, (rows, engram.head_dim))
        scales = np.full((rows, engram.head_dim // ROWS_BLOCK[1]), SCALE_BIAS, np.uint8)
        tensors |= {f"layers.{layer}.engram.embed.weight": codes, f"layers.{layer}.engram.embed.scale": scales}
    save_file(tensors, file)


def random_weights(
    folder: Path,
    config: ModelConfig,
    device: torch.device,
    dtype: torch.dtype,
    progress: bool = False,
    row_cache_bytes: int = 0,
    mesh: Mesh = ONE_RANK,
) -> Weights:
    """As `load_weights`: weights of the stored formats, of such sizes that activations stay near 1, made on `device`."""
    generator = torch.Generator(device).manual_seed(0)
    table = {name: replace(spec, shape=local_shape(spec, mesh)) for name, spec in expected_tensors(config).items()}
    num_tables = sum(spec.kind == "rows" for spec in table.values())
    weights: Weights = {}
    for name, spec in table.items():
        if spec.kind == "rows":
            files = CheckpointFiles(folder).tensors
            weights[name] = RowTable(files[f"{name}.weight"], files[f"{name}.scale"], row_cache_bytes // num_tables)
        elif spec.kind in ("linear", "projection"):
            weights[name] = _linear(spec, config, device, dtype, generator)
        else:
            weights[name] = _plain(name, spec, config, device, dtype, generator)
    return weights


def _plain(
    name: str, spec: TensorSpec, config: ModelConfig, device: torch.device, dtype: torch.dtype, generator: torch.Generator
) -> Tensor:
    if spec.kind == "expert_ids":
        scores = torch.rand(spec.shape[0], config.num_experts, device=device, generator=generator)
        return scores.topk(spec.shape[1]).indices.int()
    if name.endswith(("norm.weight", "q_weight", "k_weight")):
        return torch.ones(spec.shape, device=device)
    if "gate.bias" in name:
        return torch.zeros(spec.shape, device=device)  # any other would favour the same experts for all tokens
    if name.endswith("_scale"):
        return torch.full(spec.shape, 0.1, device=device)  # mixes near their bases, as in trained models
    values = torch.randn(
        spec.shape, device=device, generator=generator, dtype=dtype if spec.kind == "embedding" else torch.float32
    )
    if spec.kind == "embedding" or len(spec.shape) < 2:
        return values
    values.mul_(spec.shape[-1] ** -0.5)
    return values if "hc_" in name or name.endswith("ape") else values.bfloat16().float()  # as files store it (V4 spec 4.2)


def _linear(
    spec: TensorSpec, config: ModelConfig, device: torch.device, dtype: torch.dtype, generator: torch.Generator
) -> LinearWeight:
    columns = spec.shape[-1]
    if spec.kind == "projection" or config.quant is None:
        data = torch.empty(spec.shape, device=device, dtype=dtype).normal_(0, columns**-0.5, generator=generator)
        return LinearWeight(data, None, "plain", None, spec.input_tile if spec.kind == "linear" else None)
    fp4 = bool(spec.pieces) and config.quant.expert_dtype == "fp4"
    height, width = FP4_BLOCK if fp4 else config.quant.weight_block
    if len(spec.pieces) > 1:  # the seam of stacked matrices stays between two blocks
        height = math.gcd(spec.shape[-2] // len(spec.pieces), height)
    data = torch.empty(*spec.shape[:-1], columns // 2 if fp4 else columns, dtype=torch.uint8, device=device)
    data.random_(0, 256, generator=generator)
    if not fp4:
        data = data.bitwise_and_(0xBF).view(torch.float8_e4m3fn)  # without the top bit of the exponent: below 2, and no NaN
    shape = (*spec.shape[:-2], -(-spec.shape[-2] // height), -(-columns // width))
    exponent = round(math.log2(columns**-0.5 / (FP4_RMS if fp4 else FP8_RMS)))
    scale = torch.empty(shape, dtype=torch.uint8, device=device)
    scale.random_(SCALE_BIAS + exponent - 1, SCALE_BIAS + exponent + 2, generator=generator)
    return LinearWeight(data, scale, "fp4" if fp4 else "fp8", (height, width), spec.input_tile)
