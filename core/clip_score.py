"""How well images show what their prompts say: the CLIP score."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from core.device import Device
from core.distributed import rank, sum_over_ranks, world_size
from core.errors import UserError
from core.hub import loading
from core.zero import whole_models

ROWS = 32  # pairs at once


def look_at(name: str | None, args: Namespace) -> None:
    """Look at the configuration of a model that scores images, if one is named, before there is anything to score.

    Raises:
        UserError: the model cannot be found, or is of another kind.
    """
    from transformers import AutoConfig

    if name:
        with loading(f"the model {name} that scores images", name):
            kind = AutoConfig.from_pretrained(name, **_options(args)).model_type
        if kind != "clip":
            raise UserError(f"the model {name} that scores images is of the kind {kind}; name one of clip")


def _options(args: Namespace) -> dict[str, Any]:
    return {"cache_dir": args.cache_dir, "token": args.token, "trust_remote_code": False}  # None would ask the user


def clip_score(
    model_name: str, images: Sequence[np.ndarray], prompts: Sequence[str], args: Namespace, device: Device
) -> float:
    """Return the mean of 100 * max(cosine, 0) between the embeddings of each image and its prompt.

    That is Hessel et al.'s "CLIPScore: A Reference-free Evaluation Metric for Image Captioning" (EMNLP 2021) with the
    weight 100 in place of 2.5, as it is usually given for drawn images. A prompt counts as far as the model has
    positions. The ranks share the pairs, and all call it; batches have one shape, and filler does not count.

    Args:
        model_name: a hub's model or a folder of transformers' ``CLIPModel`` with tokenizer and image processor.
        images: (height, width, 3), uint8.
        prompts: one for each image.
        args: ``cache_dir`` and ``token``.

    Raises:
        UserError: the model cannot be loaded, or is of another kind.
    """
    from transformers import AutoImageProcessor, AutoTokenizer, CLIPModel

    look_at(model_name, args)
    options = _options(args)
    with loading(f"the model {model_name} that scores images", model_name), whole_models():
        tokenizer = AutoTokenizer.from_pretrained(model_name, **options)
        processor = AutoImageProcessor.from_pretrained(model_name, backend="pil", **options)
        model = CLIPModel.from_pretrained(model_name, dtype="float32", use_safetensors=True, **options).eval()
    model.to(device.torch_device)
    length = model.config.text_config.max_position_embeddings
    mine = range(len(images))[rank() :: world_size()]
    rows, scores = min(ROWS, max(len(mine), 1)), []
    for some in (mine[first : first + rows] for first in range(0, len(mine), rows)):
        filled = [some[at % len(some)] for at in range(rows)]
        how = {"padding": "max_length", "max_length": length, "truncation": True, "return_tensors": "pt"}
        batch: dict[str, Any] = dict(tokenizer([prompts[at] for at in filled], **how))
        batch |= processor([images[at] for at in filled], return_tensors="pt", input_data_format="channels_last")
        with torch.no_grad():
            output = model(**device.move(batch))
        cosines = torch.nn.functional.cosine_similarity(output.image_embeds, output.text_embeds)
        device.step_boundary()
        scores += cosines.cpu()[: len(some)].clamp(min=0).tolist()
    return 100 * sum_over_ranks([float(np.sum(scores))])[0] / len(images)
