"""The memory command as tests call it, and what they count with."""

import json
import shlex

from torch_turboquant import __main__ as command_line

GB, MiB, GiB = 10**9, 2**20, 2**30
PLAIN = {
    "model_type": "llama",
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_hidden_layers": 4,
    "num_key_value_heads": 2,
}


def nbytes(*tensors):
    return sum(t.numel() * t.element_size() for t in tensors if t is not None)


def command(capsys, line, code=0):
    assert command_line.main(["memory", *shlex.split(line)]) == code
    out, error = capsys.readouterr()
    return out if code == 0 else error


def caches(capsys, line):
    """name -> row of the JSON output."""
    facts = json.loads(command(capsys, line + " --json"))
    return facts, {row["name"]: row for row in facts["caches"]}


def model(layers, kv_heads, head_dim):
    return f"--layers {layers} --kv-heads {kv_heads} --head-dim {head_dim} "
