"""HPU graphs: what a replay does and does not do, for inference and for training; and that eager mode has none."""

import copy
import importlib
import warnings
from argparse import Namespace

import habana_frameworks.torch as bridge
import pytest
import torch
from habana_frameworks.torch import core as htcore
from habana_frameworks.torch.utils.internal import is_lazy
from torch import nn

hpu = bridge.hpu
lazy_only = pytest.mark.skipif(not is_lazy(), reason="HPU graphs exist in lazy mode only")


class Counted(nn.Module):
    """A small network that counts how often Python runs its forward pass."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(4, 8), nn.Linear(8, 3)
        self.runs = 0

    def forward(self, x, *, double=False, labels=None):
        self.runs += 1
        out = self.second(torch.tanh(self.first(x)))
        out = out * 2 if double else out
        return {"out": out, "loss": None if labels is None else (out - labels).square().mean()}

    def other_method(self, x):
        return self.forward(x)["out"] + 1


def network(seed=0):
    torch.manual_seed(seed)
    return Counted().to("hpu")


def inputs(rows=2, seed=1):
    return torch.randn(rows, 4, generator=torch.Generator().manual_seed(seed)).to("hpu")


def values(tensor):
    return tensor.detach().cpu().clone()


@pytest.mark.skipif(is_lazy(), reason="lazy mode has graphs")
class TestEagerModeHasNone:
    @pytest.mark.parametrize(
        "use",
        [
            lambda: hpu.HPUGraph(),
            lambda: hpu.wrap_in_hpu_graph(network()),
            lambda: hpu.wrap_in_hpu_graph_func(torch.sin),
            lambda: hpu.ModuleCacher(),
            lambda: hpu.make_graphed_callables(network(), (inputs(),)),
        ],
    )
    def test_raises(self, use):
        with pytest.raises(RuntimeError, match="lazy mode only"):
            use()


@lazy_only
class TestCapture:
    def record(self, x):
        recorded = hpu.HPUGraph()
        with hpu.stream(hpu.Stream()):
            recorded.capture_begin()
            out = x * 2 + 1
            recorded.capture_end()
        return recorded, out

    def test_replay_reads_the_recorded_input(self):
        x = torch.tensor([1.0, 2.0], device="hpu")
        recorded, out = self.record(x)
        assert values(out).tolist() == [3, 5]
        x.copy_(torch.tensor([10.0, 20.0]))
        recorded.replay()
        assert values(out).tolist() == [21, 41]

    def test_an_input_that_was_not_copied_in_is_not_seen(self):
        x = torch.tensor([1.0, 2.0], device="hpu")
        recorded, out = self.record(x)
        x = torch.tensor([10.0, 20.0], device="hpu")  # another tensor, not the recorded one
        recorded.replay()
        assert values(out).tolist() == [3, 5]

    def test_as_the_diffusion_pipelines_do(self):
        """Record by hash, copy into the cached inputs, replay, wait."""
        cache = {}

        def run(*given):
            key = hpu.graphs.input_hash(given)
            if key not in cache:
                recorded = hpu.HPUGraph()
                with hpu.stream(hpu.Stream()):
                    recorded.capture_begin()
                    out = given[0] @ given[1]
                    recorded.capture_end()
                cache[key] = hpu.graphs.CachedParams(given, out, recorded)
                return out
            hpu.graphs.copy_to(cache[key].graph_inputs, given)
            cache[key].graph.replay()
            htcore.hpu.default_stream().synchronize()
            return cache[key].graph_outputs

        for seed in range(3):
            pair = inputs(2, seed), inputs(4, seed + 10)
            torch.testing.assert_close(values(run(*pair)), values(pair[0]) @ values(pair[1]))
        run(inputs(3), inputs(4))
        assert len(cache) == 2

    def test_the_context_manager(self):
        x, recorded = torch.ones(2, device="hpu"), hpu.HPUGraph()
        with hpu.graph(recorded, stream=hpu.Stream()):
            out = x + 1
        x.fill_(5)
        recorded.replay()
        assert values(out).tolist() == [6, 6]

    def test_an_error_inside_ends_the_recording(self):
        recorded = hpu.HPUGraph()
        with pytest.raises(ZeroDivisionError), hpu.graph(recorded):
            raise ZeroDivisionError
        with pytest.raises(RuntimeError):
            recorded.replay()
        with hpu.graph(hpu.HPUGraph()):
            torch.ones(2, device="hpu") + 1

    def test_a_read_on_the_host_is_refused(self):
        x = torch.ones(2, device="hpu")
        with pytest.raises(RuntimeError), hpu.graph(hpu.HPUGraph()):
            (x + 1).sum().item()

    def test_random_operators_draw_anew(self):
        x, recorded = torch.ones(64, device="hpu"), hpu.HPUGraph()
        with hpu.graph(recorded):
            out = nn.functional.dropout(x, 0.5)
        draws = []
        for _ in range(3):
            recorded.replay()
            draws.append(tuple(values(out).tolist()))
        assert len(set(draws)) == 3

    def test_copy_to_checks_the_nesting(self):
        target = {"a": torch.zeros(2, device="hpu"), "b": [torch.zeros(1, device="hpu"), 3]}
        hpu.copy_to(target, {"a": torch.ones(2), "b": [torch.ones(1), 4]})
        assert values(target["a"]).tolist() == [1, 1]
        assert values(target["b"][0]).tolist() == [1]
        with pytest.raises(ValueError, match="structure"):
            hpu.copy_to(target, {"a": torch.ones(2)})

    def test_hash_sees_shapes_and_values(self):
        x = torch.zeros(2, 3, device="hpu")
        assert hpu.input_hash((x, {"a": 1})) == hpu.input_hash((torch.ones_like(x), {"a": 1}))
        assert hpu.input_hash((x, {"a": 1})) != hpu.input_hash((x, {"a": 2}))
        assert hpu.input_hash((x, {"a": 1})) != hpu.input_hash((x, {"b": 1}))
        assert hpu.input_hash([x]) != hpu.input_hash([x[:1]])


@lazy_only
class TestInference:
    def test_results_are_those_without_graphs(self):
        plain, wrapped = network(), network()
        assert hpu.wrap_in_hpu_graph(wrapped) is wrapped
        for seed, rows in enumerate([2, 3, 2, 2, 3]):
            x = inputs(rows, seed)
            torch.testing.assert_close(values(wrapped(x)["out"]), values(plain(x)["out"]))
        assert (plain.runs, wrapped.runs) == (5, 2)

    def test_values_that_are_no_tensors_make_graphs_differ(self):
        plain, wrapped = network(), hpu.wrap_in_hpu_graph(network())
        x = inputs()
        for double in (False, True, False, True):
            torch.testing.assert_close(values(wrapped(x, double=double)["out"]), values(plain(x, double=double)["out"]))
        assert wrapped.runs == 2

    def test_beyond_max_graphs_there_is_none(self):
        wrapped = hpu.wrap_in_hpu_graph(network(), max_graphs=1)
        for rows in (2, 3, 3, 2, 3):
            wrapped(inputs(rows))
        assert wrapped.runs == 4

    def test_an_output_is_overwritten_by_the_next_replay(self):
        wrapped = hpu.wrap_in_hpu_graph(network())
        first = wrapped(inputs(seed=1))["out"]
        before = values(first)
        second = wrapped(inputs(seed=2))["out"]
        assert torch.equal(values(first), values(second))
        assert not torch.equal(values(first), before)

    def test_the_callers_input_is_not_the_recorded_one(self):
        wrapped = hpu.wrap_in_hpu_graph(network())
        first = inputs(seed=1)
        before = values(first)
        wrapped(first)
        wrapped(inputs(seed=2))
        assert torch.equal(values(first), before)

    def test_gradients_are_detached(self):
        wrapped = hpu.wrap_in_hpu_graph(network())
        assert not wrapped(inputs())["out"].requires_grad
        assert not wrapped(inputs())["out"].requires_grad

    def test_other_methods_come_to_the_graphs(self):
        plain, wrapped = network(), hpu.wrap_in_hpu_graph(network())
        for seed in range(3):
            torch.testing.assert_close(
                values(wrapped.other_method(inputs(seed=seed))), values(plain.other_method(inputs(seed=seed)))
            )
        assert wrapped.runs == 1
        assert wrapped.first.weight.shape == (8, 4)

    def test_new_weights_are_seen(self):
        wrapped = hpu.wrap_in_hpu_graph(network())
        wrapped(inputs())
        with torch.no_grad():
            wrapped.second.weight.zero_()
            wrapped.second.bias.fill_(7)
        assert values(wrapped(inputs())["out"]).unique().tolist() == [7]

    def test_works_in_inference_mode(self):
        plain, wrapped = network(), hpu.wrap_in_hpu_graph(network())
        with torch.inference_mode():
            wrapped(inputs(seed=1))
        found = wrapped(inputs(seed=2))["out"]
        torch.testing.assert_close(values(found), values(plain(inputs(seed=2))["out"]))

    def test_replays_count_no_compilation(self):
        wrapped = hpu.wrap_in_hpu_graph(network())
        for seed in range(2):  # the copy into the recorded input is a graph of its own
            wrapped(inputs(seed=seed))
            htcore.mark_step()
        with hpu.metrics.metric_localcontext("graph_compilation") as metric:
            for seed in range(3):
                wrapped(inputs(seed=seed))
                htcore.mark_step()
        assert dict(metric.stats())["TotalNumber"] == 0

    def test_functions(self):
        runs = []

        def function(x):
            runs.append(1)
            return x.sin(), [x + 1]

        wrapped = hpu.wrap_in_hpu_graph(function)
        for seed in range(3):
            x = inputs(seed=seed)
            sine, (more,) = wrapped(x)
            torch.testing.assert_close(values(sine), values(x).sin())
            torch.testing.assert_close(values(more), values(x) + 1)
        assert len(runs) == 1

    def test_an_object_is_not_looked_into(self):
        class Cache:
            content = 0

        cache = Cache()

        def function(x, cache):
            cache.content += 1
            return x + cache.content

        wrapped = hpu.wrap_in_hpu_graph_func(function)
        x = torch.zeros(1, device="hpu")
        with pytest.warns(UserWarning, match="class Cache"):
            wrapped(x, cache)
        assert values(wrapped(x, cache)).tolist() == [1]
        assert cache.content == 1


def small_t5():
    """A T5 whose masks are made without a look at their values, which a graph cannot hold."""
    from transformers import T5Config, T5ForConditionalGeneration

    from core import attention

    device = Namespace(
        has_fused_attention=True, bridge=lambda name: importlib.import_module(f"{bridge.__name__}.{name}")
    )
    attention.register(device, Namespace(sdp_on_bf16=False, **dict.fromkeys(attention.OPTIONS, False)))
    torch.manual_seed(0)
    config = T5Config(
        d_model=8, d_kv=4, d_ff=16, num_layers=1, num_heads=2, vocab_size=20, dropout_rate=0.0,
        decoder_start_token_id=0, eos_token_id=19,
    )  # fmt: skip
    config._attn_implementation = attention.FUSED
    return T5ForConditionalGeneration(config).to("hpu")


def tokens(seed):
    return torch.randint(1, 18, (2, 5), generator=torch.Generator().manual_seed(seed)).to("hpu")


@lazy_only
class TestModelsOfTransformers:
    def test_generate(self):
        plain = small_t5().eval()
        wrapped = hpu.wrap_in_hpu_graph(copy.deepcopy(plain))
        options = {"max_new_tokens": 4, "min_new_tokens": 4, "do_sample": False, "use_cache": False}
        for seed in range(2):
            given = {"input_ids": tokens(seed), "attention_mask": torch.ones(2, 5, dtype=torch.int64, device="hpu")}
            wanted, found = plain.generate(**given, **options), wrapped.generate(**given, **options)
            assert found.cpu().tolist() == wanted.cpu().tolist()
        given["decoder_input_ids"] = tokens(5)
        assert type(wrapped(**given)) is type(plain(**given))

    def test_training(self):
        plain = small_t5().train()
        cached = hpu.ModuleCacher()(model=copy.deepcopy(plain))
        losses = []
        for model in (plain, cached):
            optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
            for step in range(3):
                ids = tokens(step)
                loss = model(input_ids=ids, attention_mask=torch.ones_like(ids), labels=ids, use_cache=False).loss
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                losses.append(values(loss))
        assert len(set(torch.stack(losses).tolist())) >= 3
        torch.testing.assert_close(torch.stack(losses[3:]), torch.stack(losses[:3]))


def train(model, steps, accumulate, rows=lambda step: 2, announce=False):
    """Losses of a few steps of SGD with momentum and their final weights."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    losses = []
    for step in range(steps):
        for part in range(accumulate):
            if announce:
                model.set_iteration_count(part)
            x = inputs(rows(step), seed=10 * step + part)
            loss = model(x, labels=x[:, :3].sin())["loss"]
            loss.backward()
            losses.append(values(loss))
        optimizer.step()
        optimizer.zero_grad()
        htcore.mark_step()
    return torch.stack(losses), [values(parameter) for parameter in model.parameters()]


def same(found, wanted):
    torch.testing.assert_close(found[0], wanted[0])
    torch.testing.assert_close(found[1], wanted[1])


@lazy_only
class TestTraining:
    @pytest.mark.parametrize("accumulate", [1, 3])
    def test_equals_training_without_graphs(self, accumulate):
        plain, cached = network(), network()
        assert hpu.ModuleCacher()(model=cached, inplace=True) is cached
        same(train(cached, 4, accumulate), train(plain, 4, accumulate))
        assert (plain.runs, cached.runs) == (4 * accumulate, 1)

    def test_one_graph_per_shape(self):
        plain, cached = network(), network()
        hpu.ModuleCacher()(model=cached)
        same(train(cached, 6, 2, lambda step: 2 + step % 3), train(plain, 6, 2, lambda step: 2 + step % 3))
        assert cached.runs == 3

    def test_beyond_max_graphs_there_is_none(self):
        plain, cached = network(), network()
        hpu.ModuleCacher(max_graphs=1)(model=cached)
        same(train(cached, 4, 1, lambda step: 2 + step % 2), train(plain, 4, 1, lambda step: 2 + step % 2))
        assert cached.runs == 3

    def test_graphs_of_the_first_pass_and_of_the_others(self):
        plain, cached = network(), network()
        hpu.ModuleCacher()(model=cached, have_grad_accumulation=True)
        same(train(cached, 3, 3, announce=True), train(plain, 3, 3))
        assert cached.runs == 2

    def test_most_frequent_shapes(self):
        plain, cached = network(), network()
        hpu.ModuleCacher(max_graphs=1)(model=cached, use_lfu=True)
        cached.capture_start()
        shapes = [2, 3, 3]
        train(cached, 3, 1, shapes.__getitem__)
        cached.capture_end()
        assert cached.runs == 3
        plain.load_state_dict(cached.state_dict())
        same(train(cached, 3, 1, shapes.__getitem__), train(plain, 3, 1, shapes.__getitem__))
        assert cached.runs == 5

    def test_a_copy(self):
        model = network()
        cached = hpu.ModuleCacher()(model=model, inplace=False)
        assert cached is not model
        same(train(cached, 2, 1), train(network(), 2, 1))
        assert (model.runs, cached.runs) == (0, 1)
        assert torch.equal(values(model.first.weight), values(network().first.weight))

    def test_the_gradient_of_an_input(self):
        plain, cached = network(), network()
        hpu.ModuleCacher()(model=cached)
        for seed in range(3):
            given = [inputs(seed=seed).requires_grad_() for _ in range(2)]
            for model, x in zip((plain, cached), given, strict=True):
                model(x)["out"].square().sum().backward()
            torch.testing.assert_close(values(given[1].grad), values(given[0].grad))

    def test_outputs_that_get_gradients_may_change(self):
        plain, cached = network(), network()
        hpu.ModuleCacher()(model=cached)
        optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in (plain, cached)]
        for step in range(4):
            for model, optimizer in zip((plain, cached), optimizers, strict=True):
                optimizer.zero_grad()
                result = model(inputs(seed=step), labels=torch.zeros(2, 3, device="hpu"))
                (result["loss"] if step % 2 else result["loss"] + result["out"].sum()).backward()
                optimizer.step()
            for wanted, found in zip(plain.parameters(), cached.parameters(), strict=True):
                torch.testing.assert_close(values(found.grad), values(wanted.grad))
        assert cached.runs == 1

    def test_gradients_stay_when_the_next_replay_comes(self):
        cached = network()
        hpu.ModuleCacher()(model=cached)
        cached(inputs(seed=1))["out"].sum().backward()
        cached.zero_grad()
        cached(inputs(seed=2))["out"].sum().backward()
        kept = [parameter.grad for parameter in cached.parameters()]
        before = [values(gradient) for gradient in kept]
        cached.zero_grad(set_to_none=True)
        cached(inputs(seed=3))["out"].sum().backward()
        assert all(torch.equal(values(gradient), old) for gradient, old in zip(kept, before, strict=True))

    def test_evaluation_has_its_own_graph(self):
        model = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5)).to("hpu")
        hpu.ModuleCacher()(model=model)
        x = inputs()
        for _ in range(2):
            model.train()(x)
            with torch.no_grad():
                torch.testing.assert_close(values(model.eval()(x)), values(model[0](x)))
            assert not model(x).isnan().any().item()

    def test_dropout_draws_anew_and_backward_drops_the_same(self):
        model = nn.Dropout(0.5)
        hpu.ModuleCacher()(model=model)
        masks = []
        for _ in range(4):
            x = torch.ones(64, device="hpu", requires_grad=True)
            out = model(x)
            mask = values(out)
            out.sum().backward()
            assert torch.equal(values(x.grad), mask)
            masks.append(tuple(mask.tolist()))
        assert len(set(masks)) == 4

    def test_autocast_has_its_own_graph(self):
        cached = network()
        hpu.ModuleCacher()(model=cached)
        for _ in range(2):
            assert cached(inputs())["out"].dtype == torch.float32
            with torch.autocast("hpu", torch.bfloat16):
                assert cached(inputs())["out"].dtype == torch.bfloat16
        assert cached.runs == 2

    def test_freezing_a_parameter_makes_a_new_graph(self):
        cached = network()
        hpu.ModuleCacher()(model=cached)
        cached(inputs())["out"].sum().backward()
        cached.zero_grad()
        cached.first.requires_grad_(False)
        cached(inputs())["out"].sum().backward()
        assert cached.first.weight.grad is None
        assert cached.second.weight.grad is not None

    @pytest.mark.parametrize("allow", [False, True])
    def test_unused_parameters(self, allow):
        class Unused(Counted):
            def forward(self, x):
                return self.first(x)

        model = Unused().to("hpu")
        hpu.ModuleCacher()(model=model, allow_unused_input=allow)
        if allow:
            model(inputs()).sum().backward()
            assert not model.second.weight.grad.any().item()
        else:
            with pytest.raises(RuntimeError, match="allow_unused"):
                model(inputs()).sum().backward()

    def test_make_graphed_callables(self):
        plain, graphed = nn.Linear(4, 3).to("hpu"), nn.Linear(4, 3).to("hpu")
        graphed.load_state_dict(plain.state_dict())
        module, function = hpu.make_graphed_callables(
            (graphed, torch.sin), ((inputs(),), (torch.zeros(2, 3, device="hpu", requires_grad=True),))
        )
        assert module is graphed
        for seed in range(3):
            x = inputs(seed=seed)
            torch.sin(plain(x)).sum().backward()
            function(module(x)).sum().backward()
        torch.testing.assert_close(values(graphed.weight.grad), values(plain.weight.grad))
        torch.testing.assert_close(values(graphed.bias.grad), values(plain.bias.grad))

    def test_make_graphed_callables_takes_tensors_only(self):
        with pytest.raises(TypeError, match="ModuleCacher"):
            hpu.make_graphed_callables(network(), (inputs(), 1))

    def test_no_warning_for_plain_inputs(self):
        cached = network()
        hpu.ModuleCacher()(model=cached)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            cached(inputs(), double=True, labels=None)
