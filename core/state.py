"""What a checkpoint holds: weights, optimiser, schedule, random generators. Nothing in it is unpickled."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import nn

from core import adapters, checkpoint, distributed, generators
from core.checkpoint import OnMain
from core.device import Device
from core.errors import UserError, is_main_process, read_json_object
from core.files import model_files
from core.optimizers import family
from core.untrusted import wrong_place

FILE_BYTES, SHARD = 4 * 1000**3, "10GB"
FORM = {"training": {"optimizer": "", "schedule_steps": [0], "own?": [0.0]}}


def save_model(
    model: nn.Module, folder: Path, weights: Mapping[str, torch.Tensor] | None = None, publish: bool = False
) -> None:
    """Write the weights under the module's own names; storage that several names share is written once.

    Models with ``save_pretrained`` write themselves, so that ``from_pretrained`` loads the folder. ``weights`` replace
    the module's own, where it holds a share of them only. With ``publish`` the names, of weights or (diffusers) of
    files, are those that the hub's models of this kind have; `load_model` does not read them.
    """
    named = model.state_dict() if weights is None else weights
    with model_files(folder):
        if hasattr(model, "save_config"):  # a model of diffusers, which can write no other weights than its own
            model.save_config(folder)
            write_weights(named, folder, weights_name(folder, publish))
        elif hasattr(model, "save_pretrained"):
            model.save_pretrained(folder, state_dict=weights and dict(weights), save_original_format=publish)
            dtypes = (tensor.dtype for tensor in (weights or {}).values() if tensor.is_floating_point())
            if dtype := next(dtypes, None):  # it has written down the working dtype, which these weights may not have
                note_dtype(folder, dtype)
        else:
            save_file(_once(named), folder / "model.safetensors", metadata={"format": "pt"})


def _once(named: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    first: dict[Any, str] = {}
    for name, tensor in named.items():
        key = (tensor.untyped_storage().data_ptr(), tensor.storage_offset(), tensor.shape, tensor.stride())
        first.setdefault(key if tensor.numel() else name, name)
    return {name: named[name].detach().contiguous().cpu() for name in first.values()}


def weights_name(folder: Path, publish: bool = True) -> str:
    """Name of the file of weights beside a model's ``config.json``; diffusers' library has another one to publish."""
    path = folder / "config.json"
    if publish and path.exists() and "_diffusers_version" in read_json_object(path, "config.json"):
        from diffusers.utils import SAFETENSORS_WEIGHTS_NAME

        return SAFETENSORS_WEIGHTS_NAME
    return "model.safetensors"


def write_weights(weights: Mapping[str, torch.Tensor], folder: Path, name: str) -> None:
    """Write weights into one file, or beyond `SHARD` into several with an index."""
    from huggingface_hub import save_torch_state_dict

    host = {key: tensor.detach().cpu() for key, tensor in weights.items()}
    how = {"max_shard_size": SHARD, "metadata": {"format": "pt"}}
    with model_files(folder):
        save_torch_state_dict(host, folder, filename_pattern=name.replace(".", "{suffix}.", 1), **how)


def with_others(
    model: nn.Module, weights: Mapping[str, torch.Tensor] | None, others: Mapping[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    """All weights of ``model`` (gathered ones, or None for its own), with ``others`` in place of theirs.

    Parameters have one name each, as in ``others``: a tied one would keep its old value under its second name.
    """
    if weights is None:
        second = dict(model.named_parameters(remove_duplicate=False)).keys() - dict(model.named_parameters()).keys()
        weights = {name: tensor for name, tensor in model.state_dict().items() if name not in second}
    return {**weights, **others}


def copies(main: OnMain, weights: Mapping[str, torch.Tensor], buffers: Collection[str] = ()) -> dict[str, torch.Tensor]:
    """Copy a model's weights, for what ``main`` writes later: names that share storage share the copy, too."""
    of_place: dict[Any, torch.Tensor] = {}
    for name, tensor in weights.items():
        if _place(tensor) not in of_place:
            of_place[_place(tensor)] = main.copy(tensor, at_once=name in buffers)
    return {name: of_place[_place(tensor)] for name, tensor in weights.items()}


def note_dtype(folder: Path, dtype: torch.dtype) -> None:
    """Say in a saved model's ``config.json``, if it has one, which dtype its weights have."""
    path = folder / "config.json"
    if path.exists():
        config = read_json_object(path, "config.json") | {"dtype": str(dtype).removeprefix("torch.")}
        path.write_text(json.dumps(config, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def copy_in_place(own: torch.Tensor, value: torch.Tensor) -> None:
    """Set a parameter or buffer that this process holds whole."""
    own.data.copy_(value)


def load_model(
    model: nn.Module, folder: Path, put: Callable[[torch.Tensor, torch.Tensor], None] = copy_in_place
) -> None:
    """Copy saved weights into ``model`` in place; names that share storage are filled by the one that was written.

    Of a model with adapters these alone are saved: the frozen weights are those of the model that was loaded.

    Args:
        put: sets a parameter or buffer (first) to a whole tensor, where a rank holds a share only.

    Raises:
        UserError: a weight is missing, unknown or of another shape, or one of the two has adapters.
    """
    adapters.check(model, folder)
    adapted = adapters.has_adapters(model)
    saved = TensorFiles(*sorted(folder.glob(adapters.WEIGHTS if adapted else "model*.safetensors")))
    own = adapters.in_file(model) if adapted else model.state_dict(keep_vars=True)
    places = {_place(own[name]) for name in saved.keys() & own.keys()}
    missing = [name for name, tensor in own.items() if name not in saved and _place(tensor) not in places]
    unknown = sorted(saved.keys() - own.keys())
    if missing or unknown:
        raise UserError(f"{folder} is of another model: missing {missing[:3]}, unknown {unknown[:3]}; name that model")
    for name in saved:
        tensor, shape = saved[name], getattr(own[name], "ds_shape", own[name].shape)
        if shape != tensor.shape:
            shapes = f"{list(tensor.shape)} there, {list(shape)} here"
            raise UserError(f"{folder} is of another model: {name} is {shapes}; name that model")
        put(own[name], tensor)


def _place(tensor: torch.Tensor) -> tuple[Any, ...]:
    """Equal for names of the same numbers."""
    shared_out = getattr(tensor, "ds_id", None)  # DeepSpeed's number of a parameter whose numbers are elsewhere
    if shared_out is not None:
        return ("parameter", shared_out)
    return (tensor.data_ptr(), tensor.shape, tensor.stride())  # not the storage: ZeRO puts all weights into one


def save_tensors(tensors: dict[str, torch.Tensor], path: Path) -> None:
    """Write tensors to a safetensors file, each with its own storage only."""
    save_file({name: tensor.detach().cpu().contiguous().clone() for name, tensor in tensors.items()}, path)


def save_each(tensors: Iterable[tuple[str, torch.Tensor]], folder: Path, name: str, main: OnMain) -> None:
    """Write ``<name>.safetensors``, and ``<name>-1`` and so on once a file is full.

    No more than that is held on the host, unless ``main`` writes later.
    All ranks call it and read ``tensors`` to the end, since each may be gathered from all of them.
    """
    held: dict[str, torch.Tensor] = {}
    number = size = 0
    for key, tensor in tensors:
        if main.failure or not is_main_process():
            continue
        if size + tensor.nbytes > FILE_BYTES and held:
            main.later(save_file, held, folder / f"{name}{f'-{number}' if number else ''}.safetensors")
            held, size, number = {}, 0, number + 1
        held[key] = main.copy(tensor)
        size += tensor.nbytes
    main.later(save_file, held, folder / f"{name}{f'-{number}' if number else ''}.safetensors")


class TensorFiles(Mapping[str, torch.Tensor]):
    """The tensors of safetensors files by name, each read when it is asked for, onto the CPU.

    Files in a checkpoint's folder that it does not list are passed over, see `checkpoint.lists`.

    Raises:
        UserError: there is no such file, or it is not readable as safetensors.
    """

    def __init__(self, *paths: Path) -> None:
        if not (listed := [*filter(checkpoint.lists, paths)]):
            raise UserError("the checkpoint holds no such file (*.safetensors)")
        self._files: dict[str, Any] = {}
        for path in listed:
            with _reading(path):
                file = safe_open(path, "pt")
                self._files |= dict.fromkeys(file.keys(), file)

    def __getitem__(self, name: str) -> torch.Tensor:
        with _reading(name):
            return self._files[name].get_tensor(name)

    def __contains__(self, name: object) -> bool:
        return name in self._files  # without reading it

    def __iter__(self) -> Iterator[str]:
        return iter(self._files)

    def __len__(self) -> int:
        return len(self._files)


@contextmanager
def _reading(what: Any) -> Iterator[None]:
    try:
        yield
    except (SafetensorError, OSError) as error:
        raise UserError(f"{what} cannot be read: {error}") from None


def save_training(
    folder: Path, strategy: Any, schedule: Any, device: Device, state: dict[str, Any], own: Any, main: OnMain
) -> None:
    """Write what training needs beside the weights: optimiser, schedule, random generators, and ``state`` as it is.

    Numbers go to JSON, which gives floats back bit for bit; tensors to safetensors. All ranks call it: the optimiser's
    state is gathered, each rank has a number of its ``own``, and random generators (``rank-<N>.json`` beyond rank 0).
    """
    save_each(strategy.named_state(), folder, "optimizer", main)
    mine = json.dumps(generators.as_json(device) | {"own": own})
    ranks = [json.loads(text) for text in distributed.gather_texts(mine)]
    main.later(save_tensors, device.rng_state(), folder / "rng.safetensors")
    training = {"optimizer": family(strategy.optimizer), "schedule_steps": _schedule_steps(schedule)}
    training |= {name: ranks[0][name] for name in ("python_random", "numpy_random")}
    training["own"] = [rank.pop("own") for rank in ranks]
    main.later(_write_json, folder / "state.json", {**state, "training": training})
    for number, rank in enumerate(ranks[1:], start=1):
        main.later(_write_json, folder / f"rank-{number}.json", rank)


def _schedule_steps(schedule: Any) -> list[int]:
    """The steps a schedule has made, and the calls of `step`. DeepSpeed's own know the last step's number alone."""
    if hasattr(schedule, "lr_lambdas"):
        return [schedule.last_epoch, schedule._step_count]
    return [schedule.last_batch_iteration + 1, schedule.last_batch_iteration + 2]


def _resume_schedule(schedule: Any, optimizer: torch.optim.Optimizer, steps: list[int]) -> None:
    """Let a schedule go on after so many steps, with the rate of today's flags there.

    A longer schedule or another peak counts from here on.
    """
    if not hasattr(schedule, "lr_lambdas"):
        schedule.step(steps[0] - 1)
        return
    schedule.last_epoch, schedule._step_count = steps
    rates = [base * rate(steps[0]) for base, rate in zip(schedule.base_lrs, schedule.lr_lambdas, strict=True)]
    schedule._last_lr = rates
    for group, rate in zip(optimizer.param_groups, rates, strict=True):
        group["lr"] = rate


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=1, allow_nan=False), encoding="utf-8")


def load_training(folder: Path, strategy: Any, schedule: Any, device: Device) -> tuple[dict[str, Any], list[Any]]:
    """Put back what `save_training` wrote; returns its ``state``, and ``own`` of each rank that there was.

    A rank that was not there keeps the random generators that it has.

    Raises:
        UserError: a file cannot be read, or the optimiser is of another family.
    """
    state = read_json_object(folder / "state.json", "checkpoint")
    require_form(folder, state, FORM)
    with of_a_run(folder):
        return state, _put_back(folder, state.pop("training"), strategy, schedule, device)


def require_form(folder: Path, state: dict[str, Any], form: dict[str, Any]) -> None:
    """Raise a `UserError` if what a checkpoint's state.json holds has not the form of `wrong_place`."""
    if place := wrong_place(state, form):
        raise UserError(f"{folder / 'state.json'}: {place} is not what a run writes there; give another checkpoint")


@contextmanager
def of_a_run(folder: Path) -> Iterator[None]:
    """What does not have the form that a run gives it is a `UserError` about the folder."""
    try:
        yield
    except (KeyError, TypeError, ValueError, IndexError, AttributeError, OverflowError, RuntimeError) as error:
        what = f"{folder} is not what a run writes ({type(error).__name__}: {error})"
        raise UserError(f"{what}; give another checkpoint") from error


def _put_back(folder: Path, training: dict[str, Any], strategy: Any, schedule: Any, device: Device) -> list[Any]:
    strategy.load_named_state(TensorFiles(*sorted(folder.glob("optimizer*.safetensors"))), training["optimizer"])
    _resume_schedule(schedule, strategy.optimizer, training["schedule_steps"])
    if is_main_process():
        generators.put_back(device, training, TensorFiles(folder / "rng.safetensors"))
    elif (file := folder / f"rank-{distributed.rank()}.json").exists() and checkpoint.lists(file):
        generators.put_back(device, read_json_object(file, "checkpoint"))
    return training.get("own", [])
