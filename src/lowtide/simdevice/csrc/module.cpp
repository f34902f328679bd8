// The Python face of the device. Loading this library registers the kernels; `register_device` makes it torch's
// accelerator.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/utils/pybind.h>

#include "allocators.h"
#include "device.h"
#include "generator.h"
#include "hooks.h"
#include "process_group.h"
#include "violation_error.h"

namespace py = pybind11;
using namespace lowtide;

namespace {

bool is_registered() { return ViolationError::type != nullptr; }

void register_device(py::object violation_error) {
  c10::SetAllocator(kSim, &device_allocator());
  at::setHostAllocator(kSim, &pinned_allocator());
  register_hooks();
  ViolationError::type = violation_error.release().ptr();
}

void configure(size_t memory, double flops, double bandwidth, double h2d, double d2h, double launch, bool raise) {
  Lock lock(device().mutex);
  device().configure({memory, flops, bandwidth, h2d, d2h, launch, raise});
}

py::dict settings() {
  Lock lock(device().mutex);
  const Settings& now = device().settings;
  py::dict values;
  values["memory"] = now.memory;
  values["flops"] = now.flops;
  values["bandwidth"] = now.bandwidth;
  values["h2d"] = now.h2d;
  values["d2h"] = now.d2h;
  values["launch"] = now.launch;
  values["raise_on_violation"] = now.raise;
  return values;
}

py::dict stats() {
  Device& sim = device();
  Lock lock(sim.mutex);
  sim.memory.reap();
  py::dict figures;
  figures["live_bytes"] = sim.memory.device_usage.live;
  figures["peak_bytes"] = sim.memory.device_usage.peak;
  figures["pinned_bytes"] = sim.memory.pinned_usage.live;
  figures["peak_pinned_bytes"] = sim.memory.pinned_usage.peak;
  figures["time"] = sim.streams.latest();
  figures["busy_compute"] = sim.clock.compute.busy();
  figures["busy_h2d"] = sim.clock.h2d.busy();
  figures["busy_d2h"] = sim.clock.d2h.busy();
  figures["kernels"] = sim.counters.kernels;
  figures["copies"] = sim.counters.copies;
  figures["h2d_bytes"] = sim.counters.h2d_bytes;
  figures["d2h_bytes"] = sim.counters.d2h_bytes;
  figures["flops"] = sim.counters.flops;
  figures["ooms"] = sim.counters.ooms;
  return figures;
}

py::list violations() {
  Lock lock(device().mutex);
  py::list records;
  for (const Violation& found : device().violations)
    records.append(py::make_tuple(found.kind, found.op, found.stream, found.other_op, found.other_stream, found.bytes,
                                  found.message));
  return records;
}

bool is_recording() {
  Lock lock(device().mutex);
  return device().timeline.has_value();
}

void start_timeline() {
  Lock lock(device().mutex);
  device().timeline.emplace();
}

py::list stop_timeline() {
  Lock lock(device().mutex);
  py::list spans;
  for (const Span& span : device().timeline.value())
    spans.append(py::make_tuple(span.kind, span.stream, span.begin, span.end, span.pinned));
  device().timeline.reset();
  return spans;
}

void reset() {
  Lock lock(device().mutex);
  device().reset();
}

}  // namespace

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  m.def("register_device", &register_device);
  m.def("is_registered", &is_registered);
  m.def("configure", &configure, py::kw_only(), py::arg("memory"), py::arg("flops"), py::arg("bandwidth"),
        py::arg("h2d"), py::arg("d2h"), py::arg("launch"), py::arg("raise_on_violation"));
  m.def("settings", &settings);
  m.def("stats", &stats);
  m.def("violations", &violations);
  m.def("is_recording", &is_recording);
  m.def("start_timeline", &start_timeline);
  m.def("stop_timeline", &stop_timeline);
  m.def("reset", &reset);
  m.def("stop_autograd_threads", [] { torch::autograd::Engine::get_default_engine().stop(); },
        py::call_guard<py::gil_scoped_release>());
  m.def("stage_through_host", &stage_through_host);
  m.def("default_generator", [] { return default_generator(); });
}
