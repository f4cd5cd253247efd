"""Small random V4.1 checkpoints that the engine can run, with a tokenizer of one token per byte."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import tokenizers
from safetensors.torch import save_file

from abyssal.model_config import parse_model_config
from abyssal.ops.ngram_hash import bucket_primes, token_map
from tests.checkpoint.build import random_v41_tensors, t41_config

NAMES = ("<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "<pad>")
VOCABULARY = len(NAMES) + 256


def write_v41(folder: Path, seed: int, **changes: Any) -> dict[str, Any]:
    """A checkpoint with plain weights; `changes` to `t41_config`. Returns its configuration."""
    folder.mkdir(parents=True, exist_ok=True)
    config = t41_config(**({"vocab_size": VOCABULARY, "hidden_size": 32, "moe_intermediate_size": 32} | changes))
    del config["quantization_config"]
    write_byte_tokenizer(folder, config)
    save_file(random_v41_tensors(config, seed, quantised=False)[0], folder / "model.safetensors")
    return config


def write_byte_tokenizer(folder: Path, config: dict[str, Any]) -> None:
    """`tokenizer.json`, and `config.json` with the sizes of the n-gram tables that follow from it."""
    characters = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {name: i for i, name in enumerate((*NAMES, *characters))}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE(vocabulary, []))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    tokenizer.add_special_tokens(list(NAMES))
    tokenizer.save(str(folder / "tokenizer.json"))
    if config["engram_layer_ids"]:
        texts = [(tokenizer.decode([i], skip_special_tokens=False), tokenizer.id_to_token(i)) for i in range(VOCABULARY)]
        config["engram_compressed_vocab_size"] = int(token_map(texts).max()) + 1
        engram = parse_model_config(config).engram
        assert engram is not None
        config["engram_num_embeddings"] = bucket_primes(engram).sum((1, 2)).tolist()
    (folder / "config.json").write_text(json.dumps(config))
