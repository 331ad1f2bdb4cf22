// A device for PyTorch's key PrivateUse1. Its memory is the host's and so is its arithmetic, but to
// PyTorch it is another device: tensors of both do not mix, and autograd has a thread for it.
#include <ATen/EmptyTensor.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/native/CPUFallback.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/resize_native.h>
#include <ATen/ops/set_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/extension.h>

using at::Tensor;
using c10d::Work;
using Tensors = std::vector<Tensor>;
template <class T> using Pointer = c10::intrusive_ptr<T>;
constexpr auto kDevice = c10::DeviceType::PrivateUse1;

struct Memory : c10::Allocator {
  c10::DataPtr allocate(size_t size) override {
    void *data = std::malloc(size ? size : 1);
    return {data, data, &std::free, c10::Device(kDevice, 0)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &std::free; }
  void copy_data(void *to, const void *from, size_t size) const override {
    std::memcpy(to, from, size);
  }
} memory;
REGISTER_ALLOCATOR(kDevice, &memory);

// One device with one stream, on which everything is done when it was asked for.
struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::Device device() const { return c10::Device(kDevice, 0); }
  c10::Stream stream() const { return c10::Stream(c10::Stream::DEFAULT, device()); }
  c10::DeviceType type() const override { return kDevice; }
  c10::Device exchangeDevice(c10::Device) const override { return device(); }
  c10::Device getDevice() const override { return device(); }
  void setDevice(c10::Device) const override {}
  void uncheckedSetDevice(c10::Device) const noexcept override {}
  c10::Stream getStream(c10::Device) const override { return stream(); }
  c10::Stream getDefaultStream(c10::Device) const override { return stream(); }
  c10::Stream exchangeStream(c10::Stream) const override { return stream(); }
  c10::DeviceIndex deviceCount() const noexcept override { return 1; }
  void record(void **, const c10::Stream &, const c10::DeviceIndex,
              const c10::EventFlag) const override {}
  void block(void *, const c10::Stream &) const override {}
  bool queryEvent(void *) const override { return true; }
  void destroyEvent(void *, const c10::DeviceIndex) const noexcept override {}
  void synchronizeEvent(void *) const override {}
};
C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard);

struct Hooks : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
};

// The same memory as a tensor on the host.
Tensor host(const Tensor &tensor) {
  if (!tensor.defined() || tensor.device().type() != kDevice)
    return tensor;
  return at::from_blob(tensor.data_ptr(), tensor.sizes(), tensor.strides(),
                       [tensor](void *) {}, tensor.options().device(c10::kCPU));
}
Tensors hosts(const Tensors &tensors) {
  Tensors result;
  for (const auto &tensor : tensors)
    result.push_back(host(tensor));
  return result;
}

Tensor empty(c10::IntArrayRef size, std::optional<c10::ScalarType> dtype,
             std::optional<c10::Layout>, std::optional<c10::Device>, std::optional<bool>,
             std::optional<c10::MemoryFormat> format) {
  return at::detail::empty_generic(size, &memory, c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
                                   c10::dtype_or_default(dtype), format);
}
Tensor empty_strided(c10::IntArrayRef size, c10::IntArrayRef stride,
                     std::optional<c10::ScalarType> dtype, std::optional<c10::Layout>,
                     std::optional<c10::Device>, std::optional<bool>) {
  return at::detail::empty_strided_generic(size, stride, &memory,
                                           c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
                                           c10::dtype_or_default(dtype));
}
Tensor copy_from(const Tensor &from, const Tensor &to, bool) {
  host(to).copy_(host(from));
  return to;
}
Tensor copy_and_resize(const Tensor &from, const Tensor &to) {
  return copy_from(from, to.resize_(from.sizes()), false);
}
void on_host(const c10::OperatorHandle &op, torch::jit::Stack *stack) {
  at::native::cpu_fallback(op, stack);
}
TORCH_LIBRARY_IMPL(_, PrivateUse1, m) {
  m.fallback(torch::CppFunction::makeFromBoxedFunction<&on_host>());
}
TORCH_LIBRARY_IMPL(_, AutogradPrivateUse1, m) {
  m.fallback(torch::CppFunction::makeFallthrough());
}
TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", empty);
  m.impl("empty_strided", empty_strided);
  m.impl("_copy_from", copy_from);
  m.impl("_copy_from_and_resize", copy_and_resize);
  m.impl("resize_", at::native::resize_);
  m.impl("as_strided", at::native::as_strided_tensorimpl);
  m.impl("view", at::native::view);
  m.impl("_reshape_alias", at::native::_reshape_alias);
  m.impl("set_.source_Storage", at::native::set_);
  m.impl("set_.source_Storage_storage_offset", at::native::set_storage_cpu_);
}

// Collectives of another library on the same memory.
struct Group : c10d::Backend {
  Pointer<c10d::Backend> other;
  explicit Group(Pointer<c10d::Backend> other)
      : Backend(other->getRank(), other->getSize()), other(other) {}
  const std::string getBackendName() const override { return "neuron"; }
  Pointer<Work> broadcast(Tensors &t, const c10d::BroadcastOptions &o) override {
    auto h = hosts(t);
    return other->broadcast(h, o);
  }
  Pointer<Work> allreduce(Tensors &t, const c10d::AllreduceOptions &o) override {
    auto h = hosts(t);
    return other->allreduce(h, o);
  }
  Pointer<Work> _allgather_base(Tensor &out, Tensor &in, const c10d::AllgatherOptions &o) override {
    auto to = host(out), from = host(in);
    return other->_allgather_base(to, from, o);
  }
  Pointer<Work> _reduce_scatter_base(Tensor &out, Tensor &in,
                                     const c10d::ReduceScatterOptions &o) override {
    auto to = host(out), from = host(in);
    return other->_reduce_scatter_base(to, from, o);
  }
  Pointer<Work> send(Tensors &t, int rank, int tag) override {
    auto h = hosts(t);
    return other->send(h, rank, tag);
  }
  Pointer<Work> recv(Tensors &t, int rank, int tag) override {
    auto h = hosts(t);
    return other->recv(h, rank, tag);
  }
  Pointer<Work> barrier(const c10d::BarrierOptions &o) override { return other->barrier(o); }
};

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  at::RegisterPrivateUse1HooksInterface(new Hooks);
  m.def("group", [](Pointer<c10d::Backend> other) -> Pointer<c10d::Backend> {
    return c10::make_intrusive<Group>(other);
  });
}
