// The device: memory, streams, random generators, and the hooks by which torch finds an accelerator.
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/Functions.h>
#include <ATen/detail/HPUHooksInterface.h>
#include <c10/core/impl/alloc_cpu.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <c10/util/Exception.h>
#include <sys/mman.h>

#include <chrono>

#include "simulator.h"

namespace simulator {
namespace {

int g_device_count = 1;
thread_local int t_current_device = 0;

struct Block {
  int device;
  int64_t bytes;
  void* memory;       // ours to free, or null
  c10::Storage host;  // a result of a host kernel, taken over
  std::optional<double> value;
  at::Tensor values;  // shapes mode: the bytes of a small tensor of integers, on the host
};

void free_block(void* context) {
  auto* block = static_cast<Block*>(context);
  record().freed(block->device, block->bytes);
  if (block->memory != nullptr) {
    c10::free_cpu(block->memory);
  }
  delete block;
}

// Addresses that no two live tensors share and that nothing can read: shapes mode has no memory behind a tensor.
void* next_address(int64_t bytes) {
  static std::mutex mutex;
  static uintptr_t start = 0, next = 0;
  constexpr uintptr_t kReserved = uintptr_t{1} << 45;
  std::lock_guard<std::mutex> guard(mutex);
  if (start == 0) {
    void* region = mmap(nullptr, kReserved, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    TORCH_CHECK(region != MAP_FAILED, "the HPU simulator cannot reserve addresses for its shapes mode");
    start = next = reinterpret_cast<uintptr_t>(region);
  }
  const uintptr_t size = (static_cast<uintptr_t>(bytes) + 63) / 64 * 64;
  if (next + size > start + kReserved) {
    next = start;  // 32 TiB later whatever lay here is long gone
  }
  const uintptr_t found = next;
  next += size;
  return reinterpret_cast<void*>(found);
}

struct DeviceAllocator final : c10::Allocator {
  c10::DataPtr allocate(size_t bytes) override {
    const c10::Device device(c10::kHPU, static_cast<c10::DeviceIndex>(current_device()));
    if (bytes == 0) {
      return {nullptr, nullptr, &free_block, device};
    }
    record().allocated(device.index(), static_cast<int64_t>(bytes));
    void* memory = record().shapes ? nullptr : c10::alloc_cpu(bytes);
    void* data = memory != nullptr ? memory : next_address(static_cast<int64_t>(bytes));
    return {data, new Block{device.index(), static_cast<int64_t>(bytes), memory, {}, {}, {}}, &free_block, device};
  }
  c10::DeleterFnPtr raw_deleter() const override {
    return nullptr;  // the context is not the data
  }
  void copy_data(void* to, const void* from, std::size_t count) const override {
    if (!record().shapes) {
      default_copy_data(to, from, count);
    }
  }
};

struct PinnedAllocator final : c10::Allocator {
  std::mutex mutex;
  std::map<const char*, size_t> blocks;

  static PinnedAllocator& get() {
    static auto* one = new PinnedAllocator;  // outlives every tensor
    return *one;
  }
  static void release(void* data) {
    auto& self = get();
    {
      std::lock_guard<std::mutex> guard(self.mutex);
      self.blocks.erase(static_cast<const char*>(data));
    }
    c10::free_cpu(data);
  }
  c10::DataPtr allocate(size_t bytes) override {
    void* data = c10::alloc_cpu(std::max<size_t>(bytes, 1));
    std::lock_guard<std::mutex> guard(mutex);
    blocks[static_cast<const char*>(data)] = std::max<size_t>(bytes, 1);
    return {data, data, &release, c10::Device(c10::kCPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override {
    return &release;
  }
  void copy_data(void* to, const void* from, std::size_t count) const override {
    default_copy_data(to, from, count);
  }
};

// Everything runs at once and in order, so streams are names and events are moments.
struct DeviceGuard final : c10::impl::DeviceGuardImplInterface {
  static constexpr c10::DeviceType static_type = c10::kHPU;
  c10::DeviceType type() const override {
    return c10::kHPU;
  }
  c10::Device exchangeDevice(c10::Device device) const override {
    const c10::Device before = getDevice();
    setDevice(device);
    return before;
  }
  c10::Device getDevice() const override {
    return {c10::kHPU, static_cast<c10::DeviceIndex>(current_device())};
  }
  void setDevice(c10::Device device) const override {
    set_current_device(device.has_index() ? device.index() : current_device());
  }
  void uncheckedSetDevice(c10::Device device) const noexcept override {
    t_current_device = device.index();
  }
  static c10::Stream& current_stream(c10::Device device) {
    thread_local std::map<int, c10::Stream> streams;
    const int index = device.has_index() ? device.index() : current_device();
    const c10::Device exact(c10::kHPU, static_cast<c10::DeviceIndex>(index));
    return streams.try_emplace(index, c10::Stream(c10::Stream::DEFAULT, exact)).first->second;
  }
  c10::Stream getStream(c10::Device device) const override {
    return current_stream(device);
  }
  c10::Stream getDefaultStream(c10::Device device) const override {
    return c10::Stream(c10::Stream::DEFAULT, device);
  }
  c10::Stream getStreamFromGlobalPool(c10::Device device, bool /*high priority*/) const override {
    return getNewStream(device);
  }
  c10::Stream getNewStream(c10::Device device, int /*priority*/ = 0) const override {
    static std::atomic<int64_t> next{1};
    return c10::Stream(c10::Stream::UNSAFE, device, next++);
  }
  c10::Stream exchangeStream(c10::Stream stream) const override {
    auto& current = current_stream(stream.device());
    const c10::Stream before = current;
    current = stream;
    return before;
  }
  void record(void** event, const c10::Stream& /*stream*/, c10::DeviceIndex /*device*/,
              c10::EventFlag /*flag*/) const override {
    if (*event == nullptr) {
      *event = new double;
    }
    const auto now = std::chrono::steady_clock::now().time_since_epoch();
    *static_cast<double*>(*event) = std::chrono::duration<double, std::milli>(now).count();
  }
  void destroyEvent(void* event, c10::DeviceIndex /*device*/) const noexcept override {
    delete static_cast<double*>(event);
  }
  double elapsedTime(void* from, void* to, c10::DeviceIndex /*device*/) const override {
    return *static_cast<double*>(to) - *static_cast<double*>(from);
  }
  void block(void* /*event*/, const c10::Stream& /*stream*/) const override {}
  bool queryEvent(void* /*event*/) const override {
    return true;
  }
  void synchronizeEvent(void* /*event*/) const override {}
  c10::DeviceIndex deviceCount() const noexcept override {
    return static_cast<c10::DeviceIndex>(device_count());
  }
  bool queryStream(const c10::Stream& /*stream*/) const override {
    return true;
  }
  void synchronizeStream(const c10::Stream& /*stream*/) const override {
    simulator::record().boundary("synchronize");
  }
  void synchronizeDevice(c10::DeviceIndex /*device*/) const override {
    simulator::record().boundary("synchronize");
  }
  void recordDataPtrOnStream(const c10::DataPtr& /*data*/, const c10::Stream& /*stream*/) const override {}
};
C10_REGISTER_GUARD_IMPL(HPU, DeviceGuard);

struct GeneratorImpl final : c10::GeneratorImpl {
  at::Generator host = at::detail::createCPUGenerator();

  explicit GeneratorImpl(int device)
      : c10::GeneratorImpl(c10::Device(c10::kHPU, static_cast<c10::DeviceIndex>(device)),
                           c10::DispatchKeySet(c10::DispatchKey::HPU)) {}
  void set_current_seed(uint64_t seed) override {
    host.set_current_seed(seed);
  }
  void set_offset(uint64_t offset) override {
    host.set_offset(offset);
  }
  uint64_t get_offset() const override {
    return host.get_offset();
  }
  uint64_t current_seed() const override {
    return host.current_seed();
  }
  uint64_t seed() override {
    return host.seed();
  }
  void set_state(const c10::TensorImpl& state) override {
    host.unsafeGetGeneratorImpl()->set_state(state);
  }
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override {
    return host.unsafeGetGeneratorImpl()->get_state();
  }
  GeneratorImpl* clone_impl() const override {
    auto* copy = new GeneratorImpl(device_.index());
    copy->host.unsafeGetGeneratorImpl()->set_state(*get_state());
    return copy;
  }
};

int exact_device(int device) {
  return device < 0 ? current_device() : device;
}

struct HPUHooks final : at::HPUHooksInterface {
  explicit HPUHooks(at::HPUHooksArgs /*unused*/) {}
  void init() const override {}
  bool hasHPU() const override {
    return true;
  }
  bool isBuilt() const override {
    return true;
  }
  bool isAvailable() const override {
    return device_count() > 0;
  }
  bool hasPrimaryContext(c10::DeviceIndex /*device*/) const override {
    return true;
  }
  c10::DeviceIndex deviceCount() const override {
    return static_cast<c10::DeviceIndex>(device_count());
  }
  void setCurrentDevice(c10::DeviceIndex device) const override {
    set_current_device(device);
  }
  c10::DeviceIndex getCurrentDevice() const override {
    return static_cast<c10::DeviceIndex>(current_device());
  }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex device) const override {
    const auto before = getCurrentDevice();
    set_current_device(device);
    return before;
  }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex device) const override {
    return device < 0 ? getCurrentDevice() : exchangeDevice(device);
  }
  bool isPinnedPtr(const void* data) const override {
    return is_pinned(data);
  }
  c10::Allocator* getPinnedMemoryAllocator() const override {
    return pinned_allocator();
  }
  c10::Device getDeviceFromPtr(void* /*data*/) const override {
    return {c10::kHPU, getCurrentDevice()};
  }
  const at::Generator& getDefaultGenerator(c10::DeviceIndex device) const override {
    return default_generator(exact_device(device));
  }
  at::Generator getNewGenerator(c10::DeviceIndex device) const override {
    return at::make_generator<GeneratorImpl>(exact_device(device));
  }
};

}  // namespace

c10::Allocator* device_allocator() {
  static auto* allocator = new DeviceAllocator;
  return allocator;
}

c10::Allocator* pinned_allocator() {
  return &PinnedAllocator::get();
}

bool is_pinned(const void* data) {
  auto& self = PinnedAllocator::get();
  std::lock_guard<std::mutex> guard(self.mutex);
  auto after = self.blocks.upper_bound(static_cast<const char*>(data));
  if (after == self.blocks.begin()) {
    return false;
  }
  --after;
  return static_cast<const char*>(data) < after->first + after->second;
}

c10::DataPtr adopt_data(c10::Storage host, int64_t bytes, int device) {
  const c10::Device where(c10::kHPU, static_cast<c10::DeviceIndex>(device));
  if (bytes == 0) {
    return {nullptr, nullptr, &free_block, where};
  }
  record().allocated(device, bytes);
  void* data = record().shapes ? next_address(bytes) : host.mutable_data();
  return {data, new Block{device, bytes, nullptr, std::move(host), {}, {}}, &free_block, where};
}

std::optional<double> known_value(const c10::Storage& storage) {
  const auto* block = static_cast<Block*>(storage.data_ptr().get_context());
  return block == nullptr ? std::nullopt : block->value;
}

void set_known_value(const at::Tensor& tensor, std::optional<double> value) {
  auto* block = static_cast<Block*>(tensor.storage().data_ptr().get_context());
  if (block == nullptr) {
    return;
  }
  const bool whole = static_cast<int64_t>(tensor.nbytes()) == block->bytes;
  block->value = whole || block->value == value ? value : std::nullopt;
  block->values.reset();
}

static at::Tensor values_in(const at::Tensor& bytes, const at::Tensor& geometry) {
  auto whole = bytes.narrow(0, 0, bytes.numel() / geometry.element_size() * geometry.element_size());
  return whole.view(geometry.scalar_type()).as_strided(geometry.sizes(), geometry.strides(), geometry.storage_offset());
}

at::Tensor known_values(const at::Tensor& tensor) {
  const auto* block = static_cast<Block*>(tensor.storage().data_ptr().get_context());
  if (block == nullptr || !at::isIntegralType(tensor.scalar_type(), true) || block->bytes > kMostValues) {
    return {};
  }
  at::AutoDispatchBelowADInplaceOrView below;
  if (block->values.defined()) {
    return values_in(block->values, tensor).clone();
  }
  return block->value ? at::full(tensor.sizes(), *block->value, at::TensorOptions(tensor.scalar_type())) : at::Tensor();
}

void set_known_values(const at::Tensor& tensor, const at::Tensor& values) {
  auto* block = static_cast<Block*>(tensor.storage().data_ptr().get_context());
  if (block == nullptr || !at::isIntegralType(tensor.scalar_type(), true) || block->bytes > kMostValues) {
    set_known_value(tensor, std::nullopt);
    return;
  }
  at::AutoDispatchBelowADInplaceOrView below;
  if (!block->values.defined()) {  // the rest of it is read as it was before
    const auto size = static_cast<int64_t>(tensor.element_size());
    const auto rest = at::full({block->bytes / size + 1}, block->value.value_or(1), at::TensorOptions(tensor.scalar_type()));
    block->values = rest.view(at::kByte).narrow(0, 0, block->bytes);
    block->value.reset();
  }
  values_in(block->values, tensor).copy_(values);
}

int current_device() {
  return t_current_device;
}

void set_current_device(int device) {
  TORCH_CHECK(device >= 0 && device < g_device_count, "invalid device ordinal hpu:", device, "; the simulator has ",
              g_device_count, " (--devices)");
  t_current_device = device;
}

int device_count() {
  return g_device_count;
}

void set_device_count(int count) {
  g_device_count = count;
}

const at::Generator& default_generator(int device) {
  static std::array<at::Generator, kMaxDevices> generators;
  static std::mutex mutex;
  std::lock_guard<std::mutex> guard(mutex);
  auto& generator = generators.at(device);
  if (!generator.defined()) {
    generator = at::make_generator<GeneratorImpl>(device);
  }
  return generator;
}

at::Generator host_generator(const at::Generator& generator) {
  const bool ours = generator.defined() && generator.device().type() == c10::kHPU;
  const auto& chosen = ours ? generator : default_generator(current_device());
  return static_cast<GeneratorImpl*>(chosen.unsafeGetGeneratorImpl())->host;
}

}  // namespace simulator

namespace at {
using simulator::HPUHooks;
C10_REGISTER_TYPED_CLASS(HPUHooksRegistry, "HPUHooks", HPUHooks);
}  // namespace at

static bool allocator_is_set = [] {
  c10::SetAllocator(c10::kHPU, simulator::device_allocator());
  return true;
}();
