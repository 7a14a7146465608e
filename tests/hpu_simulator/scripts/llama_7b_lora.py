"""Llama 7B in bf16 with LoRA of rank 8 on queries and values: one step of 8 rows of 512 tokens."""

import json
import resource

import torch
from peft import LoraConfig, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM

model = LlamaForCausalLM._from_config(LlamaConfig(), dtype=torch.bfloat16)
model = get_peft_model(model, LoraConfig(r=8, lora_alpha=16, target_modules=["q_proj", "v_proj"])).to("hpu")
trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
optimizer = torch.optim.AdamW(trained, lr=1e-4)
ids = torch.ones(8, 512, dtype=torch.long).to("hpu")
model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
optimizer.step()
optimizer.zero_grad()
host = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
counts = {"parameters": sum(p.numel() for p in model.parameters()), "trained": sum(p.numel() for p in trained)}
print(json.dumps({**counts, "host": host}))
