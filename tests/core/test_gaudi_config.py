"""The Gaudi configuration: strict keys, and the names it goes by."""

from __future__ import annotations

import json
from dataclasses import asdict, fields
from pathlib import Path

import pytest

from core import errors, gaudi_config
from core.errors import UserError
from core.gaudi_config import CONFIGS_DIR, FILE_NAME, REMOVED_KEYS, GaudiConfig


@pytest.fixture(autouse=True)
def _fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.setattr(errors, "_warned", set())


def write(folder: Path, content: object, name: str = FILE_NAME) -> Path:
    path = folder / name
    path.write_text(json.dumps(content), encoding="utf-8")
    return path


def test_no_configuration_means_the_defaults():
    config = GaudiConfig.from_pretrained(None)
    assert config == GaudiConfig()
    assert not any(asdict(config).values())


def test_a_saved_configuration_is_the_same_when_loaded(tmp_path):
    config = GaudiConfig(use_fused_adam=True, autocast_bf16_ops=["linear", "bmm"], autocast_fp32_ops=["softmax"])
    config.save_pretrained(tmp_path)
    assert GaudiConfig.from_pretrained(tmp_path) == config
    assert GaudiConfig.from_pretrained(str(tmp_path / FILE_NAME)) == config


@pytest.mark.parametrize("name", ["t5", "Habana/t5", "gaudi_configs/t5.json"])
def test_names_that_mean_a_shipped_file_from_any_folder(name, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert gaudi_config.find(name) == CONFIGS_DIR / "t5.json"
    assert GaudiConfig.from_pretrained(name).use_fused_adam
    said = "the published repository is not fetched" in capsys.readouterr().out
    assert said == (name == "Habana/t5"), "a published name is read from here, and that is said"


def test_published_names_have_hyphens(tmp_path, monkeypatch):
    monkeypatch.setattr(gaudi_config, "CONFIGS_DIR", tmp_path)
    path = write(tmp_path, {}, "stable_diffusion_2.json")
    assert gaudi_config.find("Habana/stable-diffusion-2") == path


@pytest.mark.parametrize(
    ("name", "family"),
    [
        ("gpt2", "gpt2"),
        ("roberta-base", "roberta"),
        ("roberta-large", "roberta"),
        ("bert-base-uncased", "bert"),
        ("bert-large-uncased-whole-word-masking", "bert"),
        ("llama", "llama"),
        ("falcon", "falcon"),
        ("stable-diffusion", "stable_diffusion"),
        ("stable-diffusion-2", "stable_diffusion_2"),
        ("stable-diffusion-xl-base", "stable_diffusion_xl"),
    ],
)
def test_a_published_name_means_its_family(name, family, capsys):
    assert gaudi_config.find(f"Habana/{name}") == CONFIGS_DIR / f"{family}.json"
    assert f"Habana/{name} is read from gaudi_configs/{family}.json" in capsys.readouterr().out
    if name.replace("-", "_") == family:
        assert gaudi_config.find(name) == gaudi_config.find(family) == CONFIGS_DIR / f"{family}.json"
    else:
        with pytest.raises(UserError, match="no configuration"):
            gaudi_config.find(name)


def test_of_two_families_the_longer_one_is_meant(tmp_path, monkeypatch):
    monkeypatch.setattr(gaudi_config, "CONFIGS_DIR", tmp_path)
    for name in ("stable", "stable_diffusion", "stable_diff"):
        write(tmp_path, {}, f"{name}.json")
    assert gaudi_config.find("Habana/stable-diffusion-2").stem == "stable_diffusion"


def test_a_path_that_exists_comes_before_a_shipped_name(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "t5").mkdir()
    write(tmp_path / "t5", {"use_dynamic_shapes": True})
    assert GaudiConfig.from_pretrained("t5") == GaudiConfig(use_dynamic_shapes=True)
    (tmp_path / "gpt2").mkdir()
    assert GaudiConfig.from_pretrained("gpt2").use_fused_adam, "the folder is a model's, and has no such file"
    write(tmp_path, {}, "my-config")
    assert GaudiConfig.from_pretrained("my-config") == GaudiConfig()


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("t55", "no configuration 't55' (did you mean 't5'?); give a JSON file or one of: bart, "),
        ("Habana/t55", "(did you mean 't5'?)"),
        ("Habana/t6", "no configuration 't6'"),
        ("zzzzz", "no configuration 'zzzzz'; give a JSON file or one of: bart, "),
        ("gaudi_configs/t55.json", "no configuration 'gaudi_configs/t55.json' (did you mean 't5'?)"),
        ("gone.json", "gone.json is not a file"),
        ("elsewhere/gaudi_configs/t5.json", "elsewhere/gaudi_configs/t5.json is not a file"),
        ("", "no configuration ''"),
        ("x" * 300, "no configuration 'xxx"),
    ],
)
def test_names_that_mean_nothing(name, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError) as error:
        GaudiConfig.from_pretrained(name)
    assert message in str(error.value)
    assert str(error.value).startswith("--gaudi_config: ")


def test_a_folder_without_the_file(tmp_path):
    with pytest.raises(UserError, match=r"gaudi_config\.json is not a file"):
        GaudiConfig.from_pretrained(tmp_path)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({"use_fused_adm": True}, "unknown key 'use_fused_adm' (did you mean 'use_fused_adam'?)"),
        ({"anything": True}, "unknown key 'anything'"),
        ({"use_fused_adam": "true"}, "'use_fused_adam' must be true or false, not 'true'"),
        ({"use_fused_adam": 1}, "'use_fused_adam' must be true or false, not 1"),
        ({"use_fused_adam": None}, "'use_fused_adam' must be true or false, not None"),
        ({"autocast_bf16_ops": "linear"}, "'autocast_bf16_ops' must be a list of operator names"),
        ({"autocast_fp32_ops": [1]}, "'autocast_fp32_ops' must be a list of operator names"),
        ({"autocast_fp32_ops": [""]}, "'autocast_fp32_ops' must be a list of operator names"),
        ([], "holds a JSON array"),
    ],
)
def test_bad_content_names_file_and_key(tmp_path, content, message):
    path = write(tmp_path, content)
    with pytest.raises(UserError) as error:
        GaudiConfig.from_pretrained(path)
    assert message in str(error.value)
    assert str(path) in str(error.value)


@pytest.mark.parametrize("key", REMOVED_KEYS)
def test_keys_of_older_guides_name_their_successor(tmp_path, key):
    with pytest.raises(UserError, match=f"{key!r} no longer exists; use {REMOVED_KEYS[key]!r}"):
        GaudiConfig.from_pretrained(write(tmp_path, {key: True}))
    assert REMOVED_KEYS[key] in {field.name for field in fields(GaudiConfig)}


def test_null_lists_are_the_bridges_own(tmp_path):
    path = write(tmp_path, {"autocast_bf16_ops": None, "autocast_fp32_ops": []})
    assert GaudiConfig.from_pretrained(path) == GaudiConfig(autocast_fp32_ops=[])


def test_a_configuration_is_not_changed_by_accident():
    with pytest.raises(AttributeError):
        GaudiConfig().use_fused_adam = True
