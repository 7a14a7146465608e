// What Python sees, autocast by operator lists, and the collectives.
#include <ATen/ATen.h>
#include <ATen/autocast_mode.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <torch/csrc/utils/pybind.h>
#include <torch/library.h>

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

// --- Collectives -------------------------------------------------------------------------------------------------

// A finished collective, whose result is the device's tensors.
class Finished final : public c10d::Work {
 public:
  Finished(c10d::OpType type, std::vector<at::Tensor> results) : Work(-1, type), results_(std::move(results)) {
    future_ = c10::make_intrusive<c10::ivalue::Future>(c10::ListType::create(c10::TensorType::get()));
    future_->markCompleted(IValue(results_));
    finish();
  }
  std::vector<at::Tensor> result() override {
    return results_;
  }
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override {
    return future_;
  }

 private:
  std::vector<at::Tensor> results_;
  c10::intrusive_ptr<c10::ivalue::Future> future_;
};

using Tensors = std::vector<at::Tensor>;
using Lists = std::vector<Tensors>;
using WorkPtr = c10::intrusive_ptr<c10d::Work>;

at::Tensor host(const at::Tensor& tensor) {
  return tensor.device().type() == c10::kHPU ? alias_of(tensor) : tensor;
}

Tensors host(const Tensors& tensors) {
  Tensors result;
  for (const auto& tensor : tensors) {
    result.push_back(host(tensor));
  }
  return result;
}

Lists host(const Lists& lists) {
  Lists result;
  for (const auto& tensors : lists) {
    result.push_back(host(tensors));
  }
  return result;
}

Tensors flat(const Lists& lists) {
  Tensors result;
  for (const auto& tensors : lists) {
    result.insert(result.end(), tensors.begin(), tensors.end());
  }
  return result;
}

// "hccl": another backend's collectives over the memory of the device's tensors.
class Hccl final : public c10d::Backend {
 public:
  explicit Hccl(c10::intrusive_ptr<c10d::Backend> inner)
      : Backend(inner->getRank(), inner->getSize()), inner_(std::move(inner)) {}

  const std::string getBackendName() const override {
    return "hccl";
  }
  void setTimeout(std::chrono::milliseconds timeout) override {
    inner_->setTimeout(timeout);
  }
  bool supportsCoalescing() const override {
    return false;
  }
  void setSequenceNumberForGroup() override {
    inner_->setSequenceNumberForGroup();
  }
  uint64_t getSequenceNumberForGroup() override {
    return inner_->getSequenceNumberForGroup();
  }

  WorkPtr broadcast(Tensors& tensors, const c10d::BroadcastOptions& options) override {
    note("broadcast", tensors);
    auto on_host = host(tensors);
    return finish(inner_->broadcast(on_host, options), c10d::OpType::BROADCAST, tensors);
  }
  WorkPtr allreduce(Tensors& tensors, const c10d::AllreduceOptions& options) override {
    note("allreduce", tensors);
    auto on_host = host(tensors);
    return finish(reduce_average(options, on_host), c10d::OpType::ALLREDUCE, tensors);
  }
  WorkPtr allreduce_coalesced(Tensors& tensors, const c10d::AllreduceCoalescedOptions& options) override {
    for (auto& tensor : tensors) {
      Tensors one{tensor};
      allreduce(one, options);
    }
    return finished(c10d::OpType::ALLREDUCE_COALESCED, tensors);
  }
  WorkPtr reduce(Tensors& tensors, const c10d::ReduceOptions& options) override {
    note("reduce", tensors);
    auto on_host = host(tensors);
    return finish(inner_->reduce(on_host, options), c10d::OpType::REDUCE, tensors);
  }
  WorkPtr allgather(Lists& outputs, Tensors& inputs, const c10d::AllgatherOptions& options) override {
    note("allgather", inputs);
    auto out = host(outputs);
    auto in = host(inputs);
    return finish(inner_->allgather(out, in, options), c10d::OpType::ALLGATHER, flat(outputs));
  }
  WorkPtr _allgather_base(at::Tensor& output, at::Tensor& input, const c10d::AllgatherOptions& options) override {
    note("allgather", {input});
    auto out = host(output).view({-1});  // how the elements are laid out in dimensions is the caller's matter
    auto in = host(input).contiguous().view({-1});
    return finish(inner_->_allgather_base(out, in, options), c10d::OpType::_ALLGATHER_BASE, {output});
  }
  WorkPtr allgather_into_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                          const c10d::AllgatherOptions& options) override {
    for (size_t i = 0; i < inputs.size(); ++i) {
      _allgather_base(outputs[i], inputs[i], options);
    }
    return finished(c10d::OpType::COALESCED, outputs);
  }
  WorkPtr gather(Lists& outputs, Tensors& inputs, const c10d::GatherOptions& options) override {
    note("gather", inputs);
    auto out = host(outputs);
    auto in = host(inputs);
    return finish(inner_->gather(out, in, options), c10d::OpType::GATHER, flat(outputs));
  }
  WorkPtr scatter(Tensors& outputs, Lists& inputs, const c10d::ScatterOptions& options) override {
    note("scatter", outputs);
    auto out = host(outputs);
    auto in = host(inputs);
    return finish(inner_->scatter(out, in, options), c10d::OpType::SCATTER, outputs);
  }
  WorkPtr reduce_scatter(Tensors& outputs, Lists& inputs, const c10d::ReduceScatterOptions& options) override {
    // By an all-reduce of every rank's part: the same sums, in any number of processes.
    for (size_t i = 0; i < outputs.size(); ++i) {
      note("reduce_scatter", {outputs[i]});
      auto whole = at::stack(host(inputs[i]));
      scatter_sum(outputs[i], whole, options);
    }
    return finished(c10d::OpType::REDUCE_SCATTER, outputs);
  }
  WorkPtr _reduce_scatter_base(at::Tensor& output, at::Tensor& input,
                               const c10d::ReduceScatterOptions& options) override {
    note("reduce_scatter", {output});
    auto whole = host(input).clone().reshape({getSize(), -1});
    scatter_sum(output, whole, options);
    return finished(c10d::OpType::_REDUCE_SCATTER_BASE, {output});
  }
  WorkPtr reduce_scatter_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                          const c10d::ReduceScatterOptions& options) override {
    for (size_t i = 0; i < inputs.size(); ++i) {
      _reduce_scatter_base(outputs[i], inputs[i], options);
    }
    return finished(c10d::OpType::COALESCED, outputs);
  }
  WorkPtr alltoall_base(at::Tensor& output, at::Tensor& input, std::vector<int64_t>& output_sizes,
                        std::vector<int64_t>& input_sizes, const c10d::AllToAllOptions& options) override {
    note("alltoall", {input});
    auto out = host(output);
    auto in = host(input);
    return finish(inner_->alltoall_base(out, in, output_sizes, input_sizes, options), c10d::OpType::ALLTOALL_BASE,
                  {output});
  }
  WorkPtr send(Tensors& tensors, int rank, int tag) override {
    note("send", tensors);
    auto on_host = host(tensors);
    return inner_->send(on_host, rank, tag);
  }
  WorkPtr recv(Tensors& tensors, int rank, int tag) override {
    auto on_host = host(tensors);
    return inner_->recv(on_host, rank, tag);
  }
  WorkPtr recvAnysource(Tensors& tensors, int tag) override {
    auto on_host = host(tensors);
    return inner_->recvAnysource(on_host, tag);
  }
  WorkPtr barrier(const c10d::BarrierOptions& options) override {
    auto plain = options;
    plain.device_ids.clear();
    plain.device.reset();
    return inner_->barrier(plain);
  }
  void monitoredBarrier(const c10d::BarrierOptions& options, bool all_ranks) override {
    inner_->monitoredBarrier(options, all_ranks);
  }

 private:
  c10::intrusive_ptr<c10d::Backend> inner_;

  static void note(const char* name, const Tensors& tensors) {
    TORCH_CHECK(!Graph::capturing(), "the HPU simulator records no collective (", name, ") in an HPU graph");
    TORCH_CHECK(!record().shapes, "--mode shapes is for one process: its tensors have no values to exchange");
    record().boundary("collective");
    for (const auto& tensor : tensors) {
      record().collective(name, tensor);
    }
  }
  static WorkPtr finished(c10d::OpType type, Tensors results) {
    return c10::make_intrusive<Finished>(type, std::move(results));
  }
  static WorkPtr finish(const WorkPtr& work, c10d::OpType type, Tensors results) {
    work->wait();
    return finished(type, std::move(results));
  }
  // The host's backend has no average.
  WorkPtr reduce_average(c10d::AllreduceOptions options, Tensors& on_host) {
    if (options.reduceOp != c10d::ReduceOp::AVG) {
      return inner_->allreduce(on_host, options);
    }
    options.reduceOp = c10d::ReduceOp::SUM;
    auto work = inner_->allreduce(on_host, options);
    work->wait();
    for (auto& tensor : on_host) {
      tensor.div_(getSize());
    }
    return work;
  }
  void scatter_sum(at::Tensor& output, at::Tensor& whole, const c10d::ReduceScatterOptions& options) {
    c10d::AllreduceOptions all;
    all.reduceOp = options.reduceOp;
    all.timeout = options.timeout;
    Tensors one{whole};
    reduce_average(all, one)->wait();
    auto target = host(output);
    target.copy_(whole[getRank()].reshape(target.sizes()));
  }
};

// Torch's collectives on tensors of this device. Its kernels for other kinds of devices do nothing but ask the group
// for that kind's backend; one of them gets a group in which that is the backend for this device.
void collective(const c10::OperatorHandle& op, Stack* stack) {
  const auto at = static_cast<std::ptrdiff_t>(*op.schema().argumentIndexWithName("process_group")) -
                  static_cast<std::ptrdiff_t>(op.schema().arguments().size());
  IValue& value = *(stack->end() + at);
  const auto group = value.toCustomClass<c10d::ProcessGroup>();
  auto stand_in = c10::make_intrusive<c10d::ProcessGroup>(group->getRank(), group->getSize());
  stand_in->setBackend(c10::kPrivateUse1, c10d::ProcessGroup::BackendType::CUSTOM, group->getBackend(c10::kHPU));
  value = IValue(std::move(stand_in));
  op.callBoxedForDispatchKey(c10::DispatchKey::PrivateUse1, *stack);
}

TORCH_LIBRARY_IMPL(c10d, HPU, m) {
  auto& dispatcher = c10::Dispatcher::singleton();
  for (const auto& name : dispatcher.getAllOpNames()) {
    const auto op = name.name.rfind("c10d::", 0) == 0 ? dispatcher.findSchema(name) : std::nullopt;
    if (op && op->hasKernelForDispatchKey(c10::DispatchKey::PrivateUse1)) {
      m.impl(name.name.substr(6).c_str(), torch::CppFunction::makeFromBoxedFunction<&collective>());
    }
  }
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
  m.def("wrap_backend", [](const c10::intrusive_ptr<c10d::Backend>& inner) {
    return c10::intrusive_ptr<c10d::Backend>(c10::make_intrusive<Hccl>(inner));
  });
  m.def("snapshot", &snapshot);
}
