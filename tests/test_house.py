"""The rules of CONTRIBUTING about the sources, each as a search for what breaks it.

A rule takes the sources by path and returns its offences, "path:line: text". It is held against the
real sources, and against a few lines that break it: a rule that finds nothing there proves nothing.
"""

import ast
import re
from collections import Counter
from collections.abc import Callable
from itertools import chain
from pathlib import PurePosixPath

import pytest
import torch

import torch_turboquant as tq
from tests.helpers import ROOT, generator

Sources = dict[str, str]  # path below csrc -> text
Rule = Callable[[Sources], list[str]]

SOURCES: Sources = {
    path.relative_to(ROOT / "csrc").as_posix(): path.read_text()
    for path in sorted((ROOT / "csrc").rglob("*"))
    if path.suffix in (".h", ".cuh", ".cpp", ".cu")
}
NATIVE = {
    path.name: path.read_text()
    for path in sorted((ROOT / "tests/native").iterdir())
    if path.suffix in (".h", ".cpp")
}

# What breaks a rule and is known: rule -> path -> how many lines. Whoever repairs one lowers it.
STILL: dict[str, dict[str, int]] = {}


def code_of(text: str) -> list[str]:
    """The lines, without their comments and strings."""
    text = re.sub(
        r"/\*.*?\*/", lambda comment: "\n" * comment[0].count("\n"), text, flags=re.DOTALL
    )
    lines = (re.sub(r'"(?:[^"\\]|\\.)*"', '""', line) for line in text.split("\n"))
    return [line.partition("//")[0] for line in lines]


def lines_with(sources: Sources, pattern: str, owners: tuple[str, ...] = ()) -> list[str]:
    """Lines of code, outside their owners, in which the pattern is found."""
    return [
        f"{path}:{number}: {line.strip()}"
        for path, text in sources.items()
        if not path.startswith(owners)
        for number, line in enumerate(code_of(text), 1)
        if re.search(pattern, line)
    ]


def includes_of(text: str) -> list[tuple[int, str]]:
    """(line, file) of every quoted include."""
    return [
        (text.count("\n", 0, found.start()) + 1, found[1])
        for found in re.finditer(r'^#include "([^"]*)"', text, re.MULTILINE)
    ]


def is_header(path: str) -> bool:
    return path.endswith((".h", ".cuh"))


def folder(path: str) -> str:
    return PurePosixPath(path).parent.as_posix()


def room_of(path: str) -> str:
    """The folder of a header, which those inside it belong to: cuda/attention."""
    return "/".join(folder(path).split("/")[:2])


def reached(sources: Sources, path: str) -> dict[str, str]:
    """Every header that this file includes, directly or not -> who includes it."""
    found: dict[str, str] = {}
    todo = [path]
    while todo:
        here = todo.pop()
        for _, header in includes_of(sources.get(here, "")):
            if header not in found:
                found[header] = here
                todo.append(header)
    return found


# ---- includes


def rooted(sources: Sources) -> list[str]:
    """An include names a header from csrc on, and never climbs."""
    return [
        f'{path}:{line}: #include "{header}"'
        for path, text in sources.items()
        for line, header in includes_of(text)
        if header not in sources or not is_header(header)
    ]


def acyclic(sources: Sources) -> list[str]:
    """No header includes itself, through whatever others."""
    return [path for path in sources if path in reached(sources, path)]


# What the headers of a folder may include beside their own folder's; their own folders stand in
# front of them. Sources (.cu, .cpp) may include every header of their device.
BELOW = {
    "cuda/common": [],
    "cuda/codec": ["cuda/common"],
    "cuda/score": ["cuda/codec", "cuda/common"],
    "cuda/attention": ["cuda/codec", "cuda/common"],
    "cuda/mla": ["cuda/attention", "cuda/codec", "cuda/common"],
    "cuda/linear": ["cuda/attention", "cuda/codec", "cuda/common"],
    "cuda/mass": ["cuda/attention", "cuda/codec", "cuda/common"],
}


def layered(sources: Sources) -> list[str]:
    """Headers include the layers below them only, and devices do not know each other."""
    offences = []
    for path, text in sources.items():
        device = path.partition("/")[0]
        for line, header in includes_of(text):
            other = header.partition("/")[0]
            where = f'{path}:{line}: #include "{header}"'
            if other in ("cpu", "cuda") and other != device:
                offences.append(where)
            elif other == "cuda" and is_header(path):
                below = next((b for room, b in BELOW.items() if inside(path, room)), [])
                rooms = [*below, *(room for room in BELOW if inside(path, room))]
                if not any(inside(header, room) for room in rooms):
                    offences.append(where)
    return offences


def inside(path: str, room: str) -> bool:
    return path.startswith(f"{room}/")


def folders_acyclic(sources: Sources) -> list[str]:
    """No two folders whose headers include each other's, through whatever other folders."""
    above: dict[str, set[str]] = {}
    for path, text in sources.items():
        if is_header(path):
            theirs = {room_of(header) for _, header in includes_of(text)}
            above.setdefault(room_of(path), set()).update(theirs - {room_of(path)})
    offences = []
    for start in above:
        seen: set[str] = set()
        todo = [start]
        while todo:
            for other in above.get(todo.pop(), ()):
                if other not in seen:
                    seen.add(other)
                    todo.append(other)
        if start in seen:
            offences.append(start)
    return offences


def kernels_know_no_torch(sources: Sources) -> list[str]:
    """A header with device code reaches no header of torch."""
    of_torch = re.compile(r"^#include <(?:torch|ATen|c10)/", re.MULTILINE)
    offences = []
    for path, text in sources.items():
        if not is_header(path) or not re.search(r"__(device|global)__", "\n".join(code_of(text))):
            continue
        chain = {**reached(sources, path), path: ""}
        offences += [
            f"{path} reaches torch through {header}"
            for header in chain
            if of_torch.search(sources.get(header, ""))
        ]
    return offences


# ---- one owner of the format


def record_addresses(sources: Sources) -> list[str]:
    """Only the format multiplies by the bytes of a record or numbers the vectors of a tail."""
    product = r"\+ *[\w.>-]*head\w*[)}] *\* *[\w.>()-]*\b(record_bytes|tile_bytes)\b"
    number = r"\bpage(_|_size)?\)? *\* *[\w.>-]*kv_heads\b"
    tail = r"- *[\w.]*sink_tokens\w*\)? *% *[\w.]*ring"
    return lines_with(sources, f"{product}|{number}|{tail}", ("format.h",))


def value_blocks(sources: Sources) -> list[str]:
    """Only the format knows the 384 bytes of a set of spread codes and the 512 of a chunk."""
    literal = (
        r"\b384\b|\b512 *\* *(chunk|unit|set|group|part)|(chunk|unit|set|group|part)s? *\* *512\b"
    )
    return lines_with(sources, literal, ("format.h",))


WIDTH = r"(?:\w+_)?(?:bits|BITS)_?(?:\(\))?|k\w*Bits"


def widths(sources: Sources) -> list[str]:
    """A width is asked for its traits (format::Width), never compared with a number.

    Zero is no width: it says that there are no codes. The ops pack and group have widths of their
    own: every number of bits up to 8, and the 2 and 4 bits of groups.
    """
    compared = rf"(?<![\w.])(?:[\w.]+(?:\.|->))?(?:{WIDTH}) *(?:[=!<>]=| [<>]) *[1-9]\b"
    owners = ("format.h", "checks.h", "cuda/pack.cu", "cpu/kernels/pack.h", "cuda/group.cu")
    return lines_with(sources, rf"{compared}|\b[1-9] *(?:[=!<>]=) *(?:{WIDTH})\b", owners)


def scale_modes(sources: Sources) -> list[str]:
    """A scale mode is one of format::ScaleMode, never a number."""
    return lines_with(sources, r"\w*(?:mode|MODE)_? *[=!]= *\d", ("format.h",))


# ---- names


def rooms(ops: str) -> dict[str, list[str]]:
    """csrc/ops.cpp: room -> names of its ops."""
    found: dict[str, list[str]] = {}
    for line in ops.split("\n"):
        if title := re.match(r" *// -- (\w+): ", line):
            found[title[1]] = []
        elif op := re.match(r' *m\.def\("(\w+)\(', line):
            found[list(found)[-1]].append(op[1])
    return found


def every_floor(sources: Sources) -> list[str]:
    """A room of csrc/ops.cpp has a file of its name on both devices. Its ops are registered there,
    or in the room's folder."""
    found = rooms(sources["ops.cpp"])
    offences = [
        f"{path} is missing"
        for room in found
        for path in (f"cpu/{room}.cpp", f"cuda/{room}.cu")
        if path not in sources
    ]
    for device in ("cpu", "cuda"):
        folders = (device, *(f"{device}/{room}" for room in found))
        texts = [text for path, text in sources.items() if folder(path) in folders]
        offences += [
            f"csrc/{device} does not register {op}"
            for op in chain.from_iterable(found.values())
            if not any(f'"{op}"' in text for text in texts)
        ]
    return offences


def decode_is_the_codecs(sources: Sources) -> list[str]:
    """`decode` is the codec's op: codes to vectors, or to weights. A model does a decode *step*."""
    named = r"\b(?:class|struct) \w*Decod\w*|\b(?:attend|attention)_decode\w*|\bdecode_attention\w*"
    owners = ("choices/codec", "cpu/kernels", "cpu/record.h")  # cpu/kernels lists the codec's
    rooms = ("codec", "group", "linear")
    owners += tuple(f"{part}/{room}" for part in ("calls", "cpu", "cuda") for room in rooms)
    files = [path for path in sources if "decode" in path and not path.startswith(owners)]
    return files + lines_with(sources, named, owners)


def short_comments(sources: Sources) -> list[str]:
    """A line of comment ends within 120 columns."""
    return [
        f"{path}:{number}: {len(line)} columns"
        for path, text in sources.items()
        for number, line in enumerate(text.split("\n"), 1)
        if len(line) > 120 and line.lstrip().startswith(("//", "*", "/*"))
    ]


def words_of_the_glossary(sources: Sources) -> list[str]:
    """The channels beside a latent are raw channels, also in comments."""
    return [
        f"{path}:{number}: {line.strip()}"
        for path, text in sources.items()
        for number, line in enumerate(text.split("\n"), 1)
        if re.search(r"\brotary\b", line, re.IGNORECASE)
    ]


# ---- the rules hold, and can fail

OPS = '// -- hadamard: a transform\nm.def("hadamard(Tensor x) -> Tensor");\n'
BROKEN: list[tuple[Rule, Sources]] = [
    (rooted, {"cuda/codec/a.cuh": "", "cuda/codec/b.cuh": '#include "a.cuh"\n'}),
    (rooted, {"format.h": "", "cuda/b.cu": '#include "../format.h"\n'}),
    (rooted, {"cuda/a.cu": "", "cuda/b.cu": '#include "cuda/a.cu"\n'}),
    (acyclic, {"a.h": '#include "b.h"\n', "b.h": '#include "c.h"\n', "c.h": '#include "a.h"\n'}),
    (
        layered,
        {"cuda/codec/a.cuh": '#include "cuda/attention/b.cuh"\n', "cuda/attention/b.cuh": ""},
    ),
    (layered, {"cuda/common/a.cuh": '#include "cuda/codec/b.cuh"\n', "cuda/codec/b.cuh": ""}),
    (layered, {"cuda/attention/x/a.cuh": '#include "cuda/score/b.cuh"\n', "cuda/score/b.cuh": ""}),
    (layered, {"cpu/a.cpp": '#include "cuda/common/b.cuh"\n', "cuda/common/b.cuh": ""}),
    (layered, {"format.h": '#include "cpu/a.h"\n', "cpu/a.h": ""}),
    (
        folders_acyclic,
        {
            "a/x.h": '#include "b/x.h"\n',
            "b/x.h": '#include "c/x.h"\n',
            "c/x.h": '#include "a/y.h"\n',
        },
    ),
    (
        kernels_know_no_torch,
        {
            "cuda/codec/a.cuh": '#include "cuda/common/b.cuh"\n__device__ void f();\n',
            "cuda/common/b.cuh": '#include "c.h"\n',
            "c.h": "#include <torch/csrc/stable/tensor.h>\n",
        },
    ),
    (kernels_know_no_torch, {"a.cuh": "#include <c10/x.h>\n__global__ void f();\n"}),
    (record_addresses, {"a.cu": "  return pages + (page * kv_heads + head) * r.record_bytes();"}),
    (
        record_addresses,
        {"a.cu": "data + uint64_t{uint32_t(page) * kv_heads + head} * r.record_bytes;"},
    ),
    (record_addresses, {"a.cu": "return (page * a.kv_heads + head) * layout.record_bytes / 16;"}),
    (record_addresses, {"a.cu": "row = sink_tokens + (position - sink_tokens) % ring;"}),
    (value_blocks, {"a.cu": "const int at = block + 384 * set;"}),
    (value_blocks, {"a.cu": "const int at = block + 512 * chunk;"}),
    (widths, {"a.cu": "if constexpr (BITS == 5) planes();"}),
    (widths, {"a.cu": "if (call.key_bits <= 4) nibbles();"}),
    (widths, {"a.cu": "x = bits_ != 8 ? table[i] : i;"}),
    (widths, {"a.cu": "static_assert(kKeyBits < 8);"}),
    (widths, {"a.cu": "if (r.value_bits() == 3) spread();"}),
    (scale_modes, {"a.cu": "if (mode == 2) mse();"}),
    (scale_modes, {"a.cu": "if (a.scale_mode != 0) fit();"}),
    (every_floor, {"ops.cpp": OPS, "cpu/hadamard.cpp": 'm.impl("hadamard", f);'}),
    (
        every_floor,
        {"ops.cpp": OPS, "cpu/hadamard.cpp": "", "cuda/hadamard.cu": 'm.impl("hadamard")'},
    ),
    (decode_is_the_codecs, {"cuda/attention/decode.cu": ""}),
    (decode_is_the_codecs, {"cuda/attention/a.cu": "class DecodeBlock {"}),
    (decode_is_the_codecs, {"cuda/attention/a.cu": "bool attend_decode(const Call& call);"}),
    (short_comments, {"a.h": "  // " + "x" * 120}),
    (words_of_the_glossary, {"cuda/mla/a.cuh": "// latent and rotary channels"}),
]
RULES = list(dict.fromkeys(rule for rule, _ in BROKEN))


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_the_rule_holds(rule):
    offences = rule({**SOURCES, **NATIVE} if rule is rooted else SOURCES)
    found = dict(Counter(offence.partition(":")[0] for offence in offences))
    known = STILL.get(rule.__name__, {})
    new = [line for line in offences if line.partition(":")[0] not in known]
    assert found == known, "\n".join(
        [f"{rule.__doc__} Found {found}, but STILL says {known}", *new]
    )


@pytest.mark.parametrize(
    ("rule", "sources"), BROKEN, ids=[f"{rule.__name__}-{i}" for i, (rule, _) in enumerate(BROKEN)]
)
def test_the_rule_can_be_broken(rule, sources):
    assert rule(sources)


@pytest.mark.parametrize("line", [
    "int size = 5;  // bits == 5 in a comment",
    'STD_TORCH_CHECK(ok, "bits == 5 and mode == 2");',
    "const int rest = d % 64 / bits;",
    "for (int bit = 0; bit < 4; ++bit) word |= x << bit;",
    "dim3 blocks(pages * kv_heads), threads(512);",
    "record += r.record_bytes();",
])  # fmt: skip
def test_what_no_rule_minds(line):
    for rule in (record_addresses, value_blocks, widths, scale_modes, decode_is_the_codecs):
        assert not rule({"cuda/attention/a.cu": line}), rule.__name__


def test_the_rooms_stand_on_every_floor():
    """csrc is the matter of every_floor; here the Python module and the tests of each room."""
    found = rooms(SOURCES["ops.cpp"])
    assert len(found) >= 9 and all(found.values())
    for room in found:
        assert (ROOT / "torch_turboquant" / "ops" / f"{room}.py").exists(), room
        assert list((ROOT / "tests").glob(f"test_{room}*.py")), room


# ---- Tests

TINY = re.compile(r"test_(tiny|[a-z_]*any_address)")  # as in tests/sanitize_cuda.sh
Modules = dict[str, ast.Module]  # path below tests -> tree


def names_in(node: ast.AST) -> set[str]:
    """Those that stand alone, and those of the package: tt.pack."""
    found = {n.id for n in ast.walk(node) if isinstance(n, ast.Name)}
    return found | {
        f"tt.{n.attr}"
        for n in ast.walk(node)
        if isinstance(n, ast.Attribute) and ast.unparse(n.value) in ("tt", "tq")
    }


def definitions(tree: ast.Module) -> dict[str, set[str]]:
    """Functions, classes and constants of a module, with the names that they use."""
    found: dict[str, set[str]] = {}
    for node in tree.body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            found[node.name] = names_in(node)
        elif isinstance(node, ast.Assign):
            found |= {ast.unparse(target): names_in(node.value) for target in node.targets}
    return found


def names_of_tiny_tests(tests: Modules) -> set[str]:
    """What they use, through functions of their module and of those without tests, too."""
    shared: dict[str, set[str]] = {}
    for path, tree in tests.items():
        if not PurePosixPath(path).name.startswith("test_"):
            shared |= definitions(tree)
    used: set[str] = set()
    for path, tree in tests.items():
        if not PurePosixPath(path).name.startswith("test_"):
            continue
        own = definitions(tree)
        known = shared | own
        seen: set[str] = set()
        todo = [name for name in own if TINY.match(name)]
        while todo:
            new = known.get(todo.pop(), set()) - seen
            seen |= new
            todo += new
        used |= seen
    return used


def test_every_test_begins_with_the_same_seed():
    assert torch.equal(torch.rand(9), torch.rand(9, generator=generator(0)))


def test_every_op_is_in_a_tiny_test():
    """So that compute-sanitizer sees its kernels. `_out` has the kernels of the op without it."""
    tests = {
        path.relative_to(ROOT / "tests").as_posix(): ast.parse(path.read_text())
        for path in (ROOT / "tests").rglob("*.py")
    }
    ops = {f"tt.{op.removesuffix('_out')}" for op in chain(*rooms(SOURCES["ops.cpp"]).values())}
    assert len(ops) > 20
    assert not ops - names_of_tiny_tests(tests)
    modules = {
        "test_a.py": "def check(): tt.pack()\ndef test_tiny(): check()\ndef test(): tt.score()",
        "common.py": "CASES = [tt.encode]",
        "b/test_b.py": "def test_keys_at_any_address():\n    CASES[0](other.unpack)",
    }
    found = names_of_tiny_tests({path: ast.parse(text) for path, text in modules.items()})
    assert found == {"tt", "check", "tt.pack", "CASES", "tt.encode", "other"}


# ---- The package


def hiding(modules: set[str], exported: list[str]) -> list[str]:
    """Names under which a reader expects a module and finds a function."""
    return sorted(modules & set(exported))


def test_no_name_hides_its_module():
    package = ROOT / "torch_turboquant"
    modules = {path.stem for path in package.glob("*.py")}
    modules |= {path.parent.name for path in package.glob("*/__init__.py")}
    assert "pool" in modules and "config" in modules
    assert not hiding(modules, tq.__all__)
    assert hiding({"pack", "pool"}, ["pack", "unpack"]) == ["pack"]


def hidden_functions(source: str) -> list[str]:
    """Parameters with the name of a function of their module, which nobody can call there."""
    tree = ast.parse(source)
    functions = {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}
    return [
        f"{node.lineno}: {a.arg}"
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef)
        for a in [*node.args.args, *node.args.kwonlyargs]
        if a.arg in functions
    ]


def test_no_parameter_hides_a_function_of_its_module():
    found = {
        path.relative_to(ROOT).as_posix(): hidden_functions(path.read_text())
        for path in (ROOT / "torch_turboquant").rglob("*.py")
    }
    assert len(found) > 100 and not {path: lines for path, lines in found.items() if lines}
    assert hidden_functions("def size(): ...\ndef f(x, *, size=0): ...") == ["2: size"]


# Arguments that only paged_attention and store_and_attend have together.
ATTENTION_ARGUMENTS = ("block_table", "sink_logits", "sliding_window", "soft_cap", "softmax_scale")


def functions_with(source: str, names: tuple[str, ...]) -> list[str]:
    """Python functions that take all of these parameters."""
    return [
        node.name
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.FunctionDef)
        and set(names) <= {a.arg for a in [*node.args.args, *node.args.kwonlyargs]}
    ]


def test_the_arguments_of_attention_are_spelled_once():
    """In C++ by the struct that the schema fills; in Python by the two public functions."""
    structs = [path for path, text in SOURCES.items() if "OptionalTensor sink_logits" in text]
    assert structs == ["calls/attention.h"]
    assert SOURCES["calls/attention.h"].count("OptionalTensor sink_logits") == 1
    found = {
        path.relative_to(ROOT).as_posix(): functions_with(path.read_text(), ATTENTION_ARGUMENTS)
        for path in (ROOT / "torch_turboquant").rglob("*.py")
    }
    assert {path: names for path, names in found.items() if names} == {
        "torch_turboquant/ops/attention.py": ["paged_attention", "store_and_attend"]
    }
    other = (
        "def again(q, block_table, softmax_scale, sliding_window, soft_cap, *, sink_logits): ..."
    )
    assert functions_with(other, ATTENTION_ARGUMENTS) == ["again"]


def test_pins_agree():
    """A package that two files of requirements name has one version.

    Environments of serving engines are apart, because these need older versions of some packages.
    """
    apart = {
        "vllm.txt": {"transformers", "huggingface_hub"},
        "sglang.txt": {"transformers", "huggingface_hub", "tokenizers"},
    }
    versions: dict[str, set[str]] = {}
    for path in (ROOT / "requirements").glob("*.txt"):
        for name, version in re.findall(r"^([\w.-]+)==(\S+)$", path.read_text(), re.MULTILINE):
            if name not in apart.get(path.name, ()):
                versions.setdefault(name.lower(), set()).add(version)
    assert len(versions) > 60
    assert not {name: found for name, found in versions.items() if len(found) > 1}
