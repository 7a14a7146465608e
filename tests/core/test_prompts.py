"""The plan of images: their order, seeds and texts; and what is refused before anything is loaded."""

from __future__ import annotations

import logging
import subprocess
import sys
from pathlib import Path

import pytest

from core.errors import UserError
from core.prompts import NO_EFFECT, SUBSTITUTES, wanted_images
from tests.conftest import REPOSITORY
from tests.core.drawings import arguments


def test_defaults_are_those_of_published_commands() -> None:
    args = arguments()
    published = {"num_images_per_prompt": 1, "batch_size": 1, "num_inference_steps": 50, "guidance_scale": 7.5}
    published |= {"eta": 0.0, "output_type": "pil", "height": None, "width": None, "prompts": None}
    assert {name: getattr(args, name) for name in published} == published


def test_the_plan_has_all_images_of_a_prompt_one_after_the_other() -> None:
    args = arguments("--prompts", "a", "b", "--num_images_per_prompt", "3", "--seed", "7")
    plan = wanted_images(args)
    assert [one.number for one in plan] == [0, 1, 2, 3, 4, 5]
    assert [one.seed for one in plan] == [7, 8, 9, 10, 11, 12]
    assert [one.prompt for one in plan] == list("aaabbb")
    assert all(one.texts.keys() == {"prompt"} for one in plan)


def test_other_texts_go_with_their_prompt_or_with_all() -> None:
    flags = ["--prompts", "a", "b", "--prompts_2", "c", "d", "--prompts_3", "e", "--num_images_per_prompt", "2"]
    flags += ["--negative_prompts", "f", "--negative_prompts_2", "g", "h", "--negative_prompts_3", "i"]
    texts = [one.texts for one in wanted_images(arguments(*flags))]
    names = ["prompt", "prompt_2", "prompt_3", "negative_prompt", "negative_prompt_2", "negative_prompt_3"]
    first, second = (dict(zip(names, words, strict=True)) for words in ("acefgi", "bdefhi"))
    assert texts == [first, first, second, second]


def test_prompts_come_from_a_file(tmp_path: Path) -> None:
    file = tmp_path / "prompts.txt"
    file.write_bytes("\ufeffein Hügel\r\n\r\n   \n  猫と犬 \nlast".encode())
    assert [one.prompt for one in wanted_images(arguments("--prompts_file", str(file)))] == [
        "ein Hügel",
        "猫と犬",
        "last",
    ]


@pytest.mark.parametrize(
    ("content", "reason"),
    [(None, "No such file"), (b"\n \n", "no prompt"), (b"caf\xe9x", "not UTF-8 text (invalid continuation byte")],
    ids=["missing", "empty", "latin-1"],
)
def test_a_file_without_prompts_is_one_line(tmp_path: Path, content: bytes | None, reason: str) -> None:
    file = tmp_path / "prompts.txt"
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(UserError) as error:
        wanted_images(arguments("--prompts_file", str(file)))
    assert str(error.value).startswith(f"--prompts_file: {file}")
    assert reason in str(error.value)


@pytest.mark.parametrize(
    ("flags", "reason"),
    [
        ([], "give --prompts or --prompts_file"),
        (["--prompts", "a", "b", "c", "--negative_prompts", "d", "e"], "--negative_prompts has 2 texts for 3 prompts"),
        (["--prompts", "a", "--prompts_2", "b", "c"], "--prompts_2 has 2 texts for 1 prompts"),
        (["--prompts", "a", "b\udcff"], "--prompts: a text is not UTF-8"),
    ],
    ids=["none", "negatives", "seconds", "bytes"],
)
def test_a_plan_that_cannot_be_is_one_line(flags: list[str], reason: str) -> None:
    with pytest.raises(UserError) as error:
        wanted_images(arguments(*flags))
    assert reason in str(error.value)


@pytest.mark.parametrize(
    ("flags", "reason"),
    [
        (["--prompts", "a", "--prompts_file", "b"], "--prompts and --prompts_file exclude each other"),
        (["--height", "64"], "--height and --width go together"),
        (["--height", "64", "--width", "0"], "--height and --width go together"),
        (["--height", "-8", "--width", "8"], "--height must be at least 0"),
        (["--mask_image", "a.png"], "--mask_image needs the --base_image"),
        (["--eta", "1.5"], "--eta must be at most 1"),
        (["--eta", "nan"], "--eta must be at least 0"),
        (["--batch_size", "0"], "--batch_size must be at least 1"),
        (["--num_inference_steps", "0"], "--num_inference_steps must be at least 1"),
        (["--ldm3d"], "--ldm3d: no depth is drawn here"),
        (["--scheduler", "dim"], "invalid choice: 'dim'"),
    ],
    ids=lambda value: value[0].lstrip("-") + value[-1] if isinstance(value, list) else "",
)
def test_flags_that_cannot_work_are_one_line(flags: list[str], reason: str) -> None:
    with pytest.raises(UserError) as error:
        arguments(*flags)
    assert reason in str(error.value)


@pytest.mark.parametrize("option", ["--image_save_dir", "--pipeline_save_dir"])
def test_folders_are_tried_before_anything_is_loaded(tmp_path: Path, option: str) -> None:
    (tmp_path / "file").write_text("")
    for path, reason in (("file", "is a file; give a folder"), ("file/in", "cannot be written to: Not a directory")):
        with pytest.raises(UserError) as error:
            arguments("--prompts", "a", option, str(tmp_path / path))
        assert str(error.value) == f"{option}: {tmp_path / path} {reason}"
    arguments("--prompts", "a", option, str(tmp_path / "new" / "folder"))
    assert not list((tmp_path / "new" / "folder").iterdir())


def test_a_size_of_zero_is_the_pipelines_own() -> None:
    args = arguments("--height", "0", "--width", "0")
    assert (args.height, args.width) == (None, None)
    args = arguments("--height", "512", "--width", "768")
    assert (args.height, args.width) == (512, 768)


def test_flags_without_effect_are_said_once(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        arguments("--use_cpu_rng", "--distributed", "--use_distributed_cfg", "--mediapipe", "dataset")
        arguments("--use_cpu_rng", "--distributed", "--use_distributed_cfg", "--mediapipe", "dataset")
        assert len(caplog.messages) == len(NO_EFFECT) == 4
        arguments("--optimize", "--use_compel", "--quant_mode", "quantize")
        assert len(caplog.messages) == 4 + len(SUBSTITUTES) == 7
    assert all("has no effect here" in line or "used instead" in line for line in caplog.messages)


def test_the_plan_needs_no_torch() -> None:
    code = "import sys; import core.prompts; assert 'torch' not in sys.modules"
    done = subprocess.run([sys.executable, "-c", code], cwd=REPOSITORY, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
