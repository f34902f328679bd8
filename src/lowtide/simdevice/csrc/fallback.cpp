// Every operator that has no kernel of its own here runs the CPU's, on the device's memory.
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/core/boxing/KernelFunction.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <torch/library.h>

#include <string_view>
#include <unordered_set>

#include "allocators.h"
#include "flops.h"
#include "generator.h"
#include "launch.h"

namespace lowtide {

namespace {

using torch::jit::Stack;

bool takes_generator(const c10::Argument& argument) {
  auto optional = argument.type()->cast<c10::OptionalType>();
  return optional && optional->getElementType()->kind() == c10::TypeKind::GeneratorType;
}

// Operators that accept CPU tensors beside accelerator tensors on CUDA as well: indices, and scalars of foreach.
bool mixes_devices(std::string_view op) {
  static const std::unordered_set<std::string_view> indexing{"aten::index",      "aten::index_put",
                                                             "aten::index_put_", "aten::_index_put_impl_",
                                                             "aten::_unsafe_index", "aten::_unsafe_index_put"};
  return indexing.count(op) || op.starts_with("aten::_foreach");
}

// Turns the arguments of one call into what the CPU kernel wants, and its results back.
class BoxedCall {
 public:
  BoxedCall(const c10::OperatorHandle& op, const char* name) : schema_(op.schema()), name_(name), launch_(name) {}

  Stack cpu_arguments(c10::ArrayRef<c10::IValue> arguments) {
    Stack stack;
    for (size_t i = 0; i < arguments.size(); ++i) stack.push_back(convert(arguments[i], schema_.arguments()[i]));
    check_devices();
    return stack;
  }

  c10::IValue sim_result(const c10::IValue& result) {
    if (result.isTensor()) return launch_.sim(result.toTensor());
    if (!result.isTensorList()) return result;
    std::vector<at::Tensor> tensors;
    for (const at::Tensor& tensor : result.toTensorVector()) tensors.push_back(launch_.sim(tensor));
    return tensors;
  }

  void finish(bool host_waits) { launch_.finish(matmul_flops(name_, tensors_), host_waits); }

  bool has_generator() const { return has_generator_; }

 private:
  c10::IValue convert(const c10::IValue& value, const c10::Argument& argument) {
    const auto* alias = argument.alias_info();
    bool written = alias && alias->isWrite();
    if (value.isTensor()) return tensor(value.toTensor(), written);
    if (value.isTensorList()) {
      std::vector<at::Tensor> list;
      for (const at::Tensor& item : value.toTensorVector()) list.push_back(tensor(item, written));
      return list;
    }
    if (value.isOptionalTensorList()) {
      c10::List<std::optional<at::Tensor>> list;
      for (const std::optional<at::Tensor>& item : value.toOptionalTensorVector())
        list.push_back(item ? std::optional(tensor(*item, written)) : std::nullopt);
      return list;
    }
    if (value.isDevice()) return c10::Device(c10::DeviceType::CPU);
    if (takes_generator(argument)) {
      has_generator_ = true;
      return cpu_generator_of(value.isNone() ? default_generator() : value.toGenerator());
    }
    return value;
  }

  at::Tensor tensor(const at::Tensor& argument, bool written) {
    tensors_.push_back(argument);
    return launch_.cpu(argument, written);
  }

  // The CPU kernel would not notice a tensor that is really on the CPU; an accelerator does.
  void check_devices() const {
    auto on_sim = [](const at::Tensor& t) { return t.defined() && t.device().type() == kSim; };
    if (mixes_devices(name_) || std::none_of(tensors_.begin(), tensors_.end(), on_sim)) return;
    for (const at::Tensor& tensor : tensors_)
      TORCH_CHECK(!tensor.defined() || on_sim(tensor) || tensor.dim() == 0,
                  "Expected all tensors to be on the same device, but found at least two devices, sim:0 and ",
                  tensor.device(), ", in a call of ", name_);
  }

  const c10::FunctionSchema& schema_;
  const char* name_;
  Launch launch_;
  std::vector<at::Tensor> tensors_;
  bool has_generator_ = false;
};

// A random operator without a generator argument (native_dropout) draws from the CPU's default one. It is lent the
// state of the device's for the call.
class LentGenerator {
 public:
  LentGenerator() : borrower_(at::detail::getDefaultCPUGenerator()), owner_(cpu_generator_of(default_generator())) {
    saved_ = borrower_.get_state();
    borrower_.set_state(owner_.get_state());
  }
  ~LentGenerator() {
    owner_.set_state(borrower_.get_state());
    borrower_.set_state(saved_);
  }

 private:
  at::Generator borrower_, owner_;
  at::Tensor saved_;
};

void run_on_cpu(const c10::OperatorHandle& op, Stack* stack) {
  const auto& schema = op.schema();
  BoxedCall call(op, schema.name().c_str());
  Stack arguments = call.cpu_arguments(torch::jit::last(*stack, schema.arguments().size()));
  {
    std::optional<LentGenerator> lent;
    if (op.hasTag(at::Tag::nondeterministic_seeded) && !call.has_generator()) lent.emplace();
    op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), &arguments);
  }
  std::vector<c10::IValue> results;
  for (const c10::IValue& result : arguments) results.push_back(call.sim_result(result));
  call.finish(op.hasTag(at::Tag::dynamic_output_shape) || op.hasTag(at::Tag::data_dependent_output));
  torch::jit::drop(*stack, schema.arguments().size());
  for (c10::IValue& result : results) torch::jit::push(*stack, std::move(result));
}

auto on_cpu() { return torch::CppFunction::makeFromBoxedFunction<&run_on_cpu>(); }

}  // namespace

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) { m.fallback(on_cpu()); }

// Without this, a new backend gets torch's decompositions of these: many kernels where CUDA has one.
TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  for (const char* name : {"native_layer_norm", "native_group_norm", "silu_backward", "mish_backward",
                           "native_channel_shuffle", "addr", "addr.out", "_stack", "_stack.out"})
    m.impl(name, on_cpu());
}

}  // namespace lowtide
