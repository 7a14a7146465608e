"""The operators that autocast runs in bf16, in fp32 and in the widest type of their inputs, and the user's lists."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch

from habana_frameworks import _lacking

__getattr__ = _lacking.attribute(__name__)

# Unlike CUDA's, the HPU's lower list has softmax, log_softmax and the norms.
LOWER_PRECISION = """
    addmm addbmm batch_norm baddbmm bmm conv1d conv2d conv3d conv_transpose1d conv_transpose2d conv_transpose3d dot
    dropout feature_dropout group_norm instance_norm layer_norm leaky_relu linear matmul mean mm mul mv softmax
    log_softmax scaled_dot_product_attention
""".split()
FP32 = """
    acos addcdiv asin atan2 bilinear binary_cross_entropy binary_cross_entropy_with_logits cdist cosh
    cosine_embedding_loss cosine_similarity cross_entropy_loss dist div divide embedding embedding_bag erfinv exp expm1
    hinge_embedding_loss huber_loss kl_div l1_loss log log10 log1p log2 logsumexp margin_ranking_loss mse_loss
    multi_margin_loss multilabel_margin_loss nll_loss pdist poisson_nll_loss pow reciprocal renorm rsqrt sinh
    smooth_l1_loss soft_margin_loss softplus tan topk triplet_margin_loss truediv true_divide
""".split()
PROMOTE = "add addcmul addcdiv cat div exp mul pow sub iadd truediv stack".split()
LOWER_VARIABLE = "PT_HPU_AUTOCAST_LOWER_PRECISION_OPS_LIST"
FP32_VARIABLE = "PT_HPU_AUTOCAST_FP32_OPS_LIST"
BRIDGE_NAMES = frozenset({"iadd", "truediv"})  # operators that torch calls otherwise


def effective(environ: Mapping[str, str]) -> tuple[list[str], list[str], list[str]]:
    """Return the lists (lower precision, fp32, promote) in force; no name is in two of them.

    A file that a variable names replaces that list. What it names leaves the lists that were not given; for the rest,
    lower precision goes before fp32, and fp32 before promote. ``LOWER_LIST`` and ``FP32_LIST`` are not read.

    Raises:
        FileNotFoundError: a variable names a file that is not there.
        ValueError: a name is no operator of torch or of the bridge.
    """
    given_lower, given_fp32 = _read(environ, LOWER_VARIABLE), _read(environ, FP32_VARIABLE)
    fp32 = FP32 if given_fp32 is None else given_fp32
    lower = LOWER_PRECISION if given_lower is None else given_lower
    if given_lower is None and given_fp32 is not None:
        lower = [name for name in lower if name not in given_fp32]
    fp32 = [name for name in fp32 if name not in lower]
    promote = [name for name in PROMOTE if name not in lower and name not in fp32]
    return list(lower), fp32, promote


def _read(environ: Mapping[str, str], variable: str) -> list[str] | None:
    """Return the names in the file that ``variable`` names, in order and once each; None if it is not set."""
    if not environ.get(variable):
        return None
    path = Path(environ[variable])
    if not path.is_file():
        raise FileNotFoundError(f"{variable} names {path}, which is not a file")
    names = list(dict.fromkeys(path.read_text(encoding="utf-8").split()))
    known = {name.partition("::")[2].partition(".")[0] for name in torch._C._dispatch_get_all_op_names()}
    if unknown := [name for name in names if name not in known | BRIDGE_NAMES]:
        raise ValueError(f"{variable}, {path}: no such operator: {', '.join(unknown)}")
    return names
