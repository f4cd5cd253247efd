"""Random V4 models in transformers, written in every naming that checkpoints use, and what they compute.

The oracle is the full forward without a cache, eager, in fp32.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Literal, Self

import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import DeepseekV4ForCausalLM

from bench.transformers_model import empty_model, to_released

Naming = Literal["released", "transformers", "save_pretrained"]
MIN_MARGIN = 3e-6  # index scores relative to the largest, gate scores absolute; fp32 noise is several times smaller


def random_model(config: dict[str, Any], seed: int) -> DeepseekV4ForCausalLM:
    """Every parameter drawn: norms around 1, sinks, gate biases, position biases and stream mixes that matter."""
    model = empty_model(config)
    model.set_experts_implementation("eager")  # the default takes only sizes that are multiples of 16 bytes
    generator = torch.Generator().manual_seed(seed)
    for name, tensor in model.state_dict().items():
        tensor.copy_(_draw(name, tensor, config, generator))
    return model


def _draw(name: str, like: Tensor, config: dict[str, Any], generator: torch.Generator) -> Tensor:
    noise = torch.randn(like.shape, generator=generator)
    leaf = name.rsplit(".", 1)[-1]
    if leaf == "tid2eid":  # distinct experts for every token
        order = torch.rand(len(like), config["n_routed_experts"], generator=generator).argsort(dim=1)
        return order[:, : like.shape[1]]
    if "norm" in name or leaf in ("scale", "hc_scale"):
        return 1 + 0.2 * noise
    if leaf in ("base", "hc_base", "position_bias"):
        return 0.5 * noise
    if leaf == "e_score_correction_bias":
        return 0.2 * noise
    if leaf == "sinks" or "embed_tokens" in name:
        return noise
    gain = 2.0 if "experts" in name or "lm_head" in name else 1.0  # large enough that the SwiGLU clamp acts
    return gain * noise / like.shape[-1] ** 0.5


def save_model(model: DeepseekV4ForCausalLM, config: dict[str, Any], folder: Path, naming: Naming) -> Path:
    """Write a checkpoint: released config and names; transformers' names with the same config; or `save_pretrained`."""
    folder.mkdir(parents=True, exist_ok=True)
    if naming == "save_pretrained":
        model.save_pretrained(folder)
        return folder
    state = model.state_dict()
    tensors = to_released(state, config["num_hidden_layers"]) if naming == "released" else state
    save_file({name: tensor.clone().contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def oracle_logits(model: DeepseekV4ForCausalLM, token_ids: list[int]) -> Tensor:
    """fp32 [n, vocab] of positions 0 to n - 1."""
    with torch.inference_mode():
        return model(torch.tensor([token_ids]), use_cache=False).logits[0]


def draw_prompt(model: DeepseekV4ForCausalLM, length: int, seed: int, margin: float = MIN_MARGIN) -> tuple[list[int], Tensor]:
    """Token ids, and their logits fp32 [length, vocab], in which no choice of entries or experts is close to a tie.

    Two fp32 programs round differently, so one of them may take the other entry where two scores are nearly equal.
    """
    generator = torch.Generator().manual_seed(seed)
    for _ in range(20):
        ids = torch.randint(model.config.vocab_size, (length,), generator=generator).tolist()
        with _Margins(model) as margins:
            logits = oracle_logits(model, ids)
        if margins.smallest > margin:
            return ids, logits
    raise AssertionError(f"20 prompts of {length} tokens all had a choice closer than {margin}")


class _Margins:
    """The smallest distance between the last chosen and the first not chosen score in the forwards run inside."""

    def __init__(self, model: DeepseekV4ForCausalLM) -> None:
        self.smallest = float("inf")
        self._config = model.config
        self._handles = []
        for layer in model.model.layers:
            if hasattr(layer.mlp.gate, "e_score_correction_bias"):
                self._handles.append(layer.mlp.gate.register_forward_hook(self._gate))
            if hasattr(layer.self_attn.compressor, "indexer"):
                self._handles.append(layer.self_attn.compressor.indexer.scorer.register_forward_hook(self._index))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        for handle in self._handles:
            handle.remove()

    def _gate(self, gate: Any, inputs: Any, output: tuple[Tensor, Tensor, Tensor]) -> None:
        scores = torch.nn.functional.softplus(output[0]).sqrt() + gate.e_score_correction_bias
        if gate.top_k < scores.shape[-1]:
            best = scores.topk(gate.top_k + 1).values
            self._keep(best[:, -2] - best[:, -1])

    def _index(self, scorer: Any, inputs: Any, scores: Tensor) -> None:
        """scores [1, n, entries]; only rows that see more entries than they may choose decide anything."""
        count, topk = scores.shape[1], self._config.index_topk
        visible = (torch.arange(count) + 1) // self._config.compress_rates["compressed_sparse_attention"]
        hidden = torch.arange(scores.shape[2]) >= visible[:, None]
        rows = scores[0].masked_fill(hidden, -torch.inf)[visible > topk]
        if len(rows):
            best = rows.topk(topk + 1).values
            self._keep((best[:, -2] - best[:, -1]) / rows.masked_fill(rows.isinf(), 0).abs().amax(1))

    def _keep(self, margins: Tensor) -> None:
        self.smallest = min(self.smallest, margins.min().item())
