"""Engine and server options: the same word as field, flag and variable; `auto` is resolved once; impossible pairs are named."""

from __future__ import annotations

import dataclasses
import itertools
import subprocess
import sys
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from abyssal.cli.plan import PlanConfig
from abyssal.config import EngineConfig, Gpu, ModelConfig, ServerConfig, from_sources, resolve, server_from_sources
from abyssal.errors import ConfigError
from abyssal.model_config import parse_model_config
from abyssal.options import OptionSpec, option_specs
from abyssal.options import build as build_config
from tests.published_configs import v4_flash, v41_flash

# One accepted value per option that differs from its default, and its text.
ENGINE_VALUES: dict[str, tuple[Any, str]] = {
    "model": ("some/folder", "some/folder"),
    "device": ("cpu", "cpu"),
    "dtype": ("bfloat16", "bfloat16"),
    "kv_layout": ("bf16", "bf16"),
    "compressed_kv_layout": ("same", "same"),
    "index_layout": ("bf16", "bf16"),
    "backend": ("reference", "reference"),
    "block_size": (256, "256"),
    "max_num_batched_tokens": (512, "512"),
    "max_num_seqs": (3, "3"),
    "gpu_memory_utilization": (0.5, "0.5"),
    "kv_cache_bytes": (2 * 2**30, "2GiB"),
    "swap_bytes": (2**30, "1GiB"),
    "engram_cache_bytes": (2**30, "1GiB"),
    "max_model_len": (1000, "1000"),
    "enable_prefix_caching": (False, "false"),
    "enable_cuda_graphs": (False, "false"),
    "batch_invariant": (True, "true"),
    "seed": (7, "7"),
    "served_model_name": ("name", "name"),
    "num_threads": (2, "2"),
    "dp": (2, "2"),
    "tp": (4, "4"),
    "ep": (8, "8"),
}
SERVER_VALUES: dict[str, tuple[Any, str]] = {
    "host": ("0.0.0.0", "0.0.0.0"),
    "port": (0, "0"),
    "api_key": ("secret", "secret"),
    "root_path": ("/v4", "/v4"),
    "thinking": ("off", "off"),
    "prefill_engines": (2, "2"),
    "decode_engines": (2, "2"),
    "transfer_backend": ("nixl", "nixl"),
    "ray": (True, "true"),
    "replicas": (3, "3"),
}
NEEDS: dict[str, dict[str, Any]] = {  # mean nothing alone
    "decode_engines": {"prefill_engines": 1},
    "transfer_backend": {"prefill_engines": 1},
    "replicas": {"ray": True},
}
EVERY_OPTION = [
    (cls, build, name, value, text)
    for cls, build, values in ((EngineConfig, from_sources, ENGINE_VALUES), (ServerConfig, server_from_sources, SERVER_VALUES))
    for name, (value, text) in values.items()
]
V4, V41 = parse_model_config(v4_flash()), parse_model_config(v41_flash())


def spec_of(name: str) -> OptionSpec:
    return {spec.name: spec for spec in option_specs(EngineConfig) + option_specs(ServerConfig)}[name]


def test_the_lists_above_cover_every_option() -> None:
    assert list(ENGINE_VALUES) == [spec.name for spec in option_specs(EngineConfig)]
    assert list(SERVER_VALUES) == [spec.name for spec in option_specs(ServerConfig)]
    assert not set(ENGINE_VALUES) & set(SERVER_VALUES)  # both live in one environment and on one command line


@pytest.mark.parametrize(("cls", "build", "name", "value", "text"), EVERY_OPTION)
def test_every_option_works_as_field_flag_and_variable(cls: Any, build: Any, name: str, value: Any, text: str) -> None:
    needs = NEEDS.get(name, {})
    expected = cls(**needs, **{name: value})
    spec = spec_of(name)
    assert (spec.flag, spec.env) == ("--" + name.replace("_", "-"), "ABYSSAL_" + name.upper())
    assert build({**needs, name: text}, {}) == expected
    assert build({**needs, name: value}, {}) == expected
    assert build(needs, {spec.env: text, "HOME": "/", "PATH": ""}) == expected
    assert spec.help and spec.default == getattr(cls(), name)


@pytest.mark.parametrize(("cls", "build", "name", "value", "text"), EVERY_OPTION)
def test_given_value_wins_over_variable_over_default(cls: Any, build: Any, name: str, value: Any, text: str) -> None:
    """And a broken variable that a given value overrides does not matter; None means not given."""
    needs = NEEDS.get(name, {})
    assert build({**needs, name: value}, {spec_of(name).env: "\t"}) == cls(**needs, **{name: value})
    assert build({**needs, name: None}, {spec_of(name).env: text}) == cls(**needs, **{name: value})
    assert build({name: None}, {}) == cls()


WRONG: list[tuple[type, str, list[Any]]] = [
    (EngineConfig, "model", ["", "  ", 3, None]),
    (EngineConfig, "device", ["gpu", "cuda:1", "CPU", None, 0]),
    (EngineConfig, "dtype", ["float16", "fp32", None]),
    (EngineConfig, "kv_layout", ["fp8", "v41_fp4", "same", None]),
    (EngineConfig, "compressed_kv_layout", ["bf16", "v41", None]),
    (EngineConfig, "index_layout", ["v4", "mxfp4", None]),
    (EngineConfig, "backend", ["cuda", "", None]),
    (EngineConfig, "block_size", [128, 255, 257, 0, None]),
    (EngineConfig, "max_num_batched_tokens", [0, -1, 1.5, True, None]),
    (EngineConfig, "max_num_seqs", [0, -1, True, "4", None]),
    (EngineConfig, "gpu_memory_utilization", [0, 1.01, -0.5, float("nan"), float("inf"), True, None]),
    (EngineConfig, "kv_cache_bytes", [0, -1, 1.5, True, "4GiB"]),
    (EngineConfig, "swap_bytes", [-1, 1.5, True, "1GiB", None]),
    (EngineConfig, "engram_cache_bytes", [-1, 1.5, True, "1GiB", None]),
    (EngineConfig, "max_model_len", [0, -5, 4096.0, False]),
    (EngineConfig, "enable_prefix_caching", [1, 0, "true", None]),
    (EngineConfig, "enable_cuda_graphs", [1, 0, "true"]),
    (EngineConfig, "batch_invariant", [1, 0, "true", None]),
    (EngineConfig, "seed", [-1, 2**63, 1.0, None]),
    (EngineConfig, "served_model_name", ["", 5]),
    (EngineConfig, "num_threads", [0, -1, True]),
    (EngineConfig, "dp", [0, -1, True, None]),
    (EngineConfig, "tp", [0, -1, 1.5, None]),
    (EngineConfig, "ep", [0, -1, True]),
    (ServerConfig, "host", ["", None]),
    (ServerConfig, "port", [-1, 65536, "80", None]),
    (ServerConfig, "api_key", ["", " ", 5]),
    (ServerConfig, "root_path", [""]),
    (ServerConfig, "thinking", ["high", True, None]),
]


@pytest.mark.parametrize(("cls", "name", "values"), WRONG)
def test_wrong_values_are_refused_by_name(cls: type, name: str, values: list[Any]) -> None:
    for value in values:
        with pytest.raises(ConfigError, match=f"^{name}=.* must be "):
            cls(**{name: value})


@pytest.mark.parametrize(
    ("name", "texts"),
    [
        ("max_num_seqs", ["", " 4", "4.0", "1e3", "four", "0x10", "1_000", "0", "-1"]),
        ("gpu_memory_utilization", ["", "nan", "inf", "90%", "0", "1.1", "0,5"]),
        ("kv_cache_bytes", ["", "4G", "4gib", "GiB", "-1GiB", "0", "0GiB", "4 GiB extra", "1e9", "0x10", "0.1B", "1.5"]),
        ("enable_prefix_caching", ["", "maybe", "2"]),
        ("device", ["", "gpu"]),
    ],
)
def test_wrong_texts_are_refused_naming_option_or_variable(name: str, texts: list[str]) -> None:
    for text in texts:
        with pytest.raises(ConfigError, match=f"^{name}="):
            from_sources({name: text}, {})
        with pytest.raises(ConfigError, match=f"^(ABYSSAL_{name.upper()}|{name})="):
            from_sources({}, {f"ABYSSAL_{name.upper()}": text})


def test_numbers_with_a_suffix_are_to_be_written_out() -> None:
    for spec in option_specs(EngineConfig):
        for text in ("32k", "32K", "1.5M"):
            if spec.type is int and not spec.in_bytes:
                with pytest.raises(ConfigError, match=f"^{spec.name}='{text}' must be .*, in digits only, such as 32768$"):
                    from_sources({spec.name: text}, {})


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("1", 1),
        ("512B", 512),
        ("3kB", None),
        ("3KB", 3000),
        ("3KiB", 3072),
        ("4GiB", 2**32),
        ("4 GiB", 2**32),
        ("1.5GiB", 3 * 2**29),
    ]
    + [("2MB", 2_000_000), ("1TiB", 2**40)],
)
def test_sizes_in_bytes(text: str, size: int | None) -> None:
    if size is None:
        with pytest.raises(ConfigError, match="such as 4GiB"):
            from_sources({"kv_cache_bytes": text}, {})
    else:
        assert from_sources({"kv_cache_bytes": text}, {}).kv_cache_bytes == size


def test_unknown_options_and_variables_are_errors() -> None:
    with pytest.raises(ConfigError, match="unknown option 'kv_layuot'; did you mean 'kv_layout'"):
        from_sources({"kv_layuot": "bf16"}, {})
    with pytest.raises(ConfigError, match="unknown option 'port'"):
        from_sources({"port": 1}, {})
    for build in (from_sources, server_from_sources):
        with pytest.raises(ConfigError, match="ABYSSAL_KV_LAYUOT; did you mean 'ABYSSAL_KV_LAYOUT'"):
            build({}, {"ABYSSAL_KV_LAYUOT": "bf16"})
        with pytest.raises(ConfigError, match="unknown environment variable ABYSSAL_"):
            build({}, {"ABYSSAL_": "1"})
    with pytest.raises(TypeError):
        EngineConfig(kv_layuot="bf16")  # type: ignore[call-arg]


def test_engine_and_server_share_one_environment() -> None:
    env = {"ABYSSAL_PORT": "9000", "ABYSSAL_MAX_NUM_SEQS": "2", "ABYSSAL_GOLDENS": "/somewhere", "MY_ABYSSAL_X": "1"}
    assert from_sources({}, env) == EngineConfig(max_num_seqs=2)
    assert server_from_sources({}, env) == ServerConfig(port=9000)


@given(st.text(max_size=12))
def test_no_text_crashes_the_parser(text: str) -> None:
    for name in ENGINE_VALUES:
        try:
            from_sources({name: text}, {})
        except ConfigError:
            continue


def test_configs_are_frozen_and_say_what_they_hold() -> None:
    config = EngineConfig()
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.seed = 1  # type: ignore[misc]
    assert all(f"{spec.name}=" in repr(config) for spec in option_specs(EngineConfig))


def test_the_api_key_is_shown_nowhere() -> None:
    assert "hunter2" not in repr(ServerConfig(api_key="hunter2"))
    with pytest.raises(ConfigError) as caught:
        ServerConfig(api_key=["hunter2"])  # type: ignore[arg-type]
    assert "hunter2" not in str(caught.value)


# --- resolve ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("model", [V4, V41], ids=["v4", "v41"])
def test_auto_on_cpu(model: ModelConfig) -> None:
    config = EngineConfig()
    resolved = resolve(config, model, device_available=False)
    expected = {"device": "cpu", "dtype": "float32", "kv_layout": "fp32", "compressed_kv_layout": "same", "index_layout": "fp32"}
    expected |= {
        "backend": "reference",
        "kv_cache_bytes": 4 * 2**30,
        "served_model_name": "tiny-v4",
        "ep": 1,
        "enable_cuda_graphs": False,
    }
    assert resolved == dataclasses.replace(config, **expected)
    assert config == EngineConfig()  # a new object; the given one still says auto


@pytest.mark.parametrize(("model", "layouts"), [(V4, ("v4", "same", "fp8")), (V41, ("v41", "fp4", "fp4"))], ids=["v4", "v41"])
def test_auto_on_cuda(model: ModelConfig, layouts: tuple[str, str, str]) -> None:
    resolved = resolve(EngineConfig(), model, device_available=True)
    assert (resolved.device, resolved.dtype, resolved.kv_cache_bytes) == ("cuda", "bfloat16", None)
    assert (resolved.kv_layout, resolved.compressed_kv_layout, resolved.index_layout) == layouts
    crossed = resolve(EngineConfig(kv_layout="v41"), V4, device_available=True)
    assert (crossed.compressed_kv_layout, crossed.index_layout) == ("same", "fp8")


@pytest.mark.parametrize("widths", [{"head_dim": 96}, {"index_head_dim": 64}])
def test_auto_packs_records_of_the_released_widths_only(widths: dict[str, int]) -> None:
    resolved = resolve(EngineConfig(), dataclasses.replace(V4, **widths), device_available=True)
    assert (resolved.kv_layout, resolved.index_layout) == ("bf16", "bf16")


def test_record_layouts_by_name() -> None:
    packed = resolve(EngineConfig(kv_layout="v41", compressed_kv_layout="fp4", index_layout="fp4"), V4, False)
    assert packed.record_layouts == ("v41", "v41_fp4", "index_mxfp4")
    assert resolve(EngineConfig(kv_layout="v4"), V4, False).record_layouts == ("v4", "v4", "index_fp8")


def test_more_threads_than_processors_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.cpu_count", lambda: 4)
    assert resolve(EngineConfig(num_threads=4), V4, False).num_threads == 4
    with pytest.raises(ConfigError, match="num_threads=5 is more than the 4 processors"):
        resolve(EngineConfig(num_threads=5), V4, False)


@pytest.mark.parametrize("size", ["-1", "0.5", "1.5"])
def test_a_size_that_is_none_is_shown_with_what_it_may_be(size: str) -> None:
    """Zero where zero is allowed; a part of a byte is most likely a forgotten unit."""
    with pytest.raises(ConfigError, match=f"^swap_bytes='?{size}'? must be a number of bytes of at least 0"):
        from_sources({"swap_bytes": size}, {})


INTEGERS = [
    (cls, spec) for cls in (EngineConfig, ServerConfig, PlanConfig) for spec in option_specs(cls) if spec.type in (int, float)
]


@pytest.mark.parametrize(("cls", "spec"), INTEGERS, ids=lambda value: getattr(value, "name", value.__class__.__name__))
@pytest.mark.parametrize("digits", [20, 400, 5000])
def test_numbers_that_python_or_the_machine_cannot_hold_are_refused(cls: Any, spec: OptionSpec, digits: int) -> None:
    """From a text, whole or with a part and a unit, and from Python; no other error, and none that repeats all the digits."""
    nines = "9" * digits
    values: list[Any] = [
        nines,
        f"-{nines}",
        f"{nines}.5",
        f"{nines}GiB",
        f"{nines}.5GiB",
        f"1e{nines}",
        10**digits,
        -(10**digits),
    ]
    for value in values:
        with pytest.raises(ConfigError, match=f"^{spec.name}=.* must be ") as caught:
            build_config(cls, {spec.name: value}, {})
        assert len(str(caught.value)) < 300


@pytest.mark.parametrize("count", [1025, 10**25])
def test_absurd_numbers_of_processes_are_refused(count: int) -> None:
    for name in ("dp", "tp"):
        with pytest.raises(ConfigError, match=f"^{name}={count} must be an integer at least 1 and at most 1024"):
            EngineConfig(**{name: count})
    for name in ("prefill_engines", "decode_engines", "replicas"):
        with pytest.raises(ConfigError, match=f"^{name}={count} must be .* at most 1024"):
            ServerConfig(**{name: count})


def test_resolving_twice_changes_nothing() -> None:
    for cuda in (False, True):
        once = resolve(EngineConfig(), V4, cuda)
        assert resolve(once, V4, cuda) == once
        assert "auto" not in dataclasses.asdict(once).values()


LAYOUTS = ("fp32", "bf16", "v4", "v41")


@pytest.mark.parametrize("model", [V4, V41], ids=["v4", "v41"])
@pytest.mark.parametrize(("kv", "compressed"), list(itertools.product(LAYOUTS, ("same", "fp8", "fp4"))))
def test_only_the_allowed_layout_pairs_pass(kv: str, compressed: str, model: ModelConfig) -> None:
    config = EngineConfig(kv_layout=kv, compressed_kv_layout=compressed)
    allowed = compressed == "same" or (kv, compressed) == ("v41", "fp4")
    if not allowed:
        with pytest.raises(ConfigError, match=f"compressed_kv_layout='{compressed}' does not go with kv_layout='{kv}'"):
            resolve(config, model, False)
    else:
        for index in ("fp32", "bf16", "fp8", "fp4"):
            resolved = resolve(dataclasses.replace(config, index_layout=index), model, False)
            assert (resolved.kv_layout, resolved.compressed_kv_layout, resolved.index_layout) == (kv, compressed, index)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"backend": "triton"}, "backend 'triton' cannot run: kernels need device=cuda; choose auto or reference"),
        ({"backend": "hopper"}, "backend 'hopper' cannot run: kernels need device=cuda; choose auto or reference"),
        ({"device": "cuda"}, "no usable CUDA device"),
        ({"enable_cuda_graphs": True}, "backend is reference on device=cpu; leave it out, or run on a CUDA device"),
        ({"max_model_len": 1048577}, "max_model_len=1048577 exceeds the model's max_position_embeddings=1048576"),
    ],
)
def test_what_model_machine_or_version_cannot_do_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        resolve(EngineConfig(**options), V4, device_available=False)


H200, A100, B200, T4 = (Gpu(capability, "3.6.0") for capability in ((9, 0), (8, 0), (10, 0), (7, 5)))
WIDE = {"head_dim": 512, "index_head_dim": 128}


@pytest.mark.parametrize(
    ("ranks", "graphs"),
    [({}, True), ({"dp": 2}, True), ({"dp": 2, "ep": 2}, True), ({"tp": 2}, False), ({"dp": 2, "tp": 2, "ep": 4}, False)],
)
def test_graphs_are_for_replicas_of_one_rank_unless_told_otherwise(ranks: dict[str, int], graphs: bool) -> None:
    assert resolve(EngineConfig(**ranks), V4, True, H200).enable_cuda_graphs is graphs
    assert resolve(EngineConfig(**ranks, enable_cuda_graphs=True), V4, True, H200).enable_cuda_graphs is True


@pytest.mark.parametrize(
    ("gpu", "options", "widths", "backend"),
    [
        (H200, {}, WIDE, "hopper"),
        (Gpu((9, 0), "3.6.1"), {}, WIDE, "hopper"),
        (Gpu((9, 0), "3.60.0"), {}, WIDE, "triton"),
        (Gpu((9, 0), "3.7.0"), {}, WIDE, "triton"),
        (Gpu((9, 0), None), {}, WIDE, "reference"),
        (A100, {}, WIDE, "triton"),
        (B200, {}, WIDE, "triton"),
        (T4, {}, WIDE, "reference"),
        (None, {}, WIDE, "reference"),
        (H200, {"device": "cpu"}, WIDE, "reference"),
        (H200, {"dtype": "float32"}, WIDE, "reference"),
        (H200, {"kv_layout": "bf16"}, WIDE, "hopper"),
        (H200, {"kv_layout": "fp32"}, WIDE, "reference"),
        (H200, {"index_layout": "fp32"}, WIDE, "reference"),
        (H200, {}, WIDE | {"head_dim": 96}, "reference"),
        (H200, {}, WIDE | {"index_head_dim": 64}, "reference"),
        (H200, {"backend": "triton"}, WIDE, "triton"),
        (H200, {"backend": "reference"}, WIDE, "reference"),
    ],
)
def test_backend_follows_the_device_and_the_model(
    gpu: Gpu | None, options: dict[str, Any], widths: dict[str, int], backend: str
) -> None:
    resolved = resolve(EngineConfig(**options), dataclasses.replace(V4, **widths), True, gpu)
    assert resolved.backend == backend


@pytest.mark.parametrize(
    ("gpu", "options", "widths", "message"),
    [
        (A100, {"backend": "hopper"}, WIDE, "compute capability 8.0 is not 9.0"),
        (B200, {"backend": "hopper"}, WIDE, "compute capability 10.0 is not 9.0"),
        (Gpu((9, 0), "3.7.0"), {"backend": "hopper"}, WIDE, r"triton 3\.7\.0 is not among the tested releases: 3\.6"),
        (Gpu((9, 0), None), {"backend": "triton"}, WIDE, "triton is not installed"),
        (T4, {"backend": "triton"}, WIDE, "compute capability 7.5 is below 8.0"),
        (H200, {"backend": "hopper", "dtype": "float32"}, WIDE, "not dtype=float32"),
        (H200, {"backend": "triton", "kv_layout": "fp32"}, WIDE, "no fp32 records"),
        (H200, {"backend": "triton"}, WIDE | {"head_dim": 96}, "this model has 96 and 128"),
    ],
)
def test_an_asked_backend_that_cannot_run_is_refused(
    gpu: Gpu, options: dict[str, Any], widths: dict[str, int], message: str
) -> None:
    with pytest.raises(ConfigError, match=f"backend '{options['backend']}' cannot run: .*{message}"):
        resolve(EngineConfig(**options), dataclasses.replace(V4, **widths), True, gpu)


def test_batch_invariance_needs_kernels_and_one_rank_per_replica() -> None:
    model = dataclasses.replace(V4, **WIDE)
    assert resolve(EngineConfig(batch_invariant=True), model, True, H200).batch_invariant
    for ranks in ({"dp": 2}, {"dp": 4, "ep": 4}, {"dp": 4, "ep": 2}):
        assert resolve(EngineConfig(batch_invariant=True, **ranks), model, True, H200).batch_invariant
    on_cuda, on_cpu = "reference on device=cuda: .*; choose another backend", "reference on device=cpu: .*run on a CUDA device$"
    for options, why in (({"backend": "reference"}, on_cuda), ({"dtype": "float32"}, on_cuda), ({"device": "cpu"}, on_cpu)):
        with pytest.raises(ConfigError, match=f"batch_invariant=true needs kernels, but backend is {why}"):
            resolve(EngineConfig(batch_invariant=True, **options), model, True, H200)
    for options in ({"tp": 2}, {"dp": 2, "tp": 2, "ep": 4}):
        with pytest.raises(ConfigError, match="batch_invariant=true: tp=2 ranks .*; set tp=1 or leave the option out"):
            resolve(EngineConfig(batch_invariant=True, **options), model, True, H200)


def test_explicit_values_survive_resolving() -> None:
    given = EngineConfig(device="cpu", dtype="bfloat16", kv_layout="bf16", kv_cache_bytes=123, max_model_len=1048576, seed=3)
    resolved = resolve(given, V4, device_available=True)
    for name in ("device", "dtype", "kv_layout", "kv_cache_bytes", "max_model_len", "seed"):
        assert getattr(resolved, name) == getattr(given, name)


@pytest.mark.parametrize(
    ("model", "name"),
    [("tiny", "tiny-v4"), ("/a/b/V4-Flash/", "V4-Flash"), ("owner/V4-Flash", "V4-Flash"), ("/", "/"), ("model", "model")],
)
def test_served_name_follows_the_model(model: str, name: str) -> None:
    assert resolve(EngineConfig(model=model), V4, False).served_model_name == name
    assert resolve(EngineConfig(model=model, served_model_name="mine"), V4, False).served_model_name == "mine"


def test_configs_need_no_server_packages() -> None:
    blocked = ("pydantic", "fastapi", "uvicorn", "msgspec", "zmq", "typer", "click", "torch")
    code = f"import sys; sys.modules.update(dict.fromkeys({blocked!r})); import abyssal.config, abyssal.model_config"
    subprocess.run([sys.executable, "-c", code], check=True)
