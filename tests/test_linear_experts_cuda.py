"""linear_experts on a GPU: products against float64, whatever the experts that tokens choose.

Which kernel takes a call follows from the number of pairs of a token and an expert
(csrc/choices/linear.h); what each of them rounds is in test_linear_cuda.py.
"""

from typing import NamedTuple

import pytest
import torch
from torch import Tensor

import torch_turboquant as tt
from tests.helpers import FLOATS, launched, randn
from tests.test_linear import (
    FORMATS,
    LAST,
    Case,
    assert_within,
    formats,
    make_case,
    moved,
    product_bound,
)
from tests.test_linear_cuda import has_tiles, of_tiles
from torch_turboquant.choices import kernel_choice
from torch_turboquant.ops.linear_reference import linear_packed_reference

pytestmark = pytest.mark.cuda


class Experts(NamedTuple):
    case: Case
    packed: Tensor  # of all experts, on the CPU

    @property
    def k(self) -> int:
        return self.case.w.shape[1]

    def multiply(self, x, chosen, bias=None) -> Tensor:
        """On the GPU, twice: the same bits."""
        arguments = moved("cuda", x, self.packed, chosen, *self.case.reading, bias)
        y, again = (tt.linear_experts(*arguments).cpu() for _ in range(2))
        assert torch.equal(y.view(torch.uint8), again.view(torch.uint8))  # NaN included
        return y


def make_experts(f, n: int, k: int, experts: int) -> Experts:
    case = make_case(f, n, k)
    w = 0.02 * randn(experts, n, k, seed=7).cuda()
    packed = torch.stack([tt.encode_weight(part, f) for part in w]).cpu()
    return Experts(case._replace(scale=torch.ones(k)), packed)


def choose(tokens: int, choices: int, experts: int, seed: int = 1) -> Tensor:
    """Each token chooses some of the experts; one number more belongs to none of them."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(experts + 1, (tokens, choices), generator=generator)


def check(experts: Experts, x: Tensor, chosen: Tensor, kernel: str, bias: Tensor | None = None):
    """kernel: the one that takes the call on a GPU that has tiles."""
    y, case, dtype = experts.multiply(x, chosen, bias), experts.case, x.dtype
    tokens, choices = chosen.shape
    sizes = {"tokens": tokens, "choices": choices, "experts": len(experts.packed), "k": experts.k}
    kind = kernel_choice("linear_experts", **sizes, dtype=dtype).kernel
    assert kind == kernel or not has_tiles()
    assert y.dtype == dtype and y.shape == (*chosen.shape, case.n)
    exists = (chosen >= 0) & (chosen < len(experts.packed))
    assert not y[~exists].any()
    for expert in chosen[exists].unique().tolist():
        packed, own = experts.packed[expert], None if bias is None else bias[expert]
        token, choice = (chosen == expert).nonzero(as_tuple=True)
        part = x[token]
        if kind == "codes":
            want = linear_packed_reference(part, packed, *case.reading, None, own)
            bound = product_bound(part, packed, case, own)
        elif kind == "tiles":
            want, bound = of_tiles(part, packed, case, own)
        else:  # linear_packed takes any of its kernels
            want = part.double() @ tt.weight_decode(packed, *case.reading).double().T
            want = want if own is None else want + own.double()
            error = (y[token, choice].double() - want).norm() / want.norm()
            assert float(error) < 0.01 + 2 * LAST[dtype]
            continue
        assert_within(y[token, choice], want, bound)


@formats
@pytest.mark.parametrize("k", [64, 128, 192, 576, 1024])
def test_few_tokens(f, k):
    experts = make_experts(f, 70, k, 6)
    for tokens, choices in ((1, 1), (1, 4), (2, 3), (5, 2), (12, 4)):
        dtype = FLOATS[tokens % 3]
        x, bias = randn(tokens, k, seed=tokens, dtype=dtype), randn(6, 70, seed=4, dtype=dtype)
        check(experts, x, choose(tokens, choices, 6), "codes", bias if tokens % 2 else None)


@formats
@pytest.mark.parametrize("k", [64, 192, 1024])
def test_more_tokens(f, k):
    experts = make_experts(f, 70, k, 3)
    for tokens in (40, 64, 200, 700):
        dtype = FLOATS[tokens % 3]
        x, bias = randn(tokens, k, seed=tokens, dtype=dtype), randn(3, 70, seed=4, dtype=dtype)
        check(experts, x, choose(tokens, 1, 3), "tiles", bias if tokens % 2 == 0 else None)


@formats
@pytest.mark.parametrize("k", [64, 192, 1024])
def test_pieces_of_two_tiles_of_columns(f, k):
    """9 to 16 pairs of an expert are one piece."""
    experts = make_experts(f, 70, k, 5)
    for tokens, choices in ((27, 2), (35, 1), (60, 1), (20, 3)):
        dtype = FLOATS[1 + tokens % 2]
        x, bias = randn(tokens, k, seed=tokens, dtype=dtype), randn(5, 70, seed=4, dtype=dtype)
        chosen = choose(tokens, choices, 5)
        check(experts, x, chosen, "codes", bias if tokens % 2 else None)
        if has_tiles() and tokens == 60:
            names = launched(lambda x=x, chosen=chosen: experts.multiply(x, chosen))
            assert any("experts_kernel" in name and ", 2>" in name for name in names), names


def test_tokens_of_one_expert():
    """Pieces are full, or have one token more; the other experts have none."""
    experts = make_experts(FORMATS[0], 33, 128, 40)
    for tokens in (1, 7, 8, 9, 15, 16, 17, 31, 32, 33, 64, 65, 100, 320):
        chosen = torch.full((tokens, 1), 39)
        check(experts, randn(tokens, 128, seed=tokens), chosen, "codes")
    for tokens in (321, 500, 1000):
        chosen = torch.full((tokens, 1), 17)
        check(experts, randn(tokens, 128, seed=tokens), chosen, "tiles")


@pytest.mark.parametrize("n", [1, 15, 16, 17, 64, 65, 129, 400, 770])
def test_any_number_of_outputs(n):
    experts = make_experts(FORMATS[0], n, 128, 4)
    for tokens, kernel in ((5, "codes"), (90, "tiles")):
        for dtype in FLOATS:
            x, bias = randn(tokens, 128, seed=n, dtype=dtype), randn(4, n, seed=1, dtype=dtype)
            check(experts, x, choose(tokens, 2, 4), kernel, bias)


def test_many_experts():
    experts = make_experts(FORMATS[0], 48, 256, 300)
    for tokens, choices in ((1, 8), (60, 8), (200, 8)):
        x = randn(tokens, 256, seed=tokens, dtype=torch.bfloat16)
        check(experts, x, choose(tokens, choices, 300), "codes")
    x = randn(500, 256, seed=9, dtype=torch.bfloat16)
    check(experts, x, choose(500, 8, 300), "tiles")


def test_rows_of_a_real_size():
    """Thread blocks share an expert's rows, and have rows of several experts."""
    experts = make_experts(FORMATS[0], 1536, 2048, 9)
    for tokens, kernel in ((1, "codes"), (4, "codes"), (30, "codes"), (64, "tiles")):
        x = randn(tokens, 2048, seed=tokens, dtype=torch.bfloat16)
        check(experts, x, choose(tokens, 2, 9), kernel)


def test_many_channels():
    experts = make_experts(FORMATS[0], 40, 14336, 3)
    for tokens, kernel in ((1, "codes"), (9, "codes"), (40, "tiles")):
        check(experts, randn(tokens, 14336, seed=tokens), choose(tokens, 2, 3), kernel)


def test_more_channels_than_shared_memory_has_room_for():
    experts = make_experts(FORMATS[0], 20, 60_032, 2)
    check(experts, randn(3, 60_032, seed=1), choose(3, 2, 2), "tiles")


@pytest.mark.parametrize(("k", "kernel"), [(10240, "codes"), (10368, "tiles")])
def test_the_most_channels_of_wide_pieces(k, kernel):
    """12 tokens for each expert are pieces of 16 as long as shared memory has room for them."""
    experts = make_experts(FORMATS[0], 40, k, 2)
    x = randn(24, k, seed=1, dtype=torch.bfloat16)
    check(experts, x, torch.arange(24)[:, None] % 2, kernel)


def test_so_many_tokens_that_they_take_turns():
    """Operands of some tokens are in memory at a time: 512 MiB."""
    experts, tokens, choices = make_experts(FORMATS[0], 16, 16384, 2), 1100, 8
    assert 4 * 16384 * choices * tokens > 512 << 20
    x = randn(tokens, 16384, seed=1, dtype=torch.bfloat16)
    check(experts, x, choose(tokens, choices, 2), "tiles")


def test_float32_of_many_tokens():
    experts = make_experts(FORMATS[0], 70, 128, 2)
    check(experts, randn(513, 128, seed=1), choose(513, 1, 2), "one_by_one", randn(2, 70, seed=2))
    none = torch.full((513, 1), -1)
    assert not experts.multiply(randn(513, 128, seed=1), none).any()


@pytest.mark.parametrize("tokens", [3, 120])
def test_broken_activations_stay_with_their_token(tokens):
    experts = make_experts(FORMATS[0], 33, 192, 4)
    x, chosen = randn(tokens, 192, seed=2), choose(tokens, 2, 4)
    x[0, 5], x[1, 70] = torch.nan, torch.inf
    chosen[:2] = torch.tensor([[0, 3], [3, 1]])
    y = experts.multiply(x, chosen)
    assert y[:2].isnan().all() and y[2:].isfinite().all()


@pytest.mark.parametrize("tokens", [6, 200])
def test_a_token_chooses_an_expert_twice(tokens):
    experts = make_experts(FORMATS[0], 33, 192, 4)
    y = experts.multiply(
        randn(tokens, 192, seed=2), choose(tokens, 1, 3).expand(-1, 2).contiguous()
    )
    assert torch.equal(y[:, 0], y[:, 1])


@pytest.mark.parametrize("tokens", [6, 200])
def test_rows_at_a_distance(tokens):
    experts, chosen = make_experts(FORMATS[0], 33, 192, 4), choose(tokens, 2, 4)
    for first in (0, 8, 3):  # the last one starts at no multiple of 16 bytes
        x = randn(tokens, 300, seed=5, dtype=torch.float16).cuda()[:, first : first + 192]
        y = experts.multiply(x, chosen)
        assert torch.equal(y, experts.multiply(x.contiguous(), chosen))


@pytest.mark.parametrize("tokens", [6, 200])
def test_results_do_not_depend_on_other_tokens(tokens):
    """The choices of others move a token to other pieces and other thread blocks."""
    experts = make_experts(FORMATS[0], 300, 512, 4)
    x, chosen = randn(tokens, 512, seed=5), choose(tokens, 2, 4)
    y = experts.multiply(x, chosen)
    for seed in (2, 3):
        others = choose(tokens, 2, 4, seed)
        others[tokens // 2] = chosen[tokens // 2]
        z = experts.multiply(x, others)
        if tokens == 6:
            assert torch.equal(z[tokens // 2], y[tokens // 2])
        else:  # parts of a tile's channels are added in other places
            assert torch.allclose(z[tokens // 2], y[tokens // 2], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("tokens", [1, 6, 120])
def test_in_a_graph(tokens):
    """The experts are read when the graph is replayed."""
    experts = make_experts(FORMATS[0], 70, 256, 4)
    x, chosen = moved("cuda", randn(tokens, 256, seed=1), choose(tokens, 2, 4))
    packed, *reading = moved("cuda", experts.packed, *experts.case.reading)
    call = lambda: tt.linear_experts(x, packed, chosen, *reading)  # noqa: E731
    call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = call()
    for new in (choose(tokens, 2, 4, 2), torch.full((tokens, 2), 3), torch.full((tokens, 2), 9)):
        chosen.copy_(new)
        graph.replay()
        assert torch.equal(y, call())


def test_more_experts_than_are_supported():
    packed = torch.zeros(4097, 1, 1, FORMATS[0].block(64).block_bytes, dtype=torch.uint8)
    case = make_case(FORMATS[0], 16, 64)
    arguments = moved("cuda", randn(1, 64, seed=1), packed, torch.zeros(1, 1).long(), *case.reading)
    with pytest.raises(RuntimeError, match="4097 experts, supported on CUDA: up to 4096"):
        tt.linear_experts(*arguments)
