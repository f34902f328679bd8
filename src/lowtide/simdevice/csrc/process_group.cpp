// A process group backend for device tensors: copy to the host, let gloo do it, copy back.
//
// Every collective is synchronous: when the call returns, it is done. The copies are ordinary blocking copies on the
// current stream, so they cost link time on the virtual clock and are race-checked like any other.
#include "process_group.h"

#include "allocators.h"

namespace lowtide {

namespace {

using at::Tensor;
using Tensors = std::vector<Tensor>;
using TensorLists = std::vector<Tensors>;
using c10d::Work;

Tensors to_host(const Tensors& tensors) {
  Tensors host;
  for (const Tensor& tensor : tensors) host.push_back(tensor.to(at::kCPU));
  return host;
}

TensorLists to_host(const TensorLists& lists) {
  TensorLists host;
  for (const Tensors& list : lists) host.push_back(to_host(list));
  return host;
}

void copy_back(const Tensors& tensors, const Tensors& host) {
  for (size_t i = 0; i < tensors.size(); ++i) tensors[i].copy_(host[i]);
}

void copy_back(const TensorLists& lists, const TensorLists& host) {
  for (size_t i = 0; i < lists.size(); ++i) copy_back(lists[i], host[i]);
}

// DDP takes its reduced bucket from the future of the work.
c10::intrusive_ptr<Work> finished(const Tensors& results) {
  auto future = c10::make_intrusive<c10::ivalue::Future>(c10::ListType::ofTensors(), std::vector<c10::Device>{kSimDevice});
  future->markCompleted(c10::IValue(results));
  return Work::create_from_future(future);
}

class StagedBackend final : public c10d::Backend {
 public:
  explicit StagedBackend(c10::intrusive_ptr<Backend> gloo)
      : Backend(gloo->getRank(), gloo->getSize()), gloo_(std::move(gloo)) {}

  const std::string getBackendName() const override { return "sim_gloo"; }
  void setSequenceNumberForGroup() override { gloo_->setSequenceNumberForGroup(); }
  uint64_t getSequenceNumberForGroup() override { return gloo_->getSequenceNumberForGroup(); }

  c10::intrusive_ptr<Work> broadcast(Tensors& tensors, const c10d::BroadcastOptions& options) override {
    return in_place(tensors, [&](Tensors& host) { return gloo_->broadcast(host, options); });
  }
  c10::intrusive_ptr<Work> allreduce(Tensors& tensors, const c10d::AllreduceOptions& options) override {
    return in_place(tensors, [&](Tensors& host) { return gloo_->allreduce(host, options); });
  }
  c10::intrusive_ptr<Work> allreduce_coalesced(Tensors& tensors,
                                               const c10d::AllreduceCoalescedOptions& options) override {
    return in_place(tensors, [&](Tensors& host) { return gloo_->allreduce_coalesced(host, options); });
  }
  c10::intrusive_ptr<Work> reduce(Tensors& tensors, const c10d::ReduceOptions& options) override {
    return in_place(tensors, [&](Tensors& host) { return gloo_->reduce(host, options); });
  }
  c10::intrusive_ptr<Work> send(Tensors& tensors, int to, int tag) override {
    Tensors host = to_host(tensors);
    gloo_->send(host, to, tag)->wait();
    return finished(tensors);
  }
  c10::intrusive_ptr<Work> recv(Tensors& tensors, int from, int tag) override {
    return in_place(tensors, [&](Tensors& host) { return gloo_->recv(host, from, tag); });
  }
  c10::intrusive_ptr<Work> barrier(const c10d::BarrierOptions& options) override { return gloo_->barrier(options); }

  c10::intrusive_ptr<Work> allgather(TensorLists& outputs, Tensors& inputs,
                                     const c10d::AllgatherOptions& options) override {
    TensorLists host_outputs = to_host(outputs);
    Tensors host_inputs = to_host(inputs);
    gloo_->allgather(host_outputs, host_inputs, options)->wait();
    copy_back(outputs, host_outputs);
    return finished(outputs.at(0));
  }
  c10::intrusive_ptr<Work> _allgather_base(Tensor& output, Tensor& input,
                                           const c10d::AllgatherOptions& options) override {
    TensorLists outputs{output.view(-1).chunk(getSize())};
    Tensors inputs{input.reshape(-1)};
    allgather(outputs, inputs, options);
    return finished({output});
  }
  // FSDP2's whole tensors come this way.
  c10::intrusive_ptr<Work> allgather_into_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                                           const c10d::AllgatherOptions& options) override {
    for (size_t i = 0; i < outputs.size(); ++i) _allgather_base(outputs[i], inputs[i], options);
    return finished(outputs);
  }
  c10::intrusive_ptr<Work> gather(TensorLists& outputs, Tensors& inputs, const c10d::GatherOptions& options) override {
    TensorLists host_outputs = to_host(outputs);
    Tensors host_inputs = to_host(inputs);
    gloo_->gather(host_outputs, host_inputs, options)->wait();
    copy_back(outputs, host_outputs);
    return finished(inputs);
  }
  c10::intrusive_ptr<Work> scatter(Tensors& outputs, TensorLists& inputs,
                                   const c10d::ScatterOptions& options) override {
    Tensors host_outputs = to_host(outputs);
    TensorLists host_inputs = to_host(inputs);
    gloo_->scatter(host_outputs, host_inputs, options)->wait();
    copy_back(outputs, host_outputs);
    return finished(outputs);
  }

  // Not every gloo has a reduce-scatter: reduce everything, keep this rank's part.
  c10::intrusive_ptr<Work> reduce_scatter(Tensors& outputs, TensorLists& inputs,
                                          const c10d::ReduceScatterOptions& options) override {
    c10d::AllreduceOptions reduce;
    reduce.reduceOp = options.reduceOp;
    for (size_t i = 0; i < outputs.size(); ++i) {
      for (Tensor& part : inputs[i]) {
        Tensors host{part.to(at::kCPU, /*non_blocking=*/false, /*copy=*/true)};
        gloo_->allreduce(host, reduce)->wait();
        if (&part == &inputs[i][getRank()]) outputs[i].copy_(host[0]);
      }
    }
    return finished(outputs);
  }
  c10::intrusive_ptr<Work> _reduce_scatter_base(Tensor& output, Tensor& input,
                                                const c10d::ReduceScatterOptions& options) override {
    Tensors outputs{output.view(-1)};
    TensorLists inputs{input.reshape(-1).chunk(getSize())};
    return reduce_scatter(outputs, inputs, options);
  }

  c10::intrusive_ptr<Work> reduce_scatter_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                                           const c10d::ReduceScatterOptions& options) override {
    for (size_t i = 0; i < outputs.size(); ++i) _reduce_scatter_base(outputs[i], inputs[i], options);
    return finished(outputs);
  }

  c10::intrusive_ptr<Work> alltoall_base(Tensor& output, Tensor& input, std::vector<int64_t>& output_sizes,
                                         std::vector<int64_t>& input_sizes,
                                         const c10d::AllToAllOptions& options) override {
    Tensor host_output = output.to(at::kCPU), host_input = input.to(at::kCPU);
    gloo_->alltoall_base(host_output, host_input, output_sizes, input_sizes, options)->wait();
    output.copy_(host_output);
    return finished({output});
  }

 private:
  template <typename Collective>
  c10::intrusive_ptr<Work> in_place(Tensors& tensors, Collective collective) {
    Tensors host = to_host(tensors);
    collective(host)->wait();
    copy_back(tensors, host);
    return finished(tensors);
  }

  c10::intrusive_ptr<Backend> gloo_;
};

}  // namespace

c10::intrusive_ptr<c10d::Backend> stage_through_host(c10::intrusive_ptr<c10d::Backend> host_backend) {
  return c10::make_intrusive<StagedBackend>(std::move(host_backend));
}

}  // namespace lowtide
