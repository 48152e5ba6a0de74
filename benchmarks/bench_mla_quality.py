"""Quality of packed latents: a small language model with latent attention (MLA), trained here.

No published model with latent attention is small, so this one is trained: 512 + 64 channels per
token as DeepSeek's models have them, on the articles of Wikipedia that `eval` reads, or on any
other text (--text). The weights are kept in --model, beside the text of `eval` if none is named,
and not in the repository.

Latents of published models have channels of very different sizes, since the weight of the norm
before the cache differs by channel. "unequal" is the same model with its norm's weights multiplied
by factors from 0.02 to 5, and the columns of kv_b_proj divided by them: it computes the same
function, and keeps those latents.

Every row is a cache of latents: its bits, whether latents are rotated before they are coded
(transform), and what is done to their channels first:

    none       nothing
    mean       the mean latent of a calibration text is subtracted
    norm       channels are divided by the weight of the norm
    mean norm  both
    learned    the mean is subtracted, channels are multiplied by (energy of absorbed queries /
               variance of the latent)^(1/4)

A segment's prompt is read exactly, then the rest of it from the cache. The divergence is that from
the predictions of the model's own cache, per token, with everything (the exact tail) as in
TurboQuantCache.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import common
import torch
import transformers
from torch import Tensor, nn
from transformers import DynamicCache

from torch_turboquant import LATENT_PRESETS, scaled_center
from torch_turboquant.eval import assets, default_cache_dir
from torch_turboquant.eval.predict import divergence
from torch_turboquant.integrations.transformers import TurboQuantCache

SHAPE = {
    "vocab_size": 2048,
    "hidden_size": 512,
    "intermediate_size": 1024,
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "q_lora_rank": None,
    "kv_lora_rank": 512,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 64,
    "v_head_dim": 64,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": True,
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": None,
}
PROMPT, SCORED, CALIBRATION = 1536, 512, 1024  # tokens
BLOCK = 32  # neighbouring tokens whose mean is one sample of the error
FACTORS = 0.02, 5.0  # of channels in the "unequal" latents
CHANNELS = ("none", "mean", "norm", "mean norm", "learned")


# ---- text and training


def read_text(arguments: Any) -> str:
    if arguments.text is not None:
        return arguments.text.read_text(encoding="utf-8")
    return "\n\n".join(assets.load_articles(default_cache_dir(), arguments.articles))


def tokens(text: str) -> Tensor:
    """The text in byte pairs that are learned from it: int64 [n]."""
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers

    pairs = Tokenizer(models.BPE())
    pairs.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    pairs.train_from_iterator(
        [text],
        trainers.BpeTrainer(
            vocab_size=SHAPE["vocab_size"], initial_alphabet=alphabet, show_progress=False
        ),
    )
    return torch.tensor(pairs.encode(text).ids)


def train(text: Tensor, arguments: Any) -> nn.Module:
    """A model that predicts the text; the last eighth of the steps reads PROMPT + SCORED tokens."""
    torch.manual_seed(0)
    device = torch.device(arguments.device)
    model = transformers.YoutuForCausalLM(transformers.YoutuConfig(**SHAPE)).to(device).train()
    rates = {"lr": 1e-3, "betas": (0.9, 0.95), "weight_decay": 0.1}
    optimiser = torch.optim.AdamW(model.parameters(), **rates)
    text, begin = text.to(device), time.perf_counter()
    for step in range(arguments.steps):
        done = step / arguments.steps
        length = PROMPT + SCORED if done >= 7 / 8 else 512
        places = torch.randint(len(text) - length, (max(1, arguments.tokens // length),))
        ids = torch.stack([text[at : at + length + 1] for at in places.tolist()])
        for group in optimiser.param_groups:
            group["lr"] = rates["lr"] * min(1, (step + 1) / 50) * max(0.02, 1 - done)
        half = torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda")
        with half:
            logits = model(ids[:, :-1], use_cache=False).logits
        loss = nn.functional.cross_entropy(logits.float().flatten(0, 1), ids[:, 1:].flatten())
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimiser.step()
        optimiser.zero_grad()
        if step % 50 == 0 or step == arguments.steps - 1:
            seconds = time.perf_counter() - begin
            print(f"step {step}: loss {loss.item():.3f}, {seconds:.0f} s", flush=True)
    return model.eval()


# ---- latents


def attentions(model: nn.Module) -> list[Any]:
    return [layer.self_attn for layer in model.model.layers]


def make_unequal(model: nn.Module) -> None:
    """Multiplies the norm's weights by factors and divides the columns of kv_b_proj by them."""
    generator = torch.Generator().manual_seed(1)
    low, high = (torch.tensor(x).log() for x in FACTORS)
    for module in attentions(model):
        weight = module.kv_a_layernorm.weight
        factors = low + (high - low) * torch.rand(weight.shape, generator=generator)
        factors = factors.exp().to(weight)
        weight.data *= factors
        module.kv_b_proj.weight.data /= factors


def statistics(model: nn.Module, ids: Tensor) -> list[tuple[Tensor, Tensor, Tensor]]:
    """Of each layer's channels: mean and variance of latents, energy of absorbed queries."""
    cache, queries, nope = DynamicCache(config=model.config), [], SHAPE["qk_nope_head_dim"]
    hooks = [
        m.q_proj.register_forward_hook(lambda *call: queries.append(call[2][0]))
        for m in attentions(model)
    ]
    model(ids[None], past_key_values=cache)
    for hook in hooks:
        hook.remove()
    found = []
    for module, layer, query in zip(attentions(model), cache.layers, queries, strict=True):
        latent = layer.keys[0, 0].double()
        heads = query.double().unflatten(-1, (module.num_heads, -1))[..., :nope]
        weight = module.kv_b_proj.weight.double().unflatten(0, (module.num_heads, -1))[:, :nope]
        absorbed = torch.einsum("thn,hnr->thr", heads, weight)
        found.append((latent.mean(0), latent.var(0), absorbed.square().mean((0, 1))))
    return found


def centers(model: nn.Module, seen: list[Any], name: str) -> list[Tensor] | None:
    """What is done to the channels of each layer before they are coded: [3, latent_dim] each."""
    if name == "none":
        return None
    out = []
    for module, (mean, variance, energy) in zip(attentions(model), seen, strict=True):
        weight = module.kv_a_layernorm.weight.double().abs()
        scale = torch.ones_like(mean)
        if "norm" in name:
            scale = 1 / weight.clamp(min=1e-6)
        elif name == "learned":
            scale = (energy / variance.clamp(min=1e-12)) ** 0.25
        scale = scale / scale.mean()
        center = torch.zeros_like(mean) if name == "norm" else mean
        out.append(scaled_center(center.float().cpu(), scale.float().cpu()))
    return out


# ---- measuring


@torch.no_grad()
def logits(model: nn.Module, cache: Any, ids: Tensor) -> Tensor:
    """Of the scored tokens of one segment, float32 [SCORED, vocabulary]."""
    model(ids[None, :PROMPT], past_key_values=cache, logits_to_keep=1)
    return model(ids[None, PROMPT:], past_key_values=cache).logits[0].float()


def measure(model: nn.Module, text: Tensor, arguments: Any) -> Iterator[common.Row]:
    """Rows of all caches on one model. The text's last tokens calibrate, the others are scored."""
    count = arguments.segments
    segments = text[: count * (PROMPT + SCORED)].view(count, -1)
    with torch.no_grad():
        seen = statistics(model, text[-CALIBRATION:])
    own = [logits(model, DynamicCache(config=model.config), ids) for ids in segments]
    pairs = zip(own, segments, strict=True)
    following = [nn.functional.cross_entropy(x[:-1], ids[PROMPT + 1 :]) for x, ids in pairs]
    loss = torch.stack(following).mean().item()
    choices: list[tuple[str, bool, str]] = [("uncompressed", False, "none")]
    choices += itertools.product(arguments.presets, (True, False), CHANNELS)
    for preset, transform, channels in choices:
        options: dict[str, Any] = {"center": centers(model, seen, channels)}
        if preset != "uncompressed":
            options["transform"] = transform
        kl = []
        with TurboQuantCache.for_model(model, preset, **options) as cache:
            for mine, ids in zip(own, segments, strict=True):
                cache.reset()
                kl.append(divergence(mine, logits(model, cache, ids))[0].cpu())
            size = cache.bytes_per_token // len(cache.packed)
        each = torch.cat(kl)
        blocks = each[: len(each) // BLOCK * BLOCK].view(-1, BLOCK).mean(1)
        row = {
            "cache": preset,
            "transform": transform,
            "channels": channels,
            "bytes_per_token_and_layer": size,
            "loss": loss,
            "kl": each.mean().item(),
            "kl_error": (blocks.std() / len(blocks) ** 0.5).item(),
        }
        print(row, flush=True)
        yield row


def main() -> None:
    options = common.parser(__doc__)
    options.add_argument("--text", type=Path, metavar="FILE", help="default: articles of Wikipedia")
    options.add_argument("--articles", type=int, default=106, help="default: %(default)s")
    options.add_argument(
        "--model", type=Path, metavar="FOLDER", help="of the weights, trained where it is not there"
    )
    options.add_argument("--steps", type=int, default=300, help="of training (default: 300)")
    options.add_argument("--tokens", type=int, default=4096, help="of a step (default: 4096)")
    options.add_argument("--segments", type=int, default=4, help="default: 4")
    options.add_argument("--presets", nargs="+", default=[*LATENT_PRESETS], metavar="NAME")
    options.add_argument("--train-only", action="store_true")
    arguments = options.parse_args()
    arguments.model = arguments.model or default_cache_dir() / "mla_lm"
    text = tokens(read_text(arguments))
    held = (arguments.segments + 1) * (PROMPT + SCORED)  # which training does not see
    if not (arguments.model / "config.json").exists():
        train(text[:-held], arguments).float().cpu().save_pretrained(arguments.model)
    if arguments.train_only:
        return
    rows = []
    for latents in ("as trained", "unequal"):
        model = transformers.YoutuForCausalLM.from_pretrained(arguments.model, dtype=torch.float32)
        model = model.to(arguments.device).eval().requires_grad_(False)
        if latents == "unequal":
            make_unequal(model)
        found = measure(model, text[-held:].to(arguments.device), arguments)
        rows += [{"latents": latents, **row} for row in found]
    common.write_rows("mla_quality", rows, arguments)


if __name__ == "__main__":
    main()
