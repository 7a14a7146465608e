"""Stable Diffusion 1.x at full size: one image of 512 x 512 in three steps, and one training step of the denoiser."""

import json
import resource

import numpy as np
import torch
from diffusers import AutoencoderKL, DDPMScheduler, PNDMScheduler, StableDiffusionPipeline, UNet2DConditionModel
from transformers import CLIPTextConfig, CLIPTextModel

down, up = "CrossAttnDownBlock2D", "CrossAttnUpBlock2D"
unet = UNet2DConditionModel(
    sample_size=64,
    down_block_types=(down, down, down, "DownBlock2D"),
    up_block_types=("UpBlock2D", up, up, up),
    block_out_channels=(320, 640, 1280, 1280),
    cross_attention_dim=768,
    attention_head_dim=8,
).to("hpu")
vae = AutoencoderKL(
    down_block_types=("DownEncoderBlock2D",) * 4,
    up_block_types=("UpDecoderBlock2D",) * 4,
    block_out_channels=(128, 256, 512, 512),
    layers_per_block=2,
    sample_size=512,
).to("hpu")
sizes = {"hidden_size": 768, "intermediate_size": 3072, "num_hidden_layers": 12, "num_attention_heads": 12}
text = CLIPTextModel(CLIPTextConfig(**sizes, vocab_size=49408, max_position_embeddings=77)).to("hpu")
parts = {"tokenizer": None, "safety_checker": None, "feature_extractor": None, "requires_safety_checker": False}
scheduler = PNDMScheduler(skip_prk_steps=True, steps_offset=1)
pipeline = StableDiffusionPipeline(vae=vae, text_encoder=text, unet=unet, scheduler=scheduler, **parts)
pipeline.set_progress_bar_config(disable=True)
with torch.no_grad():
    prompt = text(torch.ones(1, 77, dtype=torch.long).to("hpu"))[0]
    embedded = {"prompt_embeds": prompt, "negative_prompt_embeds": prompt}
    images = pipeline(**embedded, num_inference_steps=3, output_type="np").images
generation_peak = torch.hpu.max_memory_allocated()

optimizer = torch.optim.AdamW(unet.parameters(), lr=1e-5)
with torch.no_grad():
    latents = vae.encode(torch.zeros(1, 3, 512, 512).to("hpu")).latent_dist.sample() * 0.18215
noise, step = torch.randn_like(latents), torch.ones(1, dtype=torch.long).to("hpu")
noisy = DDPMScheduler().add_noise(latents, noise, step)
torch.nn.functional.mse_loss(unet(noisy, step, prompt).sample, noise).backward()
optimizer.step()
optimizer.zero_grad()
host = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
found = {"shape": np.shape(images), "parameters": sum(p.numel() for p in unet.parameters()), "host": host}
print(json.dumps({**found, "generation_peak": generation_peak}))
