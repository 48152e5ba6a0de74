"""Serving engines in processes of their own, for bench_vllm.py and bench_sglang.py.

Each engine is measured by a child process that sends its rows. The next one starts meanwhile and
imports what takes long, then waits until the one before has gone. Models have random weights and
the shapes of this file.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import common
import torch

# ---- models

LLAMA_8B = common.LLAMA_8B | {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "max_position_embeddings": 132096,  # 131,072 and what is generated behind them
    "rms_norm_eps": 1e-05,
    "hidden_act": "silu",
    "attention_bias": False,
    "mlp_bias": False,
    "tie_word_embeddings": False,
    "bos_token_id": 128000,
    "eos_token_id": 128001,
    "dtype": "bfloat16",
}
SHAPES = {
    "8b": LLAMA_8B,
    # the layers of Llama-3.1-70B, a fifth of them: for several GPUs
    "70b-cut": LLAMA_8B
    | {
        "hidden_size": 8192,
        "intermediate_size": 28672,
        "num_hidden_layers": 16,
        "num_attention_heads": 64,
    },
    # the sizes of Qwen2.5-1.5B: for CPUs
    "1.5b": LLAMA_8B
    | {
        "hidden_size": 1536,
        "intermediate_size": 8960,
        "num_hidden_layers": 28,
        "num_attention_heads": 12,
        "num_key_value_heads": 2,
        "vocab_size": 151936,
        "tie_word_embeddings": True,
    },
    # latent attention (MLA) as in DeepSeek-V2-Lite, with one dense layer's MLP in place of experts
    "v2-lite-dense": {
        "architectures": ["DeepseekV2ForCausalLM"],
        "model_type": "deepseek_v2",
        "hidden_size": 2048,
        "intermediate_size": 10944,
        "num_hidden_layers": 27,
        "num_attention_heads": 16,
        "num_key_value_heads": 16,
        "kv_lora_rank": 512,
        "qk_rope_head_dim": 64,
        "qk_nope_head_dim": 128,
        "v_head_dim": 128,
        "q_lora_rank": None,
        "first_k_dense_replace": 27,
        "vocab_size": 102400,
        "max_position_embeddings": 132096,
        "rms_norm_eps": 1e-06,
        "hidden_act": "silu",
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        "tie_word_embeddings": False,
        "bos_token_id": 100000,
        "eos_token_id": 100001,
        "dtype": "bfloat16",
    },
    "tiny": LLAMA_8B
    | {
        "hidden_size": 256,
        "intermediate_size": 512,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "vocab_size": 1024,
        "max_position_embeddings": 8192,
    },
}


def write_model(shape: dict[str, Any], folder: Path) -> None:
    """A folder that engines take for a model: a configuration, and centers for our backends."""
    from torch_turboquant import centers
    from torch_turboquant.ops.codec import scaled_center

    (folder / "config.json").write_text(json.dumps(shape))
    if "kv_lora_rank" in shape:
        return  # latents have no centers
    heads = shape["num_key_value_heads"], shape["head_dim"]
    generator = torch.Generator().manual_seed(0)
    found = [
        scaled_center(
            0.1 * torch.randn(heads, generator=generator),
            0.9 + 0.2 * torch.rand(heads, generator=generator),
        )
        for _ in range(shape["num_hidden_layers"])
    ]
    centers.save(folder / centers.FILE_NAME, found, shape)


def make_prompts(count: int, length: int, seed: int, vocabulary: int) -> list[list[int]]:
    """Random tokens of the vocabulary, without its first and last ones, which may be special."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(100, vocabulary - 300, (count, length), generator=generator).tolist()


# ---- processes


@dataclass(frozen=True)
class Engine:
    """What one process measures: a configuration with one number of drafts.

    Attributes:
        points: what is measured, each with its `text`; benchmarks have classes of their own.
    """

    config: str
    drafts: int
    points: list[Any]

    @property
    def title(self) -> str:
        """What its output is called by."""
        return f"{self.config} {self.drafts} drafts" if self.drafts else self.config


class Child:
    """The process of one engine, and the rows that it sends.

    Attributes:
        program: the benchmark to start, which hands --child to `run_child`.
        environment: variables of the process.
    """

    program: str
    environment: dict[str, str]

    def __init__(self, engine: Engine, settings: dict[str, Any], folder: Path) -> None:
        self.engine = engine
        self.log = folder / f"{engine.title.replace(' ', '_')}.log"
        self.rows, sender = os.pipe()
        task = {
            "config": engine.config,
            "drafts": engine.drafts,
            "points": [point.text for point in engine.points],
            "settings": settings,
            "sender": sender,
        }
        command = [sys.executable, self.program, "--child", json.dumps(task)]
        with self.log.open("w") as log:
            self.process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                pass_fds=(sender,),
                env={**os.environ, **self.environment},
            )
        os.close(sender)

    def measure(self, limit: float) -> Iterator[dict[str, Any]]:
        """Lets it begin, and yields its rows; after `limit` seconds it is ended."""
        timer = threading.Timer(limit, self.process.kill)
        timer.start()
        try:
            self.process.stdin.write(b"go\n")
            self.process.stdin.flush()
        except BrokenPipeError:
            pass  # it has failed already: its output says why
        with os.fdopen(self.rows) as lines:
            for line in lines:
                yield json.loads(line)
        self.process.wait()
        timer.cancel()


def run_child(task: dict[str, Any], measure: Callable[[Callable[..., None]], None]) -> None:
    """The process of one engine.

    Args:
        task: what Child gave.
        measure: gets put(**row), which sends a row as soon as it is there.
    """
    with os.fdopen(task["sender"], "w") as sender:

        def put(**row: Any) -> None:
            sender.write(json.dumps(row) + "\n")
            sender.flush()

        measure(put)
    sys.stdout.flush()
    os._exit(0)  # without waiting for the engine to take everything down


def measured(
    engines: list[Engine],
    start: Callable[[Engine], Child],
    limit: float,
    seconds: float,
    ahead: int = 1,
) -> Iterator[tuple[Engine, common.Row]]:
    """The rows of every engine, one engine after the other.

    Args:
        engines: in order.
        start: makes the process of an engine.
        limit: seconds that one engine gets.
        seconds: that all of them get.
        ahead: engines that import what they need while another one is measured; on a CPU, where
            that would disturb it, 0.
    """
    children: list[Child] = []
    started = time.perf_counter()
    for number, engine in enumerate(engines):
        while len(children) <= min(number + ahead, len(engines) - 1):
            children.append(start(engines[len(children)]))
        child, begun = children[number], time.perf_counter()
        left = seconds - (begun - started)
        for row in child.measure(max(1.0, min(limit, left))):
            yield engine, row
        took, code = time.perf_counter() - begun, child.process.returncode
        print(f"{engine.title}: {took:.0f} s, exit {code}", flush=True)
        if code:
            print(child.log.read_text()[-3000:], flush=True)


# ---- what a run prints and where it writes


def begin(arguments: Any, written: bool = False) -> bool:
    """Settles where rows go and which commit they name; whether engines run on a GPU.

    Rows of a CPU are only printed, unless they are to be `written`.
    """
    cuda = torch.device(arguments.device).type == "cuda"
    arguments.dry_run |= not cuda and not written
    if not arguments.dry_run:
        arguments.commit = arguments.commit or common.commit_name()
    if arguments.out:
        arguments.out.mkdir(parents=True, exist_ok=True)
        common.RESULTS = arguments.out.absolute()
    return cuda


def describe(row: common.Row) -> str:
    """One line about a row."""
    skipped = ("row", "vllm", "torch", "config", "point", "shape", "tensor_parallel")
    facts = (
        f"{key} {value:,.4g}" if isinstance(value, float) else f"{key} {value}"
        for key, value in row.items()
        if key not in skipped
    )
    return f"{row['row']}: {', '.join(facts)}"


def table(rows: list[common.Row], configs: list[str], base_config: str = "bf16") -> str:
    """Tokens per second, and how many times those of base_config."""
    points = list(dict.fromkeys(row["point"] for row in rows if "tokens_s" in row))
    found = {(row["config"], row["point"]): row["tokens_s"] for row in rows if "tokens_s" in row}
    body = []
    for point in points:
        cells, base = [point], found.get((base_config, point))
        for config in configs:
            speed = found.get((config, point))
            times = f" ({speed / base:.2f}x)" if speed and base else ""
            cells.append(f"{speed:,.0f}{times}" if speed else "")
        body.append(cells)
    return common.markdown(["tokens per second", *configs], body)
