"""Loading: the values in memory are exactly those of the file, however it spells and stores them."""

from __future__ import annotations

import io
import json
import logging
import sys
from collections.abc import Callable
from importlib import resources
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from abyssal.checkpoint import load_weights, loader
from abyssal.checkpoint.expected import expected_tensors
from abyssal.checkpoint.rows import RowTable
from abyssal.errors import CheckpointError
from abyssal.model_config import load_model_config
from abyssal.ops.linear import LinearWeight, dequantize, linear
from tests.checkpoint.build import (
    E2M1,
    random_tensors,
    random_v4_checkpoint,
    random_v41_tensors,
    renamed,
    t4_config,
    t41_config,
    write,
)

CPU = torch.device("cpu")
SMALL = t4_config(num_hidden_layers=3, compress_ratios=[0, 4, 128, 0], n_routed_experts=2)
# 160 rows and 96 columns: partial blocks, and a block that would straddle the seam of w1 and w3
BASE = SMALL | {"expert_dtype": "fp8", "moe_intermediate_size": 160}
Weights = dict[str, Tensor | LinearWeight]


def load(folder: Path, dtype: torch.dtype = torch.float32, device: torch.device = CPU) -> Weights:
    return load_weights(folder, load_model_config(folder), device, dtype, progress=False)


def released(weights: Weights) -> dict[str, Tensor]:
    """fp32 values by released name, experts unstacked."""
    out: dict[str, Tensor] = {}
    for name, weight in weights.items():
        if isinstance(weight, Tensor):
            out[name] = weight
            continue
        matrix = dequantize(weight, torch.float32)
        layer, _, piece = name.partition(".ffn.experts.")
        for expert, value in enumerate(matrix if piece else []):
            parts = {"w1": value.chunk(2)[0], "w3": value.chunk(2)[1]} if piece == "w13" else {"w2": value}
            out |= {f"{layer}.ffn.experts.{expert}.{key}.weight": part for key, part in parts.items()}
        if not piece:
            out[f"{name}.weight"] = matrix
    return out


def assert_values(weights: Weights, truth: dict[str, Tensor]) -> None:
    values = released(weights)
    assert values.keys() == truth.keys()
    for name, value in truth.items():
        assert torch.equal(values[name].to(value.dtype), value), name


@pytest.fixture
def no_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine on which nothing fits, so that weights stay as stored."""
    monkeypatch.setattr(loader, "physical_memory", lambda: 0)


@pytest.mark.parametrize("quantised", [True, False])
@pytest.mark.parametrize("names", ["released", "prefixed", "transformers"])
def test_j07_j11_every_value_under_every_spelling(tmp_path, names, quantised):
    truth = random_v4_checkpoint(tmp_path, t4_config(), 1, names, quantised)
    assert_values(load(tmp_path), truth)


def test_shards_and_draft_change_nothing(tmp_path):
    truth = random_v4_checkpoint(tmp_path, SMALL, 1, shards=5, draft="mtp")
    assert_values(load(tmp_path), truth)


@pytest.mark.parametrize("config", [SMALL, BASE], ids=["fp4_experts", "fp8_experts"])
@pytest.mark.parametrize("scales", ["e8m0", "u8", "f32"])
def test_j01_scale_types_are_equal(tmp_path, config, scales):
    """Bytes are exponents in all three forms, for fp8 and fp4 destinations."""
    truth = random_v4_checkpoint(tmp_path, config, 2, scales=scales)
    assert_values(load(tmp_path), truth)


@pytest.mark.parametrize("config", [SMALL, BASE], ids=["fp4_experts", "fp8_experts"])
@pytest.mark.parametrize("scales", ["e8m0", "f32"])
def test_j01_scale_types_are_equal_when_kept_as_stored(tmp_path, config, scales, no_memory):
    truth = random_v4_checkpoint(tmp_path, config, 2, scales=scales)
    weights = load(tmp_path)
    assert_values(weights, truth)
    w13 = weights["layers.1.ffn.experts.w13"]
    assert w13.format == ("fp4" if config is SMALL else "fp8")
    assert w13.scale.dtype == (torch.uint8 if scales == "e8m0" else torch.float32)
    # released blocks of 128 rows, or the largest that respect the seam after row 160
    assert weights["layers.0.attn.wq_b"].block == (128, 128)
    assert w13.block == ((1, 32) if config is SMALL else (32, 128))
    assert weights["layers.1.ffn.experts.w2"].block == ((1, 32) if config is SMALL else (128, 128))


def test_fused_fp8_experts_keep_their_own_blocks(tmp_path, no_memory):
    """A fused tensor was quantised as one matrix, so its blocks may straddle the seam."""
    config = BASE | {"num_hidden_layers": 1, "compress_ratios": [0, 0]}
    tensors, _ = random_tensors(config, 3, quantised=True)
    tensors = renamed({name: tensor for name, tensor in tensors.items()}, "transformers")
    generator = torch.Generator().manual_seed(0)
    codes = (torch.randn(2, 320, 96, generator=generator) * 50).to(torch.float8_e4m3fn)
    scale = torch.rand(2, 3, 1, generator=generator)  # as in base checkpoints: fp32, not powers of two
    tensors["model.layers.0.mlp.experts.gate_up_proj"] = codes
    tensors["model.layers.0.mlp.experts.gate_up_proj_scale_inv"] = scale
    write(tmp_path, config, tensors)
    w13 = load(tmp_path)["layers.0.ffn.experts.w13"]
    want = codes.float() * scale.repeat_interleave(128, 1)[:, :320]
    assert w13.block == (128, 128) and torch.equal(dequantize(w13, torch.float32), want)


@pytest.mark.parametrize("names", ["released", "transformers"])
def test_j11_stored_bytes_survive(tmp_path, names, no_memory):
    """Kept as stored, every code and scale byte is the file's, in its place."""
    tensors, _ = random_tensors(SMALL, 1, quantised=True)
    write(tmp_path, SMALL, renamed(tensors, names))
    weights = load(tmp_path)
    quantised = [name for name, weight in weights.items() if isinstance(weight, LinearWeight) and weight.format != "plain"]
    assert len(quantised) == 3 * (5 + 2 + 3) + 1
    for name in quantised:
        weight = weights[name]
        for part, got in (("weight", weight.data), ("scale", weight.scale)):
            if ".ffn.experts." not in name:
                want = tensors[f"{name}.{part}"].view(torch.uint8)
            else:
                prefix, _, piece = name.rpartition(".")
                want = torch.stack(
                    [
                        torch.cat([tensors[f"{prefix}.{e}.w{p}.{part}"].view(torch.uint8) for p in piece.removeprefix("w")])
                        for e in range(2)
                    ]
                )
            assert torch.equal(got.view(torch.uint8), want), (name, part)


def test_types_in_memory(tmp_path):
    """fp32 where the model computes in fp32, the run's dtype elsewhere, and who quantises its input."""
    random_v4_checkpoint(tmp_path, SMALL, 1)
    weights = load(tmp_path, torch.bfloat16)
    table = expected_tensors(load_model_config(tmp_path))
    assert weights.keys() == table.keys()
    assert {n for n, w in weights.items() if isinstance(w, Tensor) and w.dtype != torch.float32} == {
        "embed.weight",
        "layers.0.ffn.gate.tid2eid",
    }
    assert weights["embed.weight"].dtype == torch.bfloat16 and weights["layers.0.ffn.gate.tid2eid"].dtype == torch.int32
    linears = {name: weight for name, weight in weights.items() if isinstance(weight, LinearWeight)}
    assert all(weight.data.dtype == torch.bfloat16 and weight.format == "plain" for weight in linears.values())
    untouched = {name.split(".", 2)[2] for name, weight in linears.items() if weight.quantize_input is None}
    assert untouched == {"attn.indexer.weights_proj"}
    assert {weight.quantize_input for weight in linears.values()} == {None, 128}
    for name, weight in linears.items():
        assert weight.shape == table[name].shape and weight.data.is_contiguous()


def test_plain_weights_quantise_no_input(tmp_path):
    random_v4_checkpoint(tmp_path, SMALL, 1, quantised=False)
    weights = load(tmp_path, torch.bfloat16)
    assert {w.quantize_input for w in weights.values() if isinstance(w, LinearWeight)} == {None}


def test_dequantised_and_stored_weights_compute_the_same_bits(tmp_path, monkeypatch):
    """bf16 runs do not depend on how much memory the machine has."""
    random_v4_checkpoint(tmp_path, SMALL, 1)
    plain = load(tmp_path, torch.bfloat16)
    monkeypatch.setattr(loader, "physical_memory", lambda: 0)
    stored = load(tmp_path, torch.bfloat16)
    for name, weight in plain.items():
        if isinstance(weight, Tensor):
            assert torch.equal(weight, stored[name])
        elif len(weight.shape) == 2:
            x = torch.randn(3, weight.shape[-1]).bfloat16()
            assert torch.equal(linear(x, weight), linear(x, stored[name])), name


def test_other_devices_keep_weights_as_stored(tmp_path, caplog):
    """Off the CPU nothing is dequantised, whatever fits; the meta device stands for a GPU here."""
    random_v4_checkpoint(tmp_path, SMALL, 1)
    with caplog.at_level(logging.INFO, logger="abyssal"):
        weights = load(tmp_path, torch.bfloat16, torch.device("meta"))
    assert "quantised weights stay as stored on meta" in caplog.text
    assert weights["layers.0.attn.wq_a"].format == "fp8" and weights["layers.0.ffn.experts.w13"].format == "fp4"
    assert weights["layers.0.ffn.experts.w13"].data.shape == (2, 128, 48)
    for weight in weights.values():
        tensors = [weight] if isinstance(weight, Tensor) else [weight.data, weight.scale]
        assert all(tensor.device.type == "meta" for tensor in tensors if tensor is not None)


def test_memory_decision_is_printed_and_has_a_sharp_limit(tmp_path, monkeypatch, caplog):
    random_v4_checkpoint(tmp_path, SMALL, 1)
    needed = sum(w.nbytes if isinstance(w, Tensor) else w.data.nbytes for w in load(tmp_path).values())
    for memory, plain, words in ((2 * needed, True, "dequantised to float32"), (2 * needed - 2, False, "stay as stored")):
        caplog.clear()
        monkeypatch.setattr(loader, "physical_memory", lambda memory=memory: memory)
        with caplog.at_level(logging.INFO, logger="abyssal"):
            weights = load(tmp_path)
        assert (weights["layers.0.attn.wq_a"].format == "plain") == plain
        assert words in caplog.text and loader.size(needed) in caplog.text


def corrupt(folder: Path, change: Callable[[dict[str, Tensor]], None], **options) -> str:
    """Write SMALL with `change` applied to its tensors; the message of the refusal."""
    tensors, _ = random_tensors(SMALL, 1, quantised=True, **options)
    change(tensors)
    write(folder, SMALL, tensors)
    with pytest.raises(CheckpointError) as error:
        load(folder)
    assert "\n" not in str(error.value)
    return str(error.value)


SCALES = ["layers.0.attn.wq_b.scale", "layers.1.ffn.experts.1.w3.scale", "layers.2.ffn.shared_experts.w2.scale"]


@pytest.mark.parametrize("name", SCALES)
@pytest.mark.parametrize(("byte", "shown"), [(148, "2^21"), (254, "2^127"), (255, "NaN")])
def test_j01_scale_bytes_out_of_range(tmp_path, name, byte, shown):
    def change(tensors: dict[str, Tensor]) -> None:
        tensors[name].view(torch.uint8)[-1, -1] = byte

    assert f"scale {name} holds {shown};" in corrupt(tmp_path, change)


@pytest.mark.parametrize("name", SCALES)
@pytest.mark.parametrize(
    ("value", "shown"), [(2.0**20 * 1.001, "1.04962e+06"), (torch.inf, "inf"), (torch.nan, "nan"), (-0.5, "-0.5")]
)
def test_j01_fp32_scales_out_of_range(tmp_path, name, value, shown):
    def change(tensors: dict[str, Tensor]) -> None:
        tensors[name][-1, -1] = value

    assert f"scale {name} holds {shown};" in corrupt(tmp_path, change, scales="f32")


def test_j01_largest_scale_is_accepted(tmp_path):
    tensors, _ = random_tensors(SMALL, 1, quantised=True)
    tensors["layers.0.attn.wo_a.scale"].view(torch.uint8).fill_(147)
    write(tmp_path, SMALL, tensors)
    want = tensors["layers.0.attn.wo_a.weight"].float() * 2.0**20
    assert torch.equal(load(tmp_path)["layers.0.attn.wo_a"].data, want)


@pytest.mark.parametrize("wrong", [-1, 2, 2**31 - 1, 2**40])
def test_expert_ids_out_of_range(tmp_path, wrong):
    """A table that points past the experts is refused at load, not met at run time."""

    def change(tensors: dict[str, Tensor]) -> None:
        tensors["layers.0.ffn.gate.tid2eid"][7, 1] = wrong

    message = corrupt(tmp_path, change)
    assert "layers.0.ffn.gate.tid2eid holds expert ids" in message and str(wrong) in message


def test_expert_ids_as_int32(tmp_path):
    tensors, truth = random_tensors(SMALL, 1, quantised=True)
    tensors["layers.0.ffn.gate.tid2eid"] = tensors["layers.0.ffn.gate.tid2eid"].int()
    write(tmp_path, SMALL, tensors)
    assert_values(load(tmp_path), truth)


def test_half_precision_and_wider_types_than_released(tmp_path):
    """Norms and gates in fp16 or fp32 instead of bf16 load as they are."""
    tensors, _ = random_tensors(SMALL, 1, quantised=False)
    tensors = {n: t.half() if "norm" in n or "gate.weight" in n else t for n, t in tensors.items()}
    config = {key: value for key, value in SMALL.items() if key not in ("quantization_config", "expert_dtype")}
    write(tmp_path, config, tensors)
    assert_values(load(tmp_path), {n: t.float() if t.is_floating_point() else t for n, t in tensors.items()})


def test_weights_do_not_depend_on_the_file_any_more(tmp_path, no_memory):
    """Overwriting the mapped file after loading changes nothing."""
    truth = random_v4_checkpoint(tmp_path, SMALL, 1)
    weights = load(tmp_path)
    path = tmp_path / "model.safetensors"
    with path.open("r+b") as file:
        file.write(b"\xff" * path.stat().st_size)
    assert_values(weights, truth)


def test_nothing_is_read_before_all_headers_are_checked(tmp_path, monkeypatch):
    tensors, _ = random_tensors(SMALL, 1, quantised=True)
    del tensors["layers.2.ffn.experts.1.w2.scale"]
    write(tmp_path, SMALL, tensors)
    reads: list[object] = []
    monkeypatch.setattr(loader.CheckpointFiles, "read", lambda self, tensor, *rest: reads.append(tensor))
    with pytest.raises(CheckpointError, match="layers.2.ffn.experts.1.w2.weight is stored as I8 but has no scale"):
        load(tmp_path)
    assert not reads


def v41_checkpoint(folder: Path, quantised: bool = True, **more: Tensor) -> dict[str, Tensor]:
    """Write a small V4.1 with `more` tensors beside its own; its exact values."""
    config = t41_config()
    stored, truth = random_v41_tensors(config, 5, quantised)
    if not quantised:
        del config["quantization_config"]
    write(folder, config, stored | more)
    return truth


@pytest.mark.parametrize("quantised", [True, False])
def test_v41_values(tmp_path, quantised):
    truth = v41_checkpoint(tmp_path, quantised)
    weights = load(tmp_path)
    assert not any(name.startswith("hc_head") for name in weights)
    tables = {name: weights.pop(name) for name in list(weights) if isinstance(weights[name], RowTable)}
    assert set(tables) == {"layers.0.engram.embed", "layers.4.engram.embed"}
    for name, table in tables.items():
        codes, scales = table.gather(torch.arange(table.num_rows))
        stored = LinearWeight(codes, scales, "fp8", (1, 32), None)
        assert torch.equal(dequantize(stored, torch.float32), truth.pop(f"{name}.weight"))
    assert_values(weights, truth)


def test_v41_quantised_weights_keep_blocks_of_32(tmp_path, no_memory):
    truth = v41_checkpoint(tmp_path)
    weights = {name: weight for name, weight in load(tmp_path).items() if not isinstance(weight, RowTable)}
    assert_values(weights, {name: value for name, value in truth.items() if "engram.embed" not in name})
    wq_b, w13 = weights["layers.1.attn.wq_b"], weights["layers.1.ffn.experts.w13"]
    assert (wq_b.format, wq_b.block, wq_b.quantize_input) == ("fp8", (32, 32), 32)
    assert (w13.format, w13.block, w13.quantize_input) == ("fp4", (1, 32), 32)
    assert weights["layers.0.engram.wkv"].quantize_input == 32 and weights["layers.1.attn.indexer.wk"].quantize_input is None


def test_v41_tables_are_never_read_at_load(tmp_path, monkeypatch):
    v41_checkpoint(tmp_path)
    read = loader.CheckpointFiles.read
    names: list[str] = []
    monkeypatch.setattr(
        loader.CheckpointFiles, "read", lambda self, tensor, *part: (names.append(tensor.name), read(self, tensor, *part))[1]
    )
    load(tmp_path)
    assert names and not any("engram.embed" in name for name in names)


def test_v41_vision_and_draft_tensors_are_recognised_and_not_loaded(tmp_path, caplog):
    names = ["vision.patch_embed.proj.bias", "aligner.w1.weight", "image_start", "mtp.0.main_proj.weight", "mtp.0.attn.wq_a.scale",
             "mtp.2.markov_head.embed.weight", "mtp.2.markov_head.head.weight", "mtp.1.ffn.gate.bias_vl"]  # fmt: skip
    v41_checkpoint(tmp_path, **{name: torch.zeros(1) for name in names})
    with caplog.at_level(logging.INFO, "abyssal"):
        weights = load(tmp_path)
    assert not set(names) & weights.keys()
    assert "3 tensors of the image tower recognised" in caplog.text and "5 mtp.* tensors of a dspark drafter" in caplog.text


def test_vision_tensors_in_a_v4_checkpoint_are_unknown(tmp_path):
    tensors, _ = random_tensors(SMALL, 1, quantised=True)
    write(tmp_path, SMALL, tensors | {"vision.norm.weight": torch.zeros(1)})
    with pytest.raises(CheckpointError, match=r"unknown tensors: vision\.norm\.weight"):
        load(tmp_path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop("layers.2.ffn.gate.bias_vl"), r"missing tensor.*layers\.2\.ffn\.gate\.bias_vl"),
        (lambda t: t.pop("layers.1.attn.compressor.wgate.weight"), r"missing tensor.*layers\.1\.attn\.compressor\.wgate"),
        (lambda t: t.update({"layers.3.attn.compressor.wgate.weight": torch.zeros(64, 96)}), "config.json does not call for"),
        (lambda t: t.update({"layers.2.attn.indexer.wk.weight": torch.zeros(64, 64)}), "config.json does not call for"),
        (lambda t: t.update({"hc_head_base": torch.zeros(4)}), "config.json does not call for: hc_head_base"),
        (
            lambda t: t.pop("layers.0.engram.embed.scale"),
            r"layers\.0\.engram\.embed\.weight is stored as F8_E4M3 but has no scale",
        ),
        (lambda t: t.update({"layers.0.engram.embed.weight": torch.zeros(420, 64)}), "is stored as F32; expected F8_E4M3"),
        (lambda t: t.update({"layers.4.engram.embed.scale": torch.zeros(508, 2)}), "is stored as F32; expected F8_E8M0 or U8"),
        (
            lambda t: t.update({"layers.4.engram.embed.scale": torch.zeros(508, 1).byte()}),
            r"has shape \[508, 1\], expected \[508, 2\]",
        ),
    ],
)
def test_v41_mistakes_are_named(tmp_path, change, message):
    tensors, _ = random_v41_tensors(t41_config(), 5)
    change(tensors)
    write(tmp_path, t41_config(), tensors)
    with pytest.raises(CheckpointError, match=message):
        load(tmp_path)


class _Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(("terminal", "progress"), [(True, True), (True, False), (False, True)])
def test_bar_only_on_a_terminal(tmp_path, monkeypatch, terminal, progress):
    random_v4_checkpoint(tmp_path, SMALL, 1)
    monkeypatch.setattr(sys, "stderr", _Terminal() if terminal else io.StringIO())
    load_weights(tmp_path, load_model_config(tmp_path), CPU, torch.float32, progress)
    shown = sys.stderr.getvalue()
    if terminal and progress:
        assert shown.startswith("\rloading weights [") and shown.endswith("] 100 %\n")
    else:
        assert shown == ""


def test_embedded_tiny_v4():
    """The packaged checkpoint against an independent reading of some of its tensors."""
    folder = Path(str(resources.files("abyssal") / "assets" / "tiny-v4"))
    weights = load(folder)
    raw = load_file(folder / "model.safetensors")

    def scale(name: str) -> Tensor:
        return torch.exp2(raw[name].view(torch.uint8).float() - 127)

    wq_b = raw["layers.4.attn.wq_b.weight"].float().unflatten(0, (-1, 128)) * scale("layers.4.attn.wq_b.scale")[:, None]
    assert torch.equal(weights["layers.4.attn.wq_b"].data, wq_b.flatten(0, 1))
    for piece, rows in (("w1", slice(0, 128)), ("w3", slice(128, 256))):
        packed = raw[f"layers.6.ffn.experts.5.{piece}.weight"].view(torch.uint8)
        codes = torch.stack((packed % 16, packed // 16), -1).flatten(-2).long()
        values = torch.cat((E2M1, -E2M1))[codes] * scale(f"layers.6.ffn.experts.5.{piece}.scale").repeat_interleave(32, 1)
        assert torch.equal(weights["layers.6.ffn.experts.w13"].data[5, rows], values)
    assert torch.equal(weights["head.weight"], raw["head.weight"].float())
    assert len(weights) == len(expected_tensors(load_model_config(folder)))


@pytest.mark.parametrize("name", ["v4_slide_w16", "v4_csa_w16", "v4_hca_w128", "v4_mix_h512"])
def test_reference_models(goldens, name):
    folder = goldens(name)
    assert_values(load(folder), load_file(folder / "model.safetensors"))


@pytest.mark.parametrize("form", ["saved", "state_dict"])
def test_j07_transformers_own_checkpoints(tmp_path, form):
    """What transformers writes today, and its state dict's own names, hold the same weights as the released form."""
    transformers = pytest.importorskip("transformers", minversion="5.24", reason="transformers 5.24 knows DeepSeek V4")
    released_folder, folder = tmp_path / "released", tmp_path / form
    truth = random_v4_checkpoint(released_folder, SMALL | {"num_nextn_predict_layers": 0}, 10, quantised=False)
    model = transformers.DeepseekV4ForCausalLM.from_pretrained(released_folder, dtype=torch.float32)
    if form == "saved":
        model.save_pretrained(folder)
    else:
        folder.mkdir()
        save_file({name: value.contiguous() for name, value in model.state_dict().items()}, folder / "model.safetensors")
        (folder / "config.json").write_text(json.dumps(json.loads((released_folder / "config.json").read_text())))
    assert_values(load(folder), truth)
