"""What can be asked of kernel_choice: bad input, devices, and what its texts and command say."""

import argparse
import ctypes
import inspect
import itertools
import json
import re

import pytest
import torch

import torch_turboquant as tt
from tests.choices_cases import CALLS, Case
from torch_turboquant import __main__ as command_line
from torch_turboquant import _library, choices
from torch_turboquant._library import choose_kernel
from torch_turboquant.choices import GPUS, kernel_choice

# ---- bad input


@pytest.mark.parametrize("op", CALLS)
def test_facts_that_no_call_has(op):
    facts = list(CALLS[op].values())
    choose_kernel(op, facts, GPUS["H200"])
    bad = [facts[:n] for n in range(len(facts))] + [[*facts, 1]]
    for place, value in itertools.product(range(len(facts)), (-(2**63), -1, 2**62, 2**63 - 1)):
        bad.append([*facts[:place], value, *facts[place + 1 :]])
    for some in bad:
        with pytest.raises(ValueError, match=rf"the facts of {op} must be those of a call"):
            choose_kernel(op, some, GPUS["H200"])
    for place, value in itertools.product(range(6), (-1, 2**40)):
        device = [*GPUS["H200"]]
        device[place] = value
        with pytest.raises(ValueError, match="a size or a fact of the device is not supported"):
            choose_kernel(op, facts, device)
    with pytest.raises(ValueError, match="device must have 6 facts, got 4"):
        choose_kernel(op, facts, GPUS["H200"][:4])


@pytest.mark.parametrize(
    ("op", "changes"),
    [
        ("encode", {"d": 22}),
        ("encode", {"dtype": 7}),
        ("encode", {"width": 7}),
        ("encode", {"heads": 65536}),
        ("cache_load", {"seqs": 1 << 30, "max_length": 1 << 30}),
        ("paged_attention", {"k_bits": 8}),
        ("paged_attention", {"v_bits": 1, "v_uniform": 1}),
        ("score", {"has_codes": 0}),
    ],
)
def test_facts_that_do_not_go_together(op, changes):
    with pytest.raises(ValueError, match="must be those of a call"):
        Case(op, changes, "", "").ask()


def test_an_op_without_a_choice():
    with pytest.raises(ValueError, match="this op has no choice of kernels"):
        choose_kernel("pack", [1], GPUS["H200"])


STEP = {"head_dim": 128, "q_heads": 32, "kv_heads": 8, "preset": "k4v4", "device": "H200"}


@pytest.mark.parametrize(
    ("op", "changes", "message"),
    [
        ("pack", {}, "op is 'pack', supported: paged_attention, mla_attention"),
        ("paged_attention", {"device": "V100"}, "device is 'V100', supported: T4, A100"),
        ("paged_attention", {"vectors": 1}, "has no vectors, supported: head_dim, q_heads"),
        ("paged_attention", {"head_dim": 22}, "head_dim is 22, supported: m"),
        ("paged_attention", {"head_dim": 2}, "head_dim is 2, supported in page records"),
        ("paged_attention", {"head_dim": 128.0}, "head_dim is 128.0, which is no whole number"),
        ("paged_attention", {"q_heads": 12}, "q_heads is 12, supported: multiples of kv_heads"),
        ("paged_attention", {"kv_heads": 0}, "kv_heads is 0, supported: 1 to 65535"),
        ("paged_attention", {"max_q_len": 2**31}, "max_q_len is 2147483648, supported: 1 to"),
        ("paged_attention", {"seqs": 0}, "seqs is 0, supported: 1 to 2147483647"),
        ("paged_attention", {"tokens": 0}, "tokens is 0, supported: 1 to"),
        ("paged_attention", {"seqs": 2**16, "max_q_len": 2**15}, "tokens is 2147483648, supported"),
        ("paged_attention", {"preset": "k9v9"}, "unknown preset 'k9v9'"),
        ("paged_attention", {"preset": None}, "must have a preset, or key_bits and value_bits"),
        ("paged_attention", {"key_bits": 4}, "give either, not both"),
        ("paged_attention", {"dtype": "int8"}, "dtype is int8, supported: float16, float32"),
        ("paged_attention", {"dtype": torch.float64}, "dtype is torch.float64, supported"),
        ("encode", {}, "encode has no q_heads, kv_heads, preset, supported: head_dim, vectors"),
    ],
)
def test_bad_shapes(op, changes, message):
    with pytest.raises(ValueError, match=message):
        kernel_choice(op, **{**STEP, **changes})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"bits": 7}, "bits is 7, supported: 1, 2, 3, 4, 5, 8"),
        ({"bits": 8, "grid": "lloyd"}, "grid at 8 bits is 'lloyd', supported: uniform"),
        ({"bits": 1, "grid": "uniform"}, "grid at 1 bits is 'uniform', supported: lloyd"),
        ({"keys": 2**41}, "keys is 2199023255552, supported: 1 to"),
        ({"sketch_bits": -1}, "sketch_bits is -1, supported: 0 to 65536"),
    ],
)
def test_bad_scores(changes, message):
    call = {"head_dim": 128, "bits": 4, "keys": 64, "device": "L4"}
    with pytest.raises(ValueError, match=message):
        kernel_choice("score", **{**call, **changes})


def test_what_a_call_must_have():
    with pytest.raises(ValueError, match="encode must have head_dim, vectors, bits, got bits"):
        kernel_choice("encode", bits=4, device="L4")


# ---- devices


def test_without_a_gpu_a_device_is_named(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ValueError, match="there is no CUDA device, supported: T4, A100"):
        kernel_choice("decode", head_dim=128, vectors=1)


@pytest.fixture
def fourth_gpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)


@pytest.mark.parametrize("name", ["T4", "H200"])
def test_the_current_device_without_a_cuda_library(fourth_gpu, monkeypatch, name):
    names = "major minor multi_processor_count shared_memory_per_block_optin"
    names = [*names.split(), "shared_memory_per_multiprocessor"]
    facts = argparse.Namespace(**dict(zip(names, GPUS[name][:5], strict=True)))
    monkeypatch.setattr(choices, "device_facts", lambda index: None)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: {3: facts}[index])
    assert choices._gpu(None) == GPUS[name]
    call = {**STEP, "device": None}
    wanted = kernel_choice("paged_attention", **{**STEP, "device": name})
    assert kernel_choice("paged_attention", **call) == wanted


def test_the_code_of_the_current_device_decides(fourth_gpu, monkeypatch):
    """An H200 that runs code for 7.5 has none of the kernels that need more."""
    facts = [7, 5, *GPUS["H200"][2:5], 0]
    monkeypatch.setattr(choices, "device_facts", lambda index: {3: facts}[index])
    assert choices._gpu(None) == GPUS["H200"]._replace(major=7, minor=5, warpgroup_products=False)
    call = {**STEP, "device": None}
    assert kernel_choice("paged_attention", **call).reason == "compute capability below 8.0"


def test_a_library_without_code_for_the_current_device(fourth_gpu, monkeypatch, capsys):
    def ask(index):
        raise RuntimeError("torch_turboquant: no kernel image")

    monkeypatch.setattr(choices, "device_facts", ask)
    with pytest.raises(ValueError, match="None, but torch_turboquant: no kernel image, supported"):
        kernel_choice("paged_attention", **{**STEP, "device": None})
    command = "info --op decode --head-dim 128 --vectors 1"
    assert command_line.main(command.split()) == 2
    assert "info: device is None, but torch_turboquant: no kernel" in capsys.readouterr().err


def test_facts_are_those_of_the_cuda_library(monkeypatch):
    class Function:
        error = None

        def __call__(self, device, facts):
            for i in range(6):
                ctypes.c_int64.from_address(facts + 8 * i).value = 10 * device + i
            return self.error

    function = Function()
    library = argparse.Namespace(turboquant_cuda_device_facts=function)
    monkeypatch.setattr(ctypes, "CDLL", lambda path: {"a path": library}[path])
    monkeypatch.setattr(_library, "_libraries", {})
    assert _library.device_facts(2) is None
    monkeypatch.setattr(_library, "_libraries", {"cuda": {"path": "a path"}})
    assert _library.device_facts(2) == [20, 21, 22, 23, 24, 25]
    function.error = b"no kernel image"
    with pytest.raises(RuntimeError, match="no kernel image"):
        _library.device_facts(2)


@pytest.mark.cuda
def test_the_facts_of_this_gpu():
    """The table is right about the GPUs that the tests have run on, and the facts of its code about
    the architectures that the library was compiled for."""
    name = torch.cuda.get_device_name().removeprefix("NVIDIA ")
    named = [gpu for gpu in GPUS if name == gpu or name.startswith((f"{gpu} ", f"{gpu}-"))]
    found = choices._gpu(None)
    assert found.multiprocessors > 0 and found.shared_per_block <= found.shared_per_multiprocessor
    major, minor = torch.cuda.get_device_capability()
    older = (found.major, found.minor) < (major, minor)
    if named == ["H200"]:
        of = {(7, 5): GPUS["T4"], (8, 0): GPUS["A100"]}.get(found[:2], GPUS["H200"])
        assert found.multiprocessors == GPUS["H200"].multiprocessors and found[3:5] == of[3:5]
        assert older or (found.major, found.minor) == (9, 0)
    codes = set()  # that can run here
    for entry in tt.build_info()["cuda_architectures"]:
        code, _, machine = entry.removesuffix("+PTX").partition("@")
        of = [] if machine == "PTX" else (machine or code).rstrip("af").split(".")
        if not of or (int(of[0]) == major and int(of[1]) <= minor):
            codes.add(code)
    if len(codes) == 1:
        (code,) = codes
        assert f"{found.major}.{found.minor}" == code.rstrip("af")
        assert found.warpgroup_products == (code == "9.0a")


# ---- what is written of it


def test_the_docstring_names_every_option():
    table = inspect.getdoc(kernel_choice).partition("==  ===")[2].rpartition("==\n")[0]
    rows = {}
    for line in re.sub(r"\n {4,}", " ", table).splitlines():
        if match := re.match(r"(\w+) +(.*)", line):
            rows[match[1]] = match[2]
    cache = {"preset", "key_bits", "value_bits"}
    assert list(rows) == list(choices.OPS)
    for op, text in rows.items():
        parameters = inspect.signature(choices._OPS[op]).parameters
        required, _, optional = text.partition(";")
        needed = {name for name, p in parameters.items() if p.default is p.empty}
        assert set(re.findall(r"\w+", required.replace("a cache", ""))) == needed, op
        others = set(parameters) - needed - (cache if "a cache" in required else set())
        assert set(re.findall(r"\w+", optional)) == others, op
    for gpu in GPUS:
        assert f'"{gpu}"' in inspect.getdoc(kernel_choice)


def test_the_command(capsys):
    line = "info --op paged_attention --preset k5v4u --head-dim 128 --q-heads 32 --kv-heads 8"
    assert command_line.main([*line.split(), "--device", "H200"]) == 0
    rows = dict(row.split(maxsplit=1) for row in capsys.readouterr().out.splitlines())
    assert rows == {"kernel": "split_kv", "reason": "at most 16 query rows per KV head"}

    line += " --device H200 --dtype float32 --tail --json"
    assert command_line.main(line.split()) == 0
    found = json.loads(capsys.readouterr().out)
    assert found == {"kernel": "general", "reason": "the exact tail is float32"}


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("--device H200", "a shape or --device needs --op, supported: paged_attention"),
        ("--head-dim 128", "needs --op"),
        ("--op encode --head-dim 128 --device L4", "encode must have head_dim, vectors, bits, got"),
    ],
)
def test_commands_that_ask_nothing(line, message, capsys):
    assert command_line.main(["info", *line.split()]) == 2
    assert message in capsys.readouterr().err
