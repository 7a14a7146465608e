"""Captioned pictures as rows to learn from, made anew in each epoch, or with what does not change kept on disk."""

from __future__ import annotations

import hashlib
import os
from argparse import Namespace
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from core.augment import CropView
from core.captions import pick_caption
from core.data import IGNORE_INDEX, Batch
from core.device import Device
from core.encoders import Encoders
from core.errors import UserError, say, warn_once
from core.feature_cache import cached
from core.noise import Noise
from core.pictures import Pictures

Row = dict[str, np.ndarray]


@dataclass
class Examples:
    """Draws what is learned from a row, its noise included: a loader's ``augment``.

    Captions and noise are drawn before the picture's view: what `keep` keeps moves no other draw.

    Attributes:
        pictures: the split; its rows have a ``text``, one or a list of them.
        view: crops and mirrors a picture.
        encoders, noise: of the pipeline.
        empty: share of the rows that lose their caption, so that the model learns to draw without one.
        kept_pictures, kept_captions: what `keep` has found: arrays by row, and by a caption's number in ``places``.
    """

    pictures: Pictures
    view: CropView
    encoders: Encoders
    noise: Noise
    empty: float = 0.0
    kept_pictures: Row = field(default_factory=dict)
    kept_captions: Row = field(default_factory=dict)
    places: dict[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Say what of captions and pictures is lost, or made up.

        Raises:
            UserError: the pipeline does not take such views.
        """
        self.shape = self.encoders.latent_shape(self.view.crop)
        self.captions = self.pictures.rows["text"]
        self.encoders.report_cut(self.captions, self.pictures.split)
        smaller, looked_at = self.pictures.smaller_than(self.view.resolution)
        if smaller:
            share = f"{smaller:,} of {looked_at:,} images have sides below {self.view.resolution} pixels"
            warn_once(f"{self.pictures.split}: {share}: they are enlarged")

    def __call__(self, row: dict[str, Any], rng: np.random.Generator) -> Row:
        """Return the row's arrays, see `collate_examples`; one whose picture cannot be read bears no loss."""
        number = row["number"]
        caption = pick_caption(self.captions[number], rng)
        caption = "" if rng.random() < self.empty else caption
        made = self.noise.draw(self.shape, rng)
        if self.kept_pictures:
            made |= {name: values[number] for name, values in self.kept_pictures.items()}
            made |= {name: values[self.places[caption]] for name, values in self.kept_captions.items()}
        else:
            made |= self._seen(number, rng) | self.encoders.tokenize(caption)
        return made | {"labels": np.int64(IGNORE_INDEX if made["unreadable"] else 0)}

    def _seen(self, number: int, rng: np.random.Generator) -> Row:
        """A picture's view, blank where it cannot be read."""
        side = self.view.crop
        seen = self.pictures.view(number, self.view, rng)
        pixels, place = seen or (np.zeros((3, side, side), np.uint8), (side, side, 0, 0))
        made = {"pixel_values": pixels, "unreadable": np.bool_(seen is None)}
        return made | ({"time_ids": self.encoders.time_ids(place, side)} if self.encoders.needs_time_ids else {})

    def keep(self, args: Namespace, device: Device, folder: Path) -> None:
        """Find every picture's latents and every caption's embedding once, on disk; all ranks call it.

        Of each picture one view is kept, drawn by ``--seed``. What is there already, of the same pictures, captions and
        encoders, is used.

        Args:
            args: ``latents_dir`` is where they are kept, ``folder`` if it is None.

        Raises:
            UserError: it cannot be written, no picture can be read, or an encoder makes inf or nan of something.
        """
        if not self.view.center or 0 < self.view.flip < 1:
            say("--cache_latents: one view of each image is kept, so crops and mirrors do not change with the epochs")
        folder, batch_size, seed = Path(args.latents_dir or folder), args.per_device_train_batch_size, args.seed
        texts = sorted({text for of_row in self.captions for text in ([of_row] if isinstance(of_row, str) else of_row)})
        self.places = {text: place for place, text in enumerate(["", *(text for text in texts if text)])}
        texts = list(self.places)

        def latents(numbers: list[int]) -> Row:
            rows = [self._seen(number, np.random.default_rng([seed, number])) for number in numbers]
            batch = collate_examples(rows)
            moments = self.encoders.moments(device.move(batch.pop("pixel_values")))
            device.step_boundary()
            found = {"moments": moments.cpu().numpy()}
            mend = "mend or remove the image, or give another --pretrained_vae_model_name_or_path"
            _require_finite(found, list(map(self.pictures.name, numbers)), f"the autoencoder; {mend}")
            return found | {name: value.numpy() for name, value in batch.items()}

        def embeddings(numbers: list[int]) -> Row:
            ids = device.move(collate_examples([self.encoders.tokenize(texts[number]) for number in numbers]))
            found = self.encoders.embed(ids)
            device.step_boundary()
            found = {name: value.float().cpu().numpy() for name, value in found.items()}
            names = [f"the caption {texts[number]!r:.80}" for number in numbers]
            _require_finite(found, names, "a text encoder; name a pipeline whose weights are whole")
            return found

        view, encoders = repr((self.view, seed)), self.encoders.fingerprint()
        of_pictures, of_captions = _key(encoders, view, *_identities(self.pictures)), _key(encoders, *texts)
        split, rows = self.pictures.split, len(self.pictures)
        self.kept_captions = cached(folder, f"{split}-captions", of_captions, len(texts), embeddings, batch_size)
        self.kept_pictures = cached(folder, f"{split}-images", of_pictures, rows, latents, batch_size)
        broken = np.flatnonzero(self.kept_pictures["unreadable"]).tolist()
        if broken:
            self.pictures.unreadable.found(broken)


def collate_examples(rows: list[Row], shape: tuple[int, ...] = ()) -> Batch:
    """Stack rows of equal arrays: each becomes a tensor (rows, ...); they have one shape already."""
    return {name: torch.from_numpy(np.stack([row[name] for row in rows])) for name in rows[0]}


def _require_finite(found: Row, names: list[str], maker: str) -> None:
    """Refuse arrays of rows that have inf or nan: kept, they would come back in each run. ``maker`` ends the line."""
    fine = [np.isfinite(values).reshape(len(names), -1).all(1) for values in found.values()]
    wrong = list(dict.fromkeys(name for name, good in zip(names, np.all(fine, 0), strict=True) if not good))
    if wrong:
        more = f" and {len(wrong) - 3} more" if len(wrong) > 3 else ""
        raise UserError(f"--cache_latents: inf or nan is made of {', '.join(wrong[:3])}{more} by {maker}")


def _key(*parts: str) -> str:
    digest = hashlib.sha256()
    for part in parts:
        digest.update(f"{len(part)}:".encode() + part.encode(errors="surrogatepass"))
    return digest.hexdigest()


def _identities(pictures: Pictures) -> list[str]:
    """What a picture is known by: the rows' fingerprint, and of files also their sizes and times of change."""
    known = [pictures.rows._fingerprint]
    for number in range(len(pictures)):
        path = pictures.source(number)  # not as the rows have it: relative ones begin where the rows' file lies
        if isinstance(path, str):
            status = os.stat(path)
            known.append(f"{number} {status.st_size} {status.st_mtime_ns}")
    return known
