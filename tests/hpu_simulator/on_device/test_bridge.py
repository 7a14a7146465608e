"""The rest of the simulated bridge: names, devices, memory, random numbers, autocast lists, metrics, torch.compile."""

import importlib
import importlib.metadata
import importlib.util
import json
import os
import subprocess
import sys
import time

import habana_frameworks.torch as bridge
import pytest
import torch
from habana_frameworks._simulator import runtime
from habana_frameworks.torch import autocast_lists
from habana_frameworks.torch import core as htcore
from habana_frameworks.torch.utils import experimental
from habana_frameworks.torch.utils.internal import is_lazy

hpu = bridge.hpu
lazy_only = pytest.mark.skipif(not is_lazy(), reason="of lazy mode")
eager_only = pytest.mark.skipif(is_lazy(), reason="of eager mode")


def child(code, **environment):
    """Run ``code`` in a process of its own on the simulator; a variable that is None is unset."""
    inherited = {key: value for key, value in os.environ.items() if not key.startswith("HPU_SIMULATOR_")}
    whole = {**inherited, **environment}
    return subprocess.run(
        [sys.executable, "-c", code],
        env={key: value for key, value in whole.items() if value is not None},
        capture_output=True,
        text=True,
        timeout=120,
    )


class TestNames:
    @pytest.mark.parametrize(
        "name", ["core", "hpu", "hpu.random", "hpu.metrics", "hpu.graphs", "hpex.optimizers", "hpex.kernels"]
    )
    def test_a_name_that_is_lacking_says_so(self, name):
        module = importlib.import_module(f"{bridge.__name__}.{name}")
        assert not hasattr(module, "no_such_name")
        with pytest.raises(AttributeError, match=rf"the HPU simulator has no {module.__name__}\.no_such_name"):
            module.no_such_name  # noqa: B018
        with pytest.raises(ImportError, match=r"the HPU simulator has no .*no_such_name"):
            exec(f"from {module.__name__} import no_such_name")

    @pytest.mark.parametrize(
        "name", ["torch.hpex.experimental.transformer_engine", "torch.core.quantizer", "mediapipe", "torch.utils.debug"]
    )
    def test_a_module_that_is_lacking_says_so(self, name):
        with pytest.raises(ModuleNotFoundError, match=r"the HPU simulator has no habana_frameworks\."):
            importlib.import_module(f"habana_frameworks.{name}")

    def test_looking_for_a_module_does_not_raise(self):
        assert importlib.util.find_spec("habana_frameworks.mediapipe") is None
        assert importlib.util.find_spec("habana_frameworks.torch") is not None

    def test_quantised_inference_is_lacking(self):
        for name in ("hpu_set_env", "hpu_initialize", "hpu_inference_set_env"):
            with pytest.raises(AttributeError, match="HPU simulator"):
                getattr(htcore, name)

    def test_all_names_of_all_modules_exist(self):
        modules = [module for name, module in sys.modules.items() if name.startswith("habana_frameworks.torch")]
        assert len(modules) > 15
        for module in modules:
            for name in getattr(module, "__all__", []):
                getattr(module, name)

    def test_the_version_is_found(self):
        assert importlib.metadata.version("habana-torch-plugin").endswith("+simulator")

    def test_not_asked_for(self):
        result = child("import torch; print('fine'); import habana_frameworks.torch", HPU_SIMULATOR=None)
        assert result.stdout == "fine\n"
        assert "python -m hpu_simulator" in result.stderr

    def test_the_plugin_starts_by_itself(self):
        code = "import torch, sys; print(torch.ones(2, device='hpu').device, 'torch._dynamo' in sys.modules)"
        assert child(code).stdout.startswith("hpu:0 False\n")


class TestDevices:
    def test_torch_knows_the_device(self):
        assert torch.hpu is hpu
        assert hpu.is_available()
        assert hpu.is_initialized()
        assert torch.accelerator.current_accelerator().type == "hpu"
        assert torch.get_device_module("hpu") is hpu
        assert torch.ones(2).to("hpu").device == torch.device("hpu", 0)

    @pytest.mark.parametrize(
        ("generation", "gb", "fp16"), [("gaudi", 32, False), ("gaudi2", 96, True), ("gaudi3", 128, True)]
    )
    def test_generations(self, generation, gb, fp16):
        result = child(
            "import torch; from habana_frameworks.torch.utils import experimental as e; "
            "print(torch.hpu.get_device_name(), e._get_device_type().name, torch.hpu.mem_get_info()[1],"
            " e._is_fp16_supported(), torch.float16 in torch.hpu.get_amp_supported_dtype(),"
            " torch.hpu.get_device_properties(0).total_memory)",
            HPU_SIMULATOR=generation,
        )
        kind = f"synDevice{generation.capitalize()}"
        wanted = f"{generation.upper()} {kind} {gb * 2**30} {fp16} {fp16} {gb * 2**30}"
        assert result.stdout.splitlines()[0] == wanted

    def test_several_devices(self):
        result = child(
            "import torch\n"
            "with torch.hpu.device(1): print(torch.hpu.current_device(), torch.ones(1, device='hpu').device)\n"
            "with torch.hpu.device(None): print(torch.hpu.current_device())\n"
            "torch.hpu.set_device('hpu:1'); print(torch.hpu.device_count(), torch.hpu.current_device())\n"
            "print(len(torch.hpu.get_rng_state_all()))\n",
            HPU_SIMULATOR_DEVICES="2",
        )
        assert result.stdout.splitlines()[:4] == ["1 hpu:1", "0", "2 1", "2"]

    def test_another_kind_of_device_is_refused(self):
        with pytest.raises(ValueError, match="type hpu"):
            hpu.memory_stats("cpu")

    def test_the_names_that_others_ask_for(self):
        assert experimental.hpu.device_count() == hpu.device_count()
        assert htcore.hpu is hpu
        assert hpu.is_bf16_supported()
        assert not hpu._is_in_bad_fork()

    def test_streams_and_events(self):
        stream = hpu.Stream()
        before = hpu.current_stream()
        with hpu.stream(stream):
            assert hpu.current_stream() == stream
            with hpu.stream(None):
                assert hpu.current_stream() == stream
        assert hpu.current_stream() == before == hpu.default_stream()
        start, end = hpu.Event(enable_timing=True), hpu.Event(enable_timing=True)
        with pytest.raises(RuntimeError, match="recorded"):
            start.elapsed_time(end)
        start.record()
        stream.wait_event(start)
        stream.wait_stream(hpu.default_stream())
        assert stream.record_event(end) is end
        end.synchronize()
        assert end.query()
        assert 0 <= start.elapsed_time(end) < 1000
        time.sleep(0.02)
        end.record()
        assert 20 <= start.elapsed_time(end) < 1000
        assert isinstance(start, torch.Event)

    def test_dynamic_shapes(self):
        with pytest.warns(UserWarning, match="disabled"):
            hpu.enable_dynamic_shape()
        hpu.disable_dynamic_shape()

    def test_the_profiler_takes_the_hpu(self):
        from torch.profiler import ProfilerActivity, profile

        with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.HPU]) as found:
            torch.ones(4, device="hpu") + 1
        assert any(event.key == "aten::add" for event in found.key_averages())


class TestMemory:
    def test_counts_bytes(self):
        before = hpu.memory_allocated()
        hpu.reset_peak_memory_stats()
        x = torch.empty(1000, device="hpu")
        y = torch.empty(500, device="hpu")
        del y
        assert hpu.memory_allocated() - before == x.nbytes
        assert hpu.max_memory_allocated() - before == x.nbytes + 2000
        hpu.reset_peak_memory_stats()
        assert hpu.max_memory_allocated() - before == x.nbytes

    def test_keys_and_their_other_names(self):
        stats = hpu.memory_stats()
        assert list(stats) == [
            "Limit", "InUse", "MaxInUse", "NumAllocs", "NumFrees", "ActiveAllocs", "MaxAllocSize",
            "TotalSystemAllocs", "TotalSystemFrees", "TotalActiveAllocs",
        ]  # fmt: skip
        assert hpu.memory_reserved() == hpu.max_memory_reserved() == hpu.memory_cached() == stats["Limit"]
        assert hpu.mem_get_info(0) == (stats["Limit"] - stats["InUse"], stats["Limit"])
        assert hpu.memory_stats("hpu:0") == hpu.memory_stats(torch.device("hpu")) == stats

    def test_the_summary_can_be_parsed(self):
        lines = hpu.memory_summary().strip().split("\n")[3:]
        found = {name.strip(): int(value) for name, value in (line.split(":") for line in lines)}
        assert found == hpu.memory_stats()

    def test_accumulated_counts_start_again(self):
        torch.empty(10, device="hpu")
        hpu.reset_accumulated_memory_stats()
        stats = hpu.memory_stats()
        assert stats["TotalSystemFrees"] == 0
        assert stats["TotalSystemAllocs"] == stats["TotalActiveAllocs"] == stats["ActiveAllocs"]


class TestRandom:
    def test_seeds_and_states(self):
        hpu.manual_seed(5)
        assert hpu.initial_seed() == 5
        state = hpu.random.get_rng_state()
        first = torch.rand(8, device="hpu").cpu()
        hpu.random.set_rng_state(state)
        assert torch.equal(torch.rand(8, device="hpu").cpu(), first)
        hpu.set_rng_state_all([state])
        assert torch.equal(torch.rand(8, device="hpu").cpu(), first)
        hpu.manual_seed_all(5)
        assert torch.equal(torch.rand(8, device="hpu").cpu(), first)
        hpu.seed_all()
        assert not torch.equal(torch.rand(8, device="hpu").cpu(), first)
        assert state.device.type == "cpu"
        assert hpu.random.default_generators[0].device.type == "hpu"

    def test_fork_rng(self):
        state = hpu.get_rng_state()
        with torch.random.fork_rng(device_type="hpu"):
            torch.rand(3, device="hpu")
        assert torch.equal(hpu.get_rng_state(), state)

    @pytest.mark.parametrize("use_reentrant", [False, True])
    def test_checkpointing_drops_the_same_again(self, use_reentrant):
        from torch.utils.checkpoint import checkpoint

        x = torch.ones(256, device="hpu", requires_grad=True)
        out = checkpoint(torch.nn.functional.dropout, x, 0.5, use_reentrant=use_reentrant)
        out.sum().backward()
        assert torch.equal(x.grad.cpu(), out.detach().cpu())


class TestAutocastLists:
    def read(self, tmp_path, **lists):
        environment = {}
        for variable, names in lists.items():
            path = tmp_path / variable
            path.write_text("\n".join(names))
            environment[getattr(autocast_lists, variable)] = str(path)
        return autocast_lists.effective(environment)

    def test_defaults(self):
        lower, fp32, promote = autocast_lists.effective({})
        assert {"linear", "softmax", "layer_norm"} <= set(lower)
        assert {"cross_entropy_loss", "div", "embedding"} <= set(fp32)
        assert {"add", "cat"} <= set(promote)
        assert not set(lower) & set(fp32)
        assert not (set(lower) | set(fp32)) & set(promote)

    def test_a_file_replaces_its_list(self, tmp_path):
        lower, fp32, promote = self.read(tmp_path, LOWER_VARIABLE=["linear", "add", "div"])
        assert lower == ["linear", "add", "div"]
        assert "div" not in fp32
        assert "add" not in promote

    def test_a_name_of_the_other_list_moves(self, tmp_path):
        lower, fp32, _ = self.read(tmp_path, FP32_VARIABLE=["softmax", "exp"])
        assert "softmax" not in lower
        assert fp32 == ["softmax", "exp"]

    def test_lower_goes_before_fp32(self, tmp_path):
        lower, fp32, _ = self.read(tmp_path, LOWER_VARIABLE=["softmax"], FP32_VARIABLE=["softmax", "exp"])
        assert (lower, fp32) == (["softmax"], ["exp"])

    def test_errors(self, tmp_path):
        with pytest.raises(ValueError, match="linaer"):
            self.read(tmp_path, LOWER_VARIABLE=["linaer", "truediv"])
        with pytest.raises(FileNotFoundError, match="PT_HPU_AUTOCAST_FP32_OPS_LIST"):
            autocast_lists.effective({autocast_lists.FP32_VARIABLE: str(tmp_path / "missing")})
        assert autocast_lists.effective({"LOWER_LIST": "/missing"}) == autocast_lists.effective({})

    def test_they_reach_the_device(self, tmp_path):
        path = tmp_path / "lower"
        path.write_text("softmax\n")
        code = (
            "import torch\n"
            "x = torch.ones(2, 2, device='hpu')\n"
            "with torch.autocast('hpu', torch.bfloat16): print((x @ x).dtype, torch.softmax(x, -1).dtype)\n"
            "print(torch.hpu.get_autocast_hpu_dtype())"
        )
        given = child(code, PT_HPU_AUTOCAST_LOWER_PRECISION_OPS_LIST=str(path)).stdout.splitlines()
        assert given[:2] == ["torch.float32 torch.bfloat16", "torch.bfloat16"]
        assert child(code).stdout.splitlines()[0] == "torch.bfloat16 torch.bfloat16"

    def test_switches(self):
        assert not bridge.is_autocast_hpu_enabled()
        with torch.autocast("hpu", torch.float16):
            assert bridge.is_autocast_hpu_enabled()
            assert hpu.get_autocast_hpu_dtype() == torch.float16
        hpu.set_autocast_hpu_enabled(True)
        assert torch.is_autocast_enabled("hpu")
        hpu.set_autocast_hpu_enabled(False)


class TestMetrics:
    def test_global_and_local(self):
        assert hpu.metrics.metric_global("gc") is None
        htcore.mark_step()
        whole = hpu.metrics.metric_global("graph_compilation")
        before = dict(whole.stats())["TotalNumber"]
        with hpu.metrics.metric_localcontext("graph_compilation") as local:
            x = torch.ones(3, 5, 7, 11, device="hpu")  # a shape that nobody else has
            htcore.mark_step()
        inside = dict(local.stats())["TotalNumber"]
        torch.ones(3, 5, 7, 13, device="hpu")
        htcore.mark_step()
        assert x is not None
        assert dict(whole.stats())["TotalNumber"] - before >= inside
        assert dict(local.stats())["TotalNumber"] == inside
        assert [name for name, _ in local.stats()] == ["TotalNumber", "TotalTime", "AvgTime"]
        assert inside >= 1

    def test_the_file_at_exit(self, tmp_path):
        code = "import torch; torch.ones(2, device='hpu'); torch.hpu.synchronize()"
        path = tmp_path / "folder" / "metrics.json"
        for _ in range(2):
            result = child(code, PT_HPU_METRICS_FILE=str(path), RANK="3")
            assert result.returncode == 0, result.stderr
        files = sorted(file.name for file in path.parent.iterdir())
        assert files == ["metrics-rank3.json", "metrics-rank3.json.1"]
        (entry,) = json.loads((path.parent / files[0]).read_text())
        assert entry["metric_name"] == "graph_compilation"
        assert entry["triggered_by"] == "process_exit"
        assert entry["statistics"]["TotalNumber"] >= 1

    def test_as_text_and_when_asked(self, tmp_path):
        at_exit, asked = tmp_path / "exit", tmp_path / "asked"
        result = child(
            f"import torch; torch.hpu.metrics.metrics_dump({str(asked)!r}, 'text')",
            PT_HPU_METRICS_FILE=str(at_exit),
            PT_HPU_METRICS_DUMP_TRIGGERS="user",
        )
        assert result.returncode == 0, result.stderr
        assert not at_exit.exists()
        assert asked.read_text().startswith("Metric name: graph_compilation\nTriggered by: user\n")

    @pytest.mark.parametrize(
        ("environment", "error"),
        [
            ({"PT_HPU_METRICS_DUMP_TRIGGERS": "process_exit,metric_change"}, "KeyError"),
            ({"PT_HPU_METRICS_FILE_FORMAT": "xml"}, "KeyError"),
            ({"PT_HPU_METRICS_FILE": "metrics.json"}, "FileNotFoundError"),
        ],
    )
    def test_mistakes(self, tmp_path, environment, error):
        result = child("import torch", **{"PT_HPU_METRICS_FILE": str(tmp_path / "file"), **environment})
        assert result.returncode != 0
        assert error in result.stderr


class TestBoundaries:
    def test_mark_step_ends_a_graph_in_lazy_mode_only(self):
        htcore.mark_step()
        before = runtime.graph_compilations()
        for _ in range(2):
            torch.ones(3, 17, 19, device="hpu") * 2
            htcore.mark_step(sync=True)
        assert runtime.graph_compilations() - before == (1 if is_lazy() else runtime.graph_compilations() - before)
        htcore.step_closure._mark_step_if_lazy()


class TestCompile:
    @eager_only
    def test_results_and_counts(self):
        def function(x, y):
            return (x @ y).relu().sum() * x.mean()

        compiled = torch.compile(function, backend="hpu_backend")
        host = [torch.randn(4, 4, generator=torch.Generator().manual_seed(seed), requires_grad=True) for seed in (0, 1)]
        device = [tensor.detach().to("hpu").requires_grad_() for tensor in host]
        before = runtime.graph_compilations()
        for _ in range(2):
            wanted, found = function(*host), compiled(*device)
            wanted.backward()
            found.backward()
        torch.testing.assert_close(found.detach().cpu(), wanted.detach())
        torch.testing.assert_close(device[0].grad.cpu(), host[0].grad)
        assert runtime.graph_compilations() - before >= 2
        assert "hpu_backend" in torch._dynamo.list_backends()

    @lazy_only
    def test_lazy_mode_has_no_compiler(self):
        compiled = torch.compile(lambda x: x + 1, backend="hpu_backend")
        with pytest.raises(Exception, match="PT_HPU_LAZY_MODE=0"):
            compiled(torch.ones(2, device="hpu"))


class TestDistributed:
    def test_ranks(self, monkeypatch):
        from habana_frameworks.torch.distributed.hccl import initialize_distributed_hpu

        names = (
            "WORLD_SIZE",
            "RANK",
            "LOCAL_RANK",
            *(f"OMPI_COMM_WORLD_{part}" for part in ("SIZE", "RANK", "LOCAL_RANK")),
        )
        for name in names:
            monkeypatch.delenv(name, raising=False)
        assert initialize_distributed_hpu() == (1, 0, -1)
        for name, value in zip(names[3:], "421", strict=True):
            monkeypatch.setenv(name, value)
        assert initialize_distributed_hpu() == (4, 2, 1)
        for name, value in zip(names[:3], "853", strict=True):
            monkeypatch.setenv(name, value)
        assert initialize_distributed_hpu() == (8, 5, 3)
        assert initialize_distributed_hpu(world_size=2, rank=1, local_rank=0) == (2, 1, 0)

    def test_the_backend(self, tmp_path):
        code = (
            "import torch, torch.distributed as dist, habana_frameworks.torch.distributed.hccl\n"
            f"dist.init_process_group('hccl', init_method='file://{tmp_path}/store', rank=0, world_size=1)\n"
            "x = torch.ones(3, device='hpu'); dist.all_reduce(x); print(dist.get_backend(), x.cpu().tolist())\n"
            "dist.destroy_process_group()\n"
        )
        result = child(code)
        assert result.stdout.splitlines()[:1] == ["hccl [1.0, 1.0, 1.0]"], result.stderr
