// What Python sees, and autocast by operator lists.
#include <ATen/ATen.h>
#include <ATen/autocast_mode.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/utils/pybind.h>
#include <torch/library.h>

#include "collectives.h"
#include "simulator.h"

namespace py = pybind11;

namespace simulator {
namespace {

using c10::IValue;
using torch::jit::Stack;

// --- Autocast ----------------------------------------------------------------------------------------------------

enum class Cast { Lower, LowerFirst, Fp32, Promote };

bool castable(const at::Tensor& tensor) {
  return tensor.defined() && tensor.device().type() == c10::kHPU && tensor.is_floating_point() &&
         tensor.scalar_type() != at::kDouble;
}

template <typename Visit>
void for_tensors(const c10::OperatorHandle& op, Stack& stack, const Visit& visit) {
  const auto& arguments = op.schema().arguments();
  const size_t first = stack.size() - arguments.size();
  for (size_t i = 0; i < arguments.size(); ++i) {
    IValue& value = stack[first + i];
    if (arguments[i].alias_info() != nullptr && arguments[i].alias_info()->isWrite()) {
      continue;  // a cast copy would be written instead
    }
    if (value.isTensor() && castable(value.toTensor())) {
      value = IValue(visit(value.toTensor()));
    } else if (value.isTensorList()) {
      auto list = value.toTensorVector();
      for (auto& tensor : list) {
        tensor = castable(tensor) ? visit(tensor) : tensor;
      }
      value = IValue(std::move(list));
    }
  }
}

template <Cast cast>
void autocast_kernel(const c10::OperatorHandle& op, Stack* stack) {
  const c10::impl::ExcludeDispatchKeyGuard no_autocast(c10::DispatchKey::AutocastHPU);
  auto target = cast == Cast::Fp32 ? at::kFloat : at::autocast::get_autocast_dtype(c10::kHPU);
  if (cast == Cast::Promote) {
    bool wide = false;
    for_tensors(op, *stack, [&](const at::Tensor& tensor) {
      wide |= tensor.scalar_type() == at::kFloat;
      return tensor;
    });
    target = wide ? at::kFloat : target;
  }
  bool first = true;
  for_tensors(op, *stack, [&](const at::Tensor& tensor) {
    const bool kept = cast == Cast::LowerFirst && !first;
    first = false;
    return kept ? tensor : tensor.to(target);
  });
  op.callBoxed(stack);
}

void set_autocast(const std::vector<std::string>& names, torch::CppFunction (*make)()) {
  static auto* libraries = new std::vector<std::unique_ptr<torch::Library>>;
  auto library = std::make_unique<torch::Library>(torch::Library::IMPL, "aten",
                                                  std::make_optional(c10::DispatchKey::AutocastHPU), __FILE__, __LINE__);
  const std::set<std::string> wanted(names.begin(), names.end());
  for (const auto& op : c10::Dispatcher::singleton().getAllOpNames()) {
    const std::string plain = op.name.rfind("aten::", 0) == 0 ? op.name.substr(6) : "";
    const bool out = op.overload_name.find("out") != std::string::npos;
    if (wanted.count(plain) > 0 && !out) {
      library->impl((plain + (op.overload_name.empty() ? "" : "." + op.overload_name)).c_str(), make());
    }
  }
  libraries->push_back(std::move(library));
}

template <Cast cast>
torch::CppFunction make_kernel() {
  return torch::CppFunction::makeFromBoxedFunction<&autocast_kernel<cast>>();
}

TORCH_LIBRARY_IMPL(_, AutocastHPU, m) {
  m.fallback(torch::CppFunction::makeFallthrough());
}

// --- Python ------------------------------------------------------------------------------------------------------

py::dict memory_stats(int device) {
  std::lock_guard<std::recursive_mutex> guard(record().mutex);
  const auto& counters = record().memory.at(device);
  py::dict result;
  result["Limit"] = counters.limit;
  result["InUse"] = counters.in_use;
  result["MaxInUse"] = counters.peak;
  result["NumAllocs"] = counters.allocs;
  result["NumFrees"] = counters.frees;
  result["ActiveAllocs"] = counters.allocs - counters.frees;
  result["MaxAllocSize"] = counters.largest;
  result["TotalSystemAllocs"] = counters.accumulated_allocs;
  result["TotalSystemFrees"] = counters.accumulated_frees;
  result["TotalActiveAllocs"] = counters.accumulated_allocs - counters.accumulated_frees;
  return result;
}

py::dict snapshot() {
  record().boundary("end");
  std::lock_guard<std::recursive_mutex> guard(record().mutex);
  const auto& r = record();
  py::dict ops, phases, result, copies, memory;
  for (const auto* info : known_operators()) {
    if (info->count > 0) {
      const py::str name(info->name);
      const int64_t count = ops.contains(name) ? ops[name]["count"].cast<int64_t>() : 0;
      const int64_t flops = ops.contains(name) ? ops[name]["flops"].cast<int64_t>() : 0;
      ops[name] = py::dict(py::arg("count") = count + info->count, py::arg("flops") = flops + info->flops);
    }
  }
  for (int i = 0; i < kPhases; ++i) {
    if (r.phase_ops[i] > 0 || r.phase_peak[i] > 0) {
      phases[name_of(static_cast<Phase>(i))] =
          py::dict(py::arg("ops") = r.phase_ops[i], py::arg("flops") = r.phase_flops[i],
                   py::arg("peak_bytes") = r.phase_peak[i]);
    }
  }
  py::list graphs, syncs, beyond, collectives, by_step;
  for (const auto& graph : r.graphs) {
    graphs.append(py::dict(py::arg("id") = graph.id, py::arg("phase") = graph.phase, py::arg("ops") = graph.ops,
                           py::arg("compiled") = 1, py::arg("reused") = graph.reused, py::arg("step") = graph.step,
                           py::arg("inputs") = graph.inputs, py::arg("first_new_op") = graph.first_new_op,
                           py::arg("line") = graph.line, py::arg("cut_by") = graph.cut_by,
                           py::arg("cut_at") = graph.cut_at));
  }
  for (const auto& [key, counted] : r.syncs) {
    syncs.append(py::dict(py::arg("line") = key.first, py::arg("kind") = key.second, py::arg("count") = counted.count,
                          py::arg("bytes") = counted.bytes, py::arg("steps") = counted.steps));
  }
  for (const auto& [key, count] : r.beyond_int32) {
    beyond.append(py::dict(py::arg("line") = std::get<0>(key), py::arg("op") = std::get<1>(key),
                           py::arg("value") = std::get<2>(key), py::arg("count") = count));
  }
  for (const auto& [key, counted] : r.collectives) {
    collectives.append(py::dict(py::arg("op") = std::get<0>(key), py::arg("dtype") = std::get<1>(key),
                                py::arg("line") = std::get<2>(key), py::arg("count") = counted.count,
                                py::arg("bytes") = counted.bytes));
  }
  for (const auto& [step, in_use, peak] : r.by_step) {
    by_step.append(py::make_tuple(step, in_use, peak));
  }
  for (const int to_device : {0, 1}) {
    const auto& counted = r.copies[to_device];
    copies[to_device == 1 ? "to_device" : "to_host"] =
        py::dict(py::arg("count") = counted.count, py::arg("bytes") = counted.bytes);
  }
  int64_t in_use = 0;
  for (const auto& counters : r.memory) {
    in_use += counters.in_use;
  }
  result["steps"] = r.steps;
  result["ops"] = ops;
  result["phases"] = phases;
  result["graphs"] = graphs;
  result["graph_replays"] = r.replays;
  result["op_compilations"] = r.lazy ? 0 : r.compiled;
  result["syncs"] = syncs;
  result["copies"] = copies;
  result["out_of_int32"] = beyond;
  result["collectives"] = collectives;
  result["memory"] = py::dict(py::arg("limit") = r.memory[0].limit, py::arg("in_use") = in_use,
                              py::arg("peak") = r.run_peak, py::arg("peak_phase") = name_of(r.run_peak_phase),
                              py::arg("by_step") = by_step);
  result["out_of_memory"] = py::none();
  if (r.out_of_memory) {
    result["out_of_memory"] =
        py::dict(py::arg("bytes") = r.out_of_memory->bytes, py::arg("op") = r.out_of_memory->op,
                 py::arg("phase") = r.out_of_memory->phase, py::arg("line") = r.out_of_memory->line);
  }
  return result;
}

void set_line_callback(const py::object& callback) {
  if (callback.is_none()) {
    set_line_source({});
    return;
  }
  // Never released: it may be asked for until the process ends.
  const auto* kept = new py::object(callback);
  set_line_source([kept] {
    const py::gil_scoped_acquire gil;
    return (*kept)().cast<std::string>();
  });
}

void initialize(bool lazy, bool shapes, int devices, int64_t limit, int64_t large) {
  record().lazy = lazy;
  record().shapes = shapes;
  record().large = large;
  set_device_count(devices);
  for (auto& counters : record().memory) {
    counters.limit = limit;
  }
}

}  // namespace

void set_autocast_lists(const std::vector<std::string>& lower, const std::vector<std::string>& fp32,
                        const std::vector<std::string>& promote) {
  // Norms take their weights as they are.
  std::vector<std::string> norms, others;
  for (const auto& name : lower) {
    (name.find("norm") == std::string::npos ? others : norms).push_back(name);
  }
  set_autocast(others, &make_kernel<Cast::Lower>);
  set_autocast(norms, &make_kernel<Cast::LowerFirst>);
  set_autocast(fp32, &make_kernel<Cast::Fp32>);
  set_autocast(promote, &make_kernel<Cast::Promote>);
}

}  // namespace simulator

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  using namespace simulator;
  py::class_<Graph, std::shared_ptr<Graph>>(m, "Graph")
      .def(py::init<>())
      .def("capture_begin", &Graph::capture_begin)
      .def("capture_end", &Graph::capture_end)
      .def("replay", &Graph::replay, py::call_guard<py::gil_scoped_release>())
      .def("reset", &Graph::reset)
      .def_static("capturing", &Graph::capturing);
  m.def("initialize", &initialize);
  m.def("set_line_callback", &set_line_callback);
  m.def("boundary", [](const std::string& cause) { record().boundary(cause.c_str()); });
  m.def("in_optimizer", [](bool entered) { record().in_optimizer(entered); });
  m.def("compilations", [] { return record().compiled; });
  m.def("note_compilation", [] { record().compiled += 1; });
  m.def("memory_stats", &memory_stats);
  m.def("reset_peak_memory_stats", [](int device) {
    auto& counters = record().memory.at(device);
    std::lock_guard<std::recursive_mutex> guard(record().mutex);
    counters.peak = counters.in_use;
  });
  m.def("reset_accumulated_memory_stats", [](int device) {
    auto& counters = record().memory.at(device);
    std::lock_guard<std::recursive_mutex> guard(record().mutex);
    counters.accumulated_allocs = counters.allocs - counters.frees;
    counters.accumulated_frees = 0;
  });
  m.def("current_device", &current_device);
  m.def("set_device", &set_current_device);
  m.def("device_count", &device_count);
  m.def("default_generator", [](int device) { return default_generator(device); });
  m.def("set_autocast_lists", &set_autocast_lists);
  m.def("wrap_backend", &wrap_backend);
  m.def("lone_backend", &lone_backend);
  m.def("snapshot", &snapshot);
}
