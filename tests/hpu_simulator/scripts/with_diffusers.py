"""Generates images with diffusers' own Stable Diffusion pipeline, of small random models, and trains its UNet once."""

import argparse
import json
from pathlib import Path

import numpy as np
import torch
from diffusers import AutoencoderKL, DDIMScheduler, StableDiffusionPipeline, UNet2DConditionModel
from transformers import CLIPTextConfig, CLIPTextModel, CLIPTokenizer

parser = argparse.ArgumentParser()
parser.add_argument("--folder", required=True)
folder = Path(parser.parse_args().folder)

pieces = [*"lower", *(f"{letter}</w>" for letter in "lower"), "lo", "low</w>", "er</w>"]
pieces += ["<|startoftext|>", "<|endoftext|>"]
vocabulary = {piece: at for at, piece in enumerate(dict.fromkeys(pieces))}
(folder / "vocab.json").write_text(json.dumps(vocabulary))
(folder / "merges.txt").write_text("#version: 0.2\nl o\nlo w</w>\ne r</w>\n")
tokenizer = CLIPTokenizer(str(folder / "vocab.json"), str(folder / "merges.txt"), model_max_length=16)

torch.manual_seed(0)
text = CLIPTextConfig(
    vocab_size=len(vocabulary),
    hidden_size=16,
    intermediate_size=32,
    num_hidden_layers=2,
    num_attention_heads=2,
    max_position_embeddings=16,
    bos_token_id=tokenizer.bos_token_id,
    eos_token_id=tokenizer.eos_token_id,
    pad_token_id=tokenizer.pad_token_id,
)
channels = {"block_out_channels": (8, 16), "norm_num_groups": 4, "sample_size": 8}
unet = UNet2DConditionModel(
    **channels,
    layers_per_block=1,
    down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"),
    up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"),
    cross_attention_dim=16,
    attention_head_dim=4,
)
vae = AutoencoderKL(
    **channels,
    down_block_types=("DownEncoderBlock2D",) * 2,
    up_block_types=("UpDecoderBlock2D",) * 2,
    latent_channels=4,
)
pipe = StableDiffusionPipeline(
    vae=vae,
    text_encoder=CLIPTextModel(text),
    tokenizer=tokenizer,
    unet=unet,
    scheduler=DDIMScheduler(beta_schedule="scaled_linear", clip_sample=False, steps_offset=1),
    safety_checker=None,
    feature_extractor=None,
    requires_safety_checker=False,
)
device = "hpu" if hasattr(torch, "hpu") and torch.hpu.is_available() else "cpu"
pipe.to(device)
pipe.set_progress_bar_config(disable=True)
generator = torch.Generator().manual_seed(1)
images = pipe(["lower low", "o"], num_inference_steps=3, generator=generator, output_type="np").images

optimizer = torch.optim.AdamW(pipe.unet.parameters(), lr=1e-3)
losses = []
for _ in range(3):
    pixels = torch.rand(2, 3, 16, 16, generator=generator).to(device)
    latents = pipe.vae.encode(pixels).latent_dist.mode().detach()
    noise = torch.randn(latents.shape, generator=generator).to(device)
    steps = torch.randint(0, 1000, (2,), generator=generator).to(device)
    noisy = pipe.scheduler.add_noise(latents, noise, steps)
    ids = tokenizer(["low", "er"], padding="max_length", return_tensors="pt").input_ids.to(device)
    out = pipe.unet(noisy, steps, pipe.text_encoder(ids)[0].detach()).sample
    loss = torch.nn.functional.mse_loss(out, noise)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    losses.append(loss.detach())
found = {
    "device": pipe.device.type,
    "shape": list(images.shape),
    "images": images[:, ::3, ::3].ravel().astype(float).tolist(),
    "spread": float(np.ptp(images)),
    "losses": torch.stack(losses).tolist(),
}
print(json.dumps(found))
