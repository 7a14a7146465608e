// What operators do on the device: those that touch storage here, every other one on the host over the same memory.
#include <ATen/ATen.h>
#include <ATen/EmptyTensor.h>
#include <ATen/InferSize.h>
#include <ATen/SDPBackend.h>
#include <ATen/TensorUtils.h>
#include <ATen/native/Resize.h>
#include <torch/library.h>

#include <algorithm>
#include <limits>

#include "simulator.h"

namespace simulator {
namespace {

using c10::IValue;
using torch::jit::Stack;

uint64_t hash_of(uint64_t seed, const at::Tensor& tensor) {
  seed = mixed(seed, static_cast<uint64_t>(tensor.scalar_type()) * 1000 + static_cast<uint64_t>(tensor.dim()));
  for (const auto size : tensor.sizes()) {
    seed = mixed(seed, static_cast<uint64_t>(size));
  }
  // A transposed tensor, or a slice that begins elsewhere, is another graph: how it is read is compiled in.
  for (const auto stride : tensor.strides()) {
    seed = mixed(seed, static_cast<uint64_t>(stride));
  }
  return mixed(seed, static_cast<uint64_t>(tensor.storage_offset()));
}

const std::unordered_set<std::string> kReadsData{
    "aten::nonzero", "aten::masked_select", "aten::_unique", "aten::_unique2", "aten::unique_dim",
    "aten::unique_consecutive", "aten::unique_dim_consecutive", "aten::repeat_interleave", "aten::bincount",
    "aten::masked_select_backward", "aten::histc", "aten::_ctc_loss", "aten::equal"};
// Index tensors may stay on the host; the rest takes host scalars only.
const std::unordered_set<std::string> kMixesDevices{
    "aten::index", "aten::index_put_", "aten::_index_put_impl_", "aten::_unsafe_index", "aten::_unsafe_index_put"};

std::optional<c10::OperatorHandle> find(const char* name, const char* overload) {
  return c10::Dispatcher::singleton().findSchema({name, overload});
}

OperatorInfo make_info(const c10::OperatorHandle& op) {
  using Flops = OperatorInfo::Flops;
  static const std::unordered_map<std::string, Flops> kinds{
      {"aten::mm", Flops::Mm}, {"aten::addmm", Flops::Addmm}, {"aten::bmm", Flops::Bmm},
      {"aten::baddbmm", Flops::Baddbmm}, {"aten::convolution_overrideable", Flops::Convolution},
      {"aten::convolution_backward_overrideable", Flops::ConvolutionBackward}};
  const auto& schema = op.schema();
  OperatorInfo info;
  info.name = schema.name();
  const auto kind = kinds.find(info.name);
  info.flops_kind = kind == kinds.end() ? Flops::None : kind->second;
  info.starts_model = info.flops_kind != Flops::None || info.name == "aten::index_select";  // a table look-up
  info.reads_data = kReadsData.count(info.name) > 0;
  info.mixes_devices = kMixesDevices.count(info.name) > 0;
  if (info.name == "aten::convolution_overrideable") {
    info.replacement = find("aten::convolution", "");
  }
  for (const auto& argument : schema.arguments()) {
    info.writes.push_back(argument.alias_info() != nullptr && argument.alias_info()->isWrite());
    // Sizes, dimensions, flags and words are compiled into a graph; a Scalar or a float is fed to it.
    auto type = argument.real_type();
    if (const auto optional = type->cast<c10::OptionalType>()) {
      type = optional->getElementType();
    }
    info.hashed.push_back(type->kind() != c10::TypeKind::NumberType && type->kind() != c10::TypeKind::FloatType);
  }
  for (const auto& result : schema.returns()) {
    int found = -1;
    if (result.alias_info() != nullptr && result.alias_info()->isWrite()) {
      for (size_t i = 0; i < schema.arguments().size(); ++i) {
        const auto* alias = schema.arguments()[i].alias_info();
        if (alias != nullptr && alias->isWrite() && alias->beforeSets() == result.alias_info()->beforeSets()) {
          found = static_cast<int>(i);
        }
      }
    }
    info.written.push_back(found);
  }
  return info;
}

int64_t product(c10::IntArrayRef sizes, size_t first) {
  int64_t result = 1;
  for (size_t i = first; i < sizes.size(); ++i) {
    result *= sizes[i];
  }
  return result;
}

}  // namespace

// Twice the multiplications, as matrix products are counted everywhere.
int64_t flops_of(OperatorInfo::Flops kind, const IValue* arguments) {
  using Flops = OperatorInfo::Flops;
  const auto tensor = [&](int i) -> const at::Tensor& { return arguments[i].toTensor(); };
  switch (kind) {
    case Flops::Mm:
      return 2 * tensor(0).numel() * tensor(1).size(1);
    case Flops::Addmm:
      return 2 * tensor(1).numel() * tensor(2).size(1);
    case Flops::Bmm:
      return 2 * tensor(0).numel() * tensor(1).size(2);
    case Flops::Baddbmm:
      return 2 * tensor(1).numel() * tensor(2).size(2);
    case Flops::Convolution: {
      // (input, weight, ...): each output position of each output channel is one dot product over the weight's rest.
      const auto& weight = tensor(1);
      const bool transposed = arguments[6].toBool();
      if (transposed) {
        return 2 * tensor(0).numel() * product(weight.sizes(), 1);
      }
      const auto stride = arguments[3].toIntVector(), padding = arguments[4].toIntVector();
      const auto dilation = arguments[5].toIntVector();
      int64_t positions = tensor(0).size(0);
      for (size_t i = 2; i < static_cast<size_t>(tensor(0).dim()); ++i) {
        const auto at = [&](const std::vector<int64_t>& values) { return values[values.size() == 1 ? 0 : i - 2]; };
        const int64_t reach = at(dilation) * (weight.size(static_cast<int64_t>(i)) - 1) + 1;
        positions *= (tensor(0).size(static_cast<int64_t>(i)) + 2 * at(padding) - reach) / at(stride) + 1;
      }
      return 2 * positions * weight.numel();
    }
    case Flops::ConvolutionBackward: {
      // (gradient, input, weight, ...): one product for each gradient that is asked for (input, weight).
      const bool transposed = arguments[6].toBool();
      const auto& positions = transposed ? tensor(1) : tensor(0);
      const auto mask = arguments[9].toBoolList();
      const int64_t one = 2 * positions.numel() / positions.size(1) * tensor(2).numel();
      return one * (static_cast<int64_t>(mask.get(0)) + static_cast<int64_t>(mask.get(1)));
    }
    case Flops::None:
      break;
  }
  return 0;
}

namespace {

std::mutex& known_mutex() {
  static std::mutex mutex;
  return mutex;
}

std::unordered_map<const c10::FunctionSchema*, std::unique_ptr<OperatorInfo>>& known_infos() {
  static auto* known = new std::unordered_map<const c10::FunctionSchema*, std::unique_ptr<OperatorInfo>>;
  return *known;
}

OperatorInfo& info_of(const c10::OperatorHandle& op) {
  std::lock_guard<std::mutex> guard(known_mutex());
  auto& info = known_infos()[&op.schema()];
  if (info == nullptr) {
    info = std::make_unique<OperatorInfo>(make_info(op));
  }
  return *info;
}

// A host tensor beside device tensors, for a kernel that wants all of them without memory.
at::Tensor meta_like(const at::Tensor& tensor) {
  return at::empty_strided(tensor.sizes(), tensor.strides(), tensor.options().device(at::kMeta));
}

// One call's tensors: their stand-ins, and which device storage each stand-in's storage is.
class Call {
 public:
  Call(const OperatorInfo& info) : info_(info) {}

  at::Tensor enter(const at::Tensor& tensor, bool written) {
    if (!tensor.defined()) {
      return tensor;
    }
    if (!on_device(tensor)) {
      if (tensor.dim() > 0 && tensor.device().type() == c10::kCPU) {
        host_tensor_ = true;
      }
      const bool number = tensor.unsafeGetTensorImpl()->is_wrapped_number();  // a Python number, and stays one
      return record().shapes && !number && tensor.device().type() == c10::kCPU ? meta_like(tensor) : tensor;
    }
    device_ = tensor.device().index();
    device_tensor_ = true;
    for (const auto& [before, alias] : entered_) {  // kernels tell an in-place call by the tensor's identity
      if (before == tensor.unsafeGetTensorImpl()) {
        if (written) {
          written_.emplace_back(alias, tensor);
        }
        return alias;
      }
    }
    auto alias = alias_of(tensor);
    entered_.emplace_back(tensor.unsafeGetTensorImpl(), alias);
    // The same storage twice in a call must be the same storage on the host: kernels look for overlaps.
    for (const auto& [stand_in, storage] : known_) {
      if (storage.unsafeGetStorageImpl() == tensor.storage().unsafeGetStorageImpl()) {
        alias.unsafeGetTensorImpl()->set_storage_keep_dtype(stand_in);
        break;
      }
    }
    known_.emplace_back(alias.storage(), tensor.storage());
    if (written) {
      written_.emplace_back(alias, tensor);
    }
    return alias;
  }

  void check_devices() const {
    if (device_tensor_ && host_tensor_ && !info_.mixes_devices) {
      TORCH_CHECK(false, "Expected all tensors to be on the same device, but found at least two devices, hpu:", device_,
                  " and cpu! (in ", info_.name, ")");
    }
  }

  at::Tensor leave(const at::Tensor& tensor) {
    if (!tensor.defined()) {
      return tensor;
    }
    for (const auto& [stand_in, storage] : known_) {
      if (stand_in.unsafeGetStorageImpl() == tensor.storage().unsafeGetStorageImpl()) {
        return device_tensor_like(storage, tensor);
      }
    }
    const auto& host = tensor.storage();
    const auto bytes = static_cast<int64_t>(host.nbytes());
    auto storage = c10::Storage(c10::make_intrusive<c10::StorageImpl>(
        c10::StorageImpl::use_byte_size_t(), host.nbytes(), adopt_data(host, bytes, device_), device_allocator(), true));
    known_.emplace_back(host, storage);
    return device_tensor_like(storage, tensor);
  }

  // A host kernel may have resized what it writes to; then the memory it took becomes the device's.
  void finish_written() {
    for (auto& [alias, tensor] : written_) {
      auto* storage = tensor.storage().unsafeGetStorageImpl();
      const auto& host = alias.storage();
      const bool moved = record().shapes ? host.nbytes() > storage->nbytes() : host.data() != storage->data();
      if (moved) {
        const auto bytes = static_cast<int64_t>(host.nbytes());
        storage->set_data_ptr_noswap(adopt_data(host, bytes, device_));
        storage->set_nbytes(host.nbytes());
      }
      if (alias.sizes() != tensor.sizes() || alias.strides() != tensor.strides()) {
        tensor.unsafeGetTensorImpl()->set_sizes_and_strides(alias.sizes(), alias.strides(), alias.storage_offset());
      }
    }
  }

  void use_device(int device) {
    device_ = device;
  }

 private:
  const OperatorInfo& info_;
  int device_ = current_device();
  bool device_tensor_ = false, host_tensor_ = false;
  std::vector<std::pair<c10::Storage, c10::Storage>> known_;  // stand-in, device
  std::vector<std::pair<at::Tensor, at::Tensor>> written_;
  std::vector<std::pair<const c10::TensorImpl*, at::Tensor>> entered_;
};

uint64_t replace_arguments(Call& call, const OperatorInfo& info, Stack& stack, size_t first, uint64_t hash) {
  for (size_t i = 0; i < info.writes.size(); ++i) {
    IValue& value = stack[first + i];
    if (value.isTensor()) {
      const auto& tensor = value.toTensor();
      hash = tensor.defined() ? hash_of(hash, tensor) : mixed(hash, 1);
      value = IValue(call.enter(tensor, info.writes[i]));
    } else if (value.isTensorList()) {
      auto list = value.toTensorVector();
      for (auto& tensor : list) {
        hash = hash_of(hash, tensor);
        tensor = call.enter(tensor, info.writes[i]);
      }
      value = IValue(std::move(list));
    } else if (value.isOptionalTensorList()) {
      c10::List<std::optional<at::Tensor>> list;
      for (const std::optional<at::Tensor>& tensor : value.toOptionalTensorVector()) {
        const bool there = tensor.has_value() && tensor->defined();
        hash = there ? hash_of(hash, *tensor) : mixed(hash, 1);
        list.push_back(there ? std::optional<at::Tensor>(call.enter(*tensor, info.writes[i])) : std::nullopt);
      }
      value = IValue(std::move(list));
    } else if (value.isGenerator()) {
      TORCH_CHECK(value.toGenerator().device().type() == c10::kHPU, "Expected a 'hpu' device type for generator but found '",
                  value.toGenerator().device().type(), "'");
      value = IValue(host_generator(value.toGenerator()));
    } else if (value.isDevice()) {
      if (value.toDevice().type() == c10::kHPU) {
        call.use_device(value.toDevice().has_index() ? value.toDevice().index() : current_device());
        value = IValue(c10::Device(record().shapes ? c10::kMeta : c10::kCPU));
      }
    } else if (info.hashed[i]) {
      if (value.isNone()) {  // a missing tensor, too, as Python passes it
        hash = mixed(hash, 1);
      } else if (value.isString()) {
        hash = mixed(hash, std::hash<std::string>{}(value.toStringRef()));
      } else if (value.isInt() || value.isBool()) {
        hash = mixed(hash, value.isInt() ? static_cast<uint64_t>(value.toInt()) : value.toBool());
      } else if (value.isIntList()) {
        for (const auto number : value.toIntVector()) {
          hash = mixed(hash, static_cast<uint64_t>(number));
        }
      }
    }
  }
  return hash;
}

void note_large_numbers(const OperatorInfo& info, const Stack& stack, size_t first) {
  for (size_t i = 0; i < info.writes.size(); ++i) {
    const IValue& value = stack[first + i];
    // A number of the program's: as it is, or wrapped in a tensor of the host's.
    const bool wrapped = value.isTensor() && value.toTensor().defined() && value.toTensor().dim() == 0 &&
                         value.toTensor().is_cpu() && value.toTensor().scalar_type() == at::kLong;
    if (wrapped || (!info.hashed[i] && value.isInt())) {
      const auto number = wrapped ? *value.toTensor().const_data_ptr<int64_t>() : value.toInt();
      if (number > std::numeric_limits<int32_t>::max() || number < std::numeric_limits<int32_t>::min()) {
        record().note_out_of_int32(info.name.c_str(), number);
      }
    }
  }
}

// A random operator without a generator draws from the device's, not from the host's.
void give_generator(const c10::OperatorHandle& op, Stack& stack, size_t first) {
  const auto& arguments = op.schema().arguments();
  for (size_t i = 0; i < arguments.size(); ++i) {
    if (arguments[i].name() != "generator") {
      continue;
    }
    if (record().shapes) {
      stack[first + i] = IValue();  // nothing is drawn, and torch's shape functions in Python refuse a generator
    } else if (stack[first + i].isNone()) {
      stack[first + i] = IValue(host_generator(at::Generator()));
    }
  }
}

void convolution_backward(Stack& stack, size_t first) {
  // The same arguments, but for the bias's sizes, which the generic operator wants fourth.
  const bool transposed = stack[first + 6].toBool();
  const int64_t channels = transposed ? stack[first + 2].toTensor().size(1) * stack[first + 8].toInt()
                                      : stack[first + 2].toTensor().size(0);
  stack.insert(stack.begin() + static_cast<std::ptrdiff_t>(first) + 3, IValue(std::vector<int64_t>{channels}));
}

}  // namespace

void run_on_host(const c10::OperatorHandle& op, Stack& stack, size_t first, const OperatorInfo& info) {
  // Above the backend nothing is left to do: neither gradients nor casts.
  at::AutoDispatchBelowADInplaceOrView below;
  c10::impl::ExcludeDispatchKeyGuard no_autocast(c10::autocast_dispatch_keyset);
  if (info.flops_kind == OperatorInfo::Flops::ConvolutionBackward) {
    convolution_backward(stack, first);
    find("aten::convolution_backward", "")->callBoxed(&stack);
  } else {
    (info.replacement ? *info.replacement : op).callBoxed(&stack);
  }
}

namespace {

// --- Values in shapes mode ---------------------------------------------------------------------------------------
// No element is computed, but where all elements of a tensor are known to be one number it is remembered, through the
// few operators that a loop's end is made of: so generation goes on to its last step, as its memory does at worst.

std::optional<double> value_of(const IValue& argument) {
  if (argument.isTensor()) {
    const auto& tensor = argument.toTensor();
    return on_device(tensor) ? known_value(tensor.storage()) : std::nullopt;
  }
  if (argument.isScalar()) {
    return argument.toScalar().isComplex() ? std::nullopt : std::make_optional(argument.toScalar().toDouble());
  }
  return std::nullopt;
}

std::optional<double> result_value(const OperatorInfo& info, const std::vector<IValue>& arguments) {
  static const std::unordered_set<std::string> keeping{"max", "min", "amax", "amin", "all", "any", "clone", "cumprod",
                                                       "squeeze", "unsqueeze", "repeat"};
  std::string name = info.name.substr(info.name.find("::") + 2);
  if (!name.empty() && name.back() == '_') {
    name.pop_back();
  }
  if (name == "zero" || name == "isnan") {
    return 0;
  }
  const auto first = arguments.empty() ? std::nullopt : value_of(arguments[0]);
  if (keeping.count(name) > 0) {
    return first;
  }
  if (name == "bitwise_not" || name == "logical_not") {
    return first ? std::make_optional(*first == 0 ? 1.0 : 0.0) : std::nullopt;
  }
  if (arguments.size() < 2) {
    return std::nullopt;
  }
  if (arguments[0].isTensor() && arguments[1].isTensor() && arguments[0].toTensor().is_same(arguments[1].toTensor())) {
    if (name == "ne" || name == "eq") {  // with itself: no value is infinite or not a number
      return name == "eq";
    }
  }
  const auto second = value_of(arguments[1]);
  if (name == "fill" || name == "copy") {
    return second;
  }
  if (first && second && (name == "add" || name == "mul")) {  // a count of what went wrong, over tensors or ranks
    const bool plain = name == "mul" || arguments.size() < 3 || arguments[2].toScalar().equal(1);
    return !plain ? std::nullopt : std::make_optional(name == "mul" ? *first * *second : *first + *second);
  }
  if (name == "bitwise_and" || name == "logical_and" || name == "bitwise_or" || name == "logical_or") {
    const double decisive = name.find("or") == std::string::npos ? 0 : 1;
    if ((first && *first == decisive) || (second && *second == decisive)) {
      return decisive;
    }
    return first && second ? std::make_optional(1 - decisive) : std::nullopt;
  }
  if (!second || (!first && !arguments[1].isScalar())) {
    return std::nullopt;
  }
  const double left = first.value_or(1), right = *second;  // against a number: an unknown value is read as 1
  if (name == "eq") {
    return left == right;
  }
  if (name == "ne") {
    return left != right;
  }
  if (name == "lt") {
    return left < right;
  }
  if (name == "le") {
    return left <= right;
  }
  if (name == "gt") {
    return left > right;
  }
  if (name == "ge") {
    return left >= right;
  }
  return std::nullopt;
}

void fallback(const c10::OperatorHandle& op, c10::DispatchKeySet /*keys*/, Stack* stack) {
  auto& info = info_of(op);
  RunningOperator running(info.name.c_str());
  const size_t count = info.writes.size(), first = stack->size() - count;
  const std::vector<IValue> arguments(stack->end() - static_cast<std::ptrdiff_t>(count), stack->end());
  const int64_t flops = flops_of(info.flops_kind, arguments.data());
  Call call(info);
  note_large_numbers(info, *stack, first);
  const auto seed = static_cast<uint64_t>(reinterpret_cast<uintptr_t>(&info));
  const uint64_t hash = replace_arguments(call, info, *stack, first, seed);
  call.check_devices();
  give_generator(op, *stack, first);
  bool reads_data = info.reads_data;
  if (info.mixes_devices) {
    size_t indices = 0;
    for (const auto& index : arguments[1].toOptionalTensorVector()) {
      indices += index.has_value() && index->defined() ? 1 : 0;
      reads_data |= index.has_value() && index->defined() &&
                    (index->scalar_type() == at::kBool || index->scalar_type() == at::kByte);
    }
    // One number where a mask is set: torch makes that a masked fill.
    reads_data &= !(info.writes[0] && indices == 1 && arguments[2].toTensor().numel() == 1 && !arguments[3].toBool());
  }
  if (info.name == "aten::repeat_interleave") {
    reads_data = arguments.back().isNone();  // with the result's length given nothing is read
  }
  if (reads_data) {
    TORCH_CHECK(!Graph::capturing(), "a recorded HPU graph cannot hold ", info.name,
                ": the shape of its result depends on data (", user_line(), ")");
    TORCH_CHECK(!record().shapes, "the shape of the result of ", info.name, " depends on data, at ", user_line(),
                "; --mode shapes has no data: replace it (where, a mask, a fixed size), or use --mode compute");
  }
  record().operation(info, hash, flops);
  if (reads_data) {
    record().sync("shape depends on data", 0);
  }
  run_on_host(op, *stack, first, info);
  const size_t results = info.written.size();
  const size_t begin = stack->size() - results;
  call.finish_written();
  const auto value = record().shapes ? result_value(info, arguments) : std::nullopt;
  const auto remember = [&](const at::Tensor& tensor) {
    if (record().shapes && on_device(tensor)) {
      set_known_value(tensor, value);
    }
  };
  for (size_t i = 0; i < count; ++i) {
    if (info.writes[i] && arguments[i].isTensor()) {
      remember(arguments[i].toTensor());
    } else if (info.writes[i] && arguments[i].isTensorList()) {
      for (const at::Tensor& tensor : arguments[i].toTensorVector()) {
        set_known_value(tensor, std::nullopt);
      }
    }
  }
  std::vector<at::Tensor> fresh;
  for (size_t i = 0; i < results; ++i) {
    IValue& result = (*stack)[begin + i];
    if (info.written[i] >= 0) {
      result = arguments[static_cast<size_t>(info.written[i])];
    } else if (result.isTensor()) {
      result = IValue(call.leave(result.toTensor()));
      fresh.push_back(result.toTensor());
      remember(result.toTensor());
    } else if (result.isTensorList()) {
      auto list = result.toTensorVector();
      for (auto& tensor : list) {
        tensor = call.leave(tensor);
        fresh.push_back(tensor);
      }
      result = IValue(std::move(list));
    }
  }
  if (Graph::capturing()) {
    Graph::add(op, arguments, info, fresh);
  }
}

// --- Operators that touch storage --------------------------------------------------------------------------------

at::Tensor empty(c10::IntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout> layout,
                 std::optional<at::Device> device, std::optional<bool> /*pin_memory*/,
                 std::optional<at::MemoryFormat> format) {
  TORCH_CHECK(c10::layout_or_default(layout) == at::kStrided, "the simulated HPU has strided tensors only");
  const c10::OptionalDeviceGuard guard(device);
  const RunningOperator running("aten::empty");
  auto tensor = at::detail::empty_generic(size, device_allocator(), c10::DispatchKeySet(c10::DispatchKey::HPU),
                                          c10::dtype_or_default(dtype), format);
  Graph::add_storage(tensor.storage());
  return tensor;
}

at::Tensor empty_strided(c10::IntArrayRef size, c10::IntArrayRef stride, std::optional<at::ScalarType> dtype,
                         std::optional<at::Layout> layout, std::optional<at::Device> device,
                         std::optional<bool> /*pin_memory*/) {
  TORCH_CHECK(c10::layout_or_default(layout) == at::kStrided, "the simulated HPU has strided tensors only");
  const c10::OptionalDeviceGuard guard(device);
  const RunningOperator running("aten::empty_strided");
  auto tensor = at::detail::empty_strided_generic(size, stride, device_allocator(),
                                                  c10::DispatchKeySet(c10::DispatchKey::HPU),
                                                  c10::dtype_or_default(dtype));
  Graph::add_storage(tensor.storage());
  return tensor;
}

// Torch's own has no memory, which its kernels for this device's results would read.
at::Tensor efficientzerotensor(c10::IntArrayRef size, std::optional<at::ScalarType> dtype,
                               std::optional<at::Layout> layout, std::optional<at::Device> device,
                               std::optional<bool> pin_memory) {
  return empty(size, dtype, layout, device, pin_memory, {}).zero_();
}

at::Tensor strided_view(const at::Tensor& self, c10::IntArrayRef size, c10::IntArrayRef stride,
                        std::optional<int64_t> offset) {
  auto view = at::detail::make_tensor<c10::TensorImpl>(c10::TensorImpl::VIEW, c10::Storage(self.storage()),
                                                       self.key_set(), self.dtype());
  at::native::setStrided(view, size, stride, offset.value_or(self.storage_offset()));
  return view;
}

at::Tensor view(const at::Tensor& self, c10::IntArrayRef size) {
  const auto exact = at::infer_size_dv(size, self.numel());
  const auto stride = at::detail::computeStride(self.sizes(), self.strides(), exact);
  TORCH_CHECK(stride.has_value(), "view size is not compatible with input tensor's size and stride (at least one "
              "dimension spans across two contiguous subspaces). Use .reshape(...) instead.");
  return strided_view(self, exact, *stride, self.storage_offset());
}

at::Tensor reshape_alias(const at::Tensor& self, c10::IntArrayRef size, c10::IntArrayRef stride) {
  return strided_view(self, size, stride, self.storage_offset());
}

void grow_storage(const at::Tensor& tensor, size_t bytes) {
  auto* storage = tensor.storage().unsafeGetStorageImpl();
  if (bytes <= storage->nbytes()) {
    return;
  }
  const c10::DeviceGuard guard(tensor.device());
  auto larger = device_allocator()->allocate(bytes);
  if (storage->nbytes() > 0 && !record().shapes) {
    std::memcpy(larger.mutable_get(), storage->data(), storage->nbytes());
  }
  storage->set_data_ptr_noswap(std::move(larger));
  storage->set_nbytes(bytes);
}

const at::Tensor& resize_(const at::Tensor& self, c10::IntArrayRef size, std::optional<at::MemoryFormat> format) {
  auto* impl = self.unsafeGetTensorImpl();
  impl->set_sizes_contiguous(size);
  if (format.has_value()) {
    impl->empty_tensor_restride(*format);
  }
  const auto elements = at::detail::computeStorageNbytes(self.sizes(), self.strides(), self.dtype().itemsize(),
                                                         static_cast<size_t>(self.storage_offset()));
  grow_storage(self, elements);
  return self;
}

at::Tensor& set_storage(at::Tensor& self, at::Storage source, int64_t offset, c10::IntArrayRef size,
                        c10::IntArrayRef stride) {
  at::native::checkSetStorage(self, source, offset, size, stride);
  self.unsafeGetTensorImpl()->set_storage_offset(offset);
  const std::optional<c10::IntArrayRef> strides = stride.data() ? std::make_optional(stride) : std::nullopt;
  if (strides) {
    self.unsafeGetTensorImpl()->set_sizes_and_strides(size, *strides);
  } else {
    self.unsafeGetTensorImpl()->set_sizes_contiguous(size);
  }
  return self;
}

at::Tensor& set_whole_storage(at::Tensor& self, at::Storage source) {
  const auto elements = static_cast<int64_t>(source.nbytes() / self.dtype().itemsize());
  return set_storage(self, std::move(source), 0, {elements}, {1});
}

at::Tensor& set_tensor(at::Tensor& self, const at::Tensor& source) {
  self.unsafeGetTensorImpl()->set_storage_keep_dtype(source.storage());
  self.unsafeGetTensorImpl()->set_sizes_and_strides(source.sizes(), source.strides(), source.storage_offset());
  return self;
}

at::Tensor& set_empty(at::Tensor& self) {
  const c10::DeviceGuard guard(self.device());
  c10::Storage storage(c10::Storage::use_byte_size_t(), 0, device_allocator(), true);
  return set_storage(self, storage, 0, {0}, {});
}

void note_large_values(const at::Tensor& host) {
  if (host.scalar_type() != at::kLong || host.numel() == 0) {
    return;
  }
  const auto [least, most] = at::aminmax(host);
  for (const auto value : {least.item<int64_t>(), most.item<int64_t>()}) {
    if (value > std::numeric_limits<int32_t>::max() || value < std::numeric_limits<int32_t>::min()) {
      record().note_out_of_int32("copy to device", value);
      return;
    }
  }
}

// What is remembered of a host tensor that becomes the device's: integers, if they are few.
at::Tensor known_on_host(const at::Tensor& host) {
  const bool kept = at::isIntegralType(host.scalar_type(), true) && static_cast<int64_t>(host.nbytes()) <= kMostValues;
  return kept ? host : at::Tensor();
}

at::Tensor copy_from(const at::Tensor& self, const at::Tensor& destination, bool /*non_blocking*/) {
  static auto& to_itself = info_of(*find("aten::copy_", ""));
  RunningOperator running("aten::copy_");
  const bool from_device = on_device(self), to_device = on_device(destination);
  at::AutoDispatchBelowADInplaceOrView below;
  if (!to_device) {
    TORCH_CHECK(!Graph::capturing(), "a recorded HPU graph cannot hold a copy to the host (", user_line(), ")");
    record().copied(false, destination);
    record().sync("copy to host", static_cast<int64_t>(self.nbytes()));
    if (record().shapes) {
      const auto values = known_values(self);
      if (values.defined()) {
        const_cast<at::Tensor&>(destination).copy_(values);
      } else if (destination.numel() < record().large) {  // weights on their way to a file: their memory need not exist
        const_cast<at::Tensor&>(destination).fill_(known_value(self.storage()).value_or(1));
      }
    } else {
      const_cast<at::Tensor&>(destination).copy_(alias_of(self));
    }
    return destination;
  }
  if (from_device) {
    record().operation(to_itself, hash_of(hash_of(7, self), destination), 0);
  } else {
    record().copied(true, self);
    if (!record().shapes) {
      note_large_values(self);
    }
  }
  if (record().shapes) {
    const bool number = self.numel() == 1 && self.is_floating_point() && self.is_cpu();  // a flag, a sum of the host's
    const auto value = from_device ? known_value(self.storage())
                       : number    ? std::make_optional(self.item<double>())
                                   : std::nullopt;
    const auto values = value ? at::Tensor() : from_device ? known_values(self) : known_on_host(self);
    if (values.defined()) {
      set_known_values(destination, values);
    } else {
      set_known_value(destination, value);
    }
  } else {
    alias_of(destination).copy_(from_device ? alias_of(self) : self);
  }
  if (Graph::capturing()) {
    // What comes from the host is part of the graph from now on.
    Graph::add(*find("aten::copy_", ""), {destination, from_device ? self : self.clone(), false}, to_itself, {});
  }
  return destination;
}

at::Tensor copy_from_and_resize(const at::Tensor& self, const at::Tensor& destination) {
  if (destination.sizes() != self.sizes()) {
    destination.resize_(self.sizes());
  }
  return copy_from(self, destination, false);
}

// Attention is its matrix products: the host's fused kernels, which keep no attention weights, would count too little.
int64_t fused_sdp_choice(const at::Tensor& /*query*/, const at::Tensor& /*key*/, const at::Tensor& /*value*/,
                         const std::optional<at::Tensor>& /*mask*/, double /*dropout*/, bool /*causal*/,
                         std::optional<double> /*scale*/, bool /*grouped*/) {
  return static_cast<int64_t>(at::SDPBackend::math);
}

// Everything runs in order: memory that is freed is not in use.
void record_stream(at::Tensor& /*self*/, c10::Stream /*stream*/) {}

at::Scalar local_scalar_dense(const at::Tensor& self) {
  TORCH_CHECK(!Graph::capturing(), "a recorded HPU graph cannot hold .item() (", user_line(), ")");
  record().sync("item", static_cast<int64_t>(self.dtype().itemsize()));
  if (record().shapes) {
    const auto values = known_values(self);
    if (values.defined()) {
      return values.item();
    }
    const double value = known_value(self.storage()).value_or(1);
    const auto type = self.scalar_type();
    return at::isIntegralType(type, false) ? at::Scalar(static_cast<int64_t>(value))
           : type == at::kBool             ? at::Scalar(value != 0)
           : at::isComplexType(type)       ? at::Scalar(c10::complex<double>(value))
                                           : at::Scalar(value);
  }
  return at::_local_scalar_dense(alias_of(self));
}

}  // namespace

static void take_geometry(const at::Tensor& tensor, const at::Tensor& from) {
  auto* impl = tensor.unsafeGetTensorImpl();
  impl->set_sizes_and_strides(from.sizes(), from.strides(), from.storage_offset());
  impl->_set_conj(from.is_conj());
  impl->_set_neg(from.is_neg());
}

at::Tensor alias_of(const at::Tensor& tensor) {
  const bool shapes = record().shapes;
  const auto* storage = tensor.storage().unsafeGetStorageImpl();
  const c10::Device device(shapes ? c10::kMeta : c10::kCPU);
  auto stand_in = c10::make_intrusive<c10::StorageImpl>(
      c10::StorageImpl::use_byte_size_t(), storage->nbytes(),
      c10::DataPtr(shapes ? nullptr : const_cast<void*>(storage->data()), device), c10::GetAllocator(device.type()), true);
  auto alias = at::detail::make_tensor<c10::TensorImpl>(
      c10::Storage(std::move(stand_in)), c10::DispatchKeySet(shapes ? c10::DispatchKey::Meta : c10::DispatchKey::CPU),
      tensor.dtype());
  take_geometry(alias, tensor);
  if (tensor.unsafeGetTensorImpl()->is_wrapped_number()) {
    alias.unsafeGetTensorImpl()->set_wrapped_number(true);
  }
  return alias;
}

at::Tensor device_tensor_like(c10::Storage storage, const at::Tensor& geometry) {
  auto tensor = at::detail::make_tensor<c10::TensorImpl>(std::move(storage),
                                                         c10::DispatchKeySet(c10::DispatchKey::HPU), geometry.dtype());
  take_geometry(tensor, geometry);
  return tensor;
}

std::vector<const OperatorInfo*> known_operators() {
  std::lock_guard<std::mutex> guard(known_mutex());
  std::vector<const OperatorInfo*> result;
  for (const auto& [schema, info] : known_infos()) {
    result.push_back(info.get());
  }
  return result;
}

// A copy sees to these bits itself; torch would first make a copy without them, by a copy.
TORCH_LIBRARY_IMPL(aten, Conjugate, m) {
  m.impl("_copy_from", torch::CppFunction::makeFallthrough());
}
TORCH_LIBRARY_IMPL(aten, Negative, m) {
  m.impl("_copy_from", torch::CppFunction::makeFallthrough());
}

TORCH_LIBRARY_IMPL(_, HPU, m) {
  m.fallback(torch::CppFunction::makeFromBoxedFunction<&fallback>());
}

TORCH_LIBRARY_IMPL(aten, HPU, m) {
  // Torch's own kernels of these two say that the device has to bring one.
  m.impl("convolution_overrideable", torch::CppFunction::makeFromBoxedFunction<&fallback>());
  m.impl("convolution_backward_overrideable", torch::CppFunction::makeFromBoxedFunction<&fallback>());
  // torch's own decompositions give the wider type where the input is bf16 and the weight fp32, as in autocast.
  m.impl("native_layer_norm", torch::CppFunction::makeFromBoxedFunction<&fallback>());
  m.impl("native_group_norm", torch::CppFunction::makeFromBoxedFunction<&fallback>());
  m.impl("empty.memory_format", empty);
  m.impl("empty_strided", empty_strided);
  m.impl("as_strided", strided_view);
  m.impl("view", view);
  m.impl("_reshape_alias", reshape_alias);
  m.impl("resize_", resize_);
  m.impl("set_.source_Storage_storage_offset", set_storage);
  m.impl("set_.source_Storage", set_whole_storage);
  m.impl("set_.source_Tensor", set_tensor);
  m.impl("set_", set_empty);
  m.impl("_copy_from", copy_from);
  m.impl("_copy_from_and_resize", copy_from_and_resize);
  m.impl("_fused_sdp_choice", fused_sdp_choice);
  m.impl("_local_scalar_dense", local_scalar_dense);
  m.impl("record_stream", record_stream);
  m.impl("_efficientzerotensor", efficientzerotensor);
  // Torch would split these into an allocation, without the operator's name, and a call with that as its output.
  auto& dispatcher = c10::Dispatcher::singleton();
  for (const auto& name : dispatcher.getAllOpNames()) {
    const auto op = name.name.rfind("aten::", 0) == 0 ? dispatcher.findSchema(name) : std::nullopt;
    if (op && op->hasKernelForDispatchKey(c10::DispatchKey::CompositeExplicitAutogradNonFunctional) &&
        !op->hasKernelForDispatchKey(c10::DispatchKey::HPU)) {
      m.impl(toString(name).substr(6).c_str(), torch::CppFunction::makeFromBoxedFunction<&fallback>());
    }
  }
}

}  // namespace simulator
