// The collectives: "hccl" between real processes, and a rank that is rehearsed without the others.
#include "collectives.h"

#include <ATen/ATen.h>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <torch/library.h>

#include <cmath>

#include "simulator.h"

namespace simulator {
namespace {

using c10::IValue;
using c10d::OpType;
using Tensors = std::vector<at::Tensor>;
using Lists = std::vector<Tensors>;
using WorkPtr = c10::intrusive_ptr<c10d::Work>;

// A finished collective, whose result is the device's tensors.
class Finished final : public c10d::Work {
 public:
  Finished(OpType type, Tensors results) : Work(-1, type), results_(std::move(results)) {
    future_ = c10::make_intrusive<c10::ivalue::Future>(c10::ListType::create(c10::TensorType::get()));
    future_->markCompleted(IValue(results_));
    finish();
  }
  Tensors result() override {
    return results_;
  }
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override {
    return future_;
  }

 private:
  Tensors results_;
  c10::intrusive_ptr<c10::ivalue::Future> future_;
};

// A message on its way. It keeps the device's tensors: what is sent or filled is their memory, under another tensor.
class Message final : public c10d::Work {
 public:
  Message(OpType type, WorkPtr inner, Tensors tensors)
      : Work(-1, type), inner_(std::move(inner)), tensors_(std::move(tensors)) {}
  bool isCompleted() override {
    return inner_->isCompleted();
  }
  bool isSuccess() const override {
    return inner_->isSuccess();
  }
  std::exception_ptr exception() const override {
    return inner_->exception();
  }
  int sourceRank() const override {
    return inner_->sourceRank();
  }
  Tensors result() override {
    return tensors_;
  }
  void synchronize() override {
    inner_->synchronize();
  }
  bool wait(std::chrono::milliseconds timeout) override {
    return inner_->wait(timeout);
  }
  void abort() override {
    inner_->abort();
  }

 private:
  WorkPtr inner_;
  Tensors tensors_;
};

// The same elements on the host, without gaps, which gloo would take for elements; `give_back` is the way back.
at::Tensor host(const at::Tensor& tensor) {
  return (on_device(tensor) ? alias_of(tensor) : tensor).contiguous();
}

void give_back(const Tensors& tensors, const Tensors& on_host) {
  for (size_t i = 0; i < tensors.size(); ++i) {
    if (on_host[i].const_data_ptr() != tensors[i].const_data_ptr()) {
      alias_of(tensors[i]).copy_(on_host[i]);
    }
  }
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

void note(const char* name, const Tensors& tensors) {
  if (tensors.empty() || !on_device(tensors.front())) {
    return;
  }
  TORCH_CHECK(!Graph::capturing(), "the HPU simulator records no collective (", name, ") in an HPU graph");
  record().boundary("collective");
  for (const auto& tensor : tensors) {
    record().collective(name, tensor);
  }
}

// A collective over a list of tensors goes through one flat buffer on the device, while it runs.
at::Tensor flat_buffer(const char* name, const Tensors& parts) {
  if (parts.empty() || !on_device(parts.front())) {
    return {};
  }
  const RunningOperator running(name);
  int64_t elements = 0;
  for (const auto& part : parts) {
    elements += part.numel();
  }
  return at::empty({elements}, parts.front().options());
}

WorkPtr finished(OpType type, Tensors results) {
  return c10::make_intrusive<Finished>(type, std::move(results));
}

// What both have in common: collectives are done when the call returns, so several together are one after the other.
class Immediate : public c10d::Backend {
 public:
  Immediate(std::string name, int rank, int size) : Backend(rank, size), name_(std::move(name)) {}

  const std::string getBackendName() const override {
    return name_;
  }
  bool supportsCoalescing() const override {
    return false;  // messages would wait for each other
  }
  void startCoalescing() override {}
  WorkPtr endCoalescing() override {
    return finished(OpType::COALESCED, {});
  }
  WorkPtr allreduce_coalesced(Tensors& tensors, const c10d::AllreduceCoalescedOptions& options) override {
    for (auto& tensor : tensors) {
      Tensors one{tensor};
      allreduce(one, options);
    }
    return finished(OpType::ALLREDUCE_COALESCED, tensors);
  }
  WorkPtr allgather_into_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                          const c10d::AllgatherOptions& options) override {
    for (size_t i = 0; i < inputs.size(); ++i) {
      _allgather_base(outputs[i], inputs[i], options);
    }
    return finished(OpType::COALESCED, outputs);
  }
  WorkPtr reduce_scatter_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                          const c10d::ReduceScatterOptions& options) override {
    for (size_t i = 0; i < inputs.size(); ++i) {
      _reduce_scatter_base(outputs[i], inputs[i], options);
    }
    return finished(OpType::COALESCED, outputs);
  }

 private:
  std::string name_;
};

// --- Between real processes --------------------------------------------------------------------------------------

class Hccl final : public Immediate {
 public:
  explicit Hccl(c10::intrusive_ptr<c10d::Backend> inner)
      : Immediate("hccl", inner->getRank(), inner->getSize()), inner_(std::move(inner)) {}

  void setTimeout(std::chrono::milliseconds timeout) override {
    inner_->setTimeout(timeout);
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
    wait(inner_->broadcast(on_host, options), "broadcast");
    give_back(tensors, on_host);
    return finished(OpType::BROADCAST, tensors);
  }
  WorkPtr allreduce(Tensors& tensors, const c10d::AllreduceOptions& options) override {
    note("allreduce", tensors);
    auto on_host = host(tensors);
    all_reduce(on_host, options, "allreduce");
    give_back(tensors, on_host);
    return finished(OpType::ALLREDUCE, tensors);
  }
  WorkPtr reduce(Tensors& tensors, const c10d::ReduceOptions& options) override {
    note("reduce", tensors);
    auto plain = options;
    plain.reduceOp = summed(options.reduceOp);
    auto on_host = host(tensors);
    wait(inner_->reduce(on_host, plain), "reduce");
    if (getRank() == options.rootRank) {
      divide(on_host, options.reduceOp);
      give_back(tensors, on_host);
    }
    return finished(OpType::REDUCE, tensors);
  }
  WorkPtr allgather(Lists& outputs, Tensors& inputs, const c10d::AllgatherOptions& options) override {
    note("allgather", inputs);
    const auto buffer = flat_buffer("c10d::allgather_", flat(outputs));
    auto out = host(outputs);
    auto in = host(inputs);
    wait(inner_->allgather(out, in, options), "allgather");
    give_back(flat(outputs), flat(out));
    return finished(OpType::ALLGATHER, flat(outputs));
  }
  WorkPtr _allgather_base(at::Tensor& output, at::Tensor& input, const c10d::AllgatherOptions& options) override {
    note("allgather", {input});
    auto out = host(output), in = host(input).view({-1});
    auto all = out.view({-1});  // how the elements are laid out in dimensions is the caller's matter
    wait(inner_->_allgather_base(all, in, options), "allgather");
    give_back({output}, {out});
    return finished(OpType::_ALLGATHER_BASE, {output});
  }
  WorkPtr gather(Lists& outputs, Tensors& inputs, const c10d::GatherOptions& options) override {
    note("gather", inputs);
    auto out = host(outputs);
    auto in = host(inputs);
    wait(inner_->gather(out, in, options), "gather");
    give_back(flat(outputs), flat(out));
    return finished(OpType::GATHER, flat(outputs));
  }
  WorkPtr scatter(Tensors& outputs, Lists& inputs, const c10d::ScatterOptions& options) override {
    note("scatter", outputs);
    auto out = host(outputs);
    auto in = host(inputs);
    wait(inner_->scatter(out, in, options), "scatter");
    give_back(outputs, out);
    return finished(OpType::SCATTER, outputs);
  }
  WorkPtr reduce_scatter(Tensors& outputs, Lists& inputs, const c10d::ReduceScatterOptions& options) override {
    // By an all-reduce of every rank's part: the same sums, in any number of processes.
    for (size_t i = 0; i < outputs.size(); ++i) {
      note("reduce_scatter", {outputs[i]});
      const auto buffer = flat_buffer("c10d::reduce_scatter_", inputs[i]);
      auto whole = at::stack(host(inputs[i]));
      scatter_sum(outputs[i], whole, options);
    }
    return finished(OpType::REDUCE_SCATTER, outputs);
  }
  WorkPtr _reduce_scatter_base(at::Tensor& output, at::Tensor& input,
                               const c10d::ReduceScatterOptions& options) override {
    note("reduce_scatter", {output});
    auto whole = host(input).clone().reshape({getSize(), -1});
    scatter_sum(output, whole, options);
    return finished(OpType::_REDUCE_SCATTER_BASE, {output});
  }
  WorkPtr alltoall_base(at::Tensor& output, at::Tensor& input, std::vector<int64_t>& output_sizes,
                        std::vector<int64_t>& input_sizes, const c10d::AllToAllOptions& options) override {
    note("alltoall", {input});
    auto out = host(output);
    auto in = host(input);
    wait(inner_->alltoall_base(out, in, output_sizes, input_sizes, options), "alltoall");
    give_back({output}, {out});
    return finished(OpType::ALLTOALL_BASE, {output});
  }
  WorkPtr alltoall(Tensors& outputs, Tensors& inputs, const c10d::AllToAllOptions& options) override {
    note("alltoall", inputs);
    const auto buffers = std::make_pair(flat_buffer("c10d::alltoall_", inputs), flat_buffer("c10d::alltoall_", outputs));
    std::vector<int64_t> out_sizes, in_sizes;
    Tensors parts;
    for (const auto& tensor : inputs) {
      parts.push_back(host(tensor).reshape({-1}));
      in_sizes.push_back(tensor.numel());
    }
    int64_t total = 0;
    for (const auto& tensor : outputs) {
      out_sizes.push_back(tensor.numel());
      total += tensor.numel();
    }
    auto in = at::cat(parts), out = at::empty({total}, in.options());
    const auto received = out.split_with_sizes(out_sizes);  // before: the call takes the sizes away
    wait(inner_->alltoall_base(out, in, out_sizes, in_sizes, options), "alltoall");
    for (size_t i = 0; i < outputs.size(); ++i) {
      alias_of(outputs[i]).copy_(received[i].view(outputs[i].sizes()));
    }
    return finished(OpType::ALLTOALL, outputs);
  }
  WorkPtr send(Tensors& tensors, int rank, int tag) override {
    note("send", tensors);
    auto on_host = host(tensors);
    return c10::make_intrusive<Message>(OpType::SEND, inner_->send(on_host, rank, tag), tensors);
  }
  WorkPtr recv(Tensors& tensors, int rank, int tag) override {
    note("recv", tensors);
    auto on_host = received(tensors);
    return c10::make_intrusive<Message>(OpType::RECV, inner_->recv(on_host, rank, tag), tensors);
  }
  WorkPtr recvAnysource(Tensors& tensors, int tag) override {
    note("recv", tensors);
    auto on_host = received(tensors);
    return c10::make_intrusive<Message>(OpType::RECVANYSOURCE, inner_->recvAnysource(on_host, tag), tensors);
  }
  WorkPtr barrier(const c10d::BarrierOptions& options) override {
    auto plain = options;
    plain.device_ids.clear();
    plain.device.reset();
    wait(inner_->barrier(plain), "barrier");
    return finished(OpType::BARRIER, {});
  }
  void monitoredBarrier(const c10d::BarrierOptions& options, bool all_ranks) override {
    inner_->monitoredBarrier(options, all_ranks);
  }

 private:
  c10::intrusive_ptr<c10d::Backend> inner_;

  // Says which collective failed, and where: a rank that never came, or went.
  void wait(const WorkPtr& work, const char* name) {
    std::string failed;
    try {
      work->wait();
      return;
    } catch (const c10::Error& error) {
      failed = error.what_without_backtrace();
    } catch (const std::exception& error) {
      failed = error.what();
    }
    TORCH_CHECK_WITH(DistBackendError, false, "hccl: ", name, " on rank ", getRank(), " of ", getSize(), " at ",
                     user_line(), ": ", failed);
  }
  static Tensors received(const Tensors& tensors) {
    for (const auto& tensor : tensors) {
      TORCH_CHECK(tensor.is_contiguous(), "Tensors must be contiguous");
    }
    return host(tensors);
  }
  // The host's backend has no average.
  static c10d::ReduceOp summed(const c10d::ReduceOp& asked) {
    return asked == c10d::ReduceOp::AVG ? c10d::ReduceOp(c10d::ReduceOp::SUM) : asked;
  }
  void divide(Tensors& on_host, const c10d::ReduceOp& asked) {
    for (auto& tensor : on_host) {
      if (asked == c10d::ReduceOp::AVG) {
        tensor.div_(getSize());
      }
    }
  }
  void all_reduce(Tensors& on_host, const c10d::AllreduceOptions& options, const char* name) {
    auto plain = options;
    plain.reduceOp = summed(options.reduceOp);
    wait(inner_->allreduce(on_host, plain), name);
    divide(on_host, options.reduceOp);
  }
  void scatter_sum(at::Tensor& output, at::Tensor& whole, const c10d::ReduceScatterOptions& options) {
    c10d::AllreduceOptions all;
    all.reduceOp = options.reduceOp;
    all.timeout = options.timeout;
    Tensors one{whole};
    all_reduce(one, all, "reduce_scatter");
    auto target = on_device(output) ? alias_of(output) : output;
    target.copy_(whole[getRank()].reshape(target.sizes()));
  }
};

// --- One rank without the others ---------------------------------------------------------------------------------

class Lone final : public Immediate {
 public:
  using Immediate::Immediate;

  void setTimeout(std::chrono::milliseconds /*timeout*/) override {}
  void setSequenceNumberForGroup() override {}
  uint64_t getSequenceNumberForGroup() override {
    return 0;
  }

  WorkPtr broadcast(Tensors& tensors, const c10d::BroadcastOptions& /*options*/) override {
    note("broadcast", tensors);
    return finished(OpType::BROADCAST, tensors);
  }
  WorkPtr allreduce(Tensors& tensors, const c10d::AllreduceOptions& options) override {
    note("allreduce", tensors);
    for (const auto& tensor : tensors) {
      combine(tensor, options.reduceOp);
    }
    return finished(OpType::ALLREDUCE, tensors);
  }
  WorkPtr reduce(Tensors& tensors, const c10d::ReduceOptions& options) override {
    note("reduce", tensors);
    for (const auto& tensor : tensors) {
      if (getRank() == options.rootRank) {
        combine(tensor, options.reduceOp);
      }
    }
    return finished(OpType::REDUCE, tensors);
  }
  WorkPtr allgather(Lists& outputs, Tensors& inputs, const c10d::AllgatherOptions& /*options*/) override {
    note("allgather", inputs);
    const auto buffer = flat_buffer("c10d::allgather_", flat(outputs));
    repeat(outputs, inputs);
    return finished(OpType::ALLGATHER, flat(outputs));
  }
  WorkPtr _allgather_base(at::Tensor& output, at::Tensor& input, const c10d::AllgatherOptions& /*options*/) override {
    note("allgather", {input});
    TORCH_CHECK(output.numel() == input.numel() * getSize(), "all-gather of ", input.numel(), " elements into ",
                output.numel(), " on ", getSize(), " ranks");
    for (const auto& part : output.view({getSize(), -1}).unbind()) {
      assign(part, input);
    }
    return finished(OpType::_ALLGATHER_BASE, {output});
  }
  WorkPtr gather(Lists& outputs, Tensors& inputs, const c10d::GatherOptions& /*options*/) override {
    note("gather", inputs);
    repeat(outputs, inputs);  // there are outputs on the root only
    return finished(OpType::GATHER, flat(outputs));
  }
  WorkPtr scatter(Tensors& outputs, Lists& inputs, const c10d::ScatterOptions& /*options*/) override {
    note("scatter", outputs);
    for (size_t i = 0; i < inputs.size(); ++i) {  // there are inputs on the root only
      assign(outputs[i], inputs[i].at(getRank()));
    }
    return finished(OpType::SCATTER, outputs);
  }
  WorkPtr reduce_scatter(Tensors& outputs, Lists& inputs, const c10d::ReduceScatterOptions& options) override {
    for (size_t i = 0; i < outputs.size(); ++i) {
      note("reduce_scatter", {outputs[i]});
      const auto buffer = flat_buffer("c10d::reduce_scatter_", inputs[i]);
      assign(outputs[i], inputs[i].at(getRank()));
      combine(outputs[i], options.reduceOp);
    }
    return finished(OpType::REDUCE_SCATTER, outputs);
  }
  WorkPtr _reduce_scatter_base(at::Tensor& output, at::Tensor& input,
                               const c10d::ReduceScatterOptions& options) override {
    note("reduce_scatter", {output});
    TORCH_CHECK(input.numel() == output.numel() * getSize(), "reduce-scatter of ", input.numel(), " elements into ",
                output.numel(), " on ", getSize(), " ranks");
    assign(output, input.view({getSize(), -1})[getRank()]);
    combine(output, options.reduceOp);
    return finished(OpType::_REDUCE_SCATTER_BASE, {output});
  }
  WorkPtr alltoall_base(at::Tensor& output, at::Tensor& input, std::vector<int64_t>& output_sizes,
                        std::vector<int64_t>& input_sizes, const c10d::AllToAllOptions& /*options*/) override {
    note("alltoall", {input});
    Tensors out = parts(output, output_sizes), in = parts(input, input_sizes);
    exchange(out, in);
    return finished(OpType::ALLTOALL_BASE, {output});
  }
  WorkPtr alltoall(Tensors& outputs, Tensors& inputs, const c10d::AllToAllOptions& /*options*/) override {
    note("alltoall", inputs);
    const auto buffers = std::make_pair(flat_buffer("c10d::alltoall_", inputs), flat_buffer("c10d::alltoall_", outputs));
    exchange(outputs, inputs);
    return finished(OpType::ALLTOALL, outputs);
  }
  WorkPtr send(Tensors& tensors, int /*rank*/, int /*tag*/) override {
    note("send", tensors);
    return finished(OpType::SEND, tensors);
  }
  WorkPtr recv(Tensors& tensors, int /*rank*/, int /*tag*/) override {
    note("recv", tensors);  // the values are those that were there
    return finished(OpType::RECV, tensors);
  }
  WorkPtr recvAnysource(Tensors& tensors, int tag) override {
    return recv(tensors, 0, tag);
  }
  WorkPtr barrier(const c10d::BarrierOptions& /*options*/) override {
    return finished(OpType::BARRIER, {});
  }
  void monitoredBarrier(const c10d::BarrierOptions& /*options*/, bool /*all_ranks*/) override {}

 private:
  // A large host tensor has no values here (`shapes.py`), and touching it would take its memory.
  static bool valued(const at::Tensor& tensor) {
    return on_device(tensor) || !tensor.is_floating_point() || tensor.numel() < record().large;
  }
  static bool whole(const at::Tensor& tensor) {
    return tensor.nbytes() == tensor.storage().nbytes();
  }
  static void assign(const at::Tensor& to, const at::Tensor& from) {
    const at::NoGradGuard no_grad;
    if (!on_device(to)) {
      if (valued(to) && valued(from)) {
        const_cast<at::Tensor&>(to).copy_(from.reshape(to.sizes()));
      }
      return;
    }
    const auto value = known_value(from.storage());
    const auto values = value && whole(to) ? at::Tensor() : known_values(from);
    if (values.defined() && to.scalar_type() == from.scalar_type()) {
      set_known_values(to, values.reshape(to.sizes()));
    } else {
      set_known_value(to, value);
    }
  }
  // What a reduction makes of the same number on every rank.
  void combine(const at::Tensor& tensor, const c10d::ReduceOp& operation) {
    const bool sum = operation == c10d::ReduceOp::SUM, product = operation == c10d::ReduceOp::PRODUCT;
    const bool parity = operation == c10d::ReduceOp::BXOR && getSize() % 2 == 0;
    if (!valued(tensor) || !(sum || product || parity)) {
      return;
    }
    const auto change = [&](at::Tensor values) {
      parity ? values.zero_() : sum ? values.mul_(getSize()) : values.pow_(getSize());
    };
    const at::NoGradGuard no_grad;
    if (!on_device(tensor)) {
      change(tensor);
      return;
    }
    auto value = known_value(tensor.storage());
    const auto values = value && whole(tensor) ? at::Tensor() : known_values(tensor);
    if (values.defined()) {
      change(values);
      set_known_values(tensor, values);
      return;
    }
    if (value) {
      value = parity ? 0 : sum ? *value * getSize() : std::pow(*value, getSize());
    }
    set_known_value(tensor, value);
  }
  static void repeat(const Lists& outputs, const Tensors& inputs) {
    for (size_t i = 0; i < outputs.size(); ++i) {
      for (const auto& output : outputs[i]) {
        assign(output, inputs[i]);
      }
    }
  }
  Tensors parts(const at::Tensor& tensor, const std::vector<int64_t>& sizes) {
    return sizes.empty() ? tensor.chunk(getSize()) : tensor.split_with_sizes(sizes);
  }
  // Every rank sends this one what this one would send to itself.
  void exchange(const Tensors& outputs, const Tensors& inputs) {
    const auto& mine = inputs.at(getRank());
    for (const auto& output : outputs) {
      if (output.numel() == mine.numel()) {  // else other ranks send other shares, whose values nobody knows
        assign(output, mine);
      } else if (on_device(output)) {
        set_known_value(output, std::nullopt);
      }
    }
  }
};

// Torch's collectives on tensors of this device. Its kernels for other kinds of devices do nothing but ask the group
// for that kind's backend; one of them gets a group in which that is the backend for this device.
void collective(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
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

}  // namespace

c10::intrusive_ptr<c10d::Backend> wrap_backend(const c10::intrusive_ptr<c10d::Backend>& inner) {
  return c10::make_intrusive<Hccl>(inner);
}

c10::intrusive_ptr<c10d::Backend> lone_backend(const std::string& name, int rank, int size) {
  return c10::make_intrusive<Lone>(name, rank, size);
}

}  // namespace simulator
