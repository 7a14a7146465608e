"""The frozen parts of a pipeline as training needs them: captions to embeddings, pictures to the moments of latents."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from contextlib import nullcontext
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch

from core import distributed
from core.device import Device
from core.errors import UserError, is_main_process, read_json_object, warn_once
from core.files import write_json
from core.pipelines import save_pipeline

NOTED = ("architectures", "dtype", "transformers_version")  # written into a config when it is saved
AT_ONCE = 1000  # captions that are tokenized together
ORIGIN = "learned_from.json"  # in a checkpoint
TEXT_MODELS = (["CLIPTextModel"], ["CLIPTextModel", "CLIPTextModelWithProjection"])


class Encoders:
    """Tokenizers, text encoders and autoencoder of a pipeline with a UNet, in fp32; none of them is trained.

    With two text encoders their second last layers are put side by side, and the second one's projection says what the
    whole caption means; then the UNet is also told sizes and place of the crop (Podell et al., 2023, arXiv:2307.01952).

    Args:
        pipe: of diffusers; its frozen parts go to the device.
        device: of this process.

    Attributes:
        needs_time_ids: whether the UNet is told sizes and place of the crop.
        resolution: pixels of a picture's side that the pipeline draws by itself.
        layout: of pictures and latents in memory: on a CPU with the channels last.

    Raises:
        UserError: the pipeline is of another kind.
    """

    def __init__(self, pipe: Any, device: Device) -> None:
        _check(pipe)
        names = [name for name in ("", "_2") if getattr(pipe, f"text_encoder{name}", None) is not None]
        self._tokenizers = {f"input_ids{name}": getattr(pipe, f"tokenizer{name}") for name in names}
        self._texts = [getattr(pipe, f"text_encoder{name}") for name in names]
        self._pipe, self._vae, self.needs_time_ids = pipe, pipe.vae, len(names) == 2
        for part in (*self._texts, self._vae):
            part.to(device.torch_device).float().requires_grad_(False).eval()
        sizes = [part.config.max_position_embeddings for part in self._texts]
        self._lengths = {
            key: min(tokenizer.model_max_length, size)
            for (key, tokenizer), size in zip(self._tokenizers.items(), sizes, strict=True)
        }
        # Where no negative prompt is given, such pipelines draw against zeros in place of an empty text.
        self._zeroes = bool(pipe.config.get("force_zeros_for_empty_prompt"))
        self._no_text = torch.from_numpy(self.tokenize("")["input_ids"]).to(device.torch_device)
        self._channels = pipe.vae.config.latent_channels
        self._factor = 2 ** (len(pipe.vae.config.block_out_channels) - 1)
        self._multiple = self._factor * 2**pipe.unet.num_upsamplers
        self._on_host = not device.queues_work
        self.layout = torch.channels_last if self._on_host else torch.contiguous_format
        self.resolution = int(np.min(pipe.unet.config.sample_size or 64)) * self._factor

    def __getstate__(self) -> dict[str, Any]:
        """What a worker process that is not forked gets: what tokenizes and counts, and no model."""
        return self.__dict__ | {"_texts": [], "_vae": None, "_pipe": None, "_no_text": None}

    def save_pretrained(self, folder: Path) -> None:
        """Write the pipeline, but for the UNet, see `core.pipelines.save_pipeline`; on the main process."""
        if is_main_process():
            save_pipeline(self._pipe, folder)

    def tokenize(self, caption: str) -> dict[str, np.ndarray]:
        """Return ``input_ids``, and ``input_ids_2`` of a second tokenizer: int64 (tokens,), padded, or cut."""
        return {
            key: np.array(
                tokenizer(caption, padding="max_length", truncation=True, max_length=self._lengths[key])["input_ids"],
                np.int64,
            )
            for key, tokenizer in self._tokenizers.items()
        }

    def count_cut(self, captions: Iterable[str]) -> int:
        """Count the captions that have more tokens than `tokenize` leaves."""
        texts, count = list(captions), 0
        for first in range(0, len(texts), AT_ONCE):
            cut = np.zeros(len(texts[first : first + AT_ONCE]), bool)
            for key, tokenizer in self._tokenizers.items():
                ids = tokenizer(texts[first : first + AT_ONCE], truncation=False, verbose=False)["input_ids"]
                cut |= np.array([len(of_text) > self._lengths[key] for of_text in ids])
            count += int(cut.sum())
        return count

    def report_cut(self, captions: Iterable[str | list[str]], split: str) -> None:
        """Warn if captions of a split are cut; a row may have several."""
        texts = [text for of_row in captions for text in ([of_row] if isinstance(of_row, str) else of_row)]
        if cut := self.count_cut(texts):
            longest = min(self._lengths.values())
            warn_once(f"{split}: {cut} of {len(texts)} captions are longer than {longest} tokens: their ends are lost")

    @torch.no_grad()
    def embed(self, ids: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Embed tokens as the pipeline's ``encode_prompt`` does, an empty text as the pipeline draws without a text.

        Args:
            ids: of `tokenize`, stacked and on the device: int64 (rows, tokens).

        Returns:
            ``encoder_hidden_states`` (rows, tokens, size), and of two text encoders ``text_embeds`` (rows, size); fp32.
        """
        with torch.autocast(ids["input_ids"].device.type, enabled=False):
            if len(self._texts) == 1:
                return {"encoder_hidden_states": self._texts[0](ids["input_ids"])[0]}
            found = [
                model(ids[key], output_hidden_states=True)
                for key, model in zip(self._tokenizers, self._texts, strict=True)
            ]
            hidden, pooled = torch.cat([each.hidden_states[-2] for each in found], dim=-1), found[1].text_embeds
            if self._zeroes:
                some = (ids["input_ids"] != self._no_text).any(1, keepdim=True).to(hidden.dtype)
                hidden, pooled = hidden * some.unsqueeze(2), pooled * some
            return {"encoder_hidden_states": hidden, "text_embeds": pooled}

    @torch.no_grad()
    def moments(self, pixels: torch.Tensor) -> torch.Tensor:
        """Encode pictures in fp32, and none of it in less: some autoencoders overflow in fp16, and then all is black.

        But on a CPU under autocast: products in bf16, which has the range of fp32, take less than half as long.

        Args:
            pixels: uint8 (rows, 3, height, width), on the device.

        Returns:
            fp32 (rows, 2 * channels, height / factor, width / factor): first the mean of each latent, then its standard
            deviation, both scaled as the UNet takes latents: ``mean + deviation * noise`` is a draw.
        """
        config, device = self._vae.config, pixels.device.type
        with torch.autocast(device, enabled=False):
            shown = (pixels.float() / 127.5 - 1).contiguous(memory_format=self.layout)
        with nullcontext() if self._on_host else torch.autocast(device, enabled=False):
            found = self._vae.encode(shown).latent_dist
        with torch.autocast(device, enabled=False):
            mean, deviation = found.mean.float(), torch.exp(0.5 * found.logvar.float())
            if config.get("latents_mean") is not None and config.get("latents_std") is not None:
                shift, spread = (
                    torch.tensor(config[name], device=pixels.device).view(1, -1, 1, 1)
                    for name in ("latents_mean", "latents_std")
                )
                mean, deviation = (mean - shift) / spread, deviation / spread
            elif config.get("shift_factor"):
                mean = mean - config.shift_factor
            return torch.cat([mean, deviation], dim=1) * config.scaling_factor

    def latent_shape(self, resolution: int) -> tuple[int, int, int]:
        """Return (channels, height, width) of a square picture's latents.

        Raises:
            UserError: it cannot be halved as often as autoencoder and UNet do.
        """
        if resolution < 1 or resolution % self._multiple:
            below = resolution // self._multiple * self._multiple
            near = [str(side) for side in (below, below + self._multiple) if side]
            raise UserError(
                f"--resolution, --crop_resolution: pictures of {resolution} pixels do not fit this pipeline, which "
                f"needs a multiple of {self._multiple}; give {' or '.join(near)}"
            )
        side = resolution // self._factor
        return self._channels, side, side

    @staticmethod
    def time_ids(view: tuple[int, int, int, int], crop: int) -> np.ndarray:
        """Return fp32 (6,): height and width before, top and left of the crop, and its height and width.

        Args:
            view: (original height, original width, top, left).
            crop: pixels of its side.
        """
        return np.array([*view, crop, crop], np.float32)

    def fingerprint(self) -> str:
        """A digest of all weights and settings: of encoders that give the same, it is the same."""
        digest = hashlib.sha256(str(self._zeroes).encode())
        for tokenizer, length in zip(self._tokenizers.values(), self._lengths.values(), strict=True):
            digest.update(
                json.dumps([type(tokenizer).__name__, length, tokenizer.get_vocab()], sort_keys=True).encode()
            )
        for part in (*self._texts, self._vae):
            settings = getattr(part.config, "to_dict", lambda config=part.config: dict(config))()
            settings = {key: value for key, value in settings.items() if not (key.startswith("_") or key in NOTED)}
            digest.update(json.dumps(settings, sort_keys=True, default=str).encode())
        digest.update(json.dumps(self._digests).encode())
        return digest.hexdigest()

    @cached_property
    def _digests(self) -> dict[str, str]:
        """Of each part's weights, by its name in the pipeline. Found once: it reads all of them, often gigabytes."""
        names, found = [*(key.replace("input_ids", "text_encoder") for key in self._tokenizers), "vae"], {}
        for name, part in zip(names, (*self._texts, self._vae), strict=True):
            digest = hashlib.sha256()
            for tensor in part.state_dict().values():  # their names may change with the library
                digest.update(tensor.cpu().contiguous().view(-1).view(torch.uint8).numpy())
            found[name] = digest.hexdigest()
        return found

    def learned_from(self) -> dict[str, str]:
        """What a UNet's weights depend on: what they are to foretell, and a digest of each frozen part's weights."""
        return {"prediction_type": self._pipe.scheduler.config.get("prediction_type", "epsilon"), **self._digests}

    def origin(self, resume_from: Path | None) -> Origin:
        """Return what a checkpoint needs to say of these, once the one that a run goes on from fits; all ranks call it.

        Raises:
            UserError: it was trained to foretell something else, or with other frozen parts.
        """
        if resume_from:
            distributed.on_main(lambda: _check_origin(resume_from, self.learned_from()))
        return Origin(self)


class Origin:
    """Writes `Encoders.learned_from` into a checkpoint: a companion of ``Engine.save``."""

    def __init__(self, encoders: Encoders) -> None:
        self._encoders = encoders

    def save_pretrained(self, folder: Path) -> None:
        """Write ``learned_from.json``; on the main process."""
        write_json(folder / ORIGIN, self._encoders.learned_from())


def _check_origin(folder: Path, now: dict[str, str]) -> str:
    then = read_json_object(folder / ORIGIN, "checkpoint")
    kind, other = then.get("prediction_type"), now["prediction_type"]
    if kind != other:
        raise UserError(f"{folder} was trained with --prediction_type {kind}, not {other}; give that, or start anew")
    if parts := [name for name in now if now[name] != then.get(name)]:
        raise UserError(f"{folder} was trained with another {' and '.join(parts)}; name that one, or start anew")
    return ""


def _check(pipe: Any) -> None:
    """Refuse a pipeline that is trained in another way."""
    from diffusers import AsymmetricAutoencoderKL, AutoencoderKL, UNet2DConditionModel

    parts = [getattr(pipe, name, None) for name in ("text_encoder", "text_encoder_2", "text_encoder_3")]
    texts = [type(part).__name__ for part in parts if part is not None]
    unet, vae = getattr(pipe, "unet", None), getattr(pipe, "vae", None)
    kinds = isinstance(unet, UNet2DConditionModel) and isinstance(vae, (AutoencoderKL, AsymmetricAutoencoderKL))
    if not kinds or texts not in TEXT_MODELS:
        raise UserError(
            f"{type(pipe).__name__} cannot be fine-tuned here: training is for pipelines with a UNet2DConditionModel, "
            "an AutoencoderKL and one or two CLIP text encoders; name another, or leave out --do_train"
        )
    config, two = unet.config, len(texts) == 2
    told = {
        "in_channels": vae.config.latent_channels,
        "out_channels": vae.config.latent_channels,
        "cross_attention_dim": sum(part.config.hidden_size for part in parts if part is not None),
        "addition_embed_type": "text_time" if two else None,
        "class_embed_type": None,
        "encoder_hid_dim_type": None,
        "time_cond_proj_dim": None,
    }
    if two:
        size = 6 * (config.addition_time_embed_dim or 0) + parts[1].config.projection_dim
        told["projection_class_embeddings_input_dim"] = size
    for name, needed in told.items():
        if config[name] != needed:
            raise UserError(
                f"{type(pipe).__name__} cannot be fine-tuned here: its UNet's {name} is {config[name]}, and would have "
                f"to be {needed}; name another pipeline, or leave out --do_train"
            )
