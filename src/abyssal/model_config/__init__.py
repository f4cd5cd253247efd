"""A checkpoint's `config.json` and `generation_config.json`."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

from abyssal.config import ModelConfig
from abyssal.errors import ConfigError
from abyssal.model_config.parse import parse_model_config, read_eos
from abyssal.model_config.reader import MAX_NUMBER, Section

__all__ = ["load_generation_defaults", "load_model_config", "parse_model_config"]

# generation_config.json: keys that say nothing about how tokens are chosen here.
_IGNORED_GENERATION = (
    "_from_model_config",
    "transformers_version",
    "bos_token_id",
    "pad_token_id",
    "use_cache",
    "output_attentions",
    "output_hidden_states",
)


# generation_config.json: sampling numbers, the largest value of each and whether 0 is allowed.
_SAMPLING = {
    "temperature": (MAX_NUMBER, True),
    "top_p": (1.0, False),
    "min_p": (1.0, True),
    "repetition_penalty": (MAX_NUMBER, False),
}


def load_model_config(path: str | Path) -> ModelConfig:
    """Reads the config of a checkpoint folder, or one `config.json`.

    End-of-sequence ids of a `generation_config.json` beside it join those of `config.json`: either file may be the fuller one.

    Raises:
        ConfigError: the file is missing, is not JSON, or does not describe a supported model.
    """
    file = Path(path) / "config.json" if Path(path).is_dir() else Path(path)
    model = parse_model_config(_read_json(file))
    more, _ = load_generation_defaults(file.parent)
    for token in more:
        if token >= model.vocab_size:
            raise ConfigError(f"generation_config.json: eos_token_id {token} is outside the vocabulary of {model.vocab_size}")
    return dataclasses.replace(model, eos_token_ids=tuple(dict.fromkeys(model.eos_token_ids + more)))


def load_generation_defaults(folder: str | Path) -> tuple[tuple[int, ...], dict[str, Any]]:
    """Reads `generation_config.json` of a checkpoint folder.

    Returns:
        The end-of-sequence ids that it names, and sampling defaults under the names of `SamplingParams`. Both are empty when
        the file does not exist or does not say.

    Raises:
        ConfigError: the file is not JSON, or a key or value is unknown.
    """
    file = Path(folder) / "generation_config.json"
    if not file.exists():
        return (), {}
    section = Section(_read_json(file), file.name)
    section.ignore(_IGNORED_GENERATION)
    eos = read_eos(section, vocab_size=None) if section.given("eos_token_id") else ()
    sampling: dict[str, Any] = {}
    for name, (high, zero) in _SAMPLING.items():
        if section.given(name):
            sampling[name] = section.number(name, high=high, or_equal=zero)
    if section.given("top_k"):
        sampling["top_k"] = section.integer("top_k", low=0)
    if section.given("max_new_tokens"):
        sampling["max_tokens"] = section.integer("max_new_tokens")
    section.require("do_sample", (True, False))
    if section.given("do_sample") and section.raw("do_sample") is False:
        sampling["temperature"] = 0.0
    section.finish()
    return eos, sampling


def _read_json(file: Path) -> dict[str, Any]:
    if not file.is_file():
        raise ConfigError(f"{file} does not exist; a checkpoint folder has a config.json")
    try:
        value = json.loads(file.read_bytes(), object_pairs_hook=_no_repeats)
    except (ValueError, RecursionError) as error:  # ValueError: also of a number with thousands of digits
        raise ConfigError(f"{file} is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise ConfigError(f"{file} must hold a JSON object, found {type(value).__name__}")
    return value


def _no_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values = dict(pairs)
    if len(values) < len(pairs):
        names = [name for name, _ in pairs]
        repeated = next(name for name in names if names.count(name) > 1)
        raise ConfigError(f"key {repeated!r} appears twice in one JSON object; keep one")
    return values
