from __future__ import annotations

import shutil
from pathlib import Path
from types import SimpleNamespace

import huggingface_hub
import pytest
import transformers

from hotsplit.engines.transformers.resolve import load_tokenizer, model_class, model_folder
from hotsplit.errors import CheckpointError, UnsupportedEngineError

pytestmark = pytest.mark.transformers


@pytest.fixture
def hub(monkeypatch):
    """Hub ids that were asked for; every one lies in /cache."""
    asked = []

    def download(name, **_):
        asked.append(name)
        return f"/cache/{name}"

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    return asked


@pytest.mark.parametrize("name", ["model", "./org/name", "../org/name", "/org/name", "~/name", "a/b/c"])
def test_what_looks_like_a_path_is_never_asked_of_the_hub(hub, name):
    assert Path(name).expanduser() == model_folder(name)
    assert [] == hub


def test_an_id_is_fetched_from_the_hub(hub):
    assert Path("/cache/org/name") == model_folder("org/name")
    assert ["org/name"] == hub


def test_a_folder_that_looks_like_an_id_is_taken_as_it_is(hub, tmp_path, monkeypatch):
    (tmp_path / "org" / "name").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    assert Path("org/name") == model_folder("org/name")
    assert [] == hub


def test_a_home_folder_is_expanded(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    assert tmp_path / "model" == model_folder("~/model")


@pytest.mark.parametrize("name", ["no-such-org/no-such-model", "bad name/with blanks", "org/--"])
def test_what_the_hub_does_not_give_out_is_refused_by_name(name):
    with pytest.raises(CheckpointError, match="check the spelling, or download the model first") as caught:
        model_folder(name)
    assert str(caught.value).startswith(f"model {name}: got no such folder")


def test_a_network_that_fails_is_refused_too(monkeypatch):
    def fail(*_, **__):
        raise OSError("no route to host")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fail)
    with pytest.raises(CheckpointError, match="the hub does not give it out"):
        model_folder("org/name")


def test_the_bundled_tokenizer_loads(tiny_moe):
    assert "def f" == load_tokenizer(tiny_moe).decode(load_tokenizer(tiny_moe)("def f")["input_ids"])


@pytest.mark.parametrize(
    ("ignored", "reason"), [("tokenizer*", "no tokenizer files"), ("config.json", "no config.json")]
)
def test_a_folder_that_lacks_its_files_is_refused_by_what_is_missing(tiny_moe, tmp_path, ignored, reason):
    folder = shutil.copytree(tiny_moe, tmp_path / "model", ignore=shutil.ignore_patterns(ignored, "*.safetensors"))
    with pytest.raises(CheckpointError, match=reason):
        load_tokenizer(folder)


def test_a_folder_that_is_not_there_is_refused(tmp_path):
    with pytest.raises(CheckpointError, match="no such folder"):
        load_tokenizer(tmp_path / "gone")


@pytest.mark.parametrize("content", ["", "{", "[]", '{"version": "1.0"}', '{"model": {"type": "Odd"}}', "\xff"])
def test_a_tokenizer_that_cannot_be_read_is_refused_in_one_line(tiny_moe, tmp_path, content):
    folder = shutil.copytree(tiny_moe, tmp_path / "model", ignore=shutil.ignore_patterns("*.safetensors"))
    (folder / "tokenizer.json").write_bytes(content.encode("latin-1"))
    with pytest.raises(CheckpointError) as caught:
        load_tokenizer(folder)
    assert str(caught.value).startswith(f"tokenizer of {folder}: got ")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("content", "got"),
    [
        ("", "got nothing; wanted JSON"),
        ("{", "Expecting property name"),
        ("[]", "got list; wanted a JSON object"),
        ("\xff", "bytes that are no UTF-8"),
        ('{"model_type": "qwen3_moe", "hidden_size": "wide"}', "hidden_size"),
    ],
)
def test_a_config_that_cannot_be_read_is_not_blamed_on_the_tokenizer(tiny_moe, tmp_path, content, got):
    folder = shutil.copytree(tiny_moe, tmp_path / "model", ignore=shutil.ignore_patterns("*.safetensors"))
    (folder / "tokenizer_config.json").unlink(missing_ok=True)
    (folder / "config.json").write_bytes(content.encode("latin-1"))
    with pytest.raises(CheckpointError) as caught:
        load_tokenizer(folder)
    assert str(caught.value).startswith(f"model config {folder / 'config.json'}: got ")
    assert got in str(caught.value)
    assert "tokenizer" not in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_configurations_own_architecture_is_the_class():
    config = transformers.MixtralConfig(architectures=["NoSuchModel", "MixtralForCausalLM"])
    assert transformers.MixtralForCausalLM is model_class(config)


def test_without_architectures_the_causal_class_of_the_type_is_taken():
    assert transformers.Qwen3MoeForCausalLM is model_class(transformers.Qwen3MoeConfig())


def test_a_type_that_transformers_does_not_know_is_refused():
    config = SimpleNamespace(architectures=["NoSuchModel"], model_type="no_such_model")
    with pytest.raises(UnsupportedEngineError, match="model_type no_such_model: got architectures \\['NoSuchModel'\\]"):
        model_class(config)
