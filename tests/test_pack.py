"""Dense bit strings: every code in its place, for every width."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import torch_turboquant as tt
from tests.helpers import assert_same_bytes, generator
from torch_turboquant.format import dense_row_bytes
from torch_turboquant.ops.pack import pack_reference, unpack_reference

BITS = range(1, 9)


def random_codes(*shape, bits, seed=0):
    return torch.randint(2**bits, shape, generator=generator(seed), dtype=torch.uint8)


def test_by_hand():
    codes = torch.tensor([1, 2, 3, 4, 5, 6, 7, 0, 5], dtype=torch.uint8)
    # low bits first: 100 010 11|0 001 101 0|11 111 000 | 101 00000
    assert tt.pack(codes, 3).tolist() == [0b11010001, 0b01011000, 0b00011111, 0b00000101]
    assert tt.pack(codes[:3], 4).tolist() == [0x21, 0x03]
    assert tt.pack(torch.tensor([1, 0, 0, 0, 0, 0, 0, 1, 1], dtype=torch.uint8), 1).tolist() == [
        129,
        1,
    ]
    assert tt.pack(torch.tensor([0x80, 0x7F], dtype=torch.uint8), 8).tolist() == [0x80, 0x7F]


@pytest.mark.parametrize("bits", BITS)
def test_all_lengths(bits, device):
    for d in (*range(1, 41), 63, 64, 65, 576, 1023, 4096):
        codes = random_codes(3, d, bits=bits, seed=d)
        packed = tt.pack(codes.to(device), bits)
        assert packed.shape == (3, dense_row_bytes(d, bits)) == (3, -(-d * bits // 8))
        assert_same_bytes(packed, pack_reference(codes, bits))
        assert_same_bytes(tt.unpack(packed, bits, d), codes)
        # garbage in the unused bits of the last byte changes nothing
        garbage = packed.clone()
        used = (d * bits - 1) % 8 + 1
        garbage[:, -1] |= (0xFF << used) & 0xFF
        assert_same_bytes(tt.unpack(garbage, bits, d), codes)


@pytest.mark.parametrize("bits", BITS)
def test_every_code_at_every_position(bits):
    """A single code in a row of zeros sets exactly its own bits."""
    d = 17
    for position in range(d):
        codes = torch.zeros(2**bits, d, dtype=torch.uint8)
        codes[:, position] = torch.arange(2**bits, dtype=torch.uint8)
        packed = tt.pack(codes, bits).numpy()
        as_integer = [int.from_bytes(row.tobytes(), "little") for row in packed]
        assert as_integer == [code << (position * bits) for code in range(2**bits)]


@given(
    lead=st.lists(st.integers(0, 3), max_size=3),
    d=st.integers(1, 70),
    bits=st.integers(1, 8),
    offset=st.integers(0, 7),
)
def test_shapes_and_alignments(lead, d, bits, offset):
    rows = int(np.prod(lead))
    buffer = random_codes(offset + rows * d, bits=bits, seed=1)
    codes = buffer[offset:].view(*lead, d)
    packed = tt.pack(codes, bits)
    assert_same_bytes(packed, pack_reference(codes, bits))
    shifted = torch.cat([torch.zeros(offset, dtype=torch.uint8), packed.flatten()])[offset:]
    assert_same_bytes(tt.unpack(shifted.view(packed.shape), bits, d), codes)
    assert_same_bytes(unpack_reference(packed, bits, d), codes)


@pytest.mark.parametrize("bits", BITS)
def test_codes_beyond_the_bits_are_rejected(bits):
    if bits == 8:
        assert tt.pack(torch.tensor([255], dtype=torch.uint8), 8).tolist() == [255]
        return
    for place in (0, 4):
        codes = torch.zeros(2, 5, dtype=torch.uint8)
        codes[1, place] = 2**bits
        with pytest.raises(RuntimeError, match=f"codes holds values of {2**bits} or more"):
            tt.pack(codes, bits)


def test_native_header_agrees(native):
    for bits in BITS:
        for d in (1, 7, 64, 80):
            codes = random_codes(d, bits=bits, seed=d)
            packed = pack_reference(codes, bits)
            row = np.asarray(native.pack_row(codes.numpy(), bits))
            assert row.tolist() == packed.tolist()
            assert np.asarray(native.unpack_row(packed.numpy(), d, bits)).tolist() == codes.tolist()
