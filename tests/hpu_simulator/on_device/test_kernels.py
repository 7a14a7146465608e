"""The fused kernels of the simulated bridge against other formulas, on the CPU in fp64, and their quirks."""

import math

import habana_frameworks.torch as bridge
import pytest
import torch
from habana_frameworks._simulator import runtime
from habana_frameworks.torch.hpex.kernels import FusedSDPA, RotaryPosEmbeddingHelperV2
from habana_frameworks.torch.hpex.normalization import FusedClipNorm, FusedRMSNorm
from habana_frameworks.torch.hpex.optimizers import FusedAdamW, FusedLamb, FusedSGD

SHAPES = [(4, 3), (7,), ()]


def parameters(seed=0):
    """The same random parameters on the host in fp64 and on the device in fp32."""
    generator = torch.Generator().manual_seed(seed)
    host = [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in SHAPES]
    return host, [torch.nn.Parameter(tensor.float().to("hpu")) for tensor in host]


def gradients(step):
    generator = torch.Generator().manual_seed(100 + step)
    return [torch.randn(shape, generator=generator, dtype=torch.float64) * 0.1 for shape in SHAPES]


def give(device, grads):
    for parameter, grad in zip(device, grads, strict=True):
        parameter.grad = grad.float().to("hpu")


def close(device, host, tolerance=1e-6):
    for found, wanted in zip(device, host, strict=True):
        torch.testing.assert_close(found.detach().cpu().double(), wanted, rtol=tolerance, atol=tolerance)


def on_device(*tensors):
    return [tensor.detach().float().to("hpu").requires_grad_(tensor.requires_grad) for tensor in tensors]


class TestFusedAdamW:
    @pytest.mark.parametrize("weight_decay", [0.0, 0.1])
    @pytest.mark.parametrize("bias_correction", [True, False])
    def test_follows_the_formula(self, weight_decay, bias_correction):
        # Sums over all past gradients in place of running moments.
        host, device = parameters()
        beta1, beta2, eps, rate = 0.9, 0.99, 1e-3, 0.05
        optimizer = FusedAdamW(
            device, lr=rate, betas=(beta1, beta2), eps=eps, weight_decay=weight_decay, bias_correction=bias_correction
        )
        past = []
        for step in range(1, 6):
            past.append(gradients(step))
            give(device, past[-1])
            optimizer.step()
            corrected = (1 - beta1**step, 1 - beta2**step) if bias_correction else (1, 1)
            for index in range(len(host)):
                ages = range(step - 1, -1, -1)
                mean = sum((1 - beta1) * beta1**age * past[step - 1 - age][index] for age in ages)
                square = sum((1 - beta2) * beta2**age * past[step - 1 - age][index] ** 2 for age in ages)
                direction = mean / corrected[0] / ((square / corrected[1]).sqrt() + eps / math.sqrt(corrected[1]))
                host[index] = host[index] * (1 - rate * weight_decay) - rate * direction
        close(device, host)

    def test_defaults(self):
        group = FusedAdamW(parameters()[1]).param_groups[0]
        assert {name: group[name] for name in ("lr", "betas", "eps", "weight_decay", "bias_correction")} == {
            "lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-6, "weight_decay": 0.0, "bias_correction": True,
        }  # fmt: skip

    def test_counts_steps_in_the_group(self):
        _, (first, second, _) = parameters()
        optimizer = FusedAdamW([first, second])
        for _ in range(3):
            first.grad = torch.ones_like(first)
            optimizer.step()
        assert optimizer.param_groups[0]["step"] == 3
        assert set(optimizer.state[first]) == {"exp_avg", "exp_avg_sq"}
        before = second.detach().clone()
        second.grad = torch.ones_like(second)  # late: it meets the group's count, so the correction is too weak
        optimizer.step()
        size = 1e-3 * math.sqrt(1 - 0.999**4) / (1 - 0.9**4) * 0.1 / (math.sqrt(0.001) + 1e-6)
        torch.testing.assert_close((before - second).cpu(), torch.full((7,), size), rtol=1e-4, atol=0)

    def test_moments_have_the_parameters_type(self):
        parameter = torch.nn.Parameter(torch.ones(3, dtype=torch.bfloat16, device="hpu"))
        optimizer = FusedAdamW([parameter])
        parameter.grad = torch.ones_like(parameter)
        optimizer.step()
        assert optimizer.state[parameter]["exp_avg"].dtype == torch.bfloat16

    def test_state_moves_by_state_dict(self):
        (_, straight), (_, moved) = parameters(), parameters()
        first, second = FusedAdamW(straight, lr=0.1), FusedAdamW(moved, lr=0.1)
        for step in range(4):
            if step == 2:
                state = second.state_dict()
                second = FusedAdamW(moved, lr=0.5)
                second.load_state_dict(state)
            for device, optimizer in ((straight, first), (moved, second)):
                give(device, gradients(step))
                optimizer.step()
        close(moved, [parameter.detach().cpu().double() for parameter in straight], tolerance=0)

    def test_old_checkpoints_say_correct_bias(self):
        _, device = parameters()
        optimizer = FusedAdamW(device)
        group = optimizer.param_groups[0]
        del group["bias_correction"]
        group["correct_bias"] = False
        start = device[1].detach().clone()
        device[1].grad = torch.ones_like(device[1])
        optimizer.step()
        size = 1e-3 * 0.1 / (math.sqrt(0.001) + 1e-6)
        torch.testing.assert_close((start - device[1]).cpu(), torch.full((7,), size), rtol=1e-4, atol=0)

    def test_updates_in_place(self):
        _, device = parameters()
        addresses = [parameter.data_ptr() for parameter in device]
        optimizer = FusedAdamW(device)
        for step in range(2):
            give(device, gradients(step))
            optimizer.step()
        assert addresses == [parameter.data_ptr() for parameter in device]

    def test_calls_the_closure_with_gradients(self):
        _, device = parameters()
        optimizer = FusedAdamW(device)

        def closure():
            loss = sum(parameter.square().sum() for parameter in device)
            loss.backward()
            return loss

        loss = optimizer.step(closure)
        assert loss.requires_grad
        assert device[0].grad is not None


class TestFusedLamb:
    @pytest.mark.parametrize("max_grad_norm", [None, 0.2, 100.0])
    @pytest.mark.parametrize(("weight_decay", "use_lamb"), [(0.0, False), (0.0, True), (0.1, False)])
    def test_follows_the_formula(self, max_grad_norm, weight_decay, use_lamb):
        host, device = parameters()
        beta1, beta2, eps, rate = 0.9, 0.99, 1e-6, 0.05
        optimizer = FusedLamb(
            device, lr=rate, betas=(beta1, beta2), eps=eps, weight_decay=weight_decay, max_grad_norm=max_grad_norm,
            use_lamb=use_lamb,
        )  # fmt: skip
        means, squares = [0, 0, 0], [0, 0, 0]
        for step in range(1, 4):
            grads = gradients(step)
            give(device, grads)
            optimizer.step()
            norm = torch.cat([grad.flatten() for grad in grads]).norm()
            if max_grad_norm is not None and norm > max_grad_norm:
                grads = [grad * max_grad_norm / norm for grad in grads]
            for index, grad in enumerate(grads):
                means[index] = beta1 * means[index] + (1 - beta1) * grad
                squares[index] = beta2 * squares[index] + (1 - beta2) * grad**2
                corrected = (squares[index] / (1 - beta2**step)).sqrt() + eps
                update = means[index] / (1 - beta1**step) / corrected + weight_decay * host[index]
                trust = host[index].norm() / update.norm() if weight_decay or use_lamb else 1.0
                host[index] = host[index] - rate * trust * update
        close(device, host, 1e-5)

    def test_a_zero_weight_is_moved_without_a_ratio(self):
        parameter = torch.nn.Parameter(torch.zeros(3, device="hpu"))
        optimizer = FusedLamb([parameter], lr=0.1, weight_decay=0.1, max_grad_norm=None)
        parameter.grad = torch.ones_like(parameter)
        optimizer.step()
        torch.testing.assert_close(parameter.detach().cpu(), torch.full((3,), -0.1), rtol=1e-4, atol=0)

    def test_clips_at_1_by_default(self):
        parameter = torch.nn.Parameter(torch.zeros(4, device="hpu"))
        optimizer = FusedLamb([parameter])
        parameter.grad = torch.full_like(parameter, 3.0)  # norm 6
        optimizer.step()
        torch.testing.assert_close(optimizer.state[parameter]["exp_avg"].cpu(), torch.full((4,), 0.05))
        assert parameter.grad.cpu().tolist() == [3.0] * 4  # not the gradient itself

    def test_gradients_enter_whole_without_averaging(self):
        parameter = torch.nn.Parameter(torch.zeros(4, device="hpu"))
        optimizer = FusedLamb([parameter], grad_averaging=False, max_grad_norm=None)
        parameter.grad = torch.full_like(parameter, 3.0)
        optimizer.step()
        torch.testing.assert_close(optimizer.state[parameter]["exp_avg"].cpu(), torch.full((4,), 3.0))

    def test_zero_grad_takes_no_argument(self):
        _, device = parameters()
        optimizer = FusedLamb(device)
        give(device, gradients(0))
        with pytest.raises(TypeError):
            optimizer.zero_grad(set_to_none=True)
        optimizer.zero_grad()
        assert device[0].grad is None
        optimizer = FusedLamb(device, set_grad_none=False)
        give(device, gradients(0))
        optimizer.zero_grad()
        assert not device[0].grad.any().item()


@pytest.mark.parametrize("kind", [FusedAdamW, FusedLamb])
class TestFusedOptimizers:
    def test_an_empty_group_crashes(self, kind):
        _, device = parameters()
        with pytest.raises(IndexError):
            kind([{"params": device}, {"params": []}])

    def test_sparse_gradients_are_refused(self, kind):
        table = torch.nn.Embedding(4, 2, sparse=True)  # on the host: the device has no sparse tensors
        optimizer = kind(table.parameters())
        table(torch.tensor([1])).sum().backward()
        with pytest.raises(RuntimeError, match="sparse"):
            optimizer.step()

    def test_parameters_without_gradient_stay(self, kind):
        _, device = parameters()
        before = device[1].detach().clone()
        optimizer = kind(device, weight_decay=0.1)
        device[0].grad = torch.ones_like(device[0])
        optimizer.step()
        assert torch.equal(before.cpu(), device[1].detach().cpu())
        assert device[1] not in optimizer.state

    def test_nothing_waits_for_the_device(self, kind):
        def syncs():
            bridge.core.mark_step()
            return sum(sync["count"] for sync in runtime.snapshot()["syncs"])

        _, device = parameters()
        optimizer = kind(device, weight_decay=0.1)
        give(device, gradients(0))
        before = syncs()
        optimizer.step()
        assert syncs() == before

    def test_works_with_a_schedule(self, kind):
        _, device = parameters()
        optimizer = kind(device, lr=1.0)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.0 if step else 1.0)
        give(device, gradients(0))
        optimizer.step()
        schedule.step()
        before = device[0].detach().clone()
        optimizer.step()
        assert torch.equal(before.cpu(), device[0].detach().cpu())


def test_fused_sgd_is_torchs():
    host, device = parameters()
    host = [torch.nn.Parameter(tensor) for tensor in host]
    options = {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.01, "nesterov": True}
    ours, theirs = FusedSGD(device, **options), torch.optim.SGD(host, **options)
    for step in range(3):
        give(device, gradients(step))
        for parameter, grad in zip(host, gradients(step), strict=True):
            parameter.grad = grad
        ours.step()
        theirs.step()
    close(device, [parameter.detach() for parameter in host])


def test_adam_operator_of_deepspeed():
    """DeepSpeed's own call of ``torch.ops.hpu.optimizer_adamw``, in the form that this mode has."""
    from deepspeed.ops.op_builder.hpu.fused_adam import HPUFusedAdam

    (_, device), (_, ours) = parameters(), parameters()
    optimizer = FusedAdamW(ours, lr=0.1, eps=1e-3, weight_decay=0.1)
    means, squares = [[torch.zeros_like(parameter) for parameter in device] for _ in range(2)]
    for step in range(1, 3):
        give(ours, gradients(step))
        optimizer.step()
        grads = [parameter.grad for parameter in ours]
        with torch.no_grad():
            lists = [grads, list(device), means, squares]
            HPUFusedAdam.multi_tensor_adam(None, None, lists, 0.1, 0.9, 0.999, 1e-3, step, True, True, 0.1)
    close(device, [parameter.detach().cpu().double() for parameter in ours])


class TestFusedClipNorm:
    @pytest.mark.parametrize("limit", [0.5, 1000.0])
    def test_clips(self, limit):
        _, device = parameters()
        grads = gradients(0)
        give(device, grads)
        clip = FusedClipNorm(device, limit)
        norm = clip.clip_norm(device)
        whole = math.sqrt(sum(float(number) ** 2 for grad in grads for number in grad.flatten()))
        assert norm.shape == (1,)
        assert norm.device.type == "hpu"
        assert norm.item() == pytest.approx(whole, rel=1e-6)
        factor = min(1.0, limit / whole)
        close([parameter.grad for parameter in device], [grad * factor for grad in grads], 1e-5)

    def test_the_limit_is_fixed_when_it_is_made(self):
        _, device = parameters()
        clip = FusedClipNorm([], 0.25)
        give(device, gradients(0))
        clip.clip_norm(iter(device))
        whole = torch.nn.utils.get_total_norm([parameter.grad.cpu() for parameter in device])
        assert whole.item() == pytest.approx(0.25, rel=1e-4)

    def test_no_gradient(self):
        norm = FusedClipNorm([], 1.0).clip_norm(parameters()[1])
        assert (norm.device.type, norm.shape, norm.item()) == ("cpu", (), 0.0)


class TestFusedRMSNorm:
    def test_follows_torch(self):
        generator = torch.Generator().manual_seed(3)
        x = torch.randn(2, 5, 8, generator=generator, dtype=torch.float64, requires_grad=True)
        weight = torch.randn(8, generator=generator, dtype=torch.float64, requires_grad=True)
        upstream = torch.randn(2, 5, 8, generator=generator, dtype=torch.float64)
        wanted = torch.nn.functional.rms_norm(x, (8,), weight, 1e-3)
        wanted.backward(upstream)
        x_hpu, weight_hpu = on_device(x, weight)
        found = FusedRMSNorm.apply(x_hpu, weight_hpu, 1e-3)
        found.backward(upstream.float().to("hpu"))
        close([found, x_hpu.grad, weight_hpu.grad], [wanted.detach(), x.grad, weight.grad], 1e-5)

    def test_keeps_bf16(self):
        x = torch.randn(2, 8, dtype=torch.bfloat16, device="hpu", requires_grad=True)
        weight = torch.ones(8, dtype=torch.bfloat16, device="hpu", requires_grad=True)
        out = FusedRMSNorm.apply(x, weight, 1e-6)
        out.sum().backward()
        assert out.dtype == x.grad.dtype == weight.grad.dtype == torch.bfloat16

    def test_types_have_to_be_equal(self):
        with pytest.raises(RuntimeError, match="bfloat16"):
            FusedRMSNorm.apply(torch.ones(2, 8, dtype=torch.bfloat16, device="hpu"), torch.ones(8, device="hpu"), 1e-6)


def attention(query, key, value, mask=None, scale=None):
    """Row by row, in plain loops: every query's weights over the keys, their exponentials divided by their sum."""
    batch, heads, length, size = query.shape
    out = []
    for row in range(batch):
        for head in range(heads):
            shared = head * key.shape[1] // heads
            for place in range(length):
                scores = (key[row, shared] * query[row, head, place]).sum(-1) * (scale or size**-0.5)
                scores = scores if mask is None else scores + mask.expand(batch, heads, length, -1)[row, head, place]
                powers = (scores - scores.max()).exp()
                out.append((powers[:, None] * value[row, shared]).sum(0) / powers.sum())
    return torch.stack(out).reshape(batch, heads, length, -1)


def attention_inputs(key_heads=4, keys=5, length=5):
    generator = torch.Generator().manual_seed(5)
    shapes = [(2, 4, length, 8), (2, key_heads, keys, 8), (2, key_heads, keys, 6)]
    return [torch.randn(s, generator=generator, dtype=torch.float64, requires_grad=True) for s in shapes]


def causal_mask(length):
    return torch.full((length, length), -1e9, dtype=torch.float64).triu(1)[None, None]


@pytest.mark.parametrize("recompute", [False, True])
class TestFusedSDPA:
    def compare(self, inputs, mask, arguments, scale=None, rows=slice(None)):
        """Outputs and gradients of the kernel against `attention`; ``rows``: the queries that count."""
        wanted = attention(*inputs, mask, scale)
        upstream = torch.zeros_like(wanted)
        generator = torch.Generator().manual_seed(6)
        upstream[:, :, rows] = torch.randn(wanted[:, :, rows].shape, generator=generator, dtype=torch.float64)
        wanted.backward(upstream)
        device = on_device(*inputs)
        found = FusedSDPA.apply(*device, *arguments)
        found.backward(upstream.float().to("hpu"))
        close([found[:, :, rows]], [wanted.detach()[:, :, rows]], 1e-5)
        close([tensor.grad for tensor in device], [tensor.grad for tensor in inputs], 1e-5)

    def test_plain(self, recompute):
        self.compare(attention_inputs(), None, (None, 0.0, False, None, "None", recompute))

    def test_scale(self, recompute):
        self.compare(attention_inputs(), None, (None, 0.0, False, 0.7, "None", recompute), scale=0.7)

    def test_causal(self, recompute):
        self.compare(attention_inputs(), causal_mask(5), (None, 0.0, True, None, "fast", recompute))

    def test_fewer_key_heads(self, recompute):
        self.compare(attention_inputs(key_heads=2), None, (None, 0.0, False, None, "None", recompute))

    def test_cross_attention(self, recompute):
        self.compare(attention_inputs(keys=7, length=3), None, (None, 0.0, False, None, "None", recompute))

    @pytest.mark.parametrize("shape", [(2, 1, 5, 5), (1, 4, 5, 5), (2, 4, 5, 5), (2, 1, 1, 5), (5, 5)])
    @pytest.mark.parametrize("key_heads", [4, 2])
    def test_additive_mask(self, recompute, shape, key_heads):
        mask = torch.randn(shape, generator=torch.Generator().manual_seed(7), dtype=torch.float64)
        arguments = (mask.float().to("hpu"), 0.0, False, None, "None", recompute)
        self.compare(attention_inputs(key_heads), mask.reshape((1,) * (4 - mask.dim()) + shape), arguments)

    def test_bool_mask(self, recompute):
        mask = torch.rand(2, 1, 5, 5, generator=torch.Generator().manual_seed(8)) > 0.5
        mask[..., 0] = True
        additive = torch.where(mask, 0.0, -1e9).double()
        self.compare(attention_inputs(), additive, (mask.to("hpu"), 0.0, False, None, "None", recompute))

    @pytest.mark.parametrize("side", ["left", "right"])
    def test_valid_lengths(self, recompute, side):
        lengths = [3, 4]
        mask = torch.zeros(2, 1, 1, 5, dtype=torch.float64)
        for row, length in enumerate(lengths):
            mask[row, ..., length:] = -1e9
        mask = mask if side == "right" else mask.flip(-1)
        rows = slice(0, 3) if side == "right" else slice(2, 5)
        arguments = (None, 0.0, True, None, "None", recompute, torch.tensor(lengths, device="hpu"), side)
        self.compare(attention_inputs(), mask + causal_mask(5), arguments, rows=rows)

    def test_the_mask_gets_no_gradient(self, recompute):
        query, key, value = on_device(*attention_inputs())
        mask = torch.zeros(1, 4, 5, 5, device="hpu", requires_grad=True)
        FusedSDPA.apply(query, key, value, mask, 0.0, False, None, "None", recompute).sum().backward()
        assert mask.grad is None
        assert query.grad is not None

    def test_dropout(self, recompute):
        """The backward pass drops what the forward pass dropped: the derivative along a direction agrees."""
        query, key, value = on_device(*attention_inputs())
        value = torch.eye(5, device="hpu").expand(2, 4, 5, 5).clone().requires_grad_()  # the output is the weights
        bridge.hpu.manual_seed(1)
        out = FusedSDPA.apply(query, key, value, None, 0.5, False, None, "None", recompute)
        dropped = (out == 0).float().mean().item()
        assert 0.3 < dropped < 0.7
        whole = FusedSDPA.apply(query, key, value, None, 0.0, False, None, "None", recompute)
        kept = (out != 0).cpu()
        torch.testing.assert_close(out.detach().cpu()[kept], 2 * whole.detach().cpu()[kept])
        upstream = torch.randn(out.shape, device="hpu")
        out.backward(upstream)
        mask = kept.double() * 2
        q, k = (tensor.detach().cpu().double().requires_grad_() for tensor in (query, key))
        reference = (torch.softmax(q @ k.mT * 8**-0.5, -1) * mask) @ torch.eye(5).double()
        reference.backward(upstream.cpu().double())
        close([query.grad, key.grad], [q.grad, k.grad], 1e-5)

    def test_fast_softmax_with_recompute_trains_causal_layers_only(self, recompute):
        query, key, value = on_device(*attention_inputs())
        arguments = (None, 0.0, False, None, "fast", recompute)
        if recompute:
            with pytest.raises(RuntimeError, match="is_causal only"):
                FusedSDPA.apply(query, key, value, *arguments)
        else:
            FusedSDPA.apply(query, key, value, *arguments)
        FusedSDPA.apply(query.detach(), key.detach(), value.detach(), *arguments)

    def test_what_is_kept_for_the_backward_pass(self, recompute):
        query, key, value = (torch.randn(1, 1, 256, 4, device="hpu", requires_grad=True) for _ in range(3))
        before = bridge.hpu.memory_allocated()
        out = FusedSDPA.apply(query, key, value, None, 0.0, False, None, "None", recompute)
        grown = bridge.hpu.memory_allocated() - before
        weights = 256 * 256 * 4
        assert (grown < weights / 4) if recompute else (weights < grown < 1.25 * weights)
        assert out.shape == (1, 1, 256, 4)

    def test_autocast_does_not_reach_inside(self, recompute):
        query, key, value = on_device(*attention_inputs())
        with torch.autocast("hpu", torch.bfloat16):
            assert FusedSDPA.apply(query, key, value, None, 0.0, True, None, "None", recompute).dtype == torch.float32

    @pytest.mark.parametrize(
        ("change", "error"),
        [
            ({"softmax_mode": "slow"}, ValueError),
            ({"padding_side": "top"}, ValueError),
            ({"lengths": torch.tensor([1, 1])}, ValueError),
            ({"mask": torch.zeros(5, 5), "causal": True}, RuntimeError),
            ({"key_heads": 3}, RuntimeError),
        ],
    )
    def test_refuses(self, recompute, change, error):
        query, key, value = on_device(*attention_inputs(change.get("key_heads", 4)))
        mask, lengths = (change[name].to("hpu") if name in change else None for name in ("mask", "lengths"))
        causal, softmax = change.get("causal", False), change.get("softmax_mode", "None")
        arguments = (mask, 0.0, causal, None, softmax, recompute, lengths, change.get("padding_side", "None"))
        with pytest.raises(error, match="FusedSDPA"):
            FusedSDPA.apply(query, key, value, *arguments)


class TestRotaryPosEmbedding:
    @pytest.mark.parametrize("leading", [(), (1, 1)])
    def test_turns_pairs_by_their_angles(self, leading):
        # As complex numbers, the pair (i, i + size/2) being one of them.
        generator = torch.Generator().manual_seed(9)
        x = torch.randn(2, 3, 4, 8, generator=generator, dtype=torch.float64, requires_grad=True)
        upstream = torch.randn(x.shape, generator=generator, dtype=torch.float64)
        angles = torch.outer(torch.arange(10.0), torch.tensor([1.0, 0.3, 0.1, 0.03])).double()
        positions = torch.tensor([[0, 1, 2, 3], [5, 6, 7, 9]])
        turn = torch.polar(torch.ones_like(angles), angles)[positions][:, None]
        turned = torch.complex(x[..., :4], x[..., 4:]) * turn
        wanted = torch.cat([turned.real, turned.imag], -1)
        wanted.backward(upstream)
        tables = [
            torch.cat([table, table], -1).float().reshape(*leading, 10, 8).to("hpu")
            for table in (angles.cos(), angles.sin())
        ]
        (x_hpu,) = on_device(x)
        found = RotaryPosEmbeddingHelperV2.apply(x_hpu, *tables, positions.to("hpu"))
        found.backward(upstream.float().to("hpu"))
        close([found, x_hpu.grad], [wanted.detach(), x.grad], 1e-5)

    def test_keeps_the_type(self):
        x = torch.randn(1, 2, 3, 4, dtype=torch.bfloat16, device="hpu")
        table = torch.ones(3, 4, device="hpu")
        assert RotaryPosEmbeddingHelperV2.apply(x, table, table, torch.arange(3, device="hpu")[None]).dtype == x.dtype
