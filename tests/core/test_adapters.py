"""Adapters on small real models: their layers, files, merging and resume, on one device and on two real ranks."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from torch import nn
from transformers import AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

from core import adapters, optimizers, state
from core.errors import UserError
from core.export import export
from core.results import leftovers
from tests.core.programs import adapted
from tests.core.ranks import results, start_ranks
from tests.core.saved import save

KINDS = ("gpt2", "llama")
TOKENS = torch.arange(12).reshape(2, 6)


@pytest.fixture(scope="module")
def bases(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Two kinds of models of two layers: one with tied embeddings and weights stored as (in, out)."""
    torch.manual_seed(0)
    ends = {"bos_token_id": 1, "eos_token_id": 2}
    gpt2 = GPT2Config(vocab_size=32, n_positions=16, n_embd=16, n_layer=2, n_head=2, **ends)
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "max_position_embeddings": 16}
    llama = LlamaConfig(vocab_size=32, num_attention_heads=2, num_key_value_heads=1, **sizes)
    folder = tmp_path_factory.mktemp("bases")
    for model, name in ((GPT2LMHeadModel(gpt2), "gpt2"), (LlamaForCausalLM(llama), "llama")):
        model.save_pretrained(folder / name)
    return {name: folder / name for name in KINDS}


def load(folder: Path, dtype: torch.dtype = torch.float32) -> nn.Module:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval()


def adapt(model: nn.Module, rank: int = 3, alpha: float = 8, **changed: Any) -> nn.Module:
    """With an adapter that has been trained: its B is no longer zeros."""
    adapters.add_lora(model, rank, alpha, **{"dropout": 0.0, "targets": None, "seed": 1} | changed)
    generator = torch.Generator().manual_seed(2)
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data += torch.randn(parameter.shape, generator=generator) / 5
    return model.eval()


def logits(model: nn.Module) -> torch.Tensor:
    with torch.no_grad():
        return model(input_ids=TOKENS).logits.float()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", KINDS)
def test_only_adapters_are_trained_and_the_model_begins_as_it_was(
    bases: dict[str, Path], kind: str, dtype: torch.dtype
) -> None:
    model, plain = load(bases[kind], dtype), load(bases[kind], dtype)
    assert not adapters.has_adapters(model)
    adapters.add_lora(model, 4, 8, 0.1, None, seed=5)
    assert type(model) is type(plain)
    assert adapters.has_adapters(model.eval())
    assert torch.equal(logits(model), logits(plain))
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    assert list(trained) == adapters.names(model)
    assert {p.dtype for p in trained.values()} == {torch.float32}
    assert {p.dtype for p in model.parameters() if not p.requires_grad} == {dtype}
    assert sum(p.numel() for group in optimizers.parameter_groups(model, 0.1) for p in group["params"]) == sum(
        p.numel() for p in trained.values()
    )
    assert len(trained) == {"gpt2": 4, "llama": 8}[kind]


def test_the_draw_is_that_of_the_seed_and_takes_no_other_draw_away(bases: dict[str, Path]) -> None:
    """Ranks may have drawn different numbers before; dropout and data come after."""
    found = []
    for before, seed in ((3, 1), (7, 1), (7, 2)):
        model = load(bases["llama"])
        torch.manual_seed(before)
        adapters.add_lora(model, 2, 4, 0.0, ["o_proj"], seed)
        after = torch.rand(2)
        torch.manual_seed(before)
        assert torch.equal(torch.rand(2), after)
        found.append(torch.cat([p.flatten() for p in adapters.in_file(model).values()]))
    assert torch.equal(found[0], found[1])
    assert not torch.equal(found[0], found[2])


@pytest.mark.parametrize("kind", KINDS)
def test_gradients_reach_every_adapter_through_checkpointing(bases: dict[str, Path], kind: str) -> None:
    gradients = []
    for recomputed in (False, True):
        model = adapt(load(bases[kind])).train()
        if recomputed:
            model.gradient_checkpointing_enable()
        torch.manual_seed(0)  # of the model's own dropout
        model(input_ids=TOKENS, labels=TOKENS).loss.backward()
        gradients.append({name: p.grad for name, p in model.named_parameters() if p.grad is not None})
    assert list(gradients[1]) == adapters.names(model)
    for name, gradient in gradients[1].items():
        assert gradient.abs().max() > 0, name
        torch.testing.assert_close(gradient, gradients[0][name])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", KINDS)
def test_the_merged_model_is_a_plain_one(bases: dict[str, Path], tmp_path: Path, kind: str, dtype: torch.dtype) -> None:
    model, plain = (
        adapt(load(bases[kind], dtype), targets={"gpt2": ["c_attn", "c_proj"], "llama": None}[kind]),
        bases[kind],
    )
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    state.save_model(model, tmp_path, adapters.merged(model))
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    names = {path.name for path in tmp_path.iterdir()}
    assert names == {"config.json", "generation_config.json", "model.safetensors"}
    saved = load_file(tmp_path / "model.safetensors")
    assert saved.keys() == load_file(plain / "model.safetensors").keys()
    assert {tensor.dtype for tensor in saved.values()} == {dtype}
    found = AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    assert found.dtype == dtype
    tied = found.get_output_embeddings().weight.data_ptr() == found.get_input_embeddings().weight.data_ptr()
    assert tied == (kind == "gpt2")
    near = {torch.float32: 1e-5, torch.bfloat16: 0.02}[dtype]
    torch.testing.assert_close(logits(found), logits(model), atol=near, rtol=0)
    assert (logits(found) - logits(load(plain))).abs().max() > 0.1


def test_merging_takes_gathered_weights(bases: dict[str, Path]) -> None:
    """Those of the optimiser in fp32, and not what the module holds of them."""
    model = adapt(load(bases["gpt2"]))
    gathered = {name: tensor.clone() for name, tensor in model.named_parameters()}
    expected = {name: tensor.clone() for name, tensor in adapters.merged(model).items()}
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    found = adapters.merged(model, gathered)
    assert found.keys() | {"lm_head.weight"} == expected.keys()  # tied: a parameter has one name
    assert all(torch.equal(tensor, expected[name]) for name, tensor in found.items())


def write(model: nn.Module, folder: Path) -> Path:
    return save(folder, 1, lambda main, at: main(adapters.save, model, at))


@pytest.mark.parametrize("kind", KINDS)
def test_a_checkpoint_is_the_adapter_alone_as_peft_loads_it(bases: dict[str, Path], tmp_path: Path, kind: str) -> None:
    model = adapt(load(bases[kind]))
    folder = write(model, tmp_path)
    assert {path.name for path in folder.iterdir()} == {adapters.WEIGHTS, adapters.CONFIG, "checkpoint.json"}
    assert (folder / adapters.WEIGHTS).stat().st_size < (bases[kind] / "model.safetensors").stat().st_size / 2
    assert json.loads((folder / adapters.CONFIG).read_text())["base_model_name_or_path"] == str(bases[kind])
    found = PeftModel.from_pretrained(load(bases[kind]), folder).eval()
    assert torch.equal(logits(found), logits(model))


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_an_exported_adapter_loads(bases: dict[str, Path], tmp_path: Path, dtype: str) -> None:
    model = adapt(load(bases["llama"]))
    export(write(model, tmp_path), tmp_path / "out", dtype)
    assert {path.name for path in (tmp_path / "out").iterdir()} == {adapters.WEIGHTS, adapters.CONFIG}
    wanted = {"fp32": torch.float32, "bf16": torch.bfloat16}[dtype]
    assert {t.dtype for t in load_file(tmp_path / "out" / adapters.WEIGHTS).values()} == {wanted}
    found = PeftModel.from_pretrained(load(bases["llama"]), tmp_path / "out").eval()
    torch.testing.assert_close(logits(found), logits(model), atol={"fp32": 0.0, "bf16": 0.02}[dtype], rtol=0)


def test_an_adapter_is_put_back_bit_for_bit(bases: dict[str, Path], tmp_path: Path) -> None:
    model, other = adapt(load(bases["gpt2"])), load(bases["gpt2"])
    adapters.add_lora(other, 3, 8, 0.5, None, seed=9)
    state.load_model(other, write(model, tmp_path))
    assert torch.equal(logits(other.eval()), logits(model))


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        (None, "holds a LoRA adapter, not a whole model; give the LoRA flags"),
        ({"rank": 2}, "was made with LoRA's rank 3, not 2"),
        ({"alpha": 4}, "was made with LoRA's alpha 8, not 4"),
        ({"targets": ["q_proj"]}, r"is of another model: missing \[\], unknown \['base_model.model.model.layers.0"),
        ({"targets": ["q_proj", "k_proj"]}, r"is of another model: missing \['base_model.model.model.layers.0.*k_proj"),
        ({"targets": ["q_proj", "up_proj", "v_proj"]}, "is of another model: missing"),
    ],
)
def test_another_adapter_is_refused(
    bases: dict[str, Path], tmp_path: Path, changed: dict[str, Any] | None, message: str
) -> None:
    folder, model = write(adapt(load(bases["llama"])), tmp_path), load(bases["llama"])
    with pytest.raises(UserError, match=message):
        state.load_model(model if changed is None else adapt(model, **changed), folder)


def test_adapters_of_another_shape_are_refused(bases: dict[str, Path], tmp_path: Path) -> None:
    wider = LlamaForCausalLM(LlamaConfig.from_pretrained(bases["llama"], hidden_size=32))
    with pytest.raises(UserError, match=r"lora_A.weight is \[3, 32\] there, \[3, 16\] here"):
        state.load_model(adapt(load(bases["llama"])), write(adapt(wider), tmp_path))


def test_a_whole_checkpoint_is_refused_for_adapters(bases: dict[str, Path]) -> None:
    with pytest.raises(UserError, match="holds a whole model, not a LoRA adapter; leave out the LoRA flags"):
        state.load_model(adapt(load(bases["llama"])), bases["llama"])


def test_another_base_is_said(bases: dict[str, Path], tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder, model = write(adapt(load(bases["llama"])), tmp_path), load(bases["llama"])
    model.name_or_path = "another/model"
    state.load_model(adapt(model), folder)
    assert f"was trained on the model {bases['llama']}; this one is another/model" in caplog.text
    model = load(bases["llama"])
    model.name_or_path = model.config._name_or_path = ""
    state.load_model(adapt(model), folder)
    assert f"was trained on the model {bases['llama']}; this one is one built for it" in caplog.text


LLAMAS = "down_proj, gate_proj, k_proj, lm_head, o_proj, q_proj, up_proj, v_proj"


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"rank": 0}, "rank is 0; it must be 1 or more"),
        ({"alpha": 0.0}, "alpha is 0.0; it must be a positive number"),
        ({"alpha": float("nan")}, "alpha is nan; it must be a positive number"),
        ({"dropout": 1.0}, "dropout is 1.0; it must be 0 or more, below 1"),
        ({"targets": ["q_porj"]}, rf"no linear layer is named 'q_porj' \(did you mean 'q_proj'\?\).*: {LLAMAS}"),
        ({"targets": ["q_proj", "embed_tokens"]}, "no linear layer is named 'embed_tokens'"),
        ({"targets": ["self_attn"]}, "no linear layer is named 'self_attn'"),
    ],
)
def test_what_cannot_be_adapted_is_refused(bases: dict[str, Path], changed: dict[str, Any], message: str) -> None:
    model = load(bases["llama"])
    with pytest.raises(UserError, match=message) as error:
        adapters.add_lora(model, **{"rank": 2, "alpha": 4.0, "dropout": 0.0, "targets": None, "seed": 0} | changed)
    assert "\n" not in str(error.value)
    assert not adapters.has_adapters(model)


def test_a_model_that_peft_does_not_know_needs_names() -> None:
    model = nn.ModuleDict({"to_out": nn.Sequential(nn.Linear(2, 2)), "head": nn.Linear(2, 2)})
    with pytest.raises(UserError, match=r"peft names no layers of ModuleDict; name some of these: head, to_out\.0"):
        adapters.add_lora(model, 1, 1, 0.0, None, 0)
    adapters.add_lora(model, 1, 1, 0.0, ["to_out.0"], 0)
    assert [name.partition(".lora")[0] for name in adapters.names(model)] == ["to_out.0", "to_out.0"]


def test_a_tied_layer_is_refused(bases: dict[str, Path]) -> None:
    with pytest.raises(UserError, match=r"lm_head cannot be adapted, transformer\.wte and lm_head share one weight"):
        adapt(load(bases["gpt2"]), targets=["c_attn", "lm_head"])


def test_without_peft_there_is_a_hint(bases: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "peft", None)
    with pytest.raises(UserError, match="LoRA needs peft: pip install -U peft"):
        adapt(load(bases["llama"]))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("adapted")


@pytest.fixture(scope="module")
def one(folder: Path, bases: dict[str, Path]) -> dict[str, Any]:
    """One device without DeepSpeed, in this process."""
    return adapted.resumed([], folder / "one", bases["llama"])


def adapter(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "adapter" / adapters.WEIGHTS)


def test_a_run_leaves_the_merged_model_and_resumes_bit_for_bit(
    one: dict[str, Any], folder: Path, bases: dict[str, Path]
) -> None:
    straight, again = (folder / "one" / name / "final" for name in ("straight", "again"))
    assert one["again"] == one["losses"][2:]
    assert one["trained"] == "224"
    torch.testing.assert_close(adapter(again), adapter(straight), atol=0, rtol=0)
    assert not (straight / adapters.CONFIG).exists()
    assert {adapters.WEIGHTS, adapters.CONFIG} <= {path.name for path in leftovers(straight)}
    merged = AutoModelForCausalLM.from_pretrained(straight).eval()
    apart = PeftModel.from_pretrained(load(bases["llama"]), straight / "adapter").eval()
    torch.testing.assert_close(logits(merged), logits(apart), atol=1e-5, rtol=0)
    assert (logits(merged) - logits(load(bases["llama"]))).abs().max() > 1e-3
    saved = folder / "one" / "straight" / "checkpoint-2"
    assert not list(saved.glob("model*"))
    assert all(".lora_" in name for name in load_file(saved / "optimizer.safetensors"))


STRATEGIES = ("ddp", "fast_ddp", "zero2", "zero3", "zero3 bf16")


@pytest.fixture(scope="module")
def ranks(folder: Path, bases: dict[str, Path]) -> list[dict[str, Any]]:
    given = (str(folder), str(bases["llama"]), *STRATEGIES)
    return results(start_ranks(2, "adapted", *given, PYTHONWARNINGS="ignore"))


@pytest.mark.processes
@pytest.mark.parametrize("name", STRATEGIES)
def test_two_ranks_make_the_steps_of_one_and_resume_bit_for_bit(
    ranks: list[dict[str, Any]], one: dict[str, Any], folder: Path, bases: dict[str, Path], name: str
) -> None:
    straight, again = (folder / name / path / "final" for path in ("straight", "again"))
    for found in ranks:
        assert found[name]["again"] == found[name]["losses"][2:]
        assert found[name]["trained"] == one["trained"]
        assert found[name]["losses"] == pytest.approx(one["losses"], abs=0.005 if "bf16" in name else 1e-5)
    torch.testing.assert_close(adapter(again), adapter(straight), atol=0, rtol=0)
    assert {tensor.dtype for tensor in adapter(straight).values()} == {torch.float32}
    if "zero" in name:
        trained = sorted(adapters.names(adapt(load(bases["llama"]))))
        *checkpoints, final = ranks[0][name]["gathered"]
        assert checkpoints == [trained, trained]
        assert len(final) > len(trained)
        assert ranks[1][name]["gathered"] == [[], [], []]
    if "bf16" not in name:
        expected = folder / "one" / "straight" / "final"
        torch.testing.assert_close(adapter(straight), adapter(expected), atol=1e-5, rtol=0)
        whole, right = (load_file(path / "model.safetensors") for path in (straight, expected))
        torch.testing.assert_close(whole, right, atol=1e-5, rtol=0)


@pytest.mark.processes
def test_a_checkpoint_of_two_ranks_goes_on_on_one(
    ranks: list[dict[str, Any]], one: dict[str, Any], folder: Path, bases: dict[str, Path], tmp_path: Path
) -> None:
    flags = ["--resume_from_checkpoint", str(folder / "zero3" / "straight" / "checkpoint-2"), "--save_strategy", "no"]
    found = adapted.train(flags, tmp_path, bases["llama"])
    assert found["losses"] == pytest.approx(one["losses"][2:], abs=1e-5)


UNET = ["to_k", "to_q", "to_v", "to_out.0"]


def unet_of(pipeline: Path) -> nn.Module:
    from diffusers import UNet2DConditionModel

    return UNet2DConditionModel.from_pretrained(pipeline / "unet").eval()


def predicted(unet: nn.Module) -> torch.Tensor:
    generator = torch.Generator().manual_seed(3)
    latents, text = (torch.randn(2, *shape, generator=generator) for shape in ((4, 8, 8), (5, 16)))
    with torch.no_grad():
        return unet(latents, torch.tensor([3, 700]), text).sample


def test_a_unet_is_adapted_merged_and_put_back(tiny_sd: Path, tmp_path: Path) -> None:
    """Its configuration is another kind of object than those of transformers."""
    with pytest.raises(UserError, match="peft names no layers of UNet2DConditionModel; name some of these: "):
        adapters.add_lora(unet_of(tiny_sd), 3, 8, 0.0, None, 0)
    model, plain = adapt(unet_of(tiny_sd), targets=UNET), unet_of(tiny_sd)
    assert adapters.has_adapters(model)
    assert {name.partition(".lora")[0].rpartition("attn")[2][2:] for name in adapters.names(model)} == set(UNET)
    assert (predicted(model) - predicted(plain)).abs().max() > 0.01
    folder = write(model, tmp_path)
    assert json.loads((folder / adapters.CONFIG).read_text())["base_model_name_or_path"] == str(tiny_sd / "unet")
    other = unet_of(tiny_sd)
    adapters.add_lora(other, 3, 8, 0.5, UNET, seed=9)
    state.load_model(other, folder)
    assert torch.equal(predicted(other.eval()), predicted(model))
    with pytest.raises(UserError, match="holds a LoRA adapter, not a whole model"):
        state.load_model(plain, folder)
    state.save_model(model, tmp_path / "merged", adapters.merged(model), publish=True)
    merged = type(model).from_pretrained(tmp_path / "merged").eval()
    torch.testing.assert_close(predicted(merged), predicted(model), atol=1e-5, rtol=0)


@pytest.mark.parametrize("exported", [False, True])
def test_an_unmodified_pipeline_loads_the_adapter(tiny_sd: Path, tmp_path: Path, exported: bool) -> None:
    from diffusers import StableDiffusionPipeline

    model = adapt(unet_of(tiny_sd), rank=2, alpha=8, targets=UNET)
    folder = write(model, tmp_path)
    if exported:
        export(folder, tmp_path / "out", "bf16")
        folder = tmp_path / "out"
    pipe = StableDiffusionPipeline.from_pretrained(tiny_sd)
    pipe.load_lora_weights(folder)
    found = predicted(pipe.unet.eval())
    torch.testing.assert_close(found, predicted(model), atol=0.02 if exported else 0.0, rtol=0)
    assert torch.equal(found, predicted(model)) is not exported
    assert (found - predicted(unet_of(tiny_sd))).abs().max() > 0.1


def test_other_models_adapters_have_no_file_for_pipelines(bases: dict[str, Path], tmp_path: Path) -> None:
    folder = write(adapt(load(bases["llama"])), tmp_path)
    assert {path.name for path in folder.iterdir()} == {adapters.WEIGHTS, adapters.CONFIG, "checkpoint.json"}
