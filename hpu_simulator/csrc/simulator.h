// What the parts of the simulated device share: memory accounting, the record of what ran, captured graphs.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <c10/core/StorageImpl.h>

#include <array>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <string>
#include <unordered_map>
#include <unordered_set>
#include <vector>

namespace simulator {

constexpr int kMaxDevices = 128;

enum class Phase : int { Setup, Forward, Backward, Optimizer, Inference };
constexpr int kPhases = 5;
const char* name_of(Phase phase);
std::string dtype_name(at::ScalarType type);  // as Python calls it

inline bool on_device(const at::Tensor& tensor) {
  return tensor.defined() && tensor.device().type() == c10::kHPU;
}

inline uint64_t mixed(uint64_t seed, uint64_t value) {
  return seed ^ (value * 0xff51afd7ed558ccdULL + 0x9e3779b97f4a7c15ULL + (seed << 6) + (seed >> 2));
}

struct MemoryCounters {
  int64_t limit = 0, in_use = 0, peak = 0;
  int64_t allocs = 0, frees = 0, largest = 0, accumulated_allocs = 0, accumulated_frees = 0;
};

// What is looked up once for each operator.
struct OperatorInfo {
  enum class Flops { None, Mm, Addmm, Bmm, Baddbmm, Convolution, ConvolutionBackward };
  std::string name;
  Flops flops_kind = Flops::None;
  bool starts_model = false;   // a matrix product or a table look-up: where a model's forward pass begins
  bool reads_data = false;     // the result's shape depends on values
  bool mixes_devices = false;  // host tensors of any size are allowed beside device tensors
  std::vector<int> written;    // for each result: the argument that it is, or -1
  std::vector<bool> writes;    // for each argument
  std::vector<bool> hashed;    // for each argument: a number of it is part of a lazy graph's identity
  std::optional<c10::OperatorHandle> replacement;  // runs instead on the host
  int64_t count = 0, flops = 0;
};

struct GraphRecord {
  int64_t id = 0, ops = 0, step = 0, reused = 0;
  std::string phase, first_new_op, line, cut_by, cut_at;
  std::vector<std::string> inputs;
};

struct Counted {
  int64_t count = 0, bytes = 0;
  int64_t steps = 0, last_step = -1;  // in how many optimiser steps, and the latest
};

struct OutOfMemory {
  int64_t bytes = 0;
  std::string op, phase, line;
};

// Everything that the report is made of. One per process; every method may be called from any thread.
class Record {
 public:
  void operation(OperatorInfo& info, uint64_t hash, int64_t flops, bool replayed = false);
  void replayed();
  void boundary(const char* cause);  // a lazy graph ends, if one is open
  void sync(const char* kind, int64_t bytes);
  void copied(bool to_device, const at::Tensor& host);
  void collective(const std::string& op, const at::Tensor& tensor);
  void in_optimizer(bool entered);
  void allocated(int device, int64_t bytes);  // raises torch's out-of-memory error
  void freed(int device, int64_t bytes);
  void note_out_of_int32(const char* what, int64_t value);

  // Recursive: making a Python object may collect garbage, which frees tensors, which is recorded.
  std::recursive_mutex mutex;
  bool lazy = false, shapes = false;
  int64_t large = 0;  // shapes mode: host tensors of that many elements get no values
  std::array<MemoryCounters, kMaxDevices> memory;
  std::array<int64_t, kPhases> phase_ops{}, phase_flops{}, phase_peak{};
  std::vector<GraphRecord> graphs;
  std::map<std::pair<std::string, std::string>, Counted> syncs;          // (line, kind)
  std::map<std::tuple<std::string, std::string, int64_t>, int64_t> beyond_int32;  // (line, what, value): count
  std::map<std::tuple<std::string, std::string, std::string>, Counted> collectives;  // (op, dtype, line)
  std::array<Counted, 2> copies{};  // to the host, to the device
  std::vector<std::array<int64_t, 3>> by_step;  // step, bytes in use, peak in the step
  std::optional<OutOfMemory> out_of_memory;
  int64_t steps = 0, compiled = 0, replays = 0, run_peak = 0;
  Phase run_peak_phase = Phase::Setup;

 private:
  Phase advance_phase(const OperatorInfo& info);
  void close_graph();
  std::unordered_set<uint64_t> signatures_;
  std::unordered_map<uint64_t, size_t> known_graphs_;
  Phase phase_ = Phase::Setup;
  bool optimizing_ = false, backward_since_step_ = false;
  int64_t step_peak_ = 0;
  // The lazy graph that is being gathered.
  uint64_t open_hash_ = 0;
  int64_t open_ops_ = 0;
  std::array<int64_t, kPhases> open_phases_{};
  std::string open_new_op_, open_new_line_;
  std::vector<std::string> open_inputs_, last_inputs_;
};

Record& record();
std::vector<const OperatorInfo*> known_operators();

// Which line of the user's program is running; asks Python.
std::string user_line();
void set_line_source(std::function<std::string()> source);

// The operator that runs in this thread, for messages. An inner one does not count.
struct RunningOperator {
  explicit RunningOperator(const char* name);
  ~RunningOperator();
  static const char* name();

 private:
  const char* before_;
};

// Device memory is host memory that is counted, or (shapes mode) addresses with nothing behind them.
c10::Allocator* device_allocator();
c10::Allocator* pinned_allocator();
bool is_pinned(const void* data);
c10::DataPtr adopt_data(c10::Storage host, int64_t bytes, int device);
// Shapes mode: the number that all elements are known to be. A tensor that is only a part may change what is known.
std::optional<double> known_value(const c10::Storage& storage);
void set_known_value(const at::Tensor& tensor, std::optional<double> value);
// Shapes mode: what integers on the device are, as a host tensor of the same sizes; undefined if not known. Known is what
// came from the host or over a collective: counts, sizes, names as bytes, by which a program finds its way.
constexpr int64_t kMostValues = 1 << 22;  // bytes of a storage whose values are kept
at::Tensor known_values(const at::Tensor& tensor);
void set_known_values(const at::Tensor& tensor, const at::Tensor& values);
int current_device();
void set_current_device(int device);
void set_device_count(int count);
int device_count();
const at::Generator& default_generator(int device);
at::Generator host_generator(const at::Generator& generator);  // what draws for a device's generator

// A host (shapes mode: meta) tensor over the same memory, with the same geometry.
at::Tensor alias_of(const at::Tensor& tensor);
at::Tensor device_tensor_like(c10::Storage storage, const at::Tensor& geometry);

// Runs an operator on stand-ins; `first` is where its arguments begin in the stack.
void run_on_host(const c10::OperatorHandle& op, std::vector<c10::IValue>& stack, size_t first, const OperatorInfo& info);
int64_t flops_of(OperatorInfo::Flops kind, const c10::IValue* arguments);

// Recorded device operations, which run again on the recorded memory.
class Graph {
 public:
  Graph() = default;
  Graph(const Graph&) = delete;
  ~Graph();
  void capture_begin();
  void capture_end();
  void replay();
  void reset();
  static bool capturing();
  // While capturing: what ran, with the arguments as they were before stand-ins took their places.
  static void add(const c10::OperatorHandle& op, std::vector<c10::IValue> arguments, OperatorInfo& info,
                  const std::vector<at::Tensor>& results);
  static void add_storage(const c10::Storage& storage);

 private:
  struct TensorRef {
    int slot;
    std::vector<int64_t> sizes, strides;
    int64_t offset;
    caffe2::TypeMeta dtype;
    bool conj, neg;
  };
  struct Slot {
    c10::weak_intrusive_ptr<c10::StorageImpl> weak;
    c10::intrusive_ptr<c10::StorageImpl> kept;  // lives outside the graph: an input, a parameter or an output
    c10::Storage inner;                         // while replaying: an intermediate
    int64_t bytes = 0;
    int device = 0;
    size_t last_use = 0;
    explicit Slot(const c10::Storage& storage);
  };
  struct Entry {
    std::optional<c10::OperatorHandle> op;  // none: memory is taken for `results[0]`
    OperatorInfo* info = nullptr;
    int64_t flops = 0;
    std::vector<c10::IValue> arguments;
    std::map<std::pair<size_t, int>, TensorRef> tensors;  // (argument, place in its list or -1)
    std::vector<int> results;                             // slots of new memory, by result tensor; -1: none
    std::vector<std::pair<size_t, int>> written;
  };
  int slot_of(const c10::Storage& storage, bool make_external);
  TensorRef reference(const at::Tensor& tensor);
  at::Tensor materialize(const TensorRef& reference);
  void run(Entry& entry);

  std::vector<Slot> slots_;
  std::unordered_map<c10::StorageImpl*, int> by_storage_;
  std::vector<Entry> entries_;
  std::vector<std::vector<int>> dead_after_;
  bool complete_ = false;
};

void set_autocast_lists(const std::vector<std::string>& lower, const std::vector<std::string>& fp32,
                        const std::vector<std::string>& promote);

}  // namespace simulator
