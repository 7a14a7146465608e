"""Small real models and data that the tests build once: nothing is fetched, nothing is left behind."""

from __future__ import annotations

import json
import os
import random
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

os.environ["HF_HUB_OFFLINE"] = "1"  # before any of the libraries reads it
os.environ.setdefault("CUDA_VISIBLE_DEVICES", "")  # the recorded numbers are the CPU's
os.environ.setdefault("OMP_NUM_THREADS", "1")  # two workers share the cores
signal.signal(signal.SIGINT, signal.default_int_handler)  # in the background it is ignored, by what tests start, too
REPOSITORY = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(REPOSITORY))

from benchmarks.ours import load_recipe  # noqa: E402
from core import errors, host_memory, preemption  # noqa: E402

WORDS = "alpha beta gamma delta epsilon zeta eta theta iota kappa lambda mu nu xi omicron pi rho sigma tau".split()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--rebase", action="store_true", help="rewrite recorded losses and counts with those found here")


@pytest.fixture(autouse=True)
def _separate() -> Iterator[None]:
    """What a test leaves in the environment, has warned of, or does about signals is not there for the next one."""
    before, handlers = dict(os.environ), {number: signal.getsignal(number) for number in preemption.SIGNALS}
    errors._warned.clear()
    yield
    for number, handler in handlers.items():  # one that is ignored would be so in what later tests start, too
        signal.signal(number, handler)
    host_memory.release()  # of a run that did not come to its end
    for name in os.environ.keys() - before.keys():
        del os.environ[name]
    os.environ.update(before)


@pytest.fixture(scope="session")
def summarization() -> ModuleType:
    return load_recipe("summarization")


def pairs(count: int, seed: int = 0, longest: int = 30) -> list[dict[str, str]]:
    """Texts of random words of 3 to ``longest`` words; the summary is their first words, of 1 to 8."""
    draw = random.Random(seed)
    rows = []
    for _ in range(count):
        words = draw.choices(WORDS, k=draw.randint(3, longest))
        rows.append({"text": " ".join(words), "summary": " ".join(words[: draw.randint(1, 8)])})
    return rows


def write_jsonl(path: Path, rows: list[dict]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def build_tokenizer(folder: Path) -> None:
    """A word-level tokenizer over `WORDS`, with the end token that sequence-to-sequence models expect."""
    from tokenizers import Tokenizer, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    vocabulary = {word: i for i, word in enumerate(["<pad>", "</s>", "<unk>", *WORDS, ":", "summarize"])}
    words = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    words.post_processor = processors.TemplateProcessing(single="$A </s>", special_tokens=[("</s>", 1)])
    special = {"pad_token": "<pad>", "eos_token": "</s>", "unk_token": "<unk>"}
    PreTrainedTokenizerFast(tokenizer_object=words, **special).save_pretrained(folder)


@pytest.fixture(scope="session")
def tiny_t5(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A saved T5 of two layers with dropout and tied embeddings."""
    import torch
    from transformers import T5Config, T5ForConditionalGeneration

    folder = tmp_path_factory.mktemp("tiny_t5")
    build_tokenizer(folder)
    torch.manual_seed(0)
    sizes = {"vocab_size": 32, "d_model": 16, "d_kv": 8, "d_ff": 32, "num_layers": 2, "num_heads": 2}
    special = {"decoder_start_token_id": 0, "pad_token_id": 0, "eos_token_id": 1}
    T5ForConditionalGeneration(T5Config(**sizes, **special, dropout_rate=0.1)).save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def tiny_bart(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A saved BART of one layer each."""
    import torch
    from transformers import BartConfig, BartForConditionalGeneration

    folder = tmp_path_factory.mktemp("tiny_bart")
    build_tokenizer(folder)
    torch.manual_seed(0)
    sizes = {"vocab_size": 32, "d_model": 16, "encoder_layers": 1, "decoder_layers": 1, "max_position_embeddings": 64}
    heads = {"encoder_attention_heads": 2, "decoder_attention_heads": 2, "encoder_ffn_dim": 32, "decoder_ffn_dim": 32}
    special = {"decoder_start_token_id": 1, "pad_token_id": 0, "eos_token_id": 1, "bos_token_id": 1}
    special["forced_eos_token_id"] = 1
    BartForConditionalGeneration(BartConfig(**sizes, **heads, **special)).save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def pair_files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Flags that name three files of pairs: 26 for training, 13 for validation, 11 for test."""
    folder = tmp_path_factory.mktemp("pairs")
    sizes = {"train": 26, "validation": 13, "test": 11}
    return {
        f"--{split}_file": str(write_jsonl(folder / f"{split}.jsonl", pairs(count, seed)))
        for seed, (split, count) in enumerate(sizes.items())
    }


def build_text_tokenizer(folder: Path, **roles: str) -> None:
    """A word-level tokenizer over `WORDS` with the tokens of causal and masked models; ``roles`` go to it.

    With a ``cls_token`` it writes ``<cls> text <sep>``, else the text alone.
    """
    from tokenizers import Tokenizer, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    names = ["<pad>", "<eos>", "<unk>", "<cls>", "<sep>", "<mask>"]
    vocabulary = {word: i for i, word in enumerate([*names, *WORDS, ":", "."])}
    words = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    if "cls_token" in roles:
        ends = [(name, vocabulary[name]) for name in ("<cls>", "<sep>")]
        words.post_processor = processors.TemplateProcessing(single="<cls> $A <sep>", special_tokens=ends)
    PreTrainedTokenizerFast(tokenizer_object=words, unk_token="<unk>", **roles).save_pretrained(folder)


def save_text_model(folder: Path, config: Any, kind: str, **roles: str) -> Path:
    import torch
    import transformers

    build_text_tokenizer(folder, **roles)
    torch.manual_seed(0)
    getattr(transformers, kind)(config).save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def tiny_gpt2(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A saved GPT-2 of two layers with dropout and tied embeddings; its tokenizer has no padding token, as GPT-2's."""
    from transformers import GPT2Config

    config = GPT2Config(vocab_size=27, n_positions=64, n_embd=16, n_layer=2, n_head=2, eos_token_id=1, bos_token_id=1)
    return save_text_model(tmp_path_factory.mktemp("tiny_gpt2"), config, "GPT2LMHeadModel", eos_token="<eos>")


@pytest.fixture(scope="session")
def tiny_llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A saved Llama of two layers with grouped heads and untied embeddings."""
    from transformers import LlamaConfig

    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
    sizes |= {"vocab_size": 27, "num_key_value_heads": 2, "max_position_embeddings": 64}
    config = LlamaConfig(**sizes, eos_token_id=1, bos_token_id=3, pad_token_id=0)
    roles = {"eos_token": "<eos>", "pad_token": "<pad>"}
    return save_text_model(tmp_path_factory.mktemp("tiny_llama"), config, "LlamaForCausalLM", **roles)


@pytest.fixture(scope="session")
def tiny_bert(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A saved BERT of two layers with dropout."""
    from transformers import BertConfig

    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = BertConfig(vocab_size=27, max_position_embeddings=64, **sizes, pad_token_id=0)
    roles = {f"{name}_token": f"<{name}>" for name in ("pad", "cls", "sep", "mask")}
    return save_text_model(tmp_path_factory.mktemp("tiny_bert"), config, "BertForMaskedLM", **roles)


def texts(count: int, seed: int = 0, longest: int = 40) -> list[dict[str, str]]:
    """Documents of 1 to ``longest`` random words; one in ten is empty."""
    draw = random.Random(seed)
    return [{"text": " ".join(draw.choices(WORDS, k=draw.randint(1, longest)))} for _ in range(count - count // 10)] + [
        {"text": ""} for _ in range(count // 10)
    ]


@pytest.fixture(scope="session")
def language_modeling() -> ModuleType:
    return load_recipe("language_modeling")


@pytest.fixture(scope="session")
def text_files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Flags that name three files of texts: 60 for training, 15 for validation, 8 for test."""
    folder = tmp_path_factory.mktemp("texts")
    sizes = {"train": 60, "validation": 15, "test": 8}
    return {
        f"--{split}_file": str(write_jsonl(folder / f"{split}.jsonl", texts(count, seed)))
        for seed, (split, count) in enumerate(sizes.items())
    }


ANIMALS = "ant bee cat dog elk fox gnu".split()


def save_pictures(folder: Path, count: int, seed: int = 0, kinds: tuple[str, ...] = ("png", "jpg", "jpg")) -> Path:
    """Write ``folder/<class>/<number>.<kind>``, the kinds in turn, of many even sizes: noise in its class's colour."""
    import numpy
    from PIL import Image

    draw = numpy.random.default_rng(seed)
    for number in range(count):
        place = number % len(ANIMALS)
        pixels = draw.integers(0, 100, (*2 * draw.integers(6, 20, 2), 3))
        colour = [150 * ((place + 1) >> bit & 1) for bit in range(3)]
        path = folder / ANIMALS[place] / f"{number:02d}.{kinds[number % len(kinds)]}"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray((pixels + colour).astype(numpy.uint8)).save(path)
    return folder


@pytest.fixture(scope="session")
def picture_folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Flags that name three folders of pictures: 26 for training, 13 for validation, 11 for test."""
    folder = tmp_path_factory.mktemp("pictures")
    sizes = {"train": 26, "validation": 13, "test": 11}
    return {
        f"--{split}_dir": str(save_pictures(folder / split, count, seed))
        for seed, (split, count) in enumerate(sizes.items())
    }


def save_picture_model(folder: Path, config: Any, kind: str) -> Path:
    """A model of transformers for pictures of 16 x 16, and an image processor that resizes by the bicubic filter."""
    import torch
    import transformers

    sizes = {"size": {"height": 16, "width": 16}, "resample": 3, "image_mean": [0.5] * 3, "image_std": [0.5] * 3}
    transformers.ViTImageProcessorPil(**sizes).save_pretrained(folder)
    torch.manual_seed(0)
    getattr(transformers, kind)(config).save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def tiny_vit(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A saved ViT of two layers with dropout; as the one that was trained on ImageNet-21k, it has no classifier."""
    from transformers import ViTConfig

    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = ViTConfig(image_size=16, patch_size=8, **sizes, initializer_range=0.2, hidden_dropout_prob=0.1)
    return save_picture_model(tmp_path_factory.mktemp("tiny_vit"), config, "ViTModel")


@pytest.fixture(scope="session")
def tiny_swin(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A saved Swin of two stages with a classifier of nine other classes."""
    from transformers import SwinConfig

    sizes = {"embed_dim": 8, "depths": [1, 1], "num_heads": [1, 2], "window_size": 2}
    names = {number: f"plant {number}" for number in range(9)}
    config = SwinConfig(image_size=16, patch_size=4, **sizes, id2label=names, initializer_range=0.2)
    return save_picture_model(tmp_path_factory.mktemp("tiny_swin"), config, "SwinForImageClassification")


@pytest.fixture(scope="session")
def image_classification() -> ModuleType:
    return load_recipe("image_classification")


def clip_tokenizer(folder: Path) -> Any:
    """A real CLIP tokenizer of letters, digits and few merges, for texts of at most 16 tokens."""
    from transformers import CLIPTokenizer

    signs = "abcdefghijklmnopqrstuvwxyz0123456789.,"
    pieces = [*signs, *(f"{sign}</w>" for sign in signs), "al", "alp", "ta</w>", "be", "beta</w>"]
    vocabulary = {piece: at for at, piece in enumerate([*pieces, "<|startoftext|>", "<|endoftext|>"])}
    (folder / "vocab.json").write_text(json.dumps(vocabulary))
    (folder / "merges.txt").write_text("#version: 0.2\na l\nal p\nt a</w>\nb e\nbe ta</w>\n")
    return CLIPTokenizer(str(folder / "vocab.json"), str(folder / "merges.txt"), model_max_length=16)


def clip_encoder(tokenizer: Any, kind: str = "CLIPTextModel", size: int = 16) -> Any:
    """Its text encoder, of two layers with random weights."""
    import transformers

    sizes = {"hidden_size": size, "intermediate_size": 32, "projection_dim": size, "num_hidden_layers": 2}
    special = {name: getattr(tokenizer, name) for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
    config = transformers.CLIPTextConfig(
        vocab_size=len(tokenizer), **sizes, num_attention_heads=2, max_position_embeddings=16, **special
    )
    return getattr(transformers, kind)(config)


def small_vae(**options: Any) -> Any:
    """An autoencoder of pictures: 4 channels, half as high and wide."""
    from diffusers import AutoencoderKL

    blocks = {"down_block_types": ("DownEncoderBlock2D",) * 2, "up_block_types": ("UpDecoderBlock2D",) * 2}
    return AutoencoderKL(**blocks, block_out_channels=(8, 16), norm_num_groups=4, latent_channels=4, **options)


def unet_pipeline(folder: Path, two_encoders: bool) -> Any:
    """Stable Diffusion with one text encoder, or SDXL with two, for pictures of 16 x 16."""
    import diffusers

    tokenizer = clip_tokenizer(folder)
    parts = {"tokenizer": tokenizer, "text_encoder": clip_encoder(tokenizer), "vae": small_vae(sample_size=16)}
    more = {}
    if two_encoders:
        parts["tokenizer_2"] = clip_tokenizer(folder)
        parts["text_encoder_2"] = clip_encoder(tokenizer, "CLIPTextModelWithProjection", 24)
        more = {"addition_embed_type": "text_time", "addition_time_embed_dim": 4}
        more["projection_class_embeddings_input_dim"] = 24 + 6 * 4
    else:
        parts |= {"safety_checker": None, "feature_extractor": None, "requires_safety_checker": False}
    parts["unet"] = diffusers.UNet2DConditionModel(
        sample_size=8,
        block_out_channels=(8, 16),
        norm_num_groups=4,
        layers_per_block=1,
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"),
        up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"),
        cross_attention_dim=40 if two_encoders else 16,
        attention_head_dim=4,
        **more,
    )
    steps = {"beta_schedule": "scaled_linear", "beta_start": 0.00085, "beta_end": 0.012, "steps_offset": 1}
    scheduler = diffusers.DDIMScheduler(**steps, clip_sample=False, set_alpha_to_one=False)
    kind = diffusers.StableDiffusionXLPipeline if two_encoders else diffusers.StableDiffusionPipeline
    return kind(**parts, scheduler=scheduler)


def flow_pipeline(folder: Path, flux: bool) -> Any:
    """FLUX, or Stable Diffusion 3 of three text encoders, for pictures of 16 x 16."""
    import diffusers
    from transformers import T5Config, T5EncoderModel, T5TokenizerFast

    tokenizer, size = clip_tokenizer(folder), 16 if flux else 32
    special, signs = ["<pad>", "</s>", "<unk>"], "▁abcdefghijklmnopqrstuvwxyz"
    pieces = [(piece, 0.0) for piece in special] + [(sign, -2.0) for sign in signs]
    t5_tokenizer = T5TokenizerFast(vocab=pieces, extra_ids=0, model_max_length=16)
    sizes = {"d_model": size, "d_kv": 8, "d_ff": 32, "num_layers": 1, "num_heads": 2}
    t5 = T5EncoderModel(T5Config(vocab_size=32, **sizes))
    parts = {"tokenizer": tokenizer, "vae": small_vae(sample_size=16, shift_factor=0.1)}
    heads = {"num_attention_heads": 2, "attention_head_dim": 8, "joint_attention_dim": size}
    if flux:
        parts |= {"text_encoder": clip_encoder(tokenizer), "tokenizer_2": t5_tokenizer, "text_encoder_2": t5}
        more = {"pooled_projection_dim": 16, "axes_dims_rope": (2, 2, 4), "guidance_embeds": True}
        model = diffusers.FluxTransformer2DModel(in_channels=16, num_layers=1, num_single_layers=1, **heads, **more)
        return diffusers.FluxPipeline(**parts, transformer=model, scheduler=diffusers.FlowMatchEulerDiscreteScheduler())
    kind = "CLIPTextModelWithProjection"
    parts |= {"text_encoder": clip_encoder(tokenizer, kind), "text_encoder_2": clip_encoder(tokenizer, kind)}
    parts |= {"tokenizer_2": clip_tokenizer(folder), "tokenizer_3": t5_tokenizer, "text_encoder_3": t5}
    more = {"in_channels": 4, "out_channels": 4, "caption_projection_dim": 16, "pooled_projection_dim": 32}
    sizes = {"sample_size": 8, "patch_size": 1, "pos_embed_max_size": 16, "num_layers": 1}
    model = diffusers.SD3Transformer2DModel(**sizes, **more, **heads)
    scheduler = diffusers.FlowMatchEulerDiscreteScheduler(shift=3.0)
    return diffusers.StableDiffusion3Pipeline(**parts, transformer=model, scheduler=scheduler)


def save_pipeline(folder: Path, kind: str) -> Path:
    """A whole pipeline of diffusers with small random models; ``kind`` is sd, sdxl, sd3 or flux."""
    import tempfile

    import torch

    torch.manual_seed(0)
    with tempfile.TemporaryDirectory() as words:
        of_unet = kind in ("sd", "sdxl")
        build = unet_pipeline if of_unet else flow_pipeline
        build(Path(words), kind in ("sdxl", "flux")).save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def tiny_sd(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_pipeline(tmp_path_factory.mktemp("tiny_sd"), "sd")


@pytest.fixture(scope="session")
def tiny_sdxl(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_pipeline(tmp_path_factory.mktemp("tiny_sdxl"), "sdxl")


@pytest.fixture(scope="session")
def tiny_sd3(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_pipeline(tmp_path_factory.mktemp("tiny_sd3"), "sd3")


@pytest.fixture(scope="session")
def tiny_flux(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_pipeline(tmp_path_factory.mktemp("tiny_flux"), "flux")


def save_captioned(folder: Path, count: int, seed: int = 0, spoiled: bool = False) -> Path:
    """Write pictures of noise of many even sizes, and a metadata.jsonl; a third of them have two captions.

    With ``spoiled`` the second one of them is no image.
    """
    import numpy
    from PIL import Image

    draw, rows = numpy.random.default_rng(seed), []
    folder.mkdir(parents=True)
    for number in range(count):
        width, height = (2 * draw.integers(7, 20, 2)).tolist()
        pixels = draw.integers(0, 256, (height, width, 3)).astype(numpy.uint8)
        Image.fromarray(pixels).save(folder / f"{number:02d}.png")
        first, second = (str(ANIMALS[int(at)]) for at in draw.integers(0, len(ANIMALS), 2))
        captions = [f"{first} {number}", f"alpha {second}"]
        rows.append({"file_name": f"{number:02d}.png", "text": captions[: 2 if number % 3 == 0 else 1]})
    if spoiled:
        (folder / "01.png").write_bytes((folder / "01.png").read_bytes()[:200])
    write_jsonl(folder / "metadata.jsonl", rows)
    return folder


@pytest.fixture(scope="session")
def captioned_folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Flags that name two folders of captioned pictures: 13 for training, one of them unreadable, 5 for validation."""
    folder = tmp_path_factory.mktemp("captioned")
    return {
        "--train_dir": str(save_captioned(folder / "train", 13, spoiled=True)),
        "--validation_dir": str(save_captioned(folder / "validation", 5, 1)),
    }


@pytest.fixture(scope="session")
def text_to_image() -> ModuleType:
    return load_recipe("text_to_image")
