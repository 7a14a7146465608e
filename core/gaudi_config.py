"""The Gaudi configuration: one flat JSON per model family that says how the device executes."""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass, fields
from pathlib import Path

from core.errors import UserError, did_you_mean, find_shipped, read_json_object, say

FILE_NAME = "gaudi_config.json"
CONFIGS_DIR = Path(__file__).resolve().parents[1] / "gaudi_configs"
# Keys that older guides still show, with what took their place.
REMOVED_KEYS = {
    "use_habana_mixed_precision": "use_torch_autocast",
    "hmp_is_verbose": "use_torch_autocast",
    "hmp_opt_level": "use_torch_autocast",
    "hmp_bf16_ops": "autocast_bf16_ops",
    "hmp_fp32_ops": "autocast_fp32_ops",
}


@dataclass(frozen=True)
class GaudiConfig:
    """How a Gaudi executes a model.

    Attributes:
        use_torch_autocast: bf16 autocast even where ``--bf16`` is not given.
        autocast_bf16_ops: names of operators that autocast runs in bf16, in place of the bridge's own list.
        autocast_fp32_ops: names of operators that autocast keeps in fp32, in place of the bridge's own list.
        use_dynamic_shapes: let the bridge compile for dynamic shapes (lazy mode).
        use_fused_adam: the device's fused AdamW. Not with DeepSpeed.
        use_fused_clip_norm: the device's fused gradient-norm clipping.
    """

    use_torch_autocast: bool = False
    autocast_bf16_ops: list[str] | None = None
    autocast_fp32_ops: list[str] | None = None
    use_dynamic_shapes: bool = False
    use_fused_adam: bool = False
    use_fused_clip_norm: bool = False

    @classmethod
    def from_pretrained(cls, name: str | os.PathLike | None) -> GaudiConfig:
        """Load by path of a file, path of a folder that holds ``gaudi_config.json``, bare name, or published name.

        ``t5`` and ``Habana/t5`` both mean ``gaudi_configs/t5.json`` of this repository; None means the defaults. A
        published name means its family's file: ``Habana/bert-base-uncased`` that of ``bert``.

        Raises:
            UserError: nothing is found, or the file has an unknown key or a value of the wrong type.
        """
        return cls() if name is None else cls._from_file(find(str(name)))

    @classmethod
    def _from_file(cls, path: Path) -> GaudiConfig:
        content = read_json_object(path, "--gaudi_config")
        known = {field.name for field in fields(cls)}
        for key, value in content.items():
            if key in REMOVED_KEYS:
                raise UserError(f"--gaudi_config: {path}: {key!r} no longer exists; use {REMOVED_KEYS[key]!r}")
            if key not in known:
                raise UserError(f"--gaudi_config: {path}: unknown key {key!r}{did_you_mean(key, known)}")
            is_ops = key.startswith("autocast_")
            if is_ops and value is not None:
                if not isinstance(value, list) or not all(isinstance(op, str) and op for op in value):
                    raise UserError(f"--gaudi_config: {path}: {key!r} must be a list of operator names")
            elif not is_ops and not isinstance(value, bool):
                raise UserError(f"--gaudi_config: {path}: {key!r} must be true or false, not {value!r}")
        return cls(**content)

    def save_pretrained(self, folder: str | os.PathLike) -> None:
        """Write ``gaudi_config.json`` into ``folder``, so that a checkpoint says how it was made."""
        (Path(folder) / FILE_NAME).write_text(json.dumps(asdict(self), indent=2) + "\n", encoding="utf-8")


def find(name: str) -> Path:
    """Return the file that ``name`` means; see `GaudiConfig.from_pretrained`."""
    if os.path.isfile(name):
        return Path(name)
    own, shipped_too = os.path.join(name, FILE_NAME), os.path.isfile(CONFIGS_DIR / f"{name}.json")
    if os.path.isdir(name) and (os.path.isfile(own) or not shipped_too):  # a model's folder may have a family's name
        return Path(own)
    is_file_name = name.endswith(".json")
    bare = name if is_file_name else name.removeprefix("Habana/").replace("-", "_")
    if is_file_name or not name.startswith("Habana/"):
        return find_shipped(bare, CONFIGS_DIR, "--gaudi_config")
    families = [file.stem for file in CONFIGS_DIR.glob("*.json") if f"{bare}_".startswith(f"{file.stem}_")]
    shipped = find_shipped(max(families, key=len, default=bare), CONFIGS_DIR, "--gaudi_config")
    say(f"gaudi_config: {name} is read from gaudi_configs/{shipped.name} (the published repository is not fetched)")
    return shipped
