"""The recipe over several devices and on cards: the numbers and the images of one, and no step that waits for cards."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file

from tests.conftest import ANIMALS, REPOSITORY, load_recipe, save_pictures, write_jsonl
from tests.core.drawings import save_clip
from tests.recipes.devices import (
    QUIET,
    STRATEGIES,
    Plan,
    Ran,
    assert_same,
    assert_same_losses,
    assert_same_weights,
    assert_steady,
    at_size,
    made_once,
    own_lines,
    restored_environment,
    shared_folder,
)

pytestmark = pytest.mark.processes
STEPS, STOP = 4, 3  # two epochs of 16 and 4 rows; the checkpoint is one step into the second epoch
ROWS = {"train": 19, "validation": 7, "test": 3}  # and in each split one more, that cannot be read
PROMPTS = ["alpha", "beta 1", "be 2"]
AVERAGED = ["--use_ema", "--ema_decay", "0.8"]
DRAWN = ["--do_generate", "--prompts", *PROMPTS, "--batch_size", "2", "--num_inference_steps", "3"]
VIEWS = ["--resolution", "20", "--crop_resolution", "16", "--random_flip"]
PLAIN = [*VIEWS, *AVERAGED, *DRAWN, "--proportion_empty_prompts", "0.3", "--noise_offset", "0.1", "--snr_gamma", "5"]
PLAIN += ["--data_seed", "6"]  # the torn image is in the first step, and in the one after the checkpoint
PLAIN += ["--save_strategy", "steps", "--save_steps", str(STOP), "--eval_strategy", "steps", "--eval_steps", "2"]
SHOWN = ["--validation_prompt", "beta", "--num_validation_images", "3", "--validation_steps", "2"]
BUILT_IN = ["--autoencoder_steps", "2", "--max_train_samples", "20", "--max_eval_samples", "5", "--prompts", *PROMPTS]
BUILT_IN += ["--max_predict_samples", "3", "--num_images_per_prompt", "1", "--max_steps", "3"]
FEW = [*VIEWS, *DRAWN, "--max_train_samples", "3", "--max_eval_samples", "3", "--save_strategy", "steps"]
FEW += ["--save_steps", "1"]
RUNS = {  # the pipeline, None for the one that is built, and what else there is
    "plain": ("sd", PLAIN),
    "few": ("sd", FEW),
    "lora": ("sd", [*VIEWS, *AVERAGED, "--lora_rank", "2", "--lora_dropout", "0"]),
    "sdxl": ("sdxl", [*VIEWS, "--cache_latents"]),
    "built_in": (None, BUILT_IN),
}
REPLICATED = ("ddp", "fast_ddp", "zero2")
AT = {
    2: {"plain": REPLICATED, "few": ("zero3",), **dict.fromkeys(("lora", "sdxl", "built_in"), ("ddp",))},
    4: {"plain": ("ddp",), "few": ("fast_ddp",)},
}
FOUR = pytest.param("4/plain_ddp", marks=pytest.mark.slow)
IMAGES_OF = ["2/plain_ddp", "2/plain_fast_ddp", "2/plain_zero2", "2/few_zero3", "2/built_in_ddp", FOUR]
LATENTS = 4 * 4 * 8 * 8  # bytes of an image's
FILLED = {2: ("4", "2"), 4: ("2", "2")}  # micro-batches of which a short window leaves ranks nothing but filler
# On cards: one record, and epochs without news.
LONGER = ["--logging_steps", "1000", "--num_train_epochs", "6", "--eval_strategy", "no", "--save_strategy", "no"]
RECORDED = ["--distribution_strategy", "fast_ddp", "--use_hpu_graphs_for_training", "--use_hpu_graphs_for_inference"]
RECORDED += [*SHOWN, "--validation_steps", "1"]


class Drew(Ran):
    """What a run left: also images, and the weights of all that it has trained or built."""

    def weights(self) -> dict[str, torch.Tensor]:
        """Those that are published, the averages if there are any; and the last checkpoint's own."""
        kept = ("diffusion_pytorch_model", "adapter_model", "model", "ema")
        files = [path for path in self.folder.rglob("*.safetensors") if path.stem in kept]
        files = [path for path in files if not {"checkpoint-1", f"checkpoint-{STOP}"} & {*path.parts}]
        assert files
        loaded = {str(path.relative_to(self.folder)): load_file(path) for path in files}
        return {f"{path}: {name}": tensor for path, found in loaded.items() for name, tensor in found.items()}

    def images(self, name: str = "images/0*.png") -> list[np.ndarray]:
        return [np.asarray(Image.open(path)).astype(int) for path in sorted(self.folder.glob(name))]


def assert_same_images(run: Drew, expected: Drew, name: str = "images/0*.png") -> None:
    """Within one level of 255; and how well they fit their prompts."""
    mine, theirs = run.images(name), expected.images(name)
    assert len(mine) == len(theirs) > 0
    scores = [one.metrics.get("generate_clip_score") for one in (run, expected)]
    assert scores[0] == pytest.approx(scores[1], abs=0.05)
    assert np.abs(np.stack(mine) - np.stack(theirs)).max() <= 1


def of(runs: dict[str, Ran]) -> dict[str, Drew]:
    return {name: Drew(run.folder) for name, run in runs.items()}


def pairs_at(size: int) -> list[tuple[str, str]]:
    return [(kind, strategy) for kind, strategies in AT[size].items() for strategy in strategies]


def sizes(size: int) -> list[str]:
    """Flags of micro-batches whose windows have 16 rows at every size."""
    if size == 1:
        return at_size(size)
    batch, accumulation = FILLED[size]
    return ["--per_device_train_batch_size", batch, "--gradient_accumulation_steps", accumulation]


@pytest.fixture(scope="module")
def recipe() -> ModuleType:
    return load_recipe("text_to_image")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return shared_folder(tmp_path_factory, "text_to_image")


@pytest.fixture(scope="module")
def images(folder: Path) -> Path:
    """Three splits of images with one or two captions each; in each split there is one that cannot be read."""
    with made_once(folder / "data") as made:
        for seed, (split, count) in enumerate(() if made else ROWS.items()):
            path = save_pictures(folder / "data" / split, count, seed)
            whole = next(path.rglob("00.png"))
            whole.with_name("torn.png").write_bytes(whole.read_bytes()[: whole.stat().st_size // 2])
            files = sorted(file.relative_to(path) for file in path.rglob("*.*"))
            captions = [[f"alpha {ANIMALS.index(file.parent.name)}", file.parent.name] for file in files]
            rows = [{"file_name": str(file), "text": text} for file, text in zip(files, captions, strict=True)]
            write_jsonl(path / "metadata.jsonl", rows)
    return folder / "data"


@pytest.fixture(scope="module")
def flags(folder: Path, images: Path, tiny_sd: Path, tiny_sdxl: Path) -> dict[str, list[str]]:
    """Flags of each kind of run: it trains with large steps, evaluates and predicts."""
    models = {"sd": tiny_sd, "sdxl": tiny_sdxl}
    with made_once(folder / "clip") as made:
        if not made:
            save_clip(folder / "clip")
    score = ["--clip_model_name_or_path", str(folder / "clip")]
    folders = [word for split in ROWS for word in (f"--{split}_dir", str(images / split))]
    phases = ["--do_train", "--do_eval", "--do_predict", "--per_device_eval_batch_size", "3"]
    steps = ["--num_train_epochs", "2", "--learning_rate", "0.01", "--lr_scheduler_type", "cosine", "--warmup_steps"]
    steps += ["1", "--max_grad_norm", "1", "--adam_epsilon", "1e-4"]
    made = {}
    for kind, (model, how) in RUNS.items():
        named = ["--model_name_or_path", str(models[model]), *folders] if model else []
        made[kind] = [*named, *phases, *steps, *QUIET, *how, *(score if "--do_generate" in how else [])]
    return made


@pytest.fixture(scope="module")
def alone(recipe: ModuleType, flags: dict[str, list[str]], folder: Path) -> dict[str, Drew]:
    """One process, in this one."""
    runs = {**flags, "shown": [*flags["plain"], *SHOWN]}
    runs["longer"] = [*flags["plain"], *LONGER]
    here = folder / "alone"
    with made_once(here) as made:
        for name, how in () if made else runs.items():
            with restored_environment():
                recipe.main([*how, *at_size(1), "--use_cpu", "--output_dir", str(here / name)])
    return {name: Drew(here / name) for name in runs}


def resuming(flags: list[str], stopped: Path) -> list[str]:
    return [*flags, "--use_cpu", "--resume_from_checkpoint", str(stopped / f"checkpoint-{STOP}")]


def shared_out(folder: Path) -> list[str]:
    """Flags of ZeRO-3 that shares out small parameters, too."""
    config = json.loads((REPOSITORY / "deepspeed_configs" / "zero3.json").read_text())
    config["zero_optimization"]["stage3_param_persistence_threshold"] = 0
    (folder / "shared_out.json").write_text(json.dumps(config))
    return ["--deepspeed", str(folder / "shared_out.json")]


def planned(size: int, flags: dict[str, list[str]], folder: Path) -> Plan:
    plan = Plan("text_to_image", folder / str(size))
    for kind, strategy in pairs_at(size):
        shown = SHOWN if kind == "plain" and strategy != "fast_ddp" else []
        shown = [*SHOWN, "--validation_steps", "1"] if strategy == "zero3" else shown
        how = shared_out(folder) if strategy == "zero3" else STRATEGIES[strategy]
        how = [*flags[kind], *sizes(size), "--use_cpu", *how, *shown]
        plan.add(f"{kind}_{strategy}", how, watch=(kind, strategy) == ("plain", "ddp"))
    return plan


@pytest.fixture(scope="module")
def two(flags: dict[str, list[str]], folder: Path, alone: dict[str, Drew]) -> dict[str, Drew]:
    plan = planned(2, flags, folder)
    plan.add("resumed", [*resuming(flags["plain"], alone["plain"].folder), *sizes(2)])
    few = [*flags["few"], *sizes(2), "--use_cpu"]
    here = ["--resume_from_checkpoint", str(plan.folder / "few_zero3" / "checkpoint-1")]
    plan.add("few_resumed", [*few, *shared_out(folder), *here])
    plan.add("few_bf16", [*few, *STRATEGIES["zero2"], "--bf16", *SHOWN, "--validation_steps", "1"])
    return of(plan.run(2))


@pytest.fixture(scope="module")
def four(flags: dict[str, list[str]], folder: Path) -> dict[str, Drew]:
    return of(planned(4, flags, folder).run(4))


# --- The same numbers -------------------------------------------------------------------------------------------------


def test_the_runs_are_ones_that_show_a_difference(alone: dict[str, Drew], tiny_sd: Path) -> None:
    """Weights move and averages lag behind, some steps are clipped, an image is missing, and no image is another."""
    before, found = load_file(tiny_sd / "unet" / "diffusion_pytorch_model.safetensors"), alone["plain"].weights()
    moved = [(found[f"checkpoint-{STEPS}/model.safetensors: {name}"] - before[name]).abs().max() for name in before]
    lag = [(found[f"unet/diffusion_pytorch_model.safetensors: {name}"] - before[name]).abs().max() for name in before]
    assert min(moved) > 1e-4
    assert 0 < min(lag) < max(lag) < max(moved)
    assert set(alone["sdxl"].column("grad_clipped")) == {0, 1}
    assert len(alone["plain"].column("eval_loss")) == STEPS // 2
    metrics = alone["plain"].metrics
    assert [metrics[f"{phase}_unreadable_images"] for phase in ("train", "eval", "predict")] == [1, 1, 1]
    batches = {phase: shapes[0]["batches"] for phase, shapes in metrics["run"]["batch_shapes"].items()}
    assert batches == {"train": 10, "eval": 9, "predict": 2, "generate": 2}
    drawn = alone["plain"].images()
    assert min(np.abs(drawn[0] - other).max() for other in drawn[1:]) > 20


@pytest.mark.parametrize(("kind", "strategy"), pairs_at(2))
def test_two_ranks_have_the_numbers_of_one(
    kind: str, strategy: str, two: dict[str, Drew], alone: dict[str, Drew]
) -> None:
    """Also where images were drawn while they trained, as not by the one."""
    assert_same(two[f"{kind}_{strategy}"], alone[kind])


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "strategy"), pairs_at(4))
def test_four_ranks_have_the_numbers_of_one(
    kind: str, strategy: str, four: dict[str, Drew], alone: dict[str, Drew]
) -> None:
    """Ranks without a row: in the last step of an epoch, in the test split and, of a few rows, in every step."""
    assert_same(four[f"{kind}_{strategy}"], alone[kind])


@pytest.mark.parametrize("kind", ["sdxl", "built_in"])
def test_what_two_ranks_keep_is_what_one_keeps(kind: str, two: dict[str, Drew], alone: dict[str, Drew]) -> None:
    """Each has encoded a part of it: with an autoencoder, of the pipeline that is built, that it has trained itself."""
    mine, theirs = two[f"{kind}_ddp"].folder / "latents", alone[kind].folder / "latents"
    kept = {split: [path for path in mine.rglob("*.npy") if split in path.parts[-2]] for split in ROWS}
    assert {split: len(files) for split, files in kept.items()} == dict.fromkeys(ROWS, 5 if kind == "sdxl" else 3)
    for path in mine.rglob("*.npy"):
        (other,) = theirs.glob(f"{path.parent.name.rpartition('-')[0]}-*/{path.name}")
        np.testing.assert_allclose(np.load(path), np.load(other), rtol=0, atol=1e-5)


# --- Images -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", IMAGES_OF)
def test_ranks_draw_the_images_of_one(name: str, request: pytest.FixtureRequest, alone: dict[str, Drew]) -> None:
    """Three, of which the second rank has one less than the first, and the fourth none. They are counted once."""
    size, name = name.split("/")
    run = request.getfixturevalue({"2": "two", "4": "four"}[size])[name]
    assert_same_images(run, alone[name.rpartition("_")[0].removesuffix("_fast")])
    assert run.metrics["generate_images"] == len(run.images()) == 3


@pytest.mark.parametrize("name", ["2/plain_ddp", "2/plain_zero2", FOUR])
def test_ranks_show_the_images_of_one_while_they_train(
    name: str, request: pytest.FixtureRequest, alone: dict[str, Drew]
) -> None:
    size, name = name.split("/")
    run = request.getfixturevalue({"2": "two", "4": "four"}[size])[name]
    assert sorted(path.name for path in (run.folder / "validation_images").iterdir()) == [
        f"step-{step:06d}.png" for step in (2, 4)
    ]
    assert_same_images(run, alone["shown"], "validation_images/*.png")


def test_deepspeed_in_bf16_draws_nearly_the_images_of_one_in_fp32(two: dict[str, Drew], alone: dict[str, Drew]) -> None:
    """There the UNet is bf16 alone of the pipeline's parts."""
    run = two["few_bf16"]
    assert all(len(two[f"few_{how}"].images("validation_images/*.png")) == 2 for how in ("zero3", "bf16"))
    assert np.abs(np.stack(run.images()) - np.stack(alone["few"].images())).max() <= 8


def test_rank_0_writes_and_says_everything_once(folder: Path, two: dict[str, Drew]) -> None:
    run = two["plain_ddp"]
    files = [json.loads((run.folder / f"watched-rank{rank}.json").read_text())["files"] for rank in (0, 1)]
    once = {Counter(files[0])[name] for name in ("0000.png", "0001.png", "step-000002.png", "README.md")}
    assert once == {1}, files
    assert files[1] == ["0002.png"], "each rank writes what it has drawn"
    out = (folder / "2" / "out.txt").read_text()
    lines = own_lines(out)
    assert len(lines) == out.count("[rank 0]")
    assert len([line for line in lines if line.startswith("all results: ")]) == len(two), out


# --- Resume -----------------------------------------------------------------------------------------------------------


def test_two_ranks_go_on_where_one_stopped(two: dict[str, Drew], alone: dict[str, Drew]) -> None:
    assert_same(two["resumed"], alone["plain"], last=STEPS - STOP)
    assert_same_images(two["resumed"], alone["plain"])


def test_two_ranks_go_on_under_zero_3(two: dict[str, Drew], alone: dict[str, Drew]) -> None:
    assert_same(two["few_resumed"], alone["few"], last=1)
    assert_same_images(two["few_resumed"], alone["few"])


def test_one_goes_on_where_two_ranks_stopped(
    recipe: ModuleType, flags: dict[str, list[str]], two: dict[str, Drew], alone: dict[str, Drew], tmp_path: Path
) -> None:
    how = resuming(flags["plain"], two["plain_zero2"].folder)
    recipe.main([*how, *at_size(1), "--output_dir", str(tmp_path)])
    assert_same(Drew(tmp_path), alone["plain"], last=STEPS - STOP)
    assert_same_images(Drew(tmp_path), alone["plain"])


# --- On the simulated device ------------------------------------------------------------------------------------------


def on_cards(size: int, mode: str, folder: Path, runs: dict[str, list[str]]) -> dict[str, Drew]:
    plan = Plan("text_to_image", folder / f"{mode}{size}")
    for name, how in runs.items():
        plan.add(name, [*how, *sizes(size)], watch=True)
    report = str(plan.folder / "report.json")
    return of(plan.run(size, mode=mode, HPU_SIMULATOR_DEVICES=str(size), HPU_SIMULATOR_JSON=report))


@pytest.fixture(scope="module")
def lazy(folder: Path, flags: dict[str, list[str]]) -> dict[str, Drew]:
    longer = [*flags["plain"], *LONGER]
    return on_cards(2, "lazy", folder, {"plain": longer, "recorded": [*longer, *RECORDED]})


@pytest.fixture(scope="module")
def eager(folder: Path, flags: dict[str, list[str]]) -> dict[str, Drew]:
    return on_cards(1, "eager", folder, {kind: [*flags[kind], "--logging_steps", "1000"] for kind in ("sdxl", "lora")})


def steps_of(run: Drew, rank: int, count: int = 12) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Of each step: graphs, waits and bytes to the device so far."""
    found = json.loads((run.folder / f"watched-rank{rank}.json").read_text())
    assert len(found["steps"]) == count
    return (*np.transpose(found["steps"]), np.array(found["copied"]))


@pytest.mark.compiles
@pytest.mark.parametrize("name", ["plain", "recorded"])
def test_two_cards_have_the_numbers_and_images_of_one_cpu(
    name: str, lazy: dict[str, Drew], alone: dict[str, Drew]
) -> None:
    """With recorded graphs, too, and where images were drawn after every step."""
    run, expected = lazy[name], alone["longer"]
    assert_same_losses(run, expected)
    assert run.figures() == pytest.approx(expected.figures(), abs=1e-4)
    assert_same_images(run, expected)
    facts = run.metrics["run"]
    assert [facts["device"][key] for key in ("name", "execution_mode", "world_size")] == ["gaudi2", "lazy", 2]
    assert facts["batch_shapes"]["generate"] == [{"batches": 1, "images": [2, 3, 16, 16]}]


@pytest.mark.compiles
@pytest.mark.parametrize(
    ("kind", "row", "more"),
    [
        ("sdxl", 4 * LATENTS + 16 * (16 + 24) * 4 + 24 * 4 + 6 * 4, 4),
        ("lora", 3 * 16 * 16 + 16 * 8 + 2 * LATENTS, 8),
    ],
    ids=["sdxl", "lora"],
)
def test_one_card_in_eager_mode_has_them_and_no_step_waits(
    kind: str, row: int, more: int, eager: dict[str, Drew], alone: dict[str, Drew]
) -> None:
    """And to it travels, per row: kept moments and embeddings, or pixels and tokens; two draws; and three numbers."""
    run = eager[kind]
    assert run.figures() == pytest.approx(alone[kind].figures(), abs=1e-4)
    assert_same_weights(run, alone[kind], 1e-4)
    assert run.metrics["run"]["device"]["execution_mode"] == "eager"
    _, waits, copied = steps_of(run, 0, count=STEPS)
    assert set(waits) == {waits[0]}
    full, short = (rows * (row + 8 + 8 + 4) + more for rows in (16, 4))
    assert np.diff(copied).tolist() == [short, full, short]


@pytest.mark.compiles
@pytest.mark.parametrize("rank", [0, 1])
def test_a_steady_step_on_two_cards_compiles_nothing_and_waits_for_nothing(rank: int, lazy: dict[str, Drew]) -> None:
    assert_steady(lazy["plain"], rank, steps=12)


@pytest.mark.compiles
@pytest.mark.parametrize("rank", [0, 1])
def test_what_travels_to_a_card_is_the_batch(rank: int, lazy: dict[str, Drew]) -> None:
    """Per row: pixels as bytes, token numbers, two draws of noise; timestep, label and weight.

    And, per step, the window's scale and the share that averages move, of four bytes each.
    """
    row = 3 * 16 * 16 + 16 * 8 + 2 * LATENTS + 8 + 8 + 4
    copied = np.diff(steps_of(lazy["plain"], rank)[2])
    assert copied[1:].tolist() == [8 * row + 8, 4 * row + 8] * 5


@pytest.mark.compiles
@pytest.mark.parametrize("rank", [0, 1])
def test_images_after_every_step_need_no_new_graph_and_no_more_waiting_than_the_first(
    rank: int, lazy: dict[str, Drew]
) -> None:
    graphs, waits, _ = steps_of(lazy["recorded"], rank)
    assert len(set(graphs[5:])) == 1, graphs
    assert len(set(np.diff(waits)[3:])) == 1, waits


@pytest.mark.compiles
@pytest.mark.parametrize("name", ["plain", "recorded"])
@pytest.mark.parametrize("rank", [0, 1])
def test_an_evaluation_waits_once(rank: int, name: str, lazy: dict[str, Drew]) -> None:
    """For the sum of the losses, however many batches it has."""
    found = json.loads((lazy[name].folder / f"watched-rank{rank}.json").read_text())["evaluations"]
    assert found == [[2, 1], [1, 1]]


@pytest.mark.compiles
@pytest.mark.parametrize("rank", [0, 1])
def test_the_cards_can_do_all_that_is_asked_of_them(rank: int, lazy: dict[str, Drew]) -> None:
    """No collective on a dtype that they lack, no number that is too large, no shape that depends on values."""
    report = json.loads((lazy["plain"].folder.parent / f"report-rank{rank}.json").read_text())
    found = [one["title"] for one in report["findings"]]
    assert not [one for one in report["findings"] if one["severity"] == "error"], found
    assert not [title for title in found if title.startswith("shape depends")], found
