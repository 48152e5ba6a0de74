"""Tiny random models with latent attention (MLA), and the oracle of their layers' attention.

The oracle shares neither bookkeeping nor absorption with the cache under test: it decodes all
tokens with mla_load, expands keys and values of every head from them, and attends densely in
float64, with exact tokens where the definition of the tail says so.
"""

from contextlib import contextmanager

import pytest
import torch
import transformers
from transformers import AttentionInterface, AutoModelForCausalLM
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from tests.transformers.harness import COMMON
from torch_turboquant import allocate_latent_cache, mla_load, mla_store
from torch_turboquant.integrations.transformers import TurboQuantCache

LATENT, ROPE, NOPE, VALUE = 128, 32, 32, 20
ATTENTION = {
    "num_key_value_heads": 4,
    "kv_lora_rank": LATENT,
    "qk_rope_head_dim": ROPE,
    "qk_nope_head_dim": NOPE,
    "v_head_dim": VALUE,
    "q_lora_rank": 32,
}
EXPERTS = {"moe_intermediate_size": 32, "n_routed_experts": 4, "num_experts_per_tok": 2,
           "n_shared_experts": 1, "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1,
           "num_local_experts": 4}  # fmt: skip
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 16.0, "beta_fast": 32.0, "beta_slow": 1.0,
        "mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.1,
        "original_max_position_embeddings": 64, "partial_rotary_factor": 0.5}  # fmt: skip
MODELS = {
    "axk1": EXPERTS,
    "bailing_hybrid": {**EXPERTS, "head_dim": 16, "num_experts": 4,
                       "layer_types": ["linear_attention", "full_attention", "linear_attention"]},
    "deepseek_v2": {**EXPERTS, "q_lora_rank": None},
    "deepseek_v3": EXPERTS,
    "glm4_moe_lite": EXPERTS,
    "kimi_linear": {**EXPERTS, "linear_head_dim": 16, "linear_num_heads": 4,
                    "layer_types": ["linear_attention", "full_attention", "linear_attention"]},
    "longcat_flash": {"num_layers": 2, "head_dim": ROPE, "ffn_hidden_size": 96,
                      "expert_ffn_hidden_size": 32, "moe_topk": 2, "zero_expert_num": 2,
                      "n_routed_experts": 4},
    "minicpm3": {},
    "mistral4": {**EXPERTS, "head_dim": NOPE + ROPE, "rope_parameters": YARN},
    "youtu": {},
}  # fmt: skip


def make_latent_config(kind, **changes):
    options = {**COMMON, **ATTENTION, **MODELS[kind], **changes}
    if "num_layers" in options:  # blocks of two attentions each
        del options["num_hidden_layers"]
    if kind not in CONFIG_MAPPING:
        pytest.skip(f"this version of transformers has no {kind}")
    return CONFIG_MAPPING[kind](**options)


def make_latent_model(kind="deepseek_v3", dtype=torch.float32, **changes):
    config = make_latent_config(kind, **changes)
    make = AutoModelForCausalLM.from_config
    if kind == "mistral4":  # which no auto class knows
        make = transformers.Mistral4ForCausalLM._from_config
    torch.manual_seed(0)
    model = make(config, dtype=dtype).eval()
    for parameter in model.parameters():  # zeros and ones would hide a mistake
        if parameter.dim() < 2:
            parameter.add_(0.1 * torch.randn_like(parameter))
    size = sum(p.numel() for p in model.parameters())
    assert size < 1e6, f"{kind} is no tiny model: {size} parameters"
    return model


def attending_modules(model):
    """Modules with latent attention, by the index of their layer."""
    return {m.layer_idx: m for m in model.modules() if hasattr(m, "expand_kv")}


class LatentRecorder:
    """What layers get: queries [batch, heads, new, nope + rope], latents, rotary keys, results."""

    def __init__(self, model, cache):
        self.modules = attending_modules(model)
        self.layers = {index: ([], [], [], []) for index in self.modules}
        self.scaling = {}
        name = model.config._attn_implementation
        attention, update = AttentionInterface()[name], cache.update

        def recorded_update(latent, rope, layer_idx, *args, **kwargs):
            self.layers[layer_idx][1].append(latent)
            self.layers[layer_idx][2].append(rope)
            return update(latent, rope, layer_idx, *args, **kwargs)

        def recorded_attention(module, query, key, value, attention_mask=None, **kwargs):
            out, weights = attention(module, query, key, value, attention_mask, **kwargs)
            self.layers[module.layer_idx][0].append(query)
            self.layers[module.layer_idx][3].append(out.transpose(1, 2))
            self.scaling[module.layer_idx] = kwargs["scaling"]
            return out, weights

        AttentionInterface.register(name, recorded_attention)
        cache.update = recorded_update
        self.restore = lambda: AttentionInterface.register(name, attention)

    def to_cpu(self):
        """The records, and the modules that the oracle expands with."""
        self.layers = {
            layer: tuple([x.cpu() for x in part] for part in parts)
            for layer, parts in self.layers.items()
        }
        self.modules = {layer: module.cpu() for layer, module in self.modules.items()}


@contextmanager
def latents_recorded(model, *args, **options):
    """(cache, recorder) on a model."""
    with TurboQuantCache.for_model(model, *args, **options) as cache:
        recorder = LatentRecorder(model, cache)
        try:
            yield cache, recorder
        finally:
            recorder.restore()
            del cache.update


def decoded(latent, rope, config, tables):
    """[batch, 1, n, channels] each -> the same after encoding and decoding, float64."""
    batch, _, n, _ = latent.shape
    pages = -(-batch * n // config.page_size)
    cache = allocate_latent_cache(config, pages)
    tokens = [x.reshape(batch * n, -1) for x in (latent, rope)]
    mla_store(*tokens, cache, torch.arange(batch * n), config, tables)
    table = torch.arange(pages, dtype=torch.int32)[None]
    lengths = torch.tensor([batch * n], dtype=torch.int32)
    loaded = mla_load(cache, table, lengths, config, tables, batch * n, torch.float32)
    return [x[0].unflatten(0, (batch, 1, n)).double() for x in loaded]


def expanded(module, latent, rope):
    """Keys and values of all heads, float64."""
    weight = module.kv_b_proj.weight.double()
    both = (latent @ weight.T)[:, 0].unflatten(-1, (module.num_heads, -1)).transpose(1, 2)
    keys, values = both.split([module.qk_nope_head_dim, module.v_head_dim], dim=-1)
    return torch.cat([keys, rope.expand(-1, module.num_heads, -1, -1)], dim=-1), values


def latent_oracle(recorder, layer, config, prompt, pads, tables):
    """What attention must return, and what it would without quantisation: float64, and actual."""
    query, latent, rope, actual = (torch.cat(part, 2) for part in recorder.layers[layer])
    module, n = recorder.modules[layer], query.shape[2]
    keys, values = expanded(module, latent.double(), rope.double())
    rough_keys, rough_values = keys, values
    if tables is not None:
        rough_keys, rough_values = expanded(module, *decoded(latent, rope, config, tables))
    i, j = torch.arange(n)[:, None], torch.arange(n)[None]
    place = j - pads[:, None, None]  # of a token in its own sequence
    exact = (place < config.sink_tokens) | (i - j < config.recent_window) | (i < prompt)
    visible = ((j <= i) & (place >= 0))[:, None]
    exact = exact[:, None]
    q = query.double() * recorder.scaling[layer]

    def attend(exact):
        scores = torch.where(exact, q @ keys.mT, q @ rough_keys.mT)
        p = scores.masked_fill(~visible, -torch.inf).softmax(-1).nan_to_num(0.0)
        return (p * exact) @ values + (p * ~exact) @ rough_values

    return attend(exact), attend(torch.ones_like(exact)), actual


def check_latents(recorder, cache, prompt, *, pads=None, tolerance=5e-4, coarse=5):
    """Every layer's recorded results; quantisation must matter `coarse` times the tolerance.

    The tolerance is that of check_against_oracle: what rounding the weights to integers may cost.
    """
    config = cache.config
    assert recorder.layers
    for layer, (queries, *_) in recorder.layers.items():
        padding = torch.tensor(pads or [0] * len(queries[0]))
        tables = None
        if hasattr(config, "bits"):
            held = cache.layers[layer].tables
            tables = type(held)(*(x if x is None else x.cpu() for x in held))
        expected, plain, actual = latent_oracle(recorder, layer, config, prompt, padding, tables)
        real = torch.arange(actual.shape[2]) >= padding[:, None]
        error, effect = (
            (x.double() - expected).abs().amax((1, 3))[real].max().item() for x in (actual, plain)
        )
        bound = tolerance * expected.abs().max().item()
        assert error <= bound, f"layer {layer}: error {error}, bound {bound}"
        if tables is not None:
            assert effect >= coarse * bound, f"layer {layer}: effect {effect}, bound {bound}"
