"""SGLang's own tests of servers (sglang.test.kits) over ours, without HTTP between them.

The kits ask a server by `requests`; here an engine in processes of its own answers. Prompts are
random tokens in place of the texts that the kits download.
"""

import functools
import random
from types import SimpleNamespace

import pytest

sglang = pytest.importorskip("sglang", reason="needs SGLang: make sglang")

from sglang.test import kl_test_utils
from sglang.test.kits import radix_cache_server_kit
from sglang.test.kits.kl_divergence_kit import KLDivergenceMixin

from tests.sglang.harness import arguments
from tests.vllm.harness import prompt, save_llama

WINDOW = 16
VOCABULARY = 32_000  # from which the kits draw tokens
PROMPTS = [prompt(40 + 7 * i, seed=i, vocabulary=VOCABULARY) for i in range(6)]
TOKENS = 40


class Requests:
    """What the kits call of the package requests."""

    def __init__(self, llm):
        self.llm, self.answers = llm, []

    def get(self, url):
        return SimpleNamespace(json=lambda: {"disable_radix_cache": False})

    def post(self, url, json=None, **_):
        if url.endswith("/flush_cache"):
            self.llm.flush_cache()
            found = None
        else:
            names = ("input_ids", "sampling_params", "return_logprob", "logprob_start_len")
            found = self.llm.generate(**{name: json[name] for name in names if name in json})
            self.answers += found
        return SimpleNamespace(json=lambda: found, status_code=200, raise_for_status=lambda: None)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("llama")
    save_llama(path, head_dim=64, vocab_size=VOCABULARY)
    return path


@pytest.fixture
def server(folder, monkeypatch, request):
    """An engine with a preset, which the kits reach."""
    options = {"context_length": 2048, "max_total_tokens": 16_384}
    llm = sglang.Engine(**arguments(folder, {"window": WINDOW}, request.param, **options))
    requests = Requests(llm)
    monkeypatch.setattr(kl_test_utils, "requests", requests)
    monkeypatch.setattr(radix_cache_server_kit, "requests", requests)
    monkeypatch.setattr(kl_test_utils, "get_input_ids", lambda **_: PROMPTS)
    comma = SimpleNamespace(encode=lambda text: [7])
    monkeypatch.setattr(kl_test_utils, "get_tokenizer", lambda **_: comma)
    yield requests
    llm.shutdown()


class Divergence(KLDivergenceMixin):
    """The probabilities of answers behind prefixes of the tree, against those of one prompt."""

    base_url = model = ""
    kl_div_max_samples = len(PROMPTS)
    kl_div_prefill_max_new_tokens = kl_div_decode_max_new_tokens = TOKENS
    kl_div_thres = 0.01


@pytest.mark.parametrize("server", ["turboquant:k8v8"], indirect=True)
def test_kl_divergence(server):
    Divergence.test_input_output_logprobs_match_prefill_cache_hit()
    Divergence.test_input_output_logprobs_match_decode_cache_hit()


@pytest.mark.parametrize("server", ["turboquant:k3v2"], indirect=True)
def test_kl_divergence_of_few_bits(server):
    """The kit sees codes: of 2 and 3 bits, over a model that has never been trained."""
    with pytest.raises(AssertionError, match="avg_kl_div="):
        Divergence.test_input_output_logprobs_match_prefill_cache_hit()


@pytest.mark.parametrize("server", ["turboquant"], indirect=True)
def test_radix_attention(server, monkeypatch):
    """A tree of prompts, of which many are others' prefixes."""
    smaller = functools.partial(radix_cache_server_kit.gen_radix_tree, num_nodes=40, chunk_len=40)
    monkeypatch.setattr(radix_cache_server_kit, "gen_radix_tree", smaller)
    random.seed(0)
    radix_cache_server_kit.run_radix_attention_test("")
    assert len(server.answers) == 41
    assert sum(answer["meta_info"]["cached_tokens"] > 0 for answer in server.answers) > 20
