// An accelerator that every machine has (PrivateUse1): two devices with memory of their own, and the CPU's kernels.
//
// It is not the CPU: tensors of several devices do not mix, a number has to be read back, autocast has a list of its
// own or none, backward passes run in threads of the device's. It counts, it fails when it is told to, and what it
// frees it can keep, filled with nan. torch's documentation of new accelerators says what a device has to register.

#include <ATen/ATen.h>
#include <ATen/EmptyTensor.h>
#include <ATen/autocast_mode.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/NativeFunctions.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <c10/core/impl/alloc_cpu.h>
#include <torch/csrc/utils/pybind.h>
#include <torch/library.h>

#include <deque>

namespace {
using at::IntArrayRef, at::Scalar, at::ScalarType, at::Tensor, torch::jit::Stack;
using c10::Device, c10::DeviceIndex, c10::DispatchKey, c10::IValue, c10::OperatorHandle;
using Counter = std::atomic<int64_t>;
constexpr auto kSim = c10::DeviceType::PrivateUse1;
constexpr DeviceIndex kDevices = 2;
// -- what is counted, and when it fails -------------------------------------------------------------------------------
Counter launches{0}, reads{0}, copies{0}, switches{0}, left_until_failure{0};
bool keeps_names = false;
std::vector<std::string> names;

// One more operation of the device's; the n-th after fail_at(n) is refused before it has done anything.
void happens(Counter& counter, const std::string& name) {
  counter++;
  bool fails = left_until_failure > 0 && --left_until_failure == 0;
  TORCH_CHECK_WITH(OutOfMemoryError, !fails, "sim: out of memory in ", name, ", as it was told");
  if (keeps_names) names.push_back((&counter == &reads ? "read " : &counter == &copies ? "copy " : "") + name);
}
// -- memory -----------------------------------------------------------------------------------------------------------
thread_local DeviceIndex current_device = 0;
Counter bytes_now{0}, bytes_peak{0}, written_after_free{0};
std::atomic<bool> poisons{false};
constexpr char kPoison = -1;  // nan in every floating type, -1 in integers
constexpr size_t kKept = 1 << 26;
struct Block { char* memory; size_t size; };
// Freed blocks stay for a while, poisoned: reading one gives nan, and one that was written to is noticed when it goes.
std::mutex freed_lock;
std::deque<Block> freed;
size_t freed_bytes = 0;
void drop_freed(size_t most) {
  for (std::lock_guard<std::mutex> guard(freed_lock); freed_bytes > most; freed.pop_front()) {
    auto [memory, size] = freed.front();
    written_after_free += !std::all_of(memory, memory + size, [](char each) { return each == kPoison; });
    freed_bytes -= size;
    c10::free_cpu(memory);
  }
}

void free_block(void* context) {
  std::unique_ptr<Block> block(static_cast<Block*>(context));
  bytes_now -= static_cast<int64_t>(block->size);
  if (!poisons) return c10::free_cpu(block->memory);
  std::memset(block->memory, kPoison, block->size);
  std::unique_lock<std::mutex> guard(freed_lock);
  freed.push_back(*block);
  freed_bytes += block->size;
  guard.unlock();
  drop_freed(kKept);
}

struct Memory final : c10::Allocator {
  c10::DataPtr allocate(size_t size) override {
    Device device(kSim, current_device);
    if (size == 0) return {nullptr, device};
    auto* block = new Block{static_cast<char*>(c10::alloc_cpu(size)), size};
    if (poisons) std::memset(block->memory, kPoison, size);
    int64_t now = bytes_now += static_cast<int64_t>(size), peak = bytes_peak;
    while (now > peak && !bytes_peak.compare_exchange_weak(peak, now)) continue;
    return {block->memory, block, &free_block, device};
  }
  void copy_data(void* to, const void* from, size_t size) const override { std::memcpy(to, from, size); }
} memory;
// -- devices, streams and what torch asks an accelerator --------------------------------------------------------------
thread_local c10::StreamId current_stream[kDevices] = {0, 0};
std::atomic<c10::StreamId> streams_made{0};
DeviceIndex exchange(DeviceIndex index) { return index < 0 ? current_device : std::exchange(current_device, index); }

struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return kSim; }
  Device exchangeDevice(Device device) const override { return Device(kSim, exchange(device.index())); }
  Device getDevice() const override { return Device(kSim, current_device); }
  void setDevice(Device device) const override { exchange(device.index()); }
  void uncheckedSetDevice(Device device) const noexcept override { exchange(device.index()); }
  DeviceIndex deviceCount() const noexcept override { return kDevices; }

  static DeviceIndex index_of(Device device) { return device.has_index() ? device.index() : current_device; }
  static c10::Stream stream(Device device, c10::StreamId id) {
    return c10::Stream(c10::Stream::UNSAFE, Device(kSim, index_of(device)), id);
  }
  c10::Stream getStream(Device to) const noexcept override { return stream(to, current_stream[index_of(to)]); }
  c10::Stream getDefaultStream(Device to) const override { return stream(to, 0); }
  c10::Stream getNewStream(Device to, int) const override { return stream(to, ++streams_made); }
  c10::Stream exchangeStream(c10::Stream next) const noexcept override {
    switches++;
    return stream(next.device(), std::exchange(current_stream[next.device_index()], next.id()));
  }
  // Operations are over when they return: nothing has to wait, but a program that waits is counted.
  void record(void**, const c10::Stream&, const DeviceIndex, const c10::EventFlag) const override {}
  void block(void*, const c10::Stream&) const override {}
  void synchronizeStream(const c10::Stream&) const override { happens(reads, "synchronize"); }
  void synchronizeDevice(const DeviceIndex) const override { happens(reads, "synchronize"); }
};
C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard);
struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(DeviceIndex) const override { return true; }
  DeviceIndex deviceCount() const override { return kDevices; }
  DeviceIndex getCurrentDevice() const override { return current_device; }
  void setCurrentDevice(DeviceIndex index) const override { exchange(index); }
  DeviceIndex exchangeDevice(DeviceIndex index) const override { return exchange(index); }
  DeviceIndex maybeExchangeDevice(DeviceIndex index) const override { return exchange(index); }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t size) const override {
    auto* impl = storage.unsafeGetStorageImpl();
    c10::DeviceGuard guard(impl->device());
    auto moved = memory.allocate(size);
    if (size_t kept = std::min(size, impl->nbytes())) std::memcpy(moved.get(), impl->data(), kept);
    impl->set_data_ptr_noswap(std::move(moved));
    impl->set_nbytes(size);
  }
};
// -- making and moving tensors ----------------------------------------------------------------------------------------
constexpr c10::DispatchKeySet kKeys(DispatchKey::PrivateUse1);
using Type = std::optional<ScalarType>;
using Where = std::optional<Device>;

Device given(Where device) { return device && device->has_index() ? *device : Device(kSim, current_device); }
Tensor empty(IntArrayRef size, Type type, std::optional<at::Layout>, Where device, std::optional<bool>,
             std::optional<at::MemoryFormat> format) {
  c10::DeviceGuard guard(given(device));
  return at::detail::empty_generic(size, &memory, kKeys, c10::dtype_or_default(type), format);
}

Tensor empty_strided(IntArrayRef size, IntArrayRef stride, Type type, std::optional<at::Layout>, Where device,
                     std::optional<bool>) {
  c10::DeviceGuard guard(given(device));
  return at::detail::empty_strided_generic(size, stride, &memory, kKeys, c10::dtype_or_default(type));
}

// A CPU tensor over the same memory, laid out alike: the CPU's kernels go the way that they go with their own.
Tensor on_cpu(const Tensor& tensor) {
  if (!tensor.defined() || !tensor.is_privateuseone()) return tensor;
  auto options = at::TensorOptions().dtype(tensor.dtype()).device(at::kCPU);
  return at::from_blob(tensor.data_ptr(), tensor.sizes(), tensor.strides(), options);
}

Tensor copy_from(const Tensor& from, const Tensor& to, bool non_blocking) {
  bool is_within = from.device() == to.device();
  if (!is_within && to.is_cpu() && !non_blocking) happens(reads, "copy_ to the host");
  happens(is_within ? launches : copies, "copy_");
  at::NoGradGuard no_grad;
  on_cpu(to).copy_(on_cpu(from));
  return to;
}

// torch leaves it to the kernels of several tensors to count that these were written to.
void bump(const Tensor& each) { each.is_inference() ? void() : each.unsafeGetTensorImpl()->bump_version(); }

void foreach_copy_(at::TensorList to, at::TensorList from, bool non_blocking) {
  bool is_within = true;
  for (size_t i = 0; i < to.size(); i++) is_within &= to[i].device() == from[i].device();
  if (is_within) happens(launches, "_foreach_copy_");
  at::NoGradGuard no_grad;
  for (size_t i = 0; i < to.size(); i++) {
    is_within ? on_cpu(to[i]).copy_(on_cpu(from[i])) : to[i].copy_(from[i], non_blocking);
    if (is_within) bump(to[i]);
  }
}
// -- every other operation, by the CPU's kernel -----------------------------------------------------------------------
bool starts(const std::string& name, std::initializer_list<const char*> with) {
  return std::any_of(with.begin(), with.end(), [&](const char* each) { return name.rfind(each, 0) == 0; });
}

void change(IValue& value, const std::function<std::optional<Tensor>(const Tensor&)>& with) {
  if (value.isTensor()) {
    value = *with(value.toTensor());
  } else if (value.isTensorList()) {
    auto tensors = value.toTensorVector();
    for (Tensor& each : tensors) each = *with(each);
    value = tensors;
  } else if (value.isOptionalTensorList()) {
    c10::List<std::optional<Tensor>> changed;
    for (std::optional<Tensor> each : value.toOptionalTensorList()) changed.push_back(each ? with(*each) : each);
    value = changed;
  }
}

struct Call {
  const std::string name;
  Where device;
  std::vector<Tensor> written, seen;
  std::optional<c10::ScalarType> dtype;  // of the tensors with dimensions, if they are floating

  Tensor check(const Tensor& tensor) {
    if (tensor.defined() && tensor.is_floating_point()) {
      if (tensor.dim() > 0) dtype = dtype ? c10::promoteTypes(*dtype, tensor.scalar_type()) : tensor.scalar_type();
      // CUDA has no such kernel either.
      bool is_missing = tensor.scalar_type() == at::kBFloat16 && starts(name, {"aten::_amp_foreach"});
      TORCH_CHECK_NOT_IMPLEMENTED(!is_missing, '"', name, "\" not implemented for 'BFloat16'");
    }
    // From the host come numbers, and the indices and lengths that CUDA's operations take from there too.
    if (!tensor.defined()) return tensor;
    bool is_number = tensor.dim() == 0 && !starts(name, {"aten::_foreach", "aten::_fused", "aten::_amp"});
    bool may_be_there = is_number || starts(name, {"aten::index", "aten::_index_put", "aten::_pa"});
    if (tensor.is_cpu() && may_be_there) return tensor;
    if (!device) device = tensor.device();
    TORCH_CHECK(tensor.device() == *device, "Expected all tensors to be on the same device, but ", name,
                " got some on ", *device, " and some on ", tensor.device());
    return tensor;
  }

  Tensor argument(const Tensor& tensor, const c10::Argument& as) {
    if (as.alias_info()) (as.alias_info()->isWrite() ? written : seen).push_back(tensor);
    // Kernels give `out` its size; memory that is not the CPU's own would not follow.
    if (as.is_out()) return at::empty({0}, tensor.options().device(at::kCPU));
    // CUDA converts a number on the device to the other operand's dtype; the CPU's kernels compute with its float32.
    bool is_number = dtype && tensor.defined() && !tensor.is_cpu() && tensor.dim() == 0 && !as.alias_info();
    bool is_pointwise = starts(name, {"aten::mul", "aten::div", "aten::add", "aten::sub", "aten::_foreach_mul",
                                      "aten::_foreach_div", "aten::_foreach_add", "aten::_foreach_sub"});
    return is_number && is_pointwise && tensor.is_floating_point() ? on_cpu(tensor).to(*dtype) : on_cpu(tensor);
  }

  // A kernel's result on the device: what was written to, a view of what it is a view of, or in memory of its own.
  Tensor result(const Tensor& tensor, const c10::AliasInfo* alias, size_t& place) {
    if (!tensor.defined()) return tensor;
    if (alias && alias->isWrite()) {
      Tensor target = written.at(place++);
      if (target.sizes() != tensor.sizes()) target.resize_(tensor.sizes());
      if (target.data_ptr() != tensor.data_ptr()) on_cpu(target).copy_(tensor);
      return target;
    }
    auto* at = static_cast<char*>(tensor.data_ptr());
    auto* begin = alias && !seen.empty() ? static_cast<char*>(seen[0].storage().mutable_data()) : nullptr;
    if (begin && at >= begin && at < begin + seen[0].storage().nbytes()) {
      auto view = at::detail::make_tensor<c10::TensorImpl>(
          c10::TensorImpl::VIEW, c10::Storage(seen[0].storage()), kKeys, tensor.dtype());
      auto offset = (at - begin) / static_cast<int64_t>(tensor.itemsize());
      view.unsafeGetTensorImpl()->set_sizes_and_strides(tensor.sizes(), tensor.strides(), offset);
      return view;
    }
    auto made = empty_strided(tensor.sizes(), tensor.strides(), tensor.scalar_type(), {}, device, {});
    on_cpu(made).copy_(tensor);
    return made;
  }
};

// Does `op` by the kernel of `by`, which may have one argument more, after the third.
void run(const OperatorHandle& op, Stack* stack, const OperatorHandle& by) {
  const auto& [arguments, returns] = std::tie(op.schema().arguments(), op.schema().returns());
  Call call{op.schema().name(), {}, {}, {}};
  IValue* values = &*(stack->end() - static_cast<int64_t>(arguments.size()));
  for (size_t i = 0; i < arguments.size(); i++) {
    if (values[i].isDevice()) call.device = given(std::exchange(values[i], Device(at::kCPU)).toDevice());
    change(values[i], [&](const Tensor& each) { return call.check(each); });
  }
  if (!call.device) call.device = given({});
  happens(launches, call.name);
  bool is_read = op.hasTag(at::Tag::data_dependent_output) || op.hasTag(at::Tag::dynamic_output_shape);
  if (is_read || (!returns.empty() && returns[0].type()->kind() == c10::TypeKind::BoolType)) happens(reads, call.name);
  for (size_t i = 0; i < arguments.size(); i++) {
    change(values[i], [&](const Tensor& each) { return call.argument(each, arguments[i]); });
  }
  bool lacks_one = by.schema().arguments().size() > arguments.size();
  if (lacks_one) stack->insert(stack->end() - static_cast<int64_t>(arguments.size()) + 3, IValue());
  {
    at::NoGradGuard no_grad;
    c10::impl::ExcludeDispatchKeyGuard no_casts(DispatchKey::AutocastCPU);
    by.redispatchBoxed(c10::DispatchKeySet(DispatchKey::CPU), stack);
  }
  if (starts(call.name, {"aten::_foreach"})) std::for_each(call.written.begin(), call.written.end(), &bump);
  size_t place = 0;
  for (size_t i = 0; i < returns.size(); i++) {
    auto with = [&](const Tensor& each) { return call.result(each, returns[i].alias_info(), place); };
    change(*(stack->end() - static_cast<int64_t>(returns.size() - i)), with);
  }
}

void fallback(const OperatorHandle& op, Stack* stack) { run(op, stack, op); }
// torch asks devices of its own for their convolutions by names that say so.
void convolve(const OperatorHandle& op, Stack* stack) {
  std::string name = op.schema().name();
  run(op, stack, c10::Dispatcher::singleton().findSchemaOrThrow(name.substr(0, name.rfind('_')).c_str(), ""));
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&fallback>()); }
TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", &empty);
  m.impl("empty_strided", &empty_strided);
  m.impl("_copy_from", &copy_from);
  m.impl("_foreach_copy_", &foreach_copy_);
  m.impl("_local_scalar_dense", +[](const Tensor& self) { return happens(reads, "item"), on_cpu(self).item(); });
  m.impl("as_strided", &at::native::as_strided_tensorimpl);
  m.impl("view", static_cast<Tensor (*)(const Tensor&, IntArrayRef)>(&at::native::view));
  m.impl("_reshape_alias", &at::native::_reshape_alias);
  m.impl("resize_", +[](const Tensor& self, IntArrayRef size, std::optional<at::MemoryFormat> format) -> const Tensor& {
    c10::DeviceGuard guard(self.device());
    return at::native::resize_(self, size, format);
  });
  m.impl("set_.source_Storage_storage_offset", &at::native::set_storage_cpu_);
  m.impl("set_.source_Storage", static_cast<Tensor& (*)(Tensor&, at::Storage)>(&at::native::set_));
  m.impl("set_.source_Tensor", &at::native::set_tensor_);
  m.impl("record_stream", +[](Tensor&, c10::Stream) {});
  m.impl("convolution_overrideable", torch::CppFunction::makeFromBoxedFunction<&convolve>());
  m.impl("convolution_backward_overrideable", torch::CppFunction::makeFromBoxedFunction<&convolve>());
  // What torch would make of several operations on a device without a kernel of its own, and CUDA does in one.
  for (const auto& each : c10::Dispatcher::singleton().getAllOpNames()) {
    auto op = c10::Dispatcher::singleton().findOp(each);
    auto has = [&](DispatchKey key) { return op && op->hasKernelForDispatchKey(key); };
    bool has_parts = has(DispatchKey::CompositeExplicitAutograd) || has(DispatchKey::CompositeImplicitAutograd);
    bool is_one = starts(each.name, {"aten::_foreach_"}) || (starts(each.name, {"aten::"}) && has(DispatchKey::CPU));
    if (!has_parts || !is_one || each.name == "aten::_foreach_copy_") continue;
    std::string name = each.name + (each.overload_name.empty() ? "" : "." + each.overload_name);
    m.impl(name.c_str(), torch::CppFunction::makeFromBoxedFunction<&fallback>());
  }
}
// -- autocast ---------------------------------------------------------------------------------------------------------
TORCH_LIBRARY_IMPL(_, AutocastPrivateUse1, m) { m.fallback(torch::CppFunction::makeFallthrough()); }
std::unique_ptr<torch::Library> casts;
// CUDA's list, or none, as with a device that registers nothing.
void set_autocast_list(bool has_one) {
  casts.reset();
  if (!has_one) return;
  casts = std::make_unique<torch::Library>(
      torch::Library::IMPL, "aten", DispatchKey::AutocastPrivateUse1, __FILE__, __LINE__);
  torch::Library& m = *casts;
#define LOWER(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, lower_precision_fp)
#define FP32(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, fp32)
#define FP32_BY_DTYPE(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, fp32_set_opt_dtype)
#define PROMOTE(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, promote)
  AT_FORALL_LOWER_PRECISION_FP(LOWER)
  AT_FORALL_FP32(FP32)
  AT_FORALL_FP32_SET_OPT_DTYPE(FP32_BY_DTYPE)
  AT_FORALL_DIFFERENT_REDISPATCH_SIGNATURE(KERNEL_DIFFERENT_REDISPATCH_SIGNATURE_PRIVATEUSEONE)
  AT_FORALL_PROMOTE(PROMOTE)
}

}  // namespace

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  at::RegisterPrivateUse1HooksInterface(new Hooks());
  c10::SetAllocator(kSim, &memory);
  m.def("counts", [] { return std::make_tuple(launches.load(), reads.load(), copies.load(), switches.load()); });
  m.def("names", [] { return names; });
  m.def("reset", [](bool with_names) {
    launches = reads = copies = switches = 0;
    keeps_names = with_names;
    names.clear();
  });
  m.def("fail_at", [](int64_t n) { left_until_failure = n; });
  m.def("set_poison", [](bool on) { poisons = on; });
  m.def("written_after_free", [] { return drop_freed(0), written_after_free.exchange(0); });
  m.def("memory", [] { return std::make_tuple(bytes_now.load(), bytes_peak.exchange(bytes_now)); });
  m.def("set_autocast_list", &set_autocast_list);
}
