"""Trains a small language model with transformers' own Trainer: train, evaluate, save, resume."""

import argparse
import json

import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments, set_seed

parser = argparse.ArgumentParser()
parser.add_argument("--folder", required=True)
folder = parser.parse_args().folder

set_seed(0)
sizes = {"n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 12, "vocab_size": 50}
config = GPT2Config(**sizes, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, bos_token_id=0, eos_token_id=0)
rows = [{"input_ids": row, "labels": row} for row in torch.randint(0, 50, (40, 12))]


def trainer(steps: int) -> Trainer:
    options = TrainingArguments(
        output_dir=folder,
        max_steps=steps,
        per_device_train_batch_size=4,
        gradient_accumulation_steps=2,
        learning_rate=0.01,
        max_grad_norm=0.5,
        logging_steps=1,
        save_steps=3,
        report_to="none",
        disable_tqdm=True,
        optim="adamw_torch",
    )
    set_seed(0)
    return Trainer(GPT2LMHeadModel(config), options, train_dataset=rows, eval_dataset=rows[:10])


def losses(of: Trainer) -> list[list[float]]:
    return [[entry["loss"], entry["grad_norm"]] for entry in of.state.log_history if "loss" in entry]


whole = trainer(6)
whole.train()
evaluated = whole.evaluate()["eval_loss"]
whole.save_model()
resumed = trainer(6)
resumed.train(resume_from_checkpoint=f"{folder}/checkpoint-3")
loaded = GPT2LMHeadModel.from_pretrained(folder)
found = {
    "device": whole.args.device.type,
    "weights on": next(whole.model.parameters()).device.type,
    "losses": losses(whole),
    "resumed": losses(resumed),
    "evaluated": evaluated,
    "saved": sum(value.double().sum().item() for value in loaded.state_dict().values()),
}
print(json.dumps(found))
