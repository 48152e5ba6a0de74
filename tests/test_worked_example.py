"""The worked example of docs/format.md, recomputed line by line by the ops."""

import re
from pathlib import Path

import numpy as np
import pytest
import torch

import torch_turboquant  # noqa: F401  (registers the ops)
from torch_turboquant.codebook import Codebook
from torch_turboquant.format import Record
from torch_turboquant.signs import random_signs

ops = torch.ops.turboquant
DIM, BITS, SEED = 16, 4, 7
MODES = {"norm": 0, "preserve": 1, "scale": 2, "unbiased": 3}


@pytest.fixture(scope="module")
def example() -> dict[str, list[str]]:
    """The fenced block of section 11: name -> words."""
    page = (Path(__file__).parents[1] / "docs" / "format.md").read_text()
    block = re.search(r"## 11\. Worked example.*?```\n(.*?)```", page, re.DOTALL)
    assert block, "docs/format.md has lost its worked example"
    lines = (line.split("=", 1) for line in block[1].strip().splitlines())
    return {name.strip(): words.split() for name, words in lines}


@pytest.fixture(scope="module")
def vector(example):
    return torch.tensor([float(w) for w in example["x"]])


@pytest.fixture(scope="module")
def codebook(example):
    book = Codebook.make(DIM, BITS, "lloyd")
    assert list(book.levels) == [int(w) for w in example["levels"]]
    assert book.steps_tensor(1).tolist() == [float(example["step"][0])]
    return book


def encode(vector, codebook, mode: int, kind: int = 0):
    signs = random_signs(DIM, SEED, 0, kind)
    return ops.encode(vector, signs, codebook.levels_tensor(), codebook.steps_tensor(1), BITS, mode)


def test_rotation_and_integer_coordinates(example, vector):
    signs = random_signs(DIM, SEED, 0, 0)
    assert signs.tolist() == [float(w) for w in example["signs"]]
    exponent = int(example["exponent"][0])
    assert exponent == int(np.floor(np.log2(vector.abs().max().item())))
    y = 4 * ops.hadamard(vector * 2.0**-exponent, signs).numpy()  # encoders omit 1 / sqrt(n)
    assert y.tolist() == [float(w) for w in example["y"]]
    length = np.float32(example["R"][0])
    assert length == np.sqrt((y * y).sum(dtype=np.float32))  # every partial sum is exact here
    assert length / 4 == np.float32(example["r"][0])
    u = np.rint(y * (np.float32(4096 * 4) / length)).astype(int)
    assert u.tolist() == [int(w) for w in example["u"]]


def test_boundaries(example, codebook):
    levels = np.array(codebook.levels, dtype=np.float32)
    grains = np.float32(codebook.steps_tensor(1).item()) * np.float32(128)
    boundaries = 16 * np.rint((levels[1:] + levels[:-1]) * grains).astype(int)
    assert boundaries.tolist() == [int(w) for w in example["boundary"]]


def test_codes_and_sums(example, vector, codebook):
    packed, _ = encode(vector, codebook, MODES["scale"])
    assert packed.numpy().tobytes().hex(" ").split() == example["packed"]
    codes = ops.unpack(packed, BITS, DIM).tolist()
    assert codes == [int(w) for w in example["codes"]]
    u = [int(w) for w in example["u"]]
    boundaries = [int(w) for w in example["boundary"]]
    assert codes == [sum(t <= x for t in boundaries) for x in u]
    levels = [codebook.levels[c] for c in codes]
    assert sum(a * b for a, b in zip(u, levels, strict=True)) == int(example["A"][0])
    assert sum(b * b for b in levels) == int(example["B"][0])


@pytest.mark.parametrize("name", MODES)
def test_scales(example, vector, codebook, name):
    _, scale = encode(vector, codebook, MODES[name])
    assert scale.view(torch.uint16).item() == int(example[name][0], 16)


def test_bytes_in_a_record(example, vector, codebook):
    record = Record(DIM, 16, BITS, BITS)
    assert record.record_bytes == 320
    cache = torch.full((1, 1, 320), 0xFF, dtype=torch.uint8)
    levels, steps = codebook.levels_tensor(), codebook.steps_tensor(1)
    k = vector.view(1, 1, DIM)
    key_signs, value_signs = (random_signs(DIM, SEED, 0, kind) for kind in (0, 1))
    ops.cache_store(
        *(k, k, cache, torch.tensor([5]), key_signs, value_signs),
        *(levels, levels, steps, steps, None),
        *(16, BITS, BITS, MODES["scale"], MODES["scale"]),
    )
    stored = cache.flatten().tolist()
    keys = [int(w, 16) for w in example["packed"]]
    values = [0x07, 0x96, 0x80, 0x25, 0x9C, 0x96, 0x66, 0xA6]
    expected = {40 + i: b for i, b in enumerate(keys)}
    expected |= {128 + 4 * (4 * g + 2) + 1: b for g, b in enumerate(values)}
    expected |= {266: 0xF5, 267: 0x3C, 298: 0xD3, 299: 0x3C}
    assert stored == [expected.get(i, 0xFF) for i in range(320)]
