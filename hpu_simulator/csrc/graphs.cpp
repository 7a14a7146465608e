// HPU graphs: device operations are noted while they run, and run again on the same memory when replayed.
#include <ATen/ATen.h>
#include <ATen/core/dispatch/Dispatcher.h>

#include <atomic>
#include <cstring>

#include "simulator.h"

namespace simulator {
namespace {

using c10::IValue;

std::atomic<Graph*> g_capturing{nullptr};
std::mutex g_capture_mutex;  // a backward pass runs in a thread of its own

}  // namespace

Graph::Slot::Slot(const c10::Storage& storage)
    : weak(c10::weak_intrusive_ptr<c10::StorageImpl>(storage.getWeakStorageImpl())),
      bytes(static_cast<int64_t>(storage.nbytes())),
      device(storage.device().index()) {}

Graph::~Graph() {
  Graph* self = this;
  g_capturing.compare_exchange_strong(self, nullptr);  // its owner gave up while it was being recorded
}

bool Graph::capturing() {
  return g_capturing.load(std::memory_order_relaxed) != nullptr;
}

void Graph::capture_begin() {
  TORCH_CHECK(record().lazy, "HPU graphs exist in lazy mode only; set PT_HPU_LAZY_MODE=1 before the bridge is imported");
  TORCH_CHECK(!capturing(), "a graph is being recorded already");
  reset();
  record().boundary("graph");
  g_capturing = this;
}

void Graph::capture_end() {
  TORCH_CHECK(g_capturing == this, "capture_end without capture_begin");
  g_capturing = nullptr;
  record().boundary("graph");
  for (auto& slot : slots_) {
    if (slot.kept == nullptr) {
      slot.kept = slot.weak.lock();  // null: an intermediate, whose memory is free between replays
    }
    slot.weak.reset();
  }
  by_storage_.clear();
  dead_after_.resize(entries_.size());
  for (size_t slot = 0; slot < slots_.size(); ++slot) {
    if (slots_[slot].kept == nullptr && slots_[slot].last_use < entries_.size()) {
      dead_after_[slots_[slot].last_use].push_back(static_cast<int>(slot));
    }
  }
  complete_ = true;
}

void Graph::reset() {
  TORCH_CHECK(g_capturing != this, "the graph is being recorded");
  slots_.clear();
  by_storage_.clear();
  entries_.clear();
  dead_after_.clear();
  complete_ = false;
}

int Graph::slot_of(const c10::Storage& storage, bool make_external) {
  auto* key = storage.unsafeGetStorageImpl();
  const auto found = by_storage_.find(key);
  if (make_external && found != by_storage_.end()) {
    auto& slot = slots_[found->second];
    slot.last_use = entries_.size();
    slot.bytes = std::max(slot.bytes, static_cast<int64_t>(storage.nbytes()));  // an operator resized what it wrote to
    return found->second;
  }
  const int slot = static_cast<int>(slots_.size());
  slots_.emplace_back(storage);
  slots_.back().last_use = entries_.size();
  if (make_external) {
    slots_.back().kept = c10::intrusive_ptr<c10::StorageImpl>(slots_.back().weak.lock());
  }
  by_storage_[key] = slot;
  return slot;
}

Graph::TensorRef Graph::reference(const at::Tensor& tensor) {
  return {slot_of(tensor.storage(), true), tensor.sizes().vec(), tensor.strides().vec(), tensor.storage_offset(),
          tensor.dtype(), tensor.is_conj(), tensor.is_neg()};
}

void Graph::add_storage(const c10::Storage& storage) {
  if (!capturing()) {
    return;
  }
  std::lock_guard<std::mutex> guard(g_capture_mutex);
  auto* self = g_capturing.load();
  Entry entry;
  entry.results = {self->slot_of(storage, false)};
  self->entries_.push_back(std::move(entry));
}

void Graph::add(const c10::OperatorHandle& op, std::vector<IValue> arguments, OperatorInfo& info,
                const std::vector<at::Tensor>& results) {
  std::lock_guard<std::mutex> guard(g_capture_mutex);
  auto* self = g_capturing.load();
  Entry entry;
  entry.op = op;
  entry.info = &info;
  entry.flops = flops_of(info.flops_kind, arguments.data());
  for (size_t i = 0; i < arguments.size(); ++i) {
    const auto& value = arguments[i];
    if (value.isTensor() && on_device(value.toTensor())) {
      entry.tensors.emplace(std::make_pair(i, -1), self->reference(value.toTensor()));
      if (info.writes[i]) {
        entry.written.emplace_back(i, -1);
      }
      arguments[i] = IValue();
    } else if (value.isTensorList() || value.isOptionalTensorList()) {
      const auto list = value.toListRef();
      for (size_t k = 0; k < list.size(); ++k) {
        if (list[k].isTensor() && on_device(list[k].toTensor())) {
          entry.tensors.emplace(std::make_pair(i, static_cast<int>(k)), self->reference(list[k].toTensor()));
          if (info.writes[i]) {
            entry.written.emplace_back(i, static_cast<int>(k));
          }
        }
      }
    } else if (value.isDevice() && value.toDevice().type() == c10::kHPU) {
      arguments[i] = IValue(c10::Device(record().shapes ? c10::kMeta : c10::kCPU));
    } else if (op.schema().arguments()[i].name() == "generator") {
      arguments[i] = IValue(host_generator(value.isGenerator() ? value.toGenerator() : at::Generator()));
    }
  }
  entry.arguments = std::move(arguments);
  for (const auto& tensor : results) {
    // A slot keeps its storage's address from being used again, so a known address is a view of known memory.
    const bool view = tensor.defined() && self->by_storage_.count(tensor.storage().unsafeGetStorageImpl()) > 0;
    entry.results.push_back(!tensor.defined() || view ? -1 : self->slot_of(tensor.storage(), false));
  }
  self->entries_.push_back(std::move(entry));
}

at::Tensor Graph::materialize(const TensorRef& reference) {
  auto& slot = slots_[reference.slot];
  const auto storage = slot.kept != nullptr ? c10::Storage(slot.kept) : slot.inner;
  TORCH_INTERNAL_ASSERT(storage, "a recorded graph reads memory that it does not hold");
  auto tensor = at::detail::make_tensor<c10::TensorImpl>(c10::Storage(storage),
                                                         c10::DispatchKeySet(c10::DispatchKey::HPU), reference.dtype);
  tensor.unsafeGetTensorImpl()->set_sizes_and_strides(reference.sizes, reference.strides, reference.offset);
  tensor.unsafeGetTensorImpl()->_set_conj(reference.conj);
  tensor.unsafeGetTensorImpl()->_set_neg(reference.neg);
  return tensor;
}

void Graph::run(Entry& entry) {
  const auto fresh = [&](int slot) {
    slots_[slot].inner = c10::Storage(c10::Storage::use_byte_size_t(), static_cast<size_t>(slots_[slot].bytes),
                                      device_allocator()->allocate(static_cast<size_t>(slots_[slot].bytes)),
                                      device_allocator(), true);
  };
  if (!entry.op.has_value()) {
    if (slots_[entry.results[0]].kept == nullptr) {
      fresh(entry.results[0]);
    }
    return;
  }
  torch::jit::Stack stack = entry.arguments;
  std::map<std::pair<size_t, int>, at::Tensor> aliases;
  for (const auto& [place, tensor] : entry.tensors) {
    auto alias = alias_of(materialize(tensor));
    for (const auto& [other, known] : aliases) {
      if (entry.tensors.at(other).slot == tensor.slot) {
        alias.unsafeGetTensorImpl()->set_storage_keep_dtype(known.storage());
      }
    }
    aliases.emplace(place, alias);
  }
  for (size_t i = 0; i < stack.size(); ++i) {
    if (stack[i].isTensorList()) {
      auto list = stack[i].toTensorVector();
      for (size_t k = 0; k < list.size(); ++k) {
        const auto found = aliases.find({i, static_cast<int>(k)});
        list[k] = found == aliases.end() ? list[k] : found->second;
      }
      stack[i] = IValue(std::move(list));
    } else if (stack[i].isOptionalTensorList()) {
      c10::List<std::optional<at::Tensor>> list;
      const auto old = stack[i].toOptionalTensorVector();
      for (size_t k = 0; k < old.size(); ++k) {
        const auto found = aliases.find({i, static_cast<int>(k)});
        list.push_back(found == aliases.end() ? old[k] : std::optional<at::Tensor>(found->second));
      }
      stack[i] = IValue(std::move(list));
    } else if (const auto found = aliases.find({i, -1}); found != aliases.end()) {
      stack[i] = IValue(found->second);
    }
  }
  record().operation(*entry.info, 0, entry.flops, true);
  run_on_host(*entry.op, stack, 0, *entry.info);
  const auto store = [&](int slot, const at::Tensor& host) {
    auto& target = slots_[slot];
    if (target.kept == nullptr) {
      target.inner = c10::Storage(c10::make_intrusive<c10::StorageImpl>(
          c10::StorageImpl::use_byte_size_t(), host.storage().nbytes(),
          adopt_data(host.storage(), static_cast<int64_t>(host.storage().nbytes()), target.device), device_allocator(),
          true));
    } else if (!record().shapes) {
      std::memcpy(target.kept->mutable_data(), host.storage().data(),
                  std::min(target.kept->nbytes(), host.storage().nbytes()));
    }
  };
  for (const auto& place : entry.written) {  // a kernel that resized what it writes to took new memory
    const auto& alias = aliases.at(place);
    const int slot = entry.tensors.at(place).slot;
    const auto& held = slots_[slot].kept != nullptr ? c10::Storage(slots_[slot].kept) : slots_[slot].inner;
    if (!record().shapes && alias.storage().data() != held.data()) {
      store(slot, alias);
    }
  }
  size_t next = 0;
  const auto take = [&](const at::Tensor& tensor) {
    const int slot = entry.results[next++];
    if (slot >= 0) {
      store(slot, tensor);
    }
  };
  for (size_t i = 0; i < stack.size(); ++i) {
    if (entry.info->written[i] >= 0) {
      continue;
    }
    if (stack[i].isTensor() && !entry.results.empty()) {
      take(stack[i].toTensor());
    } else if (stack[i].isTensorList()) {
      for (const at::Tensor& tensor : stack[i].toTensorVector()) {
        take(tensor);
      }
    }
  }
}

void Graph::replay() {
  TORCH_CHECK(complete_, "replay of a graph that was not recorded: call capture_begin and capture_end first");
  TORCH_CHECK(!capturing(), "a graph cannot be replayed while one is being recorded");
  record().boundary("graph");
  for (size_t i = 0; i < entries_.size(); ++i) {
    run(entries_[i]);
    for (const int slot : dead_after_[i]) {
      slots_[slot].inner = c10::Storage();
    }
  }
  record().replayed();
}

}  // namespace simulator
