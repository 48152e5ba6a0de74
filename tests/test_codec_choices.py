"""Which CUDA kernel takes a call of the codec (csrc/choices/codec.h), asked on the CPU."""

import pytest

H200, SMALL = 132, 40  # multiprocessors; the small device has 64 KiB of shared memory


@pytest.mark.parametrize("d", [64, 128, 256])
def test_stores_of_a_decode_step_and_of_a_prompt(native, d):
    # two warps of a block of 16 share 32 vectors of 64 channels, 16 of 128 or 8 of 256
    enough = 2048 // d * (H200 * 16 // 2) // (2 * 8)  # tokens with 8 heads, keys and values
    span = 32 if d == 64 else 16
    assert native.choose_store(H200, d, False, 1, 8, 4, 1) == (
        "step",
        "too few vectors to fill the device",
    )
    assert native.choose_store(H200, d, False, enough - span, 8, 4, 1)[0] == "step"
    assert native.choose_store(H200, d, False, enough, 8, 4, 1)[0] == "bulk"
    assert native.choose_store(SMALL, d, False, 100_000, 8, 4, 1)[0] == "bulk"


def test_what_only_the_generic_kernels_store(native):
    def store(d=128, full=False, bits=4, candidates=1):
        return native.choose_store(H200, d, full, 4096, 8, bits, candidates)

    assert store() == ("bulk", "enough vectors to fill the device")
    assert store(d=96) == ("generic", "head_dim is not 64, 128 or 256")
    assert store(full=True) == ("generic", "dtype is float32")
    assert store(bits=8) == ("generic", "8-bit codes have no table")
    assert store(candidates=9) == ("generic", "a codebook has more than 8 candidate steps")
    assert store(d=256, candidates=2) == ("step", "several candidate steps need head_dim <= 128")


def test_several_candidates_need_shared_memory(native):
    assert native.choose_store(H200, 128, False, 100_000, 8, 4, 2)[0] == "bulk"
    assert native.choose_store(SMALL, 128, False, 100_000, 8, 4, 2) == (
        "step",
        "shared memory of the device holds too few warps",
    )


def test_standalone_vectors(native):
    few, many = "too few vectors to fill the device", "enough vectors to fill the device"
    assert native.choose_encode(H200, 128, False, 1000, 1, 4, 1) == ("generic", few)
    assert native.choose_encode(H200, 128, False, 100_000, 1, 4, 1) == ("bulk", many)
    assert native.choose_encode(H200, 128, False, 2**31, 1, 4, 1) == (
        "generic",
        "too many vectors for 32-bit counters",
    )
    assert native.choose_decode(H200, 128, False, 16 * 4 * H200 - 16, True) == ("generic", few)
    assert native.choose_decode(H200, 128, False, 16 * 4 * H200, True) == ("bulk", many)
    assert native.choose_decode(H200, 128, False, 100_000, False) == (
        "generic",
        "packed does not start at a multiple of 8 bytes",
    )


def test_loads(native):
    assert native.choose_load(H200, 128, False, 4, 4096, 8, 4)[0] == "bulk"
    assert native.choose_load(H200, 128, False, 4, 4096, 8, 8) == ("generic", "8-bit values")
    assert native.choose_load(H200, 80, False, 4, 4096, 8, 4)[0] == "generic"
    assert native.choose_load(H200, 128, False, 1, 1, 8, 4)[0] == "generic"
