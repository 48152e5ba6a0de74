"""What is refused at start, with the reason and the cure. Each sentence is written once, here."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch_turboquant.integrations.engine.limits import ELSEWHERE, wrong_dtype, wrong_head_dim
from torch_turboquant.integrations.engine.pages import SIZES
from torch_turboquant.integrations.sglang.settings import backends_of, is_ours

CACHE_DTYPES = ("auto", "bf16", "bfloat16")

PAGES_ONLY_HERE = "its pages would have to be copied by somebody who knows what they hold"
ONE_STREAM = "only one step at a time is supported"
TENSOR_PARALLEL = "only tensor parallelism is supported"

# Arguments of the server that must be off, as this says why. One that a version of SGLang does not
# have is off.
OFF = {
    "enable_hierarchical_cache": PAGES_ONLY_HERE,
    "enable_lmcache": PAGES_ONLY_HERE,
    "enable_flexkv": PAGES_ONLY_HERE,
    "enable_unified_cache_external_linker": PAGES_ONLY_HERE,
    "disaggregation_decode_enable_offload_kvcache": PAGES_ONLY_HERE,
    "enable_hisparse": "packed pages are attended to as a whole",
    "enable_unified_memory": "packed pages have a pool of their own",
    "enable_page_major_kv_layout": "packed pages have a layout of their own",
    "prefill_only_disable_kv_cache": "there would be no pages",
    "enable_streaming_session": "a session would keep a request's entry of the exact tail",
    "enable_two_batch_overlap": ONE_STREAM,
    "enable_pdmux": ONE_STREAM,
    "enable_dp_attention": TENSOR_PARALLEL,
    "speculative_adaptive": "exact tails have room for a fixed number of drafts",
    "enable_multi_layer_eagle": "it has not been tested",
    "dllm_algorithm": "attention that is not causal is not supported",
    "enable_torch_compile": "it has not been tested",
    "enable_deterministic_inference": "the other sequences of a batch move roundings",
}
# Arguments of the server that must have this value.
FIXED = {
    "disaggregation_mode": ("null", PAGES_ONLY_HERE),
    "kv_canary": ("none", "packed pages have no keys that it could look at"),
    "pp_size": (1, TENSOR_PARALLEL),
    "attn_dp_size": (1, TENSOR_PARALLEL),
    "dcp_size": (1, TENSOR_PARALLEL),
    "attn_cp_size": (1, TENSOR_PARALLEL),
}
SINCE = {"enable_unified_cache_external_linker": (0, 5, 20), "attn_dp_size": (0, 5, 22)}
"""Those of these arguments that older versions do not have. attn_dp_size took the place of
enable_dp_attention, which then is off in every engine."""

OWN_HEADS = (
    "Gemma4ForCausalLM",
    "Gemma4ForConditionalGeneration",
    "Gemma4UnifiedForConditionalGeneration",
)
"""Models whose layers with sliding windows may have other heads than the others."""

PICTURES_BOTH_WAYS = ("Gemma3ForConditionalGeneration",)
"""Models whose pictures' tokens always see each other."""

DRAFTING = ("NGRAM", "EAGLE", "EAGLE3", "STANDALONE")
"""Algorithms of speculative decoding; NEXTN is another name for EAGLE."""


def wrong_arguments(args: Any) -> list[str]:
    """What is wrong with the arguments of the server: sentences with their cures.

    Args:
        args: of arguments.chosen.
    """
    found = []
    for name, why in OFF.items():
        if getattr(args, name, None):
            found.append(f"{_flag(name)} is not supported, because {why}: leave it out")
    for name, (value, why) in FIXED.items():
        given = getattr(args, name, None)
        if given not in (value, None):
            found.append(
                f"{_flag(name)} is {given}, supported: {value}, because {why}: leave it out"
            )
    if args.page_size not in SIZES:
        found.append(
            f"--page-size is {args.page_size}, supported: "
            f"{', '.join(map(str, SIZES))}: pass --page-size 64"
        )
    if args.kv_cache_dtype not in CACHE_DTYPES:
        found.append(
            f"--kv-cache-dtype is {args.kv_cache_dtype}, but pages of TurboQuant hold codes "
            "of their own: leave it out, and choose a preset"
        )
    prefill, decode = backends_of(args)
    if prefill != decode:
        found.append(
            f"prefill has the attention backend {prefill} and decode {decode}, but only one "
            "backend can read the pages: pass --attention-backend alone"
        )
    return found + wrong_drafts(args)


def wrong_drafts(args: Any) -> list[str]:
    """What is wrong with speculative decoding; args and sentences as in wrong_arguments."""
    algorithm = args.speculative_algorithm
    if algorithm is None:
        return []
    if algorithm not in DRAFTING:
        return [
            f"--speculative-algorithm is {algorithm}, supported: {', '.join(DRAFTING)}: choose one "
            "of these, or leave it out"
        ]
    found = []
    if (args.speculative_eagle_topk or 1) != 1:
        flag = (
            "--speculative-ngram-max-bfs-breadth"
            if algorithm == "NGRAM"
            else "--speculative-eagle-topk"
        )
        found.append(
            f"drafts are trees, with {args.speculative_eagle_topk} guesses for a token, but "
            f"only chains are supported: pass {flag} 1"
        )
    theirs = args.speculative_draft_attention_backend
    if algorithm != "NGRAM" and (theirs is None or is_ours(theirs)):
        found.append(
            "the model that drafts has keys of its own in a pool of SGLang's, which another "
            "attention backend reads: pass --speculative-draft-attention-backend, such as triton, "
            "fa3 or flashinfer"
        )
    return found


def wrong_model(kvc: Any, args: Any) -> list[str]:
    """What is wrong with a model: sentences with their cures.

    Args:
        kvc: SGLang's KVCacheConfigurator.
        args: of arguments.chosen.
    """
    model, dtype = kvc.model_config, kvc.model_dtype
    on_cpu = str(kvc.device) == "cpu"
    found = []
    if kvc.use_mla_backend:
        found.append(f"latent attention (MLA) is not supported: {ELSEWHERE}")
    if kvc.mambaish_config is not None and kvc.hybrid_gdn_config is None:
        found.append(
            "models with Mamba, or linear attention other than by gated delta rules, are not "
            f"supported: {ELSEWHERE}"
        )
    elif kvc.mambaish_config is not None and args.speculative_algorithm is not None:
        found.append(
            "drafts for a model with linear attention are not supported, because they have not "
            "been tested: leave out --speculative-algorithm"
        )
    if kvc.layer_info.num_effective_layers > model.num_hidden_layers:  # IQuest-LoopCoder
        found.append(f"layers with several attentions are not supported: {ELSEWHERE}")
    if kvc.is_hybrid_swa:
        found += wrong_pools(kvc, args)
    if kvc.post_capture_kv_active:
        found.append("SGLANG_ENABLE_POST_CAPTURE_KV_SIZING is not supported: leave it out")
    if getattr(model, "is_encoder_decoder", False) or not getattr(model, "is_generation", True):
        found.append(f"models that do not generate by a decoder are not supported: {ELSEWHERE}")
    if args.kv_cache_dtype == "auto" and kvc.kv_cache_dtype != dtype:
        found.append(
            f"the checkpoint asks for a cache in {kvc.kv_cache_dtype}, but pages of TurboQuant "
            "hold codes of their own: pass --kv-cache-dtype bf16"
        )
    if not kvc.use_mla_backend:
        found += wrong_head(model.head_dim, model.v_head_dim)
        if heads_may_differ(kvc) and not found:
            found += wrong_head(model.swa_head_dim, model.swa_v_head_dim)
    if sees_pictures_both_ways(model):
        found.append(
            "pictures whose tokens see each other are not supported: give the engine "
            "enable_multimodal=False, which then reads text alone (Gemma 3 does so where "
            f"--enable-multimodal is left out), or {ELSEWHERE}"
        )
    wrong = wrong_dtype(dtype, on_cpu)
    return [*found, wrong] if wrong else found


def sees_pictures_both_ways(model: Any) -> bool:
    """Whether tokens of a picture are to see each other (Gemma 3, larger Gemma 4). With a backend
    that it does not know SGLang logs at most that they do not.

    Args:
        model: SGLang's ModelConfig.
    """
    name = model.hf_config.architectures[0]
    if not getattr(model, "is_multimodal", False):
        return False
    if name in PICTURES_BOTH_WAYS:
        return True
    text = model.hf_text_config if name in OWN_HEADS else None
    return getattr(text, "use_bidirectional_attention", None) == "vision"


def wrong_pools(kvc: Any, args: Any) -> list[str]:
    """What is wrong with a model whose sliding layers SGLang gives a pool of their own; arguments
    as in wrong_model."""
    found = []
    if kvc.is_hybrid_swa_compress and not heads_may_differ(kvc):
        found.append(
            "layers with sliding windows whose heads differ from those of other layers are not "
            f"supported: {ELSEWHERE}"
        )
    elif not kvc.model_config.full_attention_layer_ids:
        found.append(
            "a model all of whose layers have sliding windows is not supported with the pool that "
            "SGLang gives it: pass --disable-hybrid-swa-memory"
        )
    if args.speculative_algorithm is not None:
        found.append(
            "drafts beside a pool of its own for layers with sliding windows are not supported, "
            "because they have not been tested: pass --disable-hybrid-swa-memory"
        )
    return found


def heads_may_differ(kvc: Any) -> bool:
    """Whether layers with sliding windows may have other heads than the others; kvc as in
    wrong_model."""
    return kvc.model_config.hf_config.architectures[0] in OWN_HEADS


def wrong_layer_presets(presets: Mapping[int, str], layers: Sequence[int], total: int) -> list[str]:
    """What is wrong with presets of single layers.

    Args:
        presets: of layers by their numbers, negative ones from the end.
        layers: that keep keys.
        total: layers of the model.
    """
    others = sorted(number for number in presets if number % total not in layers)
    if not others:
        return []
    return [
        f'"layers" names {", ".join(map(str, others))}, which keep no keys and values; those that '
        f"do are {', '.join(map(str, layers))}: name one of these"
    ]


def wrong_head(head_dim: int, v_head_dim: int) -> list[str]:
    """What is wrong with a head of so many channels."""
    if v_head_dim != head_dim:
        return [f"keys have {head_dim} channels and values {v_head_dim}: {ELSEWHERE}"]
    wrong = wrong_head_dim(head_dim)
    return [wrong] if wrong else []


def wrong_layer(layer: Any, kv_heads: int, head_dim: int) -> list[str]:
    """What is wrong with a RadixAttention whose pages have these heads."""
    found = []
    kind = getattr(layer.attn_type, "value", layer.attn_type)
    if kind != "decoder" or layer.is_cross_attention:
        kind = "cross" if layer.is_cross_attention else kind
        found.append(f"{kind} attention is not supported: {ELSEWHERE}")
    if layer.pos_encoding_mode != "NONE":
        found.append(f"positions by {layer.pos_encoding_mode} are not supported: {ELSEWHERE}")
    if layer.logit_cap and layer.logit_capping_method != "tanh":
        found.append(f"a cap by {layer.logit_capping_method} is not supported: {ELSEWHERE}")
    if getattr(layer, "use_irope", False):  # Llama 4
        found.append(f"attention within chunks of the context is not supported: {ELSEWHERE}")
    if layer.xai_temperature_len > 0:
        found.append(f"the temperature of queries by position is not supported: {ELSEWHERE}")
    shape = (layer.qk_head_dim, layer.v_head_dim, layer.tp_k_head_num)
    if shape != (head_dim, head_dim, kv_heads):
        found.append(
            f"layer {layer.layer_id} has {layer.tp_k_head_num} KV heads of {layer.qk_head_dim} and "
            f"{layer.v_head_dim} channels, other layers {kv_heads} of {head_dim}: {ELSEWHERE}"
        )
    return found


def wrong_reader(layer: Any, source: Any | None) -> list[str]:
    """What is wrong with a RadixAttention that reads the keys of another layer, `source`; None:
    no layer before it has stored some under this number."""
    number = layer.layer_id
    if source is None:
        return [f"a layer reads the keys of layer {number}, which has none: {ELSEWHERE}"]
    alike = ("sliding_window_size", "logit_cap")
    if any(getattr(layer, name) != getattr(source, name) for name in alike):
        return [f"a layer reads the keys of layer {number} with another window or cap: {ELSEWHERE}"]
    return []


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"
