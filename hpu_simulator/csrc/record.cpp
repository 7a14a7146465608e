// The record of what ran: phases, lazy graphs, host syncs, memory.
#include <ATen/core/grad_mode.h>
#include <c10/util/Exception.h>

#include "simulator.h"

namespace torch::autograd {
TORCH_API int get_current_graph_task_id();  // -1 outside a backward pass
}  // namespace torch::autograd

namespace simulator {
namespace {

std::function<std::string()>& line_source() {
  static auto* source = new std::function<std::string()>;  // the interpreter ends before static objects do
  return *source;
}

constexpr size_t kInputs = 8;  // of a graph, the latest: before the first step buffers arrive, too

thread_local const char* t_running = nullptr;

std::string described(const at::Tensor& tensor) {
  return c10::str(dtype_name(tensor.scalar_type()), tensor.sizes());
}

}  // namespace

const char* name_of(Phase phase) {
  constexpr std::array<const char*, kPhases> names{"setup", "forward", "backward", "optimizer", "inference"};
  return names.at(static_cast<size_t>(phase));
}

std::string dtype_name(at::ScalarType type) {
  return std::string(c10::getDtypeNames(type).first);
}

Record& record() {
  static auto* one = new Record;  // tensors may be freed after static objects are
  return *one;
}

std::string user_line() {
  return line_source() ? line_source()() : "";
}

void set_line_source(std::function<std::string()> source) {
  line_source() = std::move(source);
}

RunningOperator::RunningOperator(const char* name) : before_(t_running) {
  t_running = before_ == nullptr ? name : before_;
}

RunningOperator::~RunningOperator() {
  t_running = before_;
}

const char* RunningOperator::name() {
  return t_running == nullptr ? "an allocation" : t_running;
}

// A phase lasts until an operator shows that another one began; called with the mutex held.
Phase Record::advance_phase(const OperatorInfo& info) {
  if (optimizing_) {
    phase_ = Phase::Optimizer;
  } else if (torch::autograd::get_current_graph_task_id() != -1) {
    phase_ = Phase::Backward;
    backward_since_step_ = true;
  } else if (info.starts_model) {
    phase_ = at::GradMode::is_enabled() ? Phase::Forward : Phase::Inference;
  } else if (phase_ == Phase::Backward && !at::GradMode::is_enabled()) {
    phase_ = Phase::Optimizer;  // clipping, scaling: between the backward pass and the optimiser
  }
  return phase_;
}

void Record::replayed() {
  std::lock_guard<std::recursive_mutex> guard(mutex);
  replays += 1;
}

void Record::operation(OperatorInfo& info, uint64_t hash, int64_t flops, bool replayed) {
  bool is_new = false;
  {
    std::lock_guard<std::recursive_mutex> guard(mutex);
    const auto phase = static_cast<size_t>(advance_phase(info));
    info.count += 1;
    info.flops += flops;
    phase_ops[phase] += 1;
    phase_flops[phase] += flops;
    if (replayed) {
      return;
    }
    is_new = signatures_.insert(hash).second;
    if (!lazy) {
      compiled += is_new ? 1 : 0;
      return;
    }
    open_hash_ = mixed(open_hash_, hash);
    open_ops_ += 1;
    open_phases_[phase] += 1;
    is_new = is_new && open_new_op_.empty();
  }
  if (is_new) {  // Python is asked without the mutex: another thread may hold the interpreter and wait for it
    const std::string line = user_line();
    std::lock_guard<std::recursive_mutex> guard(mutex);
    open_new_op_ = info.name;
    open_new_line_ = line;
  }
}

void Record::boundary(const char* cause) {
  {
    std::lock_guard<std::recursive_mutex> guard(mutex);
    if (!lazy || open_ops_ == 0) {
      return;
    }
    if (!open_inputs_.empty()) {
      last_inputs_ = std::move(open_inputs_);
      open_inputs_.clear();
    }
    const auto found = known_graphs_.find(open_hash_);
    if (found != known_graphs_.end()) {
      graphs[found->second].reused += 1;
      close_graph();
      return;
    }
  }
  const std::string line = user_line();
  std::lock_guard<std::recursive_mutex> guard(mutex);
  GraphRecord graph;
  graph.id = static_cast<int64_t>(graphs.size()) + 1;
  graph.ops = open_ops_;
  graph.step = steps;
  for (int phase = 0; phase < kPhases; ++phase) {
    if (open_phases_[phase] * 10 >= open_ops_) {  // a few stray operators do not name a graph
      graph.phase += (graph.phase.empty() ? "" : "+") + std::string(name_of(static_cast<Phase>(phase)));
    }
  }
  graph.first_new_op = open_new_op_;
  graph.line = open_new_op_.empty() ? line : open_new_line_;
  graph.cut_by = cause;
  graph.cut_at = line;
  graph.inputs = last_inputs_;
  known_graphs_[open_hash_] = graphs.size();
  graphs.push_back(std::move(graph));
  compiled += 1;
  close_graph();
}

void Record::close_graph() {
  open_hash_ = open_ops_ = 0;
  open_phases_ = {};
  open_new_op_.clear();
}

void Record::sync(const char* kind, int64_t bytes) {
  const std::string line = user_line();
  {
    std::lock_guard<std::recursive_mutex> guard(mutex);
    auto& counted = syncs[{line, kind}];
    counted.count += 1;
    counted.bytes += bytes;
    counted.steps += counted.last_step != steps ? 1 : 0;
    counted.last_step = steps;
  }
  boundary(kind);
}

void Record::copied(bool to_device, const at::Tensor& host) {
  std::lock_guard<std::recursive_mutex> guard(mutex);
  auto& counted = copies.at(to_device ? 1 : 0);
  counted.count += 1;
  counted.bytes += static_cast<int64_t>(host.nbytes());
  if (to_device && lazy && host.dim() > 0 && host.numel() > 0 && !host.requires_grad()) {  // weights are no input
    open_inputs_.push_back(described(host));
    if (open_inputs_.size() > kInputs) {
      open_inputs_.erase(open_inputs_.begin());
    }
  }
}

void Record::collective(const std::string& op, const at::Tensor& tensor) {
  const std::string line = user_line();
  std::lock_guard<std::recursive_mutex> guard(mutex);
  auto& counted = collectives[{op, dtype_name(tensor.scalar_type()), line}];
  counted.count += 1;
  counted.bytes += static_cast<int64_t>(tensor.nbytes());
}

void Record::note_out_of_int32(const char* what, int64_t value) {
  const std::string line = user_line();
  std::lock_guard<std::recursive_mutex> guard(mutex);
  beyond_int32[{line, what, value}] += 1;
}

void Record::in_optimizer(bool entered) {
  std::lock_guard<std::recursive_mutex> guard(mutex);
  optimizing_ = entered;
  if (entered) {
    steps += backward_since_step_ ? 1 : 0;  // one optimiser may step several times, as DeepSpeed's partitions do
    backward_since_step_ = false;
    phase_ = Phase::Optimizer;
    return;
  }
  int64_t in_use = 0;
  for (const auto& counters : memory) {
    in_use = std::max(in_use, counters.in_use);
  }
  if (!by_step.empty() && by_step.back()[0] == steps) {
    by_step.back() = {steps, in_use, std::max(by_step.back()[2], step_peak_)};
  } else {
    by_step.push_back({steps, in_use, step_peak_});
  }
  step_peak_ = in_use;
}

void Record::allocated(int device, int64_t bytes) {
  std::unique_lock<std::recursive_mutex> guard(mutex);
  auto& counters = memory.at(device);
  if (counters.in_use + bytes > counters.limit) {
    const auto phase = std::string(name_of(phase_));
    const auto in_use = counters.in_use, limit = counters.limit;
    guard.unlock();
    const auto line = user_line();
    guard.lock();
    if (!out_of_memory) {
      out_of_memory = OutOfMemory{bytes, RunningOperator::name(), phase, line};
    }
    TORCH_CHECK_WITH(OutOfMemoryError, false, "HPU out of memory: ", RunningOperator::name(), " tried to allocate ",
                     bytes, " bytes in the ", phase, " phase at ", line, "; hpu:", device, " has ", limit,
                     " bytes, of which ", in_use, " are in use");
  }
  counters.in_use += bytes;
  counters.peak = std::max(counters.peak, counters.in_use);
  counters.largest = std::max(counters.largest, bytes);
  counters.allocs += 1;
  counters.accumulated_allocs += 1;
  auto& phase_most = phase_peak.at(static_cast<size_t>(phase_));
  phase_most = std::max(phase_most, counters.in_use);
  step_peak_ = std::max(step_peak_, counters.in_use);
  if (counters.in_use > run_peak) {
    run_peak = counters.in_use;
    run_peak_phase = phase_;
  }
}

void Record::freed(int device, int64_t bytes) {
  std::lock_guard<std::recursive_mutex> guard(mutex);
  auto& counters = memory.at(device);
  counters.in_use -= bytes;
  counters.frees += 1;
  counters.accumulated_frees += 1;
}

}  // namespace simulator
