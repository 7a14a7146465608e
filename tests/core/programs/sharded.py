"""Builds a model under ZeRO-3, loaded and from a configuration: ``sharded.py FOLDER MODEL``; prints what is held."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from transformers import AutoConfig, AutoModelForSeq2SeqLM

from core import distributed
from core.gaudi_config import GaudiConfig
from core.run import Run
from tests.core import toy

folder, source = sys.argv[1:]
run = Run(toy.arguments(Path(folder) / "run", "--deepspeed", "zero3"), GaudiConfig(), "sharded")
found = {}
for name, model in (
    ("loaded", AutoModelForSeq2SeqLM.from_pretrained(source)),
    ("built", AutoModelForSeq2SeqLM.from_config(AutoConfig.from_pretrained(source))),
):
    parameters = list(model.parameters())
    found[name] = {
        "whole": sum(parameter.ds_numel for parameter in parameters),
        "here": sum(parameter.ds_tensor.numel() for parameter in parameters),
        "gathered": sum(parameter.numel() for parameter in parameters),
    }
distributed.stop()
print(json.dumps(found))
