"""linear_experts: with which expert's weight a token is multiplied, and that the product is exact.

What a product is, is tested in test_linear.py: here those of the experts must be the same bits on
the CPU, and as close to float64 on CUDA, of which test_linear_experts_cuda.py has more.
"""

import pytest
import torch

import torch_turboquant as tt
from tests.helpers import FLOATS, randn
from tests.test_linear import FORMATS, formats, make_case
from torch_turboquant.ops.linear_reference import linear_experts_reference


def experts_case(f, n, k, experts):
    """The packed weights of experts, and (signs, levels, n, bits, sub)."""
    case = make_case(f, n, k)
    w = randn(experts, n, k, seed=7)
    packed = torch.stack([tt.encode_weight(part, f) for part in w])
    return packed, case.reading


def check(device, f, n, k, tokens, choices, experts=5, dtype=torch.float32, bias=True):
    """Experts 0 .. experts are chosen, of which the last does not exist."""
    packed, reading = experts_case(f, n, k, experts)
    x = randn(tokens, k, seed=1, dtype=dtype)
    generator = torch.Generator().manual_seed(tokens)
    chosen = torch.randint(experts + 1, (tokens, choices), generator=generator)
    added = randn(experts, n, seed=3, dtype=dtype) if bias else None
    arguments = (x, packed, chosen, *reading, added)
    on_device = [t.to(device) if isinstance(t, torch.Tensor) else t for t in arguments]
    y = tt.linear_experts(*on_device)
    assert y.dtype == dtype and y.shape == (tokens, choices, n) and y.device.type == device.type
    y = y.cpu()
    for token in range(tokens):
        for choice, expert in enumerate(chosen[token].tolist()):
            if expert == experts:
                assert not y[token, choice].any()
            elif device.type == "cpu":
                own = None if added is None else added[expert]
                want = tt.linear_packed(x[token], packed[expert], *reading, None, own)
                assert torch.equal(y[token, choice], want)
    want = linear_experts_reference(*arguments)
    error = (y.double() - want).abs().max() / want.abs().max().clamp(min=1e-9)
    assert float(error) < {torch.float32: 1e-5, torch.float16: 1e-3, torch.bfloat16: 8e-3}[dtype]


@formats
@pytest.mark.parametrize("k", [64, 192, 256])
def test_products_of_experts(f, k, device):
    for tokens, choices, dtype in zip((1, 3, 9), (4, 1, 2), FLOATS, strict=True):
        check(device, f, 70, k, tokens, choices, dtype=dtype, bias=tokens > 1)


def test_one_expert_that_many_tokens_choose():
    """So many that the CPU multiplies them in parts."""
    packed, reading = experts_case(FORMATS[0], 20, 2048, experts=3)
    x, added = randn(300, 2048, seed=1), randn(3, 20, seed=3)
    chosen = torch.randint(2, 4, (300, 1), generator=torch.Generator().manual_seed(300))
    y = tt.linear_experts(x, packed, chosen, *reading, added)
    own = chosen[:, 0] == 2
    assert torch.equal(y[own, 0], tt.linear_packed(x[own], packed[2], *reading, None, added[2]))
    assert not y[~own].any()


def test_many_experts_and_pairs(device):
    check(device, FORMATS[0], 33, 128, 120, 4, experts=64, dtype=torch.bfloat16)


def test_so_many_pairs_that_they_take_turns():
    """The CPU has memory for the results of some pairs at a time: 32 MiB, and a piece."""
    f, n, tokens = FORMATS[0], 4096, 6000
    packed, reading = experts_case(f, n, 64, 3)
    x = randn(tokens, 64, seed=1)
    assert tokens * n * 4 > 2 * 2**25
    chosen = torch.randint(4, (tokens, 1), generator=torch.Generator().manual_seed(1))
    y = tt.linear_experts(x, packed, chosen, *reading)
    for expert in range(3):
        own = chosen[:, 0] == expert
        assert torch.equal(y[own, 0], tt.linear_packed(x[own], packed[expert], *reading))
    assert not y[chosen[:, 0] == 3].any()


def test_long_rows(device):
    check(device, FORMATS[0], 16, 128 * 50, 3, 2)


def test_no_tokens_and_no_choices(device):
    packed, (signs, levels, *numbers) = experts_case(FORMATS[0], 20, 128, 2)
    packed, signs, levels = (t.to(device) for t in (packed, signs, levels))
    for tokens, choices in ((0, 2), (3, 0)):
        chosen = torch.zeros(tokens, choices, dtype=torch.int64, device=device)
        x = torch.zeros(tokens, 128, device=device)
        y = tt.linear_experts(x, packed, chosen, signs, levels, *numbers)
        assert y.shape == (tokens, choices, 20)


def test_numbers_that_no_expert_has(device):
    packed, (signs, levels, *numbers) = experts_case(FORMATS[0], 20, 128, 2)
    packed, signs, levels = (t.to(device) for t in (packed, signs, levels))
    chosen = torch.tensor([[-1, 2], [-(2**63), 2**63 - 1]], device=device)
    x = torch.ones(2, 128, device=device)
    assert not tt.linear_experts(x, packed, chosen, signs, levels, *numbers).any()


def test_tokens_at_a_distance(device):
    packed, (signs, levels, *numbers) = experts_case(FORMATS[0], 20, 128, 2)
    packed, signs, levels = (t.to(device) for t in (packed, signs, levels))
    x = randn(4, 300, seed=5).to(device)[:, 7:135]
    chosen = torch.tensor([[0], [1], [1], [0]], device=device)
    y = tt.linear_experts(x, packed, chosen, signs, levels, *numbers)
    want = tt.linear_experts(x.contiguous(), packed, chosen, signs, levels, *numbers)
    assert torch.equal(y, want)


def test_tiny(device):
    """For compute-sanitizer."""
    check(device, FORMATS[0], 17, 64, 2, 2)
