"""SGLang's own tests of attention backends (sglang.test.kits.attention_unittest) over ours.

Its kit builds a runner and the pool of keys and values by itself, writes the keys of prefixes into
the pool, and compares a layer's output with PyTorch's, in float16 within 0.03. What it calls a CUDA
graph are the calls around one, which a CPU runs as well. Here the kit gets pages of 8-bit codes,
and a pool that encodes what it writes.
"""

import dataclasses
import unittest
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("sglang", reason="needs SGLang: make sglang")

from sglang.srt.layers import radix_attention
from sglang.srt.layers.attention.attention_registry import ATTENTION_BACKENDS
from sglang.srt.layers.radix_attention import RadixAttention
from sglang.srt.model_executor.forward_batch_info import ForwardMode
from sglang.srt.plugins import load_plugins
from sglang.srt.runtime_context import get_parallel
from sglang.srt.speculative.spec_info import SpeculativeAlgorithm
from sglang.test.kits.attention_unittest.attention_methods import dense_attention as dense
from sglang.test.kits.attention_unittest.runner_modes import cuda_graph_decode_runner as decode
from sglang.test.kits.attention_unittest.runner_modes import (
    speculative_target_verify_runner as spec,
)
from sglang.test.kits.attention_unittest.runner_modes import split_op_runner as split

import torch_turboquant as tt
from tests.sglang.harness import ON_GPU
from torch_turboquant.integrations.engine.pages import page_parts
from torch_turboquant.integrations.sglang.backend import TurboQuantBackend
from torch_turboquant.integrations.sglang.plan import Plan
from torch_turboquant.integrations.sglang.pool import TurboQuantKVPool
from torch_turboquant.integrations.sglang.settings import Settings

# The modules of the kit pretend to be a single rank from their import on, and the engines of other
# tests in this process would believe it. Here that ends, and `single_rank` begins it again.
PRETENDED = dict(get_parallel()._overrides)
get_parallel()._overrides = {}

NAME = "turboquant"
SIZES = {"head_dim": 64, "device": "cuda" if ON_GPU else "cpu"}
CHAIN = 4


@pytest.fixture(scope="module", autouse=True)
def single_rank():
    with get_parallel().override(**PRETENDED):
        yield


def make_plan(page_size: int, heads: int, device: str, drafts: int) -> Plan:
    """Of one layer, without an engine, every token from its codes."""
    plan = object.__new__(Plan)
    plan.settings = Settings("k8v8", window=0, first_token="codes")
    plan.rank, plan.ranks, plan.own_layers, plan.is_hybrid = 0, 1, range(1), False
    plan.page_size, plan.head_dim = page_size, 64
    plan.q_heads = plan.kv_heads = heads
    plan.device, plan.dtype = torch.device(device), torch.float16
    plan.drafts, plan.layers_of_drafts = drafts, 0
    plan.sinks, plan.window = 0, int(drafts > 0)
    config = plan.settings.config(64)
    plan.configs = [
        dataclasses.replace(config, page_size=page_size, recent_window=plan.window),
    ]
    plan.max_requests, plan.constants = 64, None
    return plan


class KitPool(TurboQuantKVPool):
    """Pages that also take keys and values from others than the backend."""

    drafts = 0
    damage = 1.0

    def __init__(self, *, page_size: int, head_num: int, device: str, **more: object) -> None:
        plan = make_plan(page_size, head_num, device, self.drafts)
        more = {"page_size": page_size, "head_num": head_num, "device": device, **more}
        super().__init__(**more, plan=plan)

    def set_kv_buffer(self, layer, slots, k, v, *_, **__):
        config = self.plan.config(0)
        pages, _ = page_parts(self.pages[0], config, None)
        k = k.detach() * self.damage
        tt.cache_store(k, v.detach(), pages, slots, config, self.plan.tables(0))


class Shifted:
    """A batch as an engine has it, whose row 0 is padding; in the kit it is a request."""

    def __init__(self, batch):
        self._batch = batch

    def __getattr__(self, name):
        value = getattr(self._batch, name)
        return value.long() + 1 if name == "req_pool_indices" else value


class KitBackend(TurboQuantBackend):
    outputs_of_graphs = 0
    """Calls that wrote into memory of SGLang's."""

    def __init__(self, runner):
        pool, config, theirs = (
            runner.token_to_kv_pool,
            runner.model_config,
            runner.req_to_token_pool,
        )
        rows = theirs.req_to_token
        table = rows.new_zeros(len(rows) + 1, rows.shape[1])
        theirs.req_to_token = table[1:]
        model = torch.nn.Module()
        model.attn = RadixAttention(
            num_heads=config.num_attention_heads,
            head_dim=64,
            scaling=64**-0.5,
            num_kv_heads=pool.plan.kv_heads,
            layer_id=0,
            sliding_window_size=runner.sliding_window_size or -1,
        )
        requests = SimpleNamespace(
            size=len(rows),
            req_to_token=table,
            req_generation=torch.zeros(len(table), dtype=torch.int64),
        )
        ours = SimpleNamespace(
            token_to_kv_pool=pool,
            req_to_token_pool=requests,
            model=model,
            spec_algorithm=SpeculativeAlgorithm.NONE,
        )
        super().__init__(ours)

    def forward_extend(self, q, k, v, layer, batch, *more, **options):
        out = super().forward_extend(q, k, v, layer, batch, *more, **options)
        if batch._attn_output is not None:  # else SGLang would copy
            assert out.data_ptr() == batch._attn_output.data_ptr()
            KitBackend.outputs_of_graphs += 1
        return out

    def init_forward_metadata(self, batch):
        super().init_forward_metadata(Shifted(batch))

    def init_forward_metadata_out_graph(self, batch, in_capture=False):
        super().init_forward_metadata_out_graph(Shifted(batch), in_capture)

    def init_forward_metadata_in_graph(self, batch):
        super().init_forward_metadata_in_graph(Shifted(batch))


between_graphs = getattr(radix_attention, "_unified_attention_with_output_impl", None)

if between_graphs is not None and not ON_GPU:  # an op of 0.5.17, which it registers for GPUs only

    def run_between_graphs(*arguments, use_mha_companion=False, **more):
        between_graphs(*arguments, use_mha_companion, False, **more)

    name = "sglang::unified_attention_with_output"
    torch.library.impl(name, "CPU", run_between_graphs)


@pytest.fixture(autouse=True)
def kit(monkeypatch):
    load_plugins()
    monkeypatch.setitem(ATTENTION_BACKENDS, NAME, KitBackend)
    monkeypatch.setattr(dense, "MHATokenToKVPool", KitPool)


def of_our_pages(cases):
    """Without pages of one token, which start refuses."""
    found = [case for case in cases if case.page_size >= 16]
    assert len(found) == len(cases) - 1 or found == [*cases]
    return found


def named(case):
    return case.name


DENSE = of_our_pages(dense.make_dense_cases(NAME))
EXTENDS = [case for case in DENSE if case.forward_mode.is_extend()]
DECODES = [case for case in DENSE if case.forward_mode.is_decode()]
WINDOWS = of_our_pages(
    dense.make_swa_no_prefix_input_config_cases(NAME)
    + dense.make_swa_prefix_input_config_cases(NAME)
)
CHAINS = {
    name: dense.DenseAttentionCase(
        name=name,
        backend=NAME,
        forward_mode=ForwardMode.TARGET_VERIFY,
        num_heads=4,
        num_kv_heads=heads,
        page_size=16,
        prefix_lens=prefix,
        extend_lens=(CHAIN,) * len(prefix),
        sliding_window_size=window,
    )
    for name, heads, prefix, window in (
        ("chain_page_edges", 4, (11, 12, 13, 16), None),
        ("chain_groups", 2, (7, 14), None),
        ("chain_one_kv_head", 1, (15,), None),
        ("chain_pages", 2, (30, 47), None),
        ("chain_sliding_window", 4, (3, 15), 4),
    )
}
# The kit writes prefixes twice around graphs, once to pages that it has not shuffled.
SHORT_CHAINS = [case for name, case in CHAINS.items() if name != "chain_pages"]


@pytest.mark.parametrize("layout", ["contiguous", "shuffled_pages", "interleaved_pages"])
@pytest.mark.parametrize("case", [*DENSE, *WINDOWS], ids=named)
def test_dense(case, layout):
    dense.run_dense_attention_case(unittest.TestCase(), case, loc_layout=layout, **SIZES)


@pytest.mark.parametrize("case", DECODES, ids=named)
def test_decode_steps_around_graphs(case):
    size = {"cuda_graph_capture_batch_size": 4}  # of three sequences and of one
    decode.run_dense_cuda_graph_decode_case(unittest.TestCase(), case, **SIZES, **size)


@pytest.mark.parametrize("breakable", [False, True])
@pytest.mark.parametrize("padding", [0, 5])
@pytest.mark.parametrize("case", EXTENDS, ids=named)
def test_prompts_between_graphs(case, padding, breakable):
    size = {"static_num_tokens": case.num_input_tokens + padding, "breakable": breakable}
    before = KitBackend.outputs_of_graphs
    split.run_dense_split_op_extend_case(unittest.TestCase(), case, **SIZES, **size)
    if padding or breakable:  # elsewhere newer versions have none
        assert KitBackend.outputs_of_graphs > before


@pytest.fixture
def drafting(monkeypatch):
    monkeypatch.setattr(KitPool, "drafts", CHAIN)


@pytest.mark.parametrize("kind", ["eagle", "ngram"])
@pytest.mark.parametrize("case", CHAINS.values(), ids=named)
def test_chains_of_drafts(drafting, case, kind):
    spec.run_dense_spec_verify_case(unittest.TestCase(), case, topk=1, spec_kind=kind, **SIZES)


@pytest.mark.parametrize("case", SHORT_CHAINS, ids=named)
def test_chains_around_graphs(drafting, case):
    spec.run_dense_spec_verify_cuda_graph_case(
        unittest.TestCase(), case, topk=1, cuda_graph_capture_batch_size=4, **SIZES
    )


def test_the_kit_sees_the_pages(monkeypatch):
    """Prefixes whose keys are three times as large are outside of its tolerance."""
    monkeypatch.setattr(KitPool, "damage", 3.0)
    case = next(case for case in DECODES if case.batch_size == 3)
    with pytest.raises(AssertionError, match="Tensor-likes are not close"):
        dense.run_dense_attention_case(unittest.TestCase(), case, **SIZES)
