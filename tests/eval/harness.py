"""A tiny random model, a text, a tokenizer and settings that tests of the evaluation share."""

import argparse

import torch
from transformers import AutoModelForCausalLM, DynamicCache, LlamaConfig

from tests.helpers import generator
from torch_turboquant.eval import measure, rows
from torch_turboquant.eval.caches import Choice

DIM, HEADS, LAYERS = 64, 2, 2
SHAPE = {
    "vocab_size": 64,
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": HEADS,
    "head_dim": DIM,
    "initializer_range": 0.2,
    "eos_token_id": None,
    "bos_token_id": None,
    "pad_token_id": 0,
    "max_position_embeddings": 4096,
}


def tiny(config_class=LlamaConfig, **more):
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config_class(**{**SHAPE, **more})).eval()


TEXT = torch.randint(1, 64, (2, 260), generator=generator(3))  # 0 is padding: a zero vector
PREFILL, CHUNK = 160, 20  # divides what comes before and after


def reading(model, name, text=TEXT, prefill=PREFILL, chunk=CHUNK):
    base, logits, _ = measure.read(model, lambda: DynamicCache(), text, prefill, chunk)
    if name == "none":
        return base
    make = Choice.parse(name).make
    return measure.read(model, lambda: make(model), text, prefill, chunk, logits)[0]


SETTINGS = rows.Settings(segments=2, prefill=PREFILL, scored_tokens=100, chunk=CHUNK)
CHOICES = [Choice.parse(name) for name in ("k4v4", "int4", "k2v2")]
ORIGIN = {"name": "quality", "device": "a device", "commit": None, "command": "x"}


def evaluate(model, done=(), settings=SETTINGS, choices=CHOICES, save=lambda rows: None):
    return rows.evaluate(model, "tiny", choices, TEXT, settings, ORIGIN, done, save)


class Tokenizer:
    """Bytes as tokens, after a first token of its own if it has one."""

    def __init__(self, first=()):
        self.first = list(first)

    def __call__(self, text, return_tensors=None, add_special_tokens=True):
        ids = self.first * add_special_tokens + [b % 64 for b in text.encode()]
        return argparse.Namespace(input_ids=torch.tensor([ids]) if return_tensors else ids)

    def decode(self, ids):
        return "".join(chr(64 + i) for i in ids)
