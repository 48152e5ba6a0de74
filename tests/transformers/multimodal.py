"""Models for pictures and sounds, as tiny random models with inputs for them.

Each entry: options of the whole model's configuration, options of its language model's, and what
`generate` gets for one picture or sound, whose tokens are ITEM in the text. Without such inputs the
model is tried on text alone.
"""

import pytest
import torch
from transformers import AutoModelForMultimodalLM
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from tests.transformers.families import LINEAR_HEADS
from tests.transformers.harness import COMMON, make_ids

ITEM = 90  # token of a picture; 91 and more: those around it, of videos, ...
TOKENS = {"image_token_id": ITEM, "video_token_id": 91, "vision_start_token_id": 92,
          "vision_end_token_id": 93}  # fmt: skip
FIRST = 10  # column of the first of them

TINY = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1,
        "num_attention_heads": 2}  # fmt: skip
CLIP = {"model_type": "clip_vision_model", **TINY, "image_size": 28, "patch_size": 14}
SIGLIP = {**CLIP, "model_type": "siglip_vision_model", "vision_use_head": False}
QWEN = {"depth": 1, "num_heads": 2, "patch_size": 4, "spatial_merge_size": 2, "in_channels": 3,
        "temporal_patch_size": 2, "hidden_size": 32, "intermediate_size": 48,
        "out_hidden_size": 64}  # fmt: skip
MROPE = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 3, 3]}
INTERLEAVED = {"rope_parameters": {**MROPE, "mrope_interleaved": True,
                                   "partial_rotary_factor": 1.0}}  # fmt: skip
DEEPSTACK = {**QWEN, "num_position_embeddings": 16, "deepstack_visual_indexes": [0]}
WIDE = {"head_dim": 32}
TWO = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 24}
EXPERTS = {"num_experts": 2, "num_experts_per_tok": 1, "moe_intermediate_size": 32}
AUDIO = {"model_type": "qwen2_audio_encoder", "d_model": 32, "encoder_layers": 1,
         "encoder_attention_heads": 2, "encoder_ffn_dim": 48, "num_mel_bins": 16,
         "max_source_positions": 16}  # fmt: skip


def noise(*shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(3))


def picture(*shape):
    return lambda ids: {"pixel_values": noise(*(shape or (1, 3, 28, 28)))}


def patches(ids):
    """A picture of 4 x 4 patches, merged to 4 tokens."""
    return {"pixel_values": noise(16, 3 * 2 * 4 * 4), "image_grid_thw": torch.tensor([[1, 4, 4]]),
            "mm_token_type_ids": (ids == ITEM).int()}  # fmt: skip


MULTIMODAL = {
    "aya_vision": ({"vision_config": {**SIGLIP, "patch_size": 7}, "downsample_factor": 2,
                    "image_token_index": ITEM, "vision_feature_layer": -1,
                    "adapter_layer_norm_eps": 1e-6}, {"model_type": "cohere2", **TWO}, picture()),
    "gemma3": ({"vision_config": SIGLIP, "mm_tokens_per_image": 4, "image_token_id": ITEM,
                "boi_token_index": 91, "eoi_token_index": 92},
               {**WIDE, **TWO, "query_pre_attn_scalar": 16},
               lambda ids: {**picture()(ids), "token_type_ids": (ids == ITEM).long()}),
    "gemma4": ({"vision_config": {**TINY, "head_dim": 16, "num_key_value_heads": 2,
                                  "patch_size": 7, "position_embedding_size": 16},
                "audio_config": None, "image_token_id": ITEM, "boi_token_id": 91,
                "eoi_token_id": 92},
               {**WIDE, **TWO, "global_head_dim": 32, "hidden_size_per_layer_input": 0,
                "num_kv_shared_layers": 0, "use_bidirectional_attention": "vision",
                "initializer_range": 0.05}, None),
    "glm4v": ({"vision_config": {**QWEN, "image_size": 16}, "image_token_id": ITEM,
               "video_token_id": 91, "image_start_token_id": 92, "image_end_token_id": 93,
               "video_start_token_id": 94, "video_end_token_id": 95},
              {"rope_parameters": MROPE}, patches),
    "idefics3": ({"vision_config": {**TINY, "image_size": 28, "patch_size": 7}, "scale_factor": 2,
                  "image_token_id": ITEM}, {"model_type": "llama"}, picture(1, 1, 3, 28, 28)),
    "internvl": ({"vision_config": {**TINY, "image_size": [28, 28], "patch_size": [7, 7]},
                  "image_token_id": ITEM, "image_seq_length": 4},
                 {"model_type": "qwen2"}, picture()),
    "lfm2_vl": ({"vision_config": {**TINY, "model_type": "siglip2_vision_model", "num_patches": 16,
                                   "vision_use_head": False}, "image_token_id": ITEM},
                {"model_type": "lfm2", "layer_types": ["conv", "full_attention"]}, None),
    "llava": ({"vision_config": CLIP, "image_token_index": ITEM, "vision_feature_layer": -1},
              {"model_type": "llama"}, picture()),
    "llava_next": ({"vision_config": CLIP, "image_token_index": ITEM,
                    "image_grid_pinpoints": [[28, 28]]}, {"model_type": "llama"}, None),
    "llava_onevision": ({"vision_config": SIGLIP, "image_token_index": ITEM,
                         "image_grid_pinpoints": [[28, 28]]}, {"model_type": "qwen2"}, None),
    "mistral3": ({"vision_config": {**TINY, "model_type": "pixtral", "head_dim": 16,
                                    "image_size": 28, "patch_size": 7}, "spatial_merge_size": 2,
                  "image_token_index": ITEM, "vision_feature_layer": -1},
                 {"model_type": "mistral", **WIDE},
                 lambda ids: {**picture()(ids), "image_sizes": torch.tensor([[28, 28]])}),
    "phi4_multimodal": ({}, {}, None),
    "qwen2_5_vl": ({"vision_config": {**QWEN, "out_hidden_size": 64, "window_size": 16,
                                      "fullatt_block_indexes": [0]}, **TOKENS},
                   {"rope_parameters": MROPE}, patches),
    "qwen2_audio": ({"audio_config": AUDIO, "audio_token_index": ITEM}, {"model_type": "qwen2"},
                    lambda ids: {"input_features": noise(1, 16, 32),
                                 "feature_attention_mask": torch.ones(1, 32).long()}),
    "qwen2_vl": ({"vision_config": {**QWEN, "hidden_size": 64, "embed_dim": 32, "mlp_ratio": 2},
                  **TOKENS}, {"rope_parameters": MROPE}, patches),
    "qwen3_5": ({"vision_config": {**DEEPSTACK, "deepstack_visual_indexes": []}, **TOKENS},
                {**INTERLEAVED, **LINEAR_HEADS, "head_dim": 16,
                 "layer_types": ["linear_attention", "full_attention"]}, patches),
    "qwen3_vl": ({"vision_config": DEEPSTACK, **TOKENS}, {**INTERLEAVED, "head_dim": 16}, patches),
    "qwen3_vl_moe": ({"vision_config": DEEPSTACK, **TOKENS},
                     {**INTERLEAVED, **EXPERTS, "head_dim": 16}, patches),
    "smolvlm": ({"vision_config": {**TINY, "image_size": 28, "patch_size": 7}, "scale_factor": 2,
                 "image_token_id": ITEM}, {"model_type": "llama"}, picture(1, 1, 3, 28, 28)),
    "voxtral": ({"audio_config": {**TINY, "model_type": "voxtral_encoder", "num_mel_bins": 16,
                                  "intermediate_size": 128, "max_source_positions": 16},
                 "audio_token_id": ITEM}, {"model_type": "llama"},
                lambda ids: {"input_features": noise(1, 16, 32)}),
}  # fmt: skip
PHI4 = {
    "vision_config": {**TINY, "image_size": 28, "patch_size": 14, "crop_size": 28,
                      "image_token_id": ITEM},
    "audio_config": {"hidden_size": 32, "intermediate_size": 48, "num_blocks": 1,
                     "num_attention_heads": 2, "nemo_conv_channels": 32, "input_size": 16,
                     "audio_token_id": 91},
}  # fmt: skip


def make_multimodal(family, **changes):
    """The model; `changes` of its language model's configuration."""
    if family not in CONFIG_MAPPING:
        pytest.skip(f"this version of transformers has no {family}")
    options, text, _ = MULTIMODAL[family]
    text = {**COMMON, "num_hidden_layers": 2, "initializer_range": 0.1, **text, **changes}
    torch.manual_seed(0)
    if family == "phi4_multimodal":
        config = CONFIG_MAPPING[family](**text, **PHI4)
    else:
        config = CONFIG_MAPPING[family](text_config=text, **options)
    model = AutoModelForMultimodalLM.from_config(config)
    size = sum(p.numel() for p in model.parameters())
    assert size < 5e6, f"{family} is no tiny model: {size} parameters"
    for parameter in model.parameters():
        if not parameter.any():  # a fresh projection of pictures: they would not matter
            parameter.add_(0.1 * torch.randn_like(parameter))
    model.generation_config.eos_token_id = None
    return model.eval()


def with_item(family, ids):
    """The text with the tokens of a picture or sound in it, and what else `generate` gets."""
    make = MULTIMODAL[family][2]
    ids = ids.clone()
    ids[:, FIRST : FIRST + (8 if family == "qwen2_audio" else 4)] = ITEM
    if "vision_start_token_id" in MULTIMODAL[family][0]:
        ids[:, FIRST - 1] = TOKENS["vision_start_token_id"]
    return ids, make(ids)


def text_ids(tokens, batch=1, seed=1):
    """Without tokens of pictures."""
    return make_ids(tokens, batch, seed) % 80 + 1
