"""SGLang's scheduler over small models, in this process."""

from __future__ import annotations

import gc
import inspect
import json
import logging
from array import array
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch

from tests.vllm.harness import prompt, randomise, save

TOKENS = 4096  # of the cache
ON_GPU = torch.cuda.is_available()
# A model in 16 bits, as GPUs compute, finds other codes of 2 and 3 bits than one in 32 bits: that
# moves logits by up to 0.7 of their deviation, with the reference on both sides.
in_32_bits = pytest.mark.skipif(ON_GPU, reason="codes of few bits, which 16-bit models move")


class Call(NamedTuple):
    """Tokens of a request that one step computes."""

    begin: int
    end: int
    is_new: bool
    """Whether the request got its row for this step."""


@dataclass
class Answer:
    """What became of a request."""

    tokens: list[int]
    cached: int
    """Tokens of the prompt that the prefix tree had."""
    reason: str
    """Why it ended, as SGLang says."""
    retractions: int
    """How often it was put back into the queue."""
    calls: list[Call] = field(default_factory=list)


class Loop:
    """The scheduler's event loop, a step at a time.

    Attributes:
        scheduler: SGLang's.
        mixed: steps with decoding requests beside prompts.
        graphs: decode steps that ran in a CUDA graph.
        prompt_graphs: the same of steps with prompts.
        accepted: of every step that checked drafts, the tokens of each request that it gave.
    """

    def __init__(self, scheduler: Any) -> None:
        self.scheduler, self.count = scheduler, 0
        self.mixed = self.graphs = self.prompt_graphs = 0
        self.accepted: list[int] = []
        self.calls: dict[str, list[Call]] = {}
        self.rows: dict[str, tuple[int, int]] = {}

    def add(self, prompt: Sequence[int], tokens: int) -> Any:
        """Puts a request into the queue; returns SGLang's Req."""
        from sglang.srt.managers.io_struct import TokenizedGenerateReqInput
        from sglang.srt.sampling.sampling_params import SamplingParams

        params = SamplingParams(max_new_tokens=tokens, temperature=0, ignore_eos=True)
        params.normalize(None)
        self.count += 1
        given = TokenizedGenerateReqInput(
            rid=f"request {self.count}",
            input_text="",
            input_ids=array("q", prompt),
            input_embeds=None,
            mm_inputs=None,
            token_type_ids=None,
            sampling_params=params,
            return_logprob=False,
            logprob_start_len=-1,
            top_logprobs_num=0,
            token_ids_logprob=None,
            stream=False,
        )
        self.scheduler.process_input_requests([given])
        return self.scheduler.waiting_queue[-1]

    def step(self) -> bool:
        """One round of the loop; False: there was nothing to do."""
        scheduler = self.scheduler
        plan = scheduler.get_next_batch_to_run(
            running_batch=scheduler.running_batch, last_batch=scheduler.last_batch
        )
        scheduler.running_batch = plan.running_batch
        batch = plan.batch_to_run
        if batch:
            calls, is_prompt = self._calls(batch), batch.forward_mode.is_extend()
            result = scheduler.run_batch(batch)
            self._note(batch, calls, result)
            in_graph = bool(getattr(result, "can_run_cuda_graph", False))
            self.graphs += in_graph and not is_prompt
            self.prompt_graphs += in_graph and is_prompt
            scheduler.process_batch_result(batch, result)
        scheduler.last_batch = batch
        return bool(batch)

    def _calls(self, batch: Any) -> list[tuple[Any, Call]]:
        """The tokens that a step is about to compute for each request."""
        generations = self.scheduler.req_to_token_pool.req_generation
        lengths = batch.seq_lens_cpu.tolist()
        extends = batch.forward_mode.is_extend()
        self.mixed += batch.forward_mode.is_mixed()
        new = batch.extend_lens if extends else [1] * len(lengths)
        found = []
        for req, length, n in zip(batch.reqs, lengths, new, strict=True):
            owner = req if hasattr(req, "req_pool_idx") else req.kv  # in newer versions
            number = owner.req_pool_idx
            row = (number, int(generations[number]))
            is_new = self.rows.get(req.rid) != row
            self.rows[req.rid] = row
            found.append((req, Call(length - n, length, is_new)))
        return found

    def _note(self, batch: Any, found: list[tuple[Any, Call]], result: Any) -> None:
        if batch.spec_algorithm.is_none() or batch.forward_mode.is_extend():
            for req, call in found:
                self.calls.setdefault(req.rid, []).append(call)
            return
        # A step that checks drafts stands for steps of one token each. Lengths are without drafts.
        counts = result.accept_lens.tolist()
        self.accepted += counts
        for (req, call), n in zip(found, counts, strict=True):
            steps = [Call(call.end + i, call.end + i + 1, False) for i in range(n)]
            self.calls.setdefault(req.rid, []).extend(steps)

    def run(self) -> None:
        """Until nothing is left to do, which the scheduler then checks for leaks."""
        idle = 0  # a round without a batch may come before the next one
        while idle < 3:
            idle = 0 if self.step() else idle + 1
        assert not self.scheduler.waiting_queue
        self.scheduler.on_idle()

    def answer(self, req: Any) -> Answer:
        reason = str(req.finished_reason and req.finished_reason.to_json())
        calls = self.calls.get(req.rid, [])
        again = req.retraction_count
        tokens = list(req.output_ids)[: req.sampling_params.max_new_tokens]  # drafts may give more
        return Answer(tokens, req.cached_tokens, reason, again, calls)

    def generate(self, prompts: Sequence[Sequence[int]], tokens: int) -> list[Answer]:
        """The greedy continuations of prompts that are computed together."""
        reqs = [self.add(prompt, tokens) for prompt in prompts]
        self.run()
        return [self.answer(req) for req in reqs]

    def abort(self, req: Any) -> None:
        from sglang.srt.managers.io_struct import AbortReq

        self.scheduler.abort_request(AbortReq(rid=req.rid))

    def flush(self) -> None:
        """Empties the prefix tree."""
        assert self.scheduler.flush_cache()

    @property
    def backend(self) -> Any:
        return self.scheduler.tp_worker.model_runner.attn_backend

    @property
    def pool(self) -> Any:
        return self.scheduler.tp_worker.model_runner.token_to_kv_pool


def arguments(
    folder: Path, settings: dict[str, Any] | None, backend: str, **options: Any
) -> dict[str, Any]:
    """Arguments of SGLang's server."""
    defaults: dict[str, Any] = {
        "model_path": str(folder),
        "attention_backend": backend,
        "page_size": 16,
        "dtype": "float32",
        "device": "cpu",
        "context_length": 512,
        "max_total_tokens": TOKENS,
        "max_running_requests": 8,
        "chunked_prefill_size": 256,
        "mem_fraction_static": 0.5,
        "skip_tokenizer_init": True,
        "grammar_backend": "none",
        "disable_cuda_graph": True,
        "disable_overlap_schedule": True,
        "random_seed": 1,
        "log_level": "error",
    }
    if ON_GPU:  # decode steps and prompts in CUDA graphs, as SGLang has them by default
        defaults |= {"device": "cuda", "dtype": "float16", "disable_cuda_graph": False}
        defaults |= {"cuda_graph_max_bs_decode": 8}
        defaults |= {"sampling_backend": "pytorch"}
    if settings is not None:
        defaults["json_model_override_args"] = json.dumps({"turboquant": settings})
    return {**defaults, **options}


# of models that transformers makes
SHAPE = {
    "vocab_size": 128,
    "hidden_size": 256,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "eos_token_id": None,
    "bos_token_id": None,
    "pad_token_id": 0,
}


def save_gemma(folder: Path) -> torch.nn.Module:
    """Writes a small random Gemma 2, two of whose layers see the last 24 tokens; returns it."""
    import transformers

    config = transformers.Gemma2Config(
        **SHAPE,
        sliding_window=24,
        attn_logit_softcapping=5.0,
        query_pre_attn_scalar=64,
        hidden_act="gelu_pytorch_tanh",  # SGLang reads it beside hidden_activation
        layer_types=["sliding_attention", "full_attention", "sliding_attention"],
    )
    return save(randomise(transformers.Gemma2ForCausalLM(config)), folder)


@contextmanager
def engine(
    folder: Path,
    settings: dict[str, Any] | None = None,
    backend: str = "turboquant",
    **options: Any,
) -> Iterator[Loop]:
    """A scheduler with this backend."""
    from sglang.srt.distributed.parallel_state import (
        destroy_distributed_environment,
        destroy_model_parallel,
    )
    from sglang.srt.eplb.expert_location import set_global_expert_location_metadata
    from sglang.srt.managers.scheduler import Scheduler
    from sglang.srt.plugins import load_plugins
    from sglang.srt.runtime_context import publish
    from sglang.srt.server_args import PortArgs, ServerArgs

    load_plugins()
    before = {id(context) for context in message_contexts()}
    args = ServerArgs(**arguments(folder, settings, backend, **options))
    ports = PortArgs.init_new(args)
    ranks: tuple[Any, ...] = ()
    if len(inspect.signature(Scheduler).parameters) == 2:  # newer versions publish the ranks
        from sglang.srt.runtime_context import SpawnRanks

        publish(args, role="scheduler", ranks=SpawnRanks(world_rank=0, dp_rank=None, gpu_id=0))
    else:
        publish(args, role="scheduler")
        ranks = (0, 0, 0, 0, 0, 0, None)
    try:
        yield Loop(Scheduler(args, ports, *ranks))
    finally:
        destroy_model_parallel()
        destroy_distributed_environment()
        # Which a process keeps of a model with experts, and the next engine's would not replace.
        set_global_expert_location_metadata(None, allow_overwrite=True)
        # The scheduler has sent messages to processes that there are not, and whoever collects it
        # would wait for ever until somebody receives them.
        for context in message_contexts():
            if id(context) not in before:
                context.destroy(linger=0)
        gc.collect()


def message_contexts() -> list[Any]:
    """The contexts of ZeroMQ in this process."""
    import zmq

    return [found for found in gc.get_objects() if issubclass(type(found), zmq.Context)]


def describe_around_graphs(loop: Loop, size: int) -> None:
    """Decode steps are described as around CUDA graphs of so many sequences, without any graph.

    SGLang's tables are empty while a graph would run, where SGLang may change them by then.
    """
    from sglang.srt.layers.attention.base_attn_backend import AttentionBackend

    backend = loop.backend
    backend.init_cuda_graph_state(size, size)
    describe = backend.init_forward_metadata
    tables = [loop.scheduler.req_to_token_pool.req_to_token]
    if hasattr(loop.pool, "full_to_swa_index_mapping"):
        tables.append(loop.pool.full_to_swa_index_mapping)

    def in_buffers(tensor: torch.Tensor, fill: int) -> torch.Tensor:
        return torch.nn.functional.pad(tensor, (0, size - len(tensor)), value=fill)

    def as_around_graphs(batch: Any) -> None:
        if not batch.forward_mode.is_decode():
            describe(batch)
            return
        before = {
            "batch_size": size,
            "forward_mode": batch.forward_mode,
            "req_pool_indices": in_buffers(batch.req_pool_indices, 0),
            "seq_lens": in_buffers(batch.seq_lens, backend.get_cuda_graph_seq_len_fill_value()),
            "out_cache_loc": batch.out_cache_loc,
        }
        inside = before | {"out_cache_loc": in_buffers(batch.out_cache_loc, 0)}
        backend.init_forward_metadata_out_graph(SimpleNamespace(**before))
        kept = [table.clone() for table in tables]
        if not hasattr(AttentionBackend, "shared_read_ends"):
            for table in tables:
                table.zero_()
        backend.init_forward_metadata_in_graph(SimpleNamespace(**inside))
        for table, content in zip(tables, kept, strict=True):
            table.copy_(content)
        assert (backend.step.rows[batch.batch_size :] == -1).all()
        assert (backend.step.slots[batch.batch_size :] == -1).all()
        backend.step = backend.steps.part(backend.step, batch.batch_size)  # whose layers follow

    backend.init_forward_metadata = as_around_graphs


@contextmanager
def told() -> Iterator[list[str]]:
    """The lines that the plug-in logs."""
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("torch_turboquant.sglang")
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        yield lines
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)


def replay(reference: Any, asked: Sequence[int], answer: Answer, past: Sequence[Call] = ()) -> None:
    """Raises unless every token of an answer is the likeliest, or as good as that.

    Args:
        reference: tests.vllm.reference.Reference.
        past: the calls of whoever computed the prefix that the request got from the tree.
    """
    from transformers import DynamicCache

    reference.centers.clear()
    hit = answer.calls[0].begin
    calls = [(Call(c.begin, min(c.end, hit), c.is_new)) for c in past if c.begin < hit]
    ids = torch.tensor([[*asked, *answer.tokens]])
    config = reference.model.config
    hybrid = "linear_attention" in (getattr(config, "layer_types", None) or ())
    # of all tokens, also in layers that see a window of them
    cache = DynamicCache(config=config) if hybrid else DynamicCache()
    with torch.no_grad():
        for call in [*calls, *answer.calls]:
            if call.is_new:
                reference.held = call.begin
            if call.end > ids.shape[1]:  # drafts behind the end of the answer
                break
            if call.begin < cache.get_seq_length():
                cache.crop(call.begin)
            new = ids[:, call.begin : call.end]
            logits = reference.model(new, past_key_values=cache).logits[0, -1]
            if call.end < len(asked) or call.end == ids.shape[1] or call in calls:
                continue
            token = int(ids[0, call.end])
            lacking = float(logits.max() - logits[token])
            assert lacking <= reference.near_tie * logits.std(), (
                f"token {call.end - len(asked)} is {token}, {lacking:.3f} below "
                f"{int(logits.argmax())}"
            )


def check_prefixes(reference: Any, started: AbstractContextManager[Loop], tokens: int) -> None:
    """Requests that continue another one's prefix have that one's codes, and their own window.

    Args:
        reference: of the engine's model and settings.
        started: an engine with pages of 16 tokens.
        tokens: of each answer.
    """
    first = prompt(100, seed=1)
    others = [[*first[:70], *prompt(n, seed=n)] for n in (80, 95)]
    with started as loop:
        (source,) = loop.generate([first], tokens)
        answers = loop.generate(others, tokens)
        loop.flush()
        (cold,) = loop.generate([others[0]], tokens)
    for p, answer in zip(others, answers, strict=True):
        assert answer.cached == answer.calls[0].begin == 64
        replay(reference, p, answer, source.calls)
    assert cold.cached == 0
    replay(reference, others[0], cold)


def check_retraction(reference: Any, started: AbstractContextManager[Loop]) -> None:
    """What a retracted request had generated is computed again as a prompt.

    Args:
        reference: of the engine's model and settings.
        started: an engine that has not been entered.
    """
    prompts = [prompt(40, seed=seed) for seed in range(4)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("sglang.srt.managers.scheduler.TEST_RETRACT", True)
        patch.setattr("sglang.srt.managers.scheduler.TEST_RETRACT_INTERVAL", 20)
        with started as loop:
            answers = loop.generate(prompts, 50)
    assert sum(answer.retractions for answer in answers) > 1
    for p, answer in zip(prompts, answers, strict=True):
        assert len(answer.tokens) == 50, answer.reason
        replay(reference, p, answer)
