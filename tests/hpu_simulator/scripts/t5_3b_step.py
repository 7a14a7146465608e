"""Train T5-3B for two steps as the published run did: fp32, gradient checkpointing, one row of 1,024 + 128 tokens."""

import json
import resource
import time

import habana_frameworks.torch.core as htcore
import torch
from transformers import T5Config, T5ForConditionalGeneration

sizes = {"d_model": 1024, "d_ff": 16384, "num_layers": 24, "num_heads": 32, "d_kv": 128, "vocab_size": 32128}
model = T5ForConditionalGeneration(T5Config(**sizes, decoder_start_token_id=0)).to("hpu")
model.tie_weights()
model.gradient_checkpointing_enable()
model.train()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
seconds = []
for _ in range(2):
    start = time.process_time()
    ids, labels = torch.ones(1, 1024, dtype=torch.long).to("hpu"), torch.ones(1, 128, dtype=torch.long).to("hpu")
    model(input_ids=ids, labels=labels, use_cache=False).loss.backward()
    htcore.mark_step()
    optimizer.step()
    optimizer.zero_grad()
    htcore.mark_step()
    seconds.append(time.process_time() - start)
host = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
print(json.dumps({"parameters": sum(p.numel() for p in model.parameters()), "seconds": seconds, "host": host}))
