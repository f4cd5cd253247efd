"""Layer plans: which layer owns, reads and computes what, for V4 and for V4.1."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, TypeAlias

from abyssal.config import Family, LayerPlan
from abyssal.errors import ConfigError
from abyssal.model_config.reader import Section

Routers: TypeAlias = tuple[Literal["hash", "scored"], ...]

RATIOS: dict[Family, tuple[int, ...]] = {"v4": (0, 4, 128), "v41": (0, 1, 2)}

# Layer kinds as transformers names them, with the ratio that V4 gives each (V4 spec 1.2).
LAYER_TYPES = {"sliding_attention": 0, "compressed_sparse_attention": 4, "heavily_compressed_attention": 128}
ROUTERS: dict[str, Literal["hash", "scored"]] = {"hash_moe": "hash", "moe": "scored"}
# In V4.1 these only tell KV sources from other layers.
V41_LAYER_TYPES = ("sliding_attention", "shared_compressed_attention")


def v4_layers(config: Section, num_layers: int) -> tuple[LayerPlan, ...]:
    """Every compressed layer owns its compressor; ratio-4 layers own an indexer (V4 spec 1.1, 2.9, 2.10)."""
    ratios, routers = _v4_ratios(config, num_layers), _v4_routers(config, num_layers)
    return tuple(_v4_layer(layer, ratios[layer], routers[layer]) for layer in range(num_layers))


def v41_layers(config: Section, num_layers: int, engram_layers: Sequence[int]) -> tuple[LayerPlan, ...]:
    """A few layers own compressors and indexers, the rest read theirs (V4.1 spec 3.5, 3.6)."""
    ratios = _ratios(config, "v41", num_layers)
    kv_sources = _sources(config, "kv_source_layer_ids", ratios)
    index_sources = _sources(config, "index_source_layer_ids", ratios)
    _check_sources(config, ratios, kv_sources, index_sources)
    candidate_source = _candidate_source(config, kv_sources, index_sources)
    plans = []
    for layer, ratio in enumerate(ratios):
        index_source = _latest(index_sources, layer) if ratio else None
        plans.append(
            LayerPlan(
                layer=layer,
                ratio=ratio,
                rope="compress" if ratio else "main",
                kv_source=_latest(kv_sources, layer) if ratio else None,
                selection="topk" if ratio else "none",
                index_source=index_source,
                index_keys="latent" if layer in kv_sources else "none",
                candidates=_candidates(layer, index_source, candidate_source),
                router="scored",
                engram=engram_layers.index(layer) if layer in engram_layers else None,
                hc_order="previous",
            )
        )
    return tuple(plans)


def _v4_layer(layer: int, ratio: int, router: Literal["hash", "scored"]) -> LayerPlan:
    selections: dict[int, Literal["none", "topk", "all"]] = {0: "none", 4: "topk", 128: "all"}
    return LayerPlan(
        layer=layer,
        ratio=ratio,
        rope="compress" if ratio else "main",
        kv_source=layer if ratio else None,
        selection=selections[ratio],
        index_source=layer if ratio == 4 else None,
        index_keys="pooled" if ratio == 4 else "none",
        candidates="none",
        router=router,
        engram=None,
        hc_order="own",
    )


def _v4_ratios(config: Section, num_layers: int) -> tuple[int, ...]:
    rates = _compress_rates(config)
    typed = None
    if config.given("layer_types"):
        types = config.texts("layer_types", LAYER_TYPES)
        _check_length(config, "layer_types", len(types), num_layers)
        for kind in sorted(set(types) - set(rates)):
            raise ConfigError(f"{config.where}: layer_types uses {kind!r}, but compress_rates does not give its ratio")
        typed = tuple(rates[kind] for kind in types)
    if not config.given("compress_ratios"):
        if typed is None:
            raise ConfigError(f"{config.where} gives neither compress_ratios nor layer_types; no layer pattern is assumed")
        return typed
    ratios = _ratios(config, "v4", num_layers)
    for layer, (ratio, other) in enumerate(zip(ratios, typed or ratios, strict=True)):
        if ratio != other:
            raise ConfigError(f"{config.where}: layer {layer} has ratio {ratio} in compress_ratios and {other} in layer_types")
    return ratios


def _compress_rates(config: Section) -> dict[str, int]:
    rates = {"sliding_attention": 0}
    if not config.given("compress_rates"):
        return rates
    section = config.section("compress_rates")
    for kind, ratio in LAYER_TYPES.items():
        section.require(kind, (ratio,))  # other ratios would need other kernels and another state layout
        if section.given(kind):
            rates[kind] = ratio
    section.finish()
    return rates


def _v4_routers(config: Section, num_layers: int) -> Routers:
    typed: Routers | None = None
    if config.given("mlp_layer_types"):
        types = config.texts("mlp_layer_types", ROUTERS)
        _check_length(config, "mlp_layer_types", len(types), num_layers)
        typed = tuple(ROUTERS[kind] for kind in types)
    if not config.given("num_hash_layers"):
        if typed is None:
            raise ConfigError(f"{config.where} gives neither num_hash_layers nor mlp_layer_types; no router is assumed")
        return typed
    count = config.integer("num_hash_layers", low=0, high=num_layers)
    counted: Routers = tuple("hash" if layer < count else "scored" for layer in range(num_layers))
    if typed not in (None, counted):
        raise config.fail("num_hash_layers", "contradicts mlp_layer_types; keep one of them")
    return counted


def _ratios(config: Section, family: Family, num_layers: int) -> tuple[int, ...]:
    """The decoder's ratios. Entries behind them belong to draft stages, which are window-only (V4 spec 1.1)."""
    ratios = config.integers("compress_ratios")
    if len(ratios) < num_layers:
        _check_length(config, "compress_ratios", len(ratios), num_layers)
    for layer, ratio in enumerate(ratios[:num_layers]):
        if ratio not in RATIOS[family]:
            allowed = ", ".join(map(str, RATIOS[family]))
            raise ConfigError(f"{config.where}: compress_ratios gives layer {layer} ratio {ratio}; supported: {allowed}")
    for entry, ratio in enumerate(ratios[num_layers:], start=num_layers):
        if ratio:
            raise ConfigError(
                f"{config.where}: entry {entry} of compress_ratios is {ratio} with num_hidden_layers={num_layers}; "
                "entries behind the decoder belong to draft stages and must be 0"
            )
    return ratios[:num_layers]


def _check_length(config: Section, name: str, found: int, expected: int) -> None:
    if found != expected:
        raise ConfigError(f"{config.where}: {name} has {found} entries for num_hidden_layers={expected}")


def _sources(config: Section, name: str, ratios: Sequence[int]) -> tuple[int, ...]:
    sources = config.integers(name, high=len(ratios) - 1)
    if list(sources) != sorted(set(sources)):
        raise config.fail(name, "must rise strictly")
    for source in sources:
        if ratios[source] == 0:
            raise config.fail(name, f"names layer {source}, whose ratio is 0")
    return sources


def _check_sources(config: Section, ratios: Sequence[int], kv_sources: Sequence[int], index_sources: Sequence[int]) -> None:
    for missing in sorted(set(kv_sources) - set(index_sources)):
        # Otherwise its readers would use positions chosen among another layer's entries.
        raise config.fail("index_source_layer_ids", f"must include every KV source; {missing} is missing")
    for layer, ratio in enumerate(ratios):
        if not ratio:
            continue
        source = _latest(kv_sources, layer)
        if source is None:
            raise config.fail("kv_source_layer_ids", f"has no source at or before layer {layer}, whose ratio is {ratio}")
        if ratios[source] != ratio:
            raise config.fail("kv_source_layer_ids", f"gives layer {layer} of ratio {ratio} a source of ratio {ratios[source]}")
    if config.given("layer_types"):
        expected = tuple(V41_LAYER_TYPES[layer in kv_sources] for layer in range(len(ratios)))
        if config.texts("layer_types", V41_LAYER_TYPES) != expected:
            raise ConfigError(f"{config.where}: layer_types contradicts kv_source_layer_ids; keep one of them")


def _candidate_source(config: Section, kv_sources: Sequence[int], index_sources: Sequence[int]) -> int | None:
    """The layer that publishes candidate blocks, or None; a negative id switches the second level off."""
    source = config.integer("candidate_source_layer_id", low=-1)
    if source < 0:
        return None
    if source not in index_sources:
        raise config.fail("candidate_source_layer_id", "must be one of index_source_layer_ids")
    if source < kv_sources[-1]:
        # Later indexers are confined to its blocks, which only mean something in the cache that it scored.
        raise config.fail("candidate_source_layer_id", f"must not lie before the last KV source, layer {kv_sources[-1]}")
    return source


def _candidates(layer: int, index_source: int | None, candidate_source: int | None) -> Literal["none", "publish", "use"]:
    if candidate_source is None or layer != index_source or layer < candidate_source:
        return "none"
    return "publish" if layer == candidate_source else "use"


def _latest(sources: Sequence[int], layer: int) -> int | None:
    return max((source for source in sources if source <= layer), default=None)
