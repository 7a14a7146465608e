"""Autocast: when it is on and on what; the operator lists: written before the bridge reads them, and checked."""

from __future__ import annotations

import itertools
import json
import os
import sys
import tempfile
from argparse import Namespace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from core import errors, mixed_precision
from core.arguments import parse_arguments
from core.device import BRIDGE, Device
from core.errors import UserError
from core.gaudi_config import GaudiConfig
from core.mixed_precision import Precision, announce_op_lists, effective_op_lists, known_ops, resolve_precision
from tests import fake_bridge

BF16_VARIABLE, FP32_VARIABLE = mixed_precision.OP_LIST_VARIABLES.values()

# The operators of the bridge's own lists (its documentation), of published lists, and of optimum-habana's constants.
BRIDGE_LOWER = """addmm addbmm batch_norm baddbmm bmm conv1d conv2d conv3d conv_transpose1d conv_transpose2d
    conv_transpose3d dot dropout feature_dropout group_norm instance_norm layer_norm leaky_relu linear matmul mean mm
    mul mv softmax log_softmax scaled_dot_product_attention"""
BRIDGE_FP32 = """acos addcdiv asin atan2 bilinear binary_cross_entropy binary_cross_entropy_with_logits cdist cosh
    cosine_embedding_loss
    cosine_similarity cross_entropy_loss dist div divide embedding embedding_bag erfinv exp expm1 hinge_embedding_loss
    huber_loss kl_div l1_loss log log10 log1p log2 logsumexp margin_ranking_loss mse_loss multi_margin_loss
    multilabel_margin_loss nll_loss pdist poisson_nll_loss pow reciprocal renorm rsqrt sinh smooth_l1_loss
    soft_margin_loss softplus tan topk triplet_margin_loss truediv true_divide"""
BRIDGE_PROMOTE = "add addcmul addcdiv cat div exp mul pow sub iadd truediv stack"
DIFFUSION_BF16 = """_convolution.deprecated _convolution conv1d conv2d conv3d conv_tbc conv_transpose1d
    conv_transpose2d.input conv_transpose3d.input convolution prelu addmm addmv addr matmul einsum mm mv silu linear
    addbmm baddbmm bmm chain_matmul linalg_multi_dot layer_norm group_norm"""
DIFFUSION_FP32 = """acos asin cosh erfinv exp expm1 log log10 log2 log1p reciprocal rsqrt sinh tan pow.Tensor_Scalar
    pow.Tensor_Tensor pow.Scalar softplus frobenius_norm frobenius_norm.dim nuclear_norm nuclear_norm.dim
    cosine_similarity poisson_nll_loss cosine_embedding_loss nll_loss nll_loss2d hinge_embedding_loss kl_div l1_loss
    smooth_l1_loss huber_loss mse_loss margin_ranking_loss multilabel_margin_loss soft_margin_loss triplet_margin_loss
    multi_margin_loss binary_cross_entropy_with_logits dist pdist cdist renorm logsumexp"""
LANGUAGE_BF16 = """addmm addbmm batch_norm baddbmm bmm conv1d conv2d conv3d conv_transpose1d conv_transpose2d
    conv_transpose3d dot dropout feature_dropout group_norm instance_norm layer_norm leaky_relu linear matmul mean mm
    mul mv softmax log_softmax sin cos add div gather embedding"""
DEFAULT_CONSTANTS = """add addmm bmm div dropout gelu iadd linear layer_norm matmul mm rsub softmax truediv embedding
    nll_loss log_softmax"""


@pytest.fixture(autouse=True)
def first_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """No warning was given yet, and no operator list is announced."""
    monkeypatch.setattr(errors, "_warned", set())
    for name in (BF16_VARIABLE, FP32_VARIABLE):
        monkeypatch.setenv(name, "")  # so that it is put back, whatever the code under test sets
        monkeypatch.delenv(name)
    for name in mixed_precision.OLD_VARIABLES:
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def bridge_ahead(monkeypatch: pytest.MonkeyPatch) -> list:
    """A bridge is installed and not yet imported; what would run at exit is collected, and run after the test."""
    at_exit: list = []
    monkeypatch.setattr(mixed_precision, "bridge_is_installed", lambda: True)
    monkeypatch.setattr(
        mixed_precision, "atexit", SimpleNamespace(register=lambda f, *a, **k: at_exit.append(lambda: f(*a, **k)))
    )
    yield at_exit
    for function in at_exit:
        function()


def gaudi() -> Device:
    return Device("hpu", "gaudi2", "lazy", torch.device("cpu"))


def cpu() -> Device:
    return Device("cpu", "cpu (test)", "eager", torch.device("cpu"))


def flags(*argv: str) -> Namespace:
    return parse_arguments(["--do_eval", *argv], description="test")


# ------------------------------------------------------------------------------------------------------ operator lists


def test_lists_are_in_a_private_folder_of_a_random_name(bridge_ahead):
    config = GaudiConfig(autocast_bf16_ops=["mm", "linear"], autocast_fp32_ops=["exp"])
    announce_op_lists(config)
    paths = [Path(os.environ[name]) for name in (BF16_VARIABLE, FP32_VARIABLE)]
    assert [path.read_text() for path in paths] == ["mm\nlinear\n", "exp\n"]
    folder = paths[0].parent
    assert paths[1].parent == folder
    assert folder.stat().st_mode & 0o777 == 0o700
    assert folder.parent == Path(tempfile.gettempdir())
    for name in (BF16_VARIABLE, FP32_VARIABLE):
        del os.environ[name]
    announce_op_lists(config)
    assert Path(os.environ[BF16_VARIABLE]).parent != folder
    bridge_ahead[0]()
    assert not folder.exists()


@pytest.mark.parametrize(
    ("config", "variables"),
    [
        (GaudiConfig(), []),
        (GaudiConfig(autocast_bf16_ops=["mm"]), [BF16_VARIABLE]),
        (GaudiConfig(autocast_fp32_ops=["exp"]), [FP32_VARIABLE]),
        (GaudiConfig(autocast_bf16_ops=[], autocast_fp32_ops=["exp"]), [BF16_VARIABLE, FP32_VARIABLE]),
    ],
)
def test_only_given_lists_are_announced(bridge_ahead, config, variables):
    announce_op_lists(config)
    assert [name for name in (BF16_VARIABLE, FP32_VARIABLE) if name in os.environ] == variables
    assert len(bridge_ahead) == bool(variables)


def test_without_a_bridge_nothing_is_written(monkeypatch):
    monkeypatch.setattr(mixed_precision, "bridge_is_installed", lambda: False)
    monkeypatch.setattr(tempfile, "mkdtemp", lambda **_: pytest.fail("a folder nobody reads"))
    announce_op_lists(GaudiConfig(autocast_bf16_ops=["mm"]))
    assert BF16_VARIABLE not in os.environ


@pytest.mark.parametrize("name", ["LOWER_LIST", "FP32_LIST"])
def test_variables_of_old_guides_are_errors(monkeypatch, name):
    monkeypatch.setenv(name, "/tmp/list.txt")
    key = {"LOWER_LIST": "autocast_bf16_ops", "FP32_LIST": "autocast_fp32_ops"}[name]
    with pytest.raises(UserError, match=f"{name}.*{key}"):
        announce_op_lists(GaudiConfig())


def test_a_bridge_that_was_imported_before_is_an_error(monkeypatch, bridge_ahead):
    monkeypatch.setitem(sys.modules, BRIDGE + ".core", SimpleNamespace())
    announce_op_lists(GaudiConfig())  # nothing to announce
    with pytest.raises(UserError, match="bridge was imported before the operator lists"):
        announce_op_lists(GaudiConfig(autocast_fp32_ops=["exp"]))
    assert FP32_VARIABLE not in os.environ


def test_a_variable_and_the_configuration_may_not_differ(monkeypatch, bridge_ahead, tmp_path):
    path = tmp_path / "list.txt"
    monkeypatch.setenv(BF16_VARIABLE, str(path))
    config = GaudiConfig(autocast_bf16_ops=["mm", "linear"])
    for content in (None, "mm\n", "linear\nmm\n"):
        if content:
            path.write_text(content)
        with pytest.raises(UserError) as error:
            announce_op_lists(config)
        assert f"{BF16_VARIABLE}={path}" in str(error.value)
        assert "'autocast_bf16_ops'" in str(error.value)
    path.write_text("mm\nlinear\n")  # said twice, the same
    announce_op_lists(config)
    assert os.environ[BF16_VARIABLE] == str(path)
    assert bridge_ahead == []


def test_a_second_run_in_one_process_keeps_the_first_ones_lists(monkeypatch, bridge_ahead):
    config = GaudiConfig(autocast_bf16_ops=["mm"])
    announce_op_lists(config)
    announced = os.environ[BF16_VARIABLE]
    monkeypatch.setitem(sys.modules, BRIDGE + ".core", SimpleNamespace())  # imported meanwhile, with these lists
    announce_op_lists(config)
    assert os.environ[BF16_VARIABLE] == announced


def test_the_bridge_reads_the_lists_which_are_gone_after_the_run(tmp_path):
    config = {"autocast_bf16_ops": ["mm", "linear"], "autocast_fp32_ops": ["exp", "softmax"]}
    path = tmp_path / "config.json"
    path.write_text(json.dumps(config))
    code = f"""
import os, sys
from core.arguments import parse_arguments
from core.mixed_precision import effective_op_lists, prepare_environment
args = parse_arguments(["--do_eval", "--gaudi_config", {str(path)!r}], description="test")
gaudi_config = prepare_environment(args)
assert "torch" not in sys.modules
from core.device import select_device
device = select_device(args, args.execution_mode)
assert list(effective_op_lists(gaudi_config, device).values()) == [["mm", "linear"], ["exp", "softmax"]]
read = sys.modules["habana_frameworks.torch"].OP_LISTS
assert list(read.values()) == [["mm", "linear"], ["exp", "softmax"]], read
print(*[os.environ[name] for name in read])
"""
    done = fake_bridge.run(code, fake_bridge.write(tmp_path / "bridge"))
    assert done.stderr == ""
    paths = [Path(name) for name in done.stdout.split()]
    assert [path.name for path in paths] == ["autocast_bf16_ops.txt", "autocast_fp32_ops.txt"]
    assert not paths[0].parent.exists()


def test_every_published_operator_is_known():
    assert len(DIFFUSION_BF16.split()) == 27
    assert len(DIFFUSION_FP32.split()) == 44
    lists = [
        (BRIDGE_LOWER, BRIDGE_FP32),
        (LANGUAGE_BF16, BRIDGE_PROMOTE),
        (DIFFUSION_BF16, DIFFUSION_FP32),
        (DEFAULT_CONSTANTS, ""),
    ]
    for bf16, fp32 in lists:
        config = GaudiConfig(autocast_bf16_ops=bf16.split(), autocast_fp32_ops=fp32.split())
        assert effective_op_lists(config, gaudi()) == {
            "autocast_bf16_ops": bf16.split(),
            "autocast_fp32_ops": fp32.split(),
        }
    assert {"iadd", "truediv"} <= known_ops()  # the bridge's own names, which torch does not have


@pytest.mark.parametrize(
    ("name", "nearest"),
    [("lienar", "linear"), ("matmull", "matmul"), ("pow.Tensor_Skalar", "pow.Tensor_Scalar"), ("aten::mm", "")],
)
@pytest.mark.parametrize("device", [gaudi(), cpu()], ids=["gaudi", "cpu"])
def test_an_unknown_operator_is_an_error_with_the_nearest(name, nearest, device):
    with pytest.raises(UserError) as error:
        effective_op_lists(GaudiConfig(autocast_bf16_ops=["mm"], autocast_fp32_ops=["exp", name]), device)
    assert f"no such operator: {name}" in str(error.value)
    assert f"did you mean {nearest!r}" in str(error.value) or not nearest


def test_a_list_by_variable_is_checked_and_used(monkeypatch, tmp_path):
    path = tmp_path / "list.txt"
    path.write_text("mm\n\nlinear\n")
    monkeypatch.setenv(BF16_VARIABLE, str(path))
    assert effective_op_lists(GaudiConfig(), gaudi()) == {"autocast_bf16_ops": ["mm", "linear"]}
    path.write_text("mn\n")
    with pytest.raises(UserError, match="no such operator: mn"):
        effective_op_lists(GaudiConfig(), gaudi())
    path.unlink()
    with pytest.raises(UserError, match=f"{BF16_VARIABLE} names {path}"):
        effective_op_lists(GaudiConfig(), gaudi())


def test_lists_elsewhere_are_one_warning(caplog):
    config = GaudiConfig(autocast_bf16_ops=["mm"], autocast_fp32_ops=["exp"])
    assert effective_op_lists(config, cpu()) == {}
    assert effective_op_lists(config, cpu()) == {}
    assert len(caplog.messages) == 1
    assert "autocast_bf16_ops and autocast_fp32_ops" in caplog.messages[0]
    assert effective_op_lists(GaudiConfig(), cpu()) == {}
    assert len(caplog.messages) == 1


# ----------------------------------------------------------------------------------------------------------- precision

# (--half_precision_backend, device) -> whose operators autocast affects, and a word of the warning.
WHERE = {
    ("auto", "hpu"): ("hpu", None),
    ("auto", "cuda"): ("cuda", None),
    ("auto", "cpu"): ("cpu", None),
    ("hpu_amp", "hpu"): ("hpu", None),
    ("hpu_amp", "cuda"): ("cuda", "there is none"),
    ("hpu_amp", "cpu"): ("cpu", "there is none"),
    ("cpu_amp", "hpu"): ("cpu", "stay in fp32"),
    ("cpu_amp", "cuda"): ("cpu", "stay in fp32"),
    ("cpu_amp", "cpu"): ("cpu", None),
}


@pytest.mark.parametrize(("backend", "kind"), WHERE)
@pytest.mark.parametrize(("bf16", "configured"), list(itertools.product([False, True], repeat=2)))
def test_precision_table(monkeypatch, caplog, bf16, configured, backend, kind):
    monkeypatch.setattr(Device, "has_fast_bf16", True)
    args = flags("--half_precision_backend", backend, *(["--bf16"] if bf16 else []))
    device = Device(kind, f"a {kind}", "eager", torch.device("cpu"))
    precision = resolve_precision(args, GaudiConfig(use_torch_autocast=configured), device)
    if not (bf16 or configured):
        assert precision == Precision(False, kind, "fp32")
        expected = [] if backend == "auto" else [f"--half_precision_backend {backend} has no effect"]
    else:
        where, warned = WHERE[backend, kind]
        assert precision == Precision(True, where, f"bf16 autocast ({where})")
        expected = [] if bf16 else ["use_torch_autocast"]
        expected += [warned] if warned else []
    assert len(caplog.messages) == len(expected)
    assert all(word in message for word, message in zip(expected, caplog.messages, strict=True))


def test_emulated_bf16_is_said(monkeypatch, caplog):
    monkeypatch.setattr(Device, "has_fast_bf16", False)
    assert resolve_precision(flags("--bf16"), GaudiConfig(), cpu()).enabled
    assert "slower than in fp32" in caplog.text


def test_autocast_computes_in_bf16_and_keeps_parameters_in_fp32():
    layer, x = torch.nn.Linear(8, 8), torch.randn(4, 8)
    with Precision(True, "cpu", "bf16").autocast():
        y = layer(x)
        assert y.dtype == (x @ x.T).dtype == torch.bfloat16
        loss = torch.nn.functional.mse_loss(y, torch.zeros(4, 8))
        assert loss.dtype == torch.float32
    loss.backward()
    assert layer.weight.dtype == layer.weight.grad.dtype == torch.float32
    with Precision(False, "cpu", "fp32").autocast():
        assert layer(x).dtype == torch.float32


def test_autocast_of_another_device_leaves_these_operators_alone():
    x = torch.randn(4, 4)
    with Precision(True, "hpu", "bf16 autocast (hpu)").autocast():
        assert torch.is_autocast_enabled("hpu")
        assert torch.get_autocast_dtype("hpu") == torch.bfloat16
        assert (x @ x).dtype == torch.float32
