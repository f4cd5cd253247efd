"""The two rotary tables of a model from any spelling of rope settings (V4 spec 1.2 and 2.6, V4.1 spec 3.4)."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TypeVar

from abyssal.config import RopeConfig, YarnConfig
from abyssal.errors import ConfigError
from abyssal.model_config.reader import Section, rename

T = TypeVar("T")
ROPE_TYPES = ("default", "yarn")
INFERENCE_KEYS = ("rope_factor", "original_seq_len", "beta_fast", "beta_slow")


@dataclass
class _Statements:
    """What the config says, with the place that says it; every place must say the same."""

    main: dict[str, float] = field(default_factory=dict)  # base of the window layers' table
    compress: dict[str, float] = field(default_factory=dict)  # base of the compressed layers' table
    yarn: dict[str, YarnConfig | None] = field(default_factory=dict)
    dim: dict[str, int] = field(default_factory=dict)


def parse_rope(config: Section, head_dim: int) -> tuple[RopeConfig, RopeConfig]:
    """The table of window layers and the table of compressed layers.

    Accepts flat `rope_scaling`, flat `rope_parameters`, `rope_parameters` with `main` and `compress`, and the official
    inference config's `rope_factor`, `original_seq_len`. Several of them together must agree. `rope_scaling: null` says that
    there is no YaRN; saying nothing is an error, since the two give different models.
    """
    said = _Statements()
    _read_root(config, head_dim, said)
    for name in ("rope_scaling", "rope_parameters"):
        if config.given(name):
            _read_object(config.section(name), name, head_dim, said)
    if not said.yarn and config.says_null("rope_scaling"):
        said.yarn["rope_scaling"] = None
    dim = _agreed("the rotary size (qk_rope_head_dim or partial_rotary_factor)", said.dim, config)
    yarn = _agreed("YaRN (rope_scaling or rope_parameters)", said.yarn, config)
    main = RopeConfig(dim, _agreed("the rope base of window layers (rope_theta)", said.main, config), None)
    base = _agreed("the rope base of compressed layers (compress_rope_theta)", said.compress, config)
    return main, RopeConfig(dim, base, yarn)


def _read_root(config: Section, head_dim: int, said: _Statements) -> None:
    if config.given("rope_theta"):
        said.main["rope_theta"] = config.number("rope_theta", above=1)
    if config.given("compress_rope_theta"):
        said.compress["compress_rope_theta"] = config.number("compress_rope_theta", above=1)
    if config.given("qk_rope_head_dim"):
        said.dim["qk_rope_head_dim"] = config.integer("qk_rope_head_dim", low=2, high=head_dim)
    _read_partial(config, "partial_rotary_factor", head_dim, said)
    if any(config.given(name) for name in INFERENCE_KEYS):
        said.yarn["rope_factor"] = _yarn(config, "rope_factor", "original_seq_len")


def _read_object(rope: Section, name: str, head_dim: int, said: _Statements) -> None:
    if not rope.given("main") and not rope.given("compress"):
        said.yarn[name] = _read_flat(rope, name, head_dim, said.main, ROPE_TYPES, said)
        return
    for part in ("main", "compress"):
        if not rope.given(part):
            raise ConfigError(f"{rope.where}: {part!r} is missing; give both main and compress, or one flat object")
    # Window layers never scale (V4 spec 2.6).
    _read_flat(rope.section("main"), f"{name}.main", head_dim, said.main, ("default",), said)
    part = f"{name}.compress"
    said.yarn[name] = _read_flat(rope.section("compress"), part, head_dim, said.compress, ROPE_TYPES, said)
    rope.finish()


def _read_flat(
    rope: Section, place: str, head_dim: int, bases: dict[str, float], types: Iterable[str], said: _Statements
) -> YarnConfig | None:
    rope = Section(rename(rope.values(), {"type": "rope_type"}, rope.where), rope.where)
    kind = rope.text("rope_type", types)
    if rope.given("rope_theta"):
        bases[f"{place}.rope_theta"] = rope.number("rope_theta", above=1)
    _read_partial(rope, f"{place}.partial_rotary_factor", head_dim, said)
    rope.require("attention_factor", (1.0,))
    yarn = _yarn(rope, "factor", "original_max_position_embeddings") if kind == "yarn" else None
    rope.finish()
    return yarn


def _read_partial(section: Section, place: str, head_dim: int, said: _Statements) -> None:
    if not section.given("partial_rotary_factor"):
        return
    size = section.number("partial_rotary_factor", high=1) * head_dim
    if abs(size - round(size)) > 1e-3:
        raise section.fail("partial_rotary_factor", f"times head_dim={head_dim} is not a whole number of dimensions")
    said.dim[place] = round(size)


def _yarn(section: Section, factor: str, original: str) -> YarnConfig:
    yarn = YarnConfig(
        factor=section.number(factor),
        original_max_position=section.integer(original),
        beta_fast=section.number("beta_fast"),
        beta_slow=section.number("beta_slow"),
    )
    if yarn.factor < 1:
        raise section.fail(factor, "must be at least 1")
    if yarn.beta_fast <= yarn.beta_slow:
        raise section.fail("beta_fast", f"must be above beta_slow={yarn.beta_slow:g}")
    return yarn


def _agreed(what: str, said: dict[str, T], config: Section) -> T:
    if not said:
        raise ConfigError(f"{config.where} does not give {what}; nothing is assumed in its place")
    (first, value), *others = said.items()
    for place, other in others:
        if other != value:
            raise ConfigError(f"{config.where}: {first} gives {value} and {place} gives {other} for {what}; keep one of them")
    return value
