"""Pinned bytes: what make_golden.py once wrote into tests/data is what ops write and read."""

import pytest
import torch

import torch_turboquant as tt
from tests.helpers import load_script, to_device
from torch_turboquant.ops.cache import cache_load_reference, cache_store_reference
from torch_turboquant.ops.codec import decode_reference, encode_reference

make_golden = load_script("tests/make_golden.py")


@pytest.mark.parametrize("case", make_golden.RECORDS, ids=lambda c: f"{c[0]}-{c[1]}-{c[2]}")
def test_golden_records(case, device):
    config, tables, k, v, slots = make_golden.record_case(*case)
    golden = make_golden.record_file(*case).read_bytes()
    cache = tt.allocate_cache(config, 1, make_golden.KV_HEADS, device)
    tt.cache_store(
        k.to(device), v.to(device), cache, slots.to(device), config, to_device(tables, device)
    )
    assert cache.cpu().numpy().tobytes() == golden
    cache = tt.allocate_cache(config, 1, make_golden.KV_HEADS)
    cache_store_reference(k, v, cache, slots, config, tables)
    assert cache.numpy().tobytes() == golden


def test_golden_dense_rows():
    golden = (make_golden.DATA / "dense_rows.bin").read_bytes()
    assert make_golden.dense_bytes(tt.encode) == golden
    assert make_golden.dense_bytes(encode_reference) == golden


@pytest.mark.parametrize("case", make_golden.READERS, ids=lambda c: f"{c[0]}-{c[1]}")
def test_golden_readers(case, device):
    """Unused bits that are 1, and every byte of an 8-bit code."""
    config, tables, data = make_golden.reader_record(*case)
    golden = make_golden.reader_file(*case).read_bytes()
    assert golden[: config.record_bytes] == data.tobytes()
    cache = torch.from_numpy(data)[None, None]
    arguments = make_golden.load_arguments(config, to_device(tables, device), device)
    loaded = tt.cache_load(cache.to(device), *arguments)
    expected = cache_load_reference(cache, *make_golden.load_arguments(config, tables))
    for parts in (loaded, expected):
        read = b"".join(part.cpu().numpy().tobytes() for part in parts)
        assert read == golden[config.record_bytes :]


def test_golden_reader_rows(device):
    golden = (make_golden.DATA / "reader_rows.bin").read_bytes()
    assert make_golden.reader_row_bytes(decode_reference) == golden

    def decode(*arguments):
        return tt.decode(*(to_device(a, device) for a in arguments)).cpu()

    assert make_golden.reader_row_bytes(decode) == golden


def test_golden_constants(device):
    """Constants are computed in float64 and rounded once: for these sizes it can be seen."""
    golden = (make_golden.DATA / "constants.bin").read_bytes()
    assert make_golden.constant_bytes(encode_reference) == golden

    def encode(*arguments):
        packed, scale = tt.encode(*(to_device(a, device) for a in arguments))
        return packed.cpu(), scale.cpu()

    assert make_golden.constant_bytes(encode) == golden
