"""What a checkpoint holds: weights and state bit for bit, in files of which nothing is unpickled."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from core import checkpoint, state
from core.checkpoint import OnMain
from core.device import Device
from core.errors import UserError
from core.gaudi_config import GaudiConfig
from core.strategies import Replicated
from tests.core import toy
from tests.core.saved import save

CPU = Device("cpu", "cpu", "eager", torch.device("cpu"))


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(7, 4)
        self.head = nn.Linear(4, 7, bias=False)
        self.head.weight = self.embedding.weight
        self.register_buffer("view", torch.arange(1000.0)[:3])


def test_tied_weights_are_written_once_and_stay_tied(tmp_path: Path) -> None:
    model, other = Tied(), Tied()
    state.save_model(model, tmp_path)
    assert (tmp_path / "model.safetensors").stat().st_size < 1000  # the view's own three numbers, not its base
    state.load_model(other, tmp_path)
    assert torch.equal(other.head.weight, model.embedding.weight)
    assert other.head.weight.data_ptr() == other.embedding.weight.data_ptr()
    with torch.no_grad():
        other.embedding.weight.add_(1)
    assert torch.equal(other.head.weight, other.embedding.weight)


def test_equal_but_untied_weights_stay_apart(tmp_path: Path) -> None:
    model = nn.ModuleDict({"a": nn.Linear(3, 3), "b": nn.Linear(3, 3)})
    model["b"].load_state_dict(model["a"].state_dict())
    state.save_model(model, tmp_path)
    with torch.no_grad():
        model["a"].weight.zero_()
    state.load_model(model, tmp_path)
    assert torch.equal(model["a"].weight, model["b"].weight)
    assert model["a"].weight.data_ptr() != model["b"].weight.data_ptr()


def test_a_published_model_has_the_names_that_the_hub_knows(tmp_path: Path) -> None:
    """ViT's layers are called otherwise in memory; an older library would take other names for missing weights."""
    from transformers import ViTConfig, ViTModel

    sizes = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1}
    model = ViTModel(ViTConfig(image_size=8, patch_size=4, **sizes))
    state.save_model(model, tmp_path / "published", publish=True)
    assert "encoder.layer.0.layernorm_after.weight" in load_file(tmp_path / "published" / "model.safetensors")
    loaded = ViTModel.from_pretrained(tmp_path / "published").state_dict()
    assert all(torch.equal(weight, loaded[name]) for name, weight in model.state_dict().items())
    state.save_model(model, tmp_path / "checkpoint")
    assert load_file(tmp_path / "checkpoint" / "model.safetensors").keys() == model.state_dict().keys()


@pytest.mark.parametrize("other", [nn.Linear(3, 4), nn.Sequential(nn.Linear(3, 3)), nn.Linear(3, 3, bias=False)])
def test_weights_of_another_model_are_refused(tmp_path: Path, other: nn.Module) -> None:
    state.save_model(nn.Linear(3, 3), tmp_path)
    with pytest.raises(UserError, match="another model"):
        state.load_model(other, tmp_path)


class Training:
    """A model, the strategy of one device and a schedule, some steps on."""

    def __init__(self, steps: int = 0) -> None:
        torch.manual_seed(0)
        self.model = nn.Linear(3, 2)
        args = toy.arguments(Path("unused"), "--learning_rate", "0.01")
        self.strategy = Replicated(self.model, args, GaudiConfig(), CPU)
        self.schedule = torch.optim.lr_scheduler.LambdaLR(self.strategy.optimizer, lambda step: 1 / (1 + step))
        for _ in range(steps):
            self.strategy.backward(self.model(torch.ones(1, 3)).square().sum(), torch.tensor(1.0))
            self.strategy.step()
            self.schedule.step()

    def write(self, main: OnMain, folder: Path) -> None:
        main(state.save_model, self.model, folder)
        progress = {"step": 1, "value": 0.1 + 0.2}
        state.save_training(folder, self.strategy, self.schedule, CPU, progress, 0.3, main)

    def load(self, folder: Path) -> tuple[dict, list]:
        state.load_model(self.model, folder, self.strategy.put)
        return state.load_training(folder, self.strategy, self.schedule, CPU)

    def all_state(self) -> dict[str, list]:
        return {name: tensor.tolist() for name, tensor in self.strategy.named_state()}


def test_no_file_of_a_checkpoint_needs_unpickling(tmp_path: Path) -> None:
    """Every state file is JSON or safetensors, and reads with nothing else."""
    first, second = Training(2), Training()
    folder = save(tmp_path, 2, first.write)
    for path in folder.iterdir():
        assert path.suffix in (".json", ".safetensors")
        json.loads(path.read_text()) if path.suffix == ".json" else dict(state.TensorFiles(path))
    drawn = torch.rand(4)
    assert second.load(folder) == ({"step": 1, "value": 0.1 + 0.2}, [0.3])
    assert torch.equal(torch.rand(4), drawn)
    assert torch.equal(second.model.weight, first.model.weight)
    assert second.all_state() == first.all_state() != {}
    assert second.schedule.get_last_lr() == pytest.approx([0.01 / 3] * 2) == first.schedule.get_last_lr()


def test_a_checkpoint_of_the_release_before_still_loads(tmp_path: Path) -> None:
    """It has one rank's generators in state.json, and no rank's own number."""
    first, second = Training(2), Training()

    def write(main: OnMain, folder: Path) -> None:
        first.write(main, folder)
        content = json.loads((folder / "state.json").read_text())
        del content["training"]["own"]
        (folder / "state.json").write_text(json.dumps(content))

    folder = save(tmp_path, 2, write)
    assert json.loads((folder / checkpoint.MARKER).read_text())["format"] == 1
    drawn = torch.rand(4)
    assert checkpoint.find("auto", tmp_path) == folder
    assert second.load(folder) == ({"step": 1, "value": 0.1 + 0.2}, [])
    assert torch.equal(torch.rand(4), drawn)
    assert second.all_state() == first.all_state()


def test_copies_that_somebody_keeps_in_a_checkpoint_are_not_read(tmp_path: Path) -> None:
    """Their names sort after the checkpoint's own."""
    old, first, second = Training(1), Training(2), Training()
    folder, other = save(tmp_path, 2, first.write), save(tmp_path / "old", 1, old.write)
    for name in ("model", "optimizer"):
        shutil.copy(other / f"{name}.safetensors", folder / f"{name}_old.safetensors")
    (folder / "model_mine.safetensors").write_text("not tensors")
    second.load(folder)
    assert torch.equal(second.model.weight, first.model.weight)
    assert second.all_state() == first.all_state() != old.all_state()
    marker = folder / checkpoint.MARKER
    content = json.loads(marker.read_text())
    del content["files"]["model.safetensors"]
    marker.write_text(json.dumps(content))
    with pytest.raises(UserError, match="holds no such file"):
        second.load(folder)


def test_generators_that_somebody_put_beside_a_checkpoint_are_not_another_ranks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on the second of two ranks, of which each keeps the generators that it has."""
    folder, second = save(tmp_path, 2, Training(2).write), Training()
    (folder / "rank-1.json").write_text('{"python_random": "mine"}')
    for name, value in {"RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    second.load(folder)


class Configured(nn.Linear):
    """Writes a configuration and its weights, as models of transformers do, if there is room."""

    room = True

    def save_pretrained(self, folder: Path, state_dict: dict | None, save_original_format: bool) -> None:
        (folder / "config.json").write_text("{}")
        save_file(self.state_dict(), folder / "model.safetensors")
        if not self.room:
            raise OSError("No space left on device")


def test_a_model_is_written_whole_or_not_at_all_and_for_others_to_read(tmp_path: Path) -> None:
    """What was there stays."""
    (tmp_path / "mine.json").write_text("{}")
    model = Configured(2, 2)
    model.room = False
    with pytest.raises(OSError, match="No space"):
        state.save_model(model, tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["mine.json"]
    model.room = True
    for written in (model, nn.Linear(2, 2)):
        state.save_model(written, tmp_path)
        modes = [path.stat().st_mode for path in (tmp_path / "model.safetensors", tmp_path / "mine.json")]
        assert modes[0] == modes[1]
    state.write_weights(model.state_dict(), tmp_path, "adapter_model.safetensors")
    assert (tmp_path / "adapter_model.safetensors").stat().st_mode == modes[1]


def test_state_beyond_one_file_goes_into_more(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tensors of 40 bytes, files of 100: two in each; one tensor alone may be larger than a file."""
    monkeypatch.setattr(state, "FILE_BYTES", 100)
    tensors = {f"t{number}": torch.arange(10.0) + number for number in range(5)} | {"large": torch.zeros(50)}
    main = OnMain()
    state.save_each(tensors.items(), tmp_path, "optimizer", main)
    main.agree()
    paths = sorted(tmp_path.iterdir())
    assert [path.name for path in paths] == ["optimizer-1.safetensors", "optimizer-2.safetensors",
                                             "optimizer-3.safetensors", "optimizer.safetensors"]  # fmt: skip
    found = state.TensorFiles(*paths)
    assert found.keys() == tensors.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in tensors.items())


def test_state_of_several_files_is_put_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(state, "FILE_BYTES", 30)
    first, second = Training(2), Training()
    folder = save(tmp_path, 2, first.write)
    assert len(list(folder.glob("optimizer*.safetensors"))) > 2
    second.load(folder)
    assert second.all_state() == first.all_state()


def test_nothing_is_written_after_a_failure_but_all_is_read(tmp_path: Path) -> None:
    """Ranks gather together: what is read from the others must be read by all, even if it goes nowhere."""
    main, read = OnMain(), []
    main((tmp_path / "absent" / "file").write_text, "")

    def tensors():
        for number in range(3):
            read.append(number)
            yield f"t{number}", torch.zeros(2)

    state.save_each(tensors(), tmp_path, "optimizer", main)
    assert read == [0, 1, 2]
    assert not list(tmp_path.iterdir())
    with pytest.raises(UserError, match=r"checkpoint: .*No such file"):
        main.agree("checkpoint: {}")


def test_a_file_that_is_no_safetensors_is_named(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_text("not tensors")
    with pytest.raises(UserError, match=r"model\.safetensors cannot be read"):
        state.load_model(nn.Linear(2, 2), tmp_path)
    with pytest.raises(UserError, match="holds no such file"):
        state.load_model(nn.Linear(2, 2), tmp_path / "absent")


def unet_of(pipeline: Path) -> nn.Module:
    from diffusers import UNet2DConditionModel

    return UNet2DConditionModel.from_pretrained(pipeline / "unet")


def test_a_model_of_diffusers_is_saved_and_put_back(tiny_sd: Path, tmp_path: Path) -> None:
    """In a checkpoint under our name, with the weights that are given; published as its own library writes it."""
    model, other = unet_of(tiny_sd), unet_of(tiny_sd)
    changed = {name: tensor + 1 for name, tensor in model.state_dict().items()}
    state.save_model(model, tmp_path / "own")
    state.save_model(model, tmp_path / "given", changed)
    assert {path.name for path in (tmp_path / "given").iterdir()} == {"config.json", "model.safetensors"}
    for folder, expected in (("given", changed), ("own", model.state_dict())):
        state.load_model(other, tmp_path / folder)
        assert all(torch.equal(tensor, expected[name]) for name, tensor in other.state_dict().items())
    state.save_model(model, tmp_path / "published", changed, publish=True)
    model.save_pretrained(tmp_path / "peer")
    names = {path.name for path in (tmp_path / "published").iterdir()}
    assert names == {path.name for path in (tmp_path / "peer").iterdir()}
    loaded = type(model).from_pretrained(tmp_path / "published").state_dict()
    assert loaded.keys() == changed.keys()
    assert all(torch.equal(tensor, changed[name]) for name, tensor in loaded.items())


@pytest.mark.parametrize("publish", [True, False])
def test_weights_beyond_one_file_have_an_index(
    tiny_sd: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, publish: bool
) -> None:
    monkeypatch.setattr(state, "SHARD", "40KB")
    model = unet_of(tiny_sd)
    with torch.no_grad():
        next(model.parameters()).add_(1)
    state.save_model(model, tmp_path, publish=publish)
    assert len(list(tmp_path.glob("*.safetensors"))) > 2
    assert len(list(tmp_path.glob("*.safetensors.index.json"))) == 1
    other = unet_of(tiny_sd)
    if publish:
        other = type(model).from_pretrained(tmp_path)
    else:
        state.load_model(other, tmp_path)
    assert all(torch.equal(tensor, other.state_dict()[name]) for name, tensor in model.state_dict().items())


def test_other_values_take_their_parameters_places_under_all_names() -> None:
    """A tied weight has a second name, under which its old value must not come back."""
    model = Tied()
    average = {"embedding.weight": torch.full((7, 4), 2.0)}
    found = state.with_others(model, None, average)
    assert found.keys() == {"embedding.weight", "view"}
    assert torch.equal(found["embedding.weight"], average["embedding.weight"])
    gathered = {"embedding.weight": torch.zeros(7, 4), "view": torch.ones(3)}
    assert state.with_others(model, gathered, average).keys() == gathered.keys()
    assert not gathered["embedding.weight"].any()
