"""Which model families of transformers the cache serves, and which it refuses.

Every family is a tiny random model. Greedy generation through the cache is compared with a
reference that knows nothing of caches: one forward over the generated text with an attention
function that quantises the keys and values it is given and attends in float64, under the mask that
the model itself has made. Families that a version of transformers does not have are skipped.
"""

import re
from pathlib import Path

import pytest
import torch

transformers = pytest.importorskip("transformers")

from transformers import (  # noqa: E402
    AttentionInterface,
    AttentionMaskInterface,
    AutoModelForCausalLM,
    DynamicCache,
)
from transformers.masking_utils import eager_mask  # noqa: E402
from transformers.models.auto.configuration_auto import CONFIG_MAPPING  # noqa: E402

from tests.test_transformers import COMMON, feed, generate, make_ids, quantised  # noqa: E402
from torch_turboquant import make_tables  # noqa: E402
from torch_turboquant.integrations.transformers import (  # noqa: E402
    TurboQuantCache,
    TurboQuantLayer,
    load_centers,
    save_centers,
)
from torch_turboquant.integrations.transformers.models import (  # noqa: E402
    layer_windows,
    rotary_partners,
)

WINDOW = {"sliding_window": 24}
WIDE = {"head_dim": 32}  # not hidden_size / heads
EXPERTS = {"num_experts": 2, "num_experts_per_tok": 1, "moe_intermediate_size": 32}
LOCAL_EXPERTS = {"num_local_experts": 2, "num_experts_per_tok": 1}
MINOR = int(transformers.__version__.split(".")[1])
# layers of hybrid models, whose names have changed
ONE_OF_THREE = {"layer_types": ["linear_attention", "full_attention", "linear_attention"]}
BLOCKS = ["linear_attention", "full_attention"] if MINOR >= 17 else ["mamba", "attention"]
CONV = {"layer_types": ["conv", "full_attention", "conv"]}
MAMBA = {"mamba_n_heads": 8, "mamba_d_head": 16, "mamba_n_groups": 1, "mamba_d_state": 16,
         "mamba_chunk_size": 16}  # fmt: skip
LINEAR_HEADS = {"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 16,
                "linear_value_head_dim": 16}  # fmt: skip
MIXED = {**WINDOW, "layer_types": ["sliding_attention", "full_attention", "sliding_attention"]}

SUPPORTED = {
    "afmoe": {**WIDE, **EXPERTS, **MIXED},
    "apertus": {},
    "arcee": WIDE,
    "biogpt": {},  # learned positions
    "bitnet": {},
    "cohere": {},
    "cohere2": {**MIXED},
    "cohere2_moe": {**WIDE, **EXPERTS, **MIXED},
    "cwm": {**WIDE, **MIXED, "bos_token_id": 1, "eos_token_id": [99]},
    "ernie4_5": WIDE,
    "ernie4_5_moe": {"moe_num_experts": 2, "moe_k": 1, "moe_intermediate_size": 32},
    "exaone4": {**MIXED},
    "exaone_moe": {**MIXED, **EXPERTS},
    "flex_olmo": {},
    "gemma": WIDE,
    "gemma2": {**WIDE, **MIXED, "attn_logit_softcapping": 0.2, "query_pre_attn_scalar": 24},
    "gemma3_text": {**WIDE, **MIXED, "query_pre_attn_scalar": 24},
    "glm": WIDE,
    "glm4": WIDE,
    "glm4_moe": {"n_routed_experts": 2, "num_experts_per_tok": 1, "moe_intermediate_size": 32},
    "gpt-sw3": {},
    "gpt2": {},  # learned positions
    "gpt_bigcode": {},  # one KV head
    "gpt_neox": {},
    "gpt_oss": {**WIDE, **LOCAL_EXPERTS, **MIXED},  # learned sinks
    "granite": {},
    "granitemoe": LOCAL_EXPERTS,
    "granitemoehybrid": {**MAMBA, **LOCAL_EXPERTS, "shared_intermediate_size": 32,
                         "layer_types": [BLOCKS[0], BLOCKS[1], BLOCKS[0]]},
    "granitemoeshared": LOCAL_EXPERTS,
    "hunyuan_v1_dense": WIDE,
    "internlm3": WIDE,
    "jais2": WIDE,
    "jamba": {"num_experts": 2, "num_experts_per_tok": 1, "attn_layer_period": 2,
              "attn_layer_offset": 1, "mamba_d_state": 8, "use_mamba_kernels": False},
    "lfm2": CONV,
    "lfm2_moe": {**CONV, **EXPERTS},
    "llama": WIDE,
    "ministral": {**WIDE, **MIXED},
    "ministral3": WIDE,
    "minimax_m2": {**WIDE, **LOCAL_EXPERTS},
    "mistral": {**WIDE, **WINDOW},
    "mixtral": {**LOCAL_EXPERTS, **WINDOW},
    "nanochat": {},
    "nemotron": WIDE,
    "nemotron_h": {**WIDE, "layers_block_type": ["mamba", "attention", "mlp"], "mamba_num_heads": 8,
                   "mamba_head_dim": 16, "ssm_state_size": 16, "n_groups": 1, "chunk_size": 16},
    "olmo": {},
    "olmo2": {},
    "olmo3": MIXED,
    "olmo_hybrid": {**LINEAR_HEADS, **ONE_OF_THREE},
    "olmoe": EXPERTS,
    "opt": {},  # learned positions
    "persimmon": {},
    "phi": {},
    "phi3": WINDOW,
    "phimoe": {**LOCAL_EXPERTS, **WINDOW},  # its window is in the mask only
    "qwen2": {"use_sliding_window": True, "max_window_layers": 1, **WINDOW},
    "qwen2_moe": {**EXPERTS, "shared_expert_intermediate_size": 32},
    "qwen3": WIDE,
    "qwen3_5_text": {**WIDE, **LINEAR_HEADS, **ONE_OF_THREE},
    "qwen3_moe": {**WIDE, **EXPERTS},
    "qwen3_next": {**WIDE, **EXPERTS, **LINEAR_HEADS, **ONE_OF_THREE,
                   "shared_expert_intermediate_size": 32},
    "recurrent_gemma": {"attention_window_size": 24, "lru_width": 64,
                        "block_types": ["recurrent", "attention"]},
    "seed_oss": WIDE,
    "smollm3": {"no_rope_layers": [1, 0, 1]},
    "stablelm": {},
    "starcoder2": WINDOW,
    "vaultgemma": {**WIDE, **MIXED, "attn_logit_softcapping": 0.2},
}  # fmt: skip
# earlier versions have another attention or cache class of their own for these
SINCE = {"nemotron": 17, "nemotron_h": 17, "olmo_hybrid": 17, "recurrent_gemma": 18}
FAMILIES = {**SUPPORTED, "llama with a window": {**WIDE, **WINDOW}}  # which llama does not read

MLA = "latent attention"
INTERFACE = "does not go through transformers' AttentionInterface"
LINEAR = "only layers of type .'(linear_attention|mamba)'"  # the name depends on the version
REFUSED = {
    "bloom": ({}, INTERFACE),
    "codegen": ({}, INTERFACE),
    "deepseek_v2": ({}, MLA),
    "deepseek_v3": ({}, MLA),
    "falcon_h1": ({}, "layers of type .'hybrid'"),
    "falcon_mamba": ({}, LINEAR),
    "gptj": ({}, INTERFACE),
    "llama4_text": ({**LOCAL_EXPERTS, **WIDE}, "chunked attention"),
    "mamba": ({}, LINEAR),
    "minimax": (LOCAL_EXPERTS, "a cache class of its own .MiniMaxCache"),
    "minicpm3": ({}, MLA),
    "mpt": ({}, INTERFACE),
    "xglm": ({}, INTERFACE),
}
# only their attention shows it: refused in a forward
REFUSED_WHILE_RUNNING = {
    "bert": ({}, "mask other than causal"),
    "diffllama": (WIDE, f"changes keys or values|{INTERFACE}"),
    "olmoe": ({**EXPERTS, **WINDOW}, "attends with sliding_window=24"),  # under full masks
    "mimo_v2_flash": ({**WIDE, **MIXED, **EXPERTS, "v_head_dim": 16}, "supports equal shapes"),
}


@pytest.fixture(autouse=True)
def _no_grad():
    with torch.no_grad():
        yield


def make_config(family, options):
    kind = family.split(" ")[0]
    if kind not in CONFIG_MAPPING:
        pytest.skip(f"this version of transformers has no {kind}")
    return CONFIG_MAPPING[kind](**{**COMMON, "initializer_range": 0.08, **options})


def make_model(family, options):
    if MINOR < SINCE.get(family, 0):
        pytest.skip("not supported with this version")
    config = make_config(family, options)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).eval()
    size = sum(p.numel() for p in model.parameters())
    assert size < 5e6, f"{family} is no tiny model: {size} parameters"
    # zeros and ones of fresh biases, gates and sinks would hide a mistake
    for parameter in model.parameters():
        if parameter.dim() < 2:
            parameter.add_(0.1 * torch.randn_like(parameter))
    if family in ("gemma2", "vaultgemma"):
        model.set_attn_implementation("eager")  # sdpa has no soft cap; some versions drop it there
    return model


def reference_logits(model, tokens, prompt, config, centers):
    """Logits of all tokens where those after the prompt attend to quantised keys and values."""

    def attention(module, query, key, value, attention_mask=None, scaling=None, **kwargs):
        n, group = query.shape[2], query.shape[1] // key.shape[1]
        layer = module.layer_idx
        tables = make_tables(config, layer, center=centers[layer])
        rough = quantised(key, value, config, tables)
        i, j = torch.arange(n)[:, None], torch.arange(n)[None]
        exact = (j < config.sink_tokens) | (i - j < config.recent_window) | (i < prompt)
        k, v, rough_k, rough_v = (
            x.double().repeat_interleave(group, 1) for x in (key, value, *rough)
        )
        q = query.double() * (query.shape[-1] ** -0.5 if scaling is None else scaling)
        scores = torch.where(exact, q @ k.mT, q @ rough_k.mT)
        if kwargs.get("softcap"):
            scores = kwargs["softcap"] * torch.tanh(scores / kwargs["softcap"])
        scores = scores.masked_fill(attention_mask != 0, -torch.inf)
        total = scores.logsumexp(-1, keepdim=True)
        if kwargs.get("s_aux") is not None:
            total = torch.logaddexp(total, kwargs["s_aux"].double()[None, :, None, None])
        p = (scores - total).exp()
        out = (p * exact) @ v + (p * ~exact) @ rough_v
        return out.transpose(1, 2).to(query.dtype).contiguous(), None

    name = "reference_of_test_transformers_families"
    AttentionInterface.register(name, attention)
    AttentionMaskInterface.register(name, eager_mask)
    before = model.config._attn_implementation
    model.set_attn_implementation(name)
    logits = model(tokens, use_cache=False).logits
    model.set_attn_implementation(before)
    return logits


@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_decoding_equals_the_reference(family):
    model, prompt = make_model(family, FAMILIES[family]), make_ids(80)
    options = {"page_size": 16, "sink_tokens": 3, "recent_window": 9, "max_q_len": 7}
    with TurboQuantCache.for_model(model, "k3v2", **options) as cache:
        tokens = generate(model, prompt, cache, new=12)
        config, centers = cache.config, cache.centers
        cache.reset()
        logits = feed(model, cache, tokens[:, :-1], 80, *[1] * 11)[:, 79:]
        assert torch.equal(logits.argmax(-1), tokens[:, 80:])
    expected = reference_logits(model, tokens[:, :-1], 80, config, centers)[:, 79:]
    plain = model(tokens[:, :-1], use_cache=False).logits[:, 79:]
    error = (logits - expected).abs()
    effect = (plain - expected).abs()[:, 1:].mean()  # the prompt's last token attends exactly
    assert error.mean() < 0.1 * effect, (error.mean(), effect)
    # the same tokens, wherever the choice does not hang on the last bits
    best = expected.topk(2).values
    clear = (best[..., 0] - best[..., 1]) > 2 * error.amax(-1)
    assert clear.sum() >= 9
    assert torch.equal(expected.argmax(-1)[clear], tokens[:, 80:][clear])


def test_the_documented_families():
    text = (Path(__file__).parents[1] / "docs/transformers.md").read_text()
    for heading, families in (("Families", SUPPORTED), ("Refused", REFUSED)):
        section = re.search(rf"^## {heading}\n(.*?)(?=^## |\Z)", text, re.DOTALL | re.MULTILINE)[1]
        assert set(re.findall(r"`([\w-]+)`", section)) == set(families), heading


@pytest.mark.parametrize("family", REFUSED)
def test_families_that_are_refused(family):
    options, match = REFUSED[family]
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(make_config(family, options))
    with pytest.raises(ValueError, match=f"does not support {type(model).__name__}.*({match})"):
        TurboQuantCache.for_model(model)


@pytest.mark.parametrize("family", REFUSED_WHILE_RUNNING)
def test_families_that_are_refused_while_running(family):
    options, match = REFUSED_WHILE_RUNNING[family]
    model = make_model(family, options)
    with pytest.raises((ValueError, RuntimeError), match=match):
        with TurboQuantCache.for_model(model, page_size=16) as cache:
            feed(model, cache, make_ids(80), 75, 1, 1)


HYBRIDS = ["qwen3_next", "lfm2", "jamba"]


@pytest.mark.parametrize("family", HYBRIDS)
def test_hybrid_models(family):
    """Only layers with keys and values are ours; what their other states cannot do is refused."""
    model, ids = make_model(family, SUPPORTED[family]), make_ids(90, 2)
    attends = [window is not None for window in layer_windows(model)]
    centers = TurboQuantCache.calibrate(model, make_ids(90, seed=5))
    assert [center is not None for center in centers] == attends and True in attends
    with TurboQuantCache.for_model(model, "k3v2", center=centers, max_batch_size=2) as cache:
        packed = [isinstance(layer, TurboQuantLayer) for layer in cache.layers]
        assert packed == attends
        first = feed(model, cache, ids, 80, *[1] * 10)
        learned = cache.centers
        assert [center is not None for center in learned] == attends
        with pytest.raises(RuntimeError, match="cannot take tokens back"):
            cache.crop(-1)
        cache.reset()
        assert torch.equal(feed(model, cache, ids, 80, *[1] * 10), first)
        cache.reset()
        feed(model, cache, ids, 80, *[1] * 10)
        cache.reorder_cache(torch.tensor([1, 1]))
        swapped = feed(model, cache, ids[[0, 0], :1])
        torch.testing.assert_close(swapped[0], swapped[1])
        hook = model.model.layers[2].register_forward_pre_hook(lambda *a: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            model(ids[:, :1], past_key_values=cache)
        hook.remove()
        with pytest.raises(RuntimeError, match="reset"):
            model(ids[:, :1], past_key_values=cache)
        cache.reset()
        feed(model, cache, ids, 80)


@pytest.mark.parametrize("family", HYBRIDS)
def test_centers_of_hybrid_models_in_files(family, tmp_path):
    pytest.importorskip("safetensors")
    model, path = make_model(family, SUPPORTED[family]), tmp_path / "centers.safetensors"
    centers = TurboQuantCache.calibrate(model, make_ids(90, seed=5))
    save_centers(path, centers, model)
    for saved, loaded in zip(centers, load_centers(path, model), strict=True):
        assert saved is loaded is None or torch.equal(saved, loaded)
    with TurboQuantCache.for_model(model, center=path, page_size=16) as cache:
        feed(model, cache, make_ids(20), 10)


def test_bamba_decodes_as_with_its_own_cache():
    """transformers' cached forwards of it differ from its uncached one: no reference but them."""
    model = make_model("bamba", {**MAMBA, "attn_layer_indices": [1]})
    ids, logits = make_ids(100), []
    with TurboQuantCache.for_model(model, "k8v8") as cache:
        for each in (cache, DynamicCache(config=model.config)):
            logits.append(feed(model, each, ids, 80, *[1] * 20))
    torch.testing.assert_close(*logits, rtol=0, atol=2e-3)


@pytest.mark.parametrize("family, partners", [
    ("llama", [*range(16, 32), *range(16)]),
    ("cohere", [1, 0, 3, 2, 5, 4, 7, 6, 9, 8, 11, 10, 13, 12, 15, 14]),  # neighbours
    ("phi", [4, 5, 6, 7, 0, 1, 2, 3, *range(8, 16)]),  # half of the channels
    ("gpt2", [*range(16)]),  # no RoPE
])  # fmt: skip
def test_channels_that_rope_turns_into_each_other(family, partners):
    model = make_model(family, FAMILIES[family])
    assert rotary_partners(model).tolist() == partners
