// The emulated device: one object that owns clock, streams, memory and the violations found so far.
//
// One mutex guards it all. It is held for bookkeeping and for copies between host and device, never while another kernel
// runs and never while Python objects may be destroyed, so it cannot deadlock with the interpreter lock.
#pragma once

#include <mutex>
#include <optional>
#include <vector>

#include "clock.h"
#include "host_watch.h"
#include "memory.h"
#include "race.h"
#include "streams.h"

namespace lowtide {

struct Settings {
  size_t memory = 0;     // bytes
  double flops = 0;      // per second
  double bandwidth = 0;  // device memory, bytes per second
  double h2d = 0;        // link, bytes per second
  double d2h = 0;
  double launch = 0;  // host seconds per kernel or copy
  bool raise = false;
};

struct Counters {
  uint64_t kernels = 0;
  uint64_t copies = 0;
  uint64_t ooms = 0;
  double flops = 0;
  size_t h2d_bytes = 0;
  size_t d2h_bytes = 0;
};

enum class Direction { h2d, d2h };

// A kernel or a copy, as the clock placed it: in virtual seconds.
struct Span {
  const char* kind;  // "kernel", "h2d" or "d2h"
  StreamId stream;
  double begin, end;
  bool pinned;  // a copy from or to pinned memory
};

struct Device {
  std::recursive_mutex mutex;
  Settings settings;
  Counters counters;
  Clock clock;
  Streams streams{clock};
  Memory memory{*this};
  HostWatch watch;
  std::vector<Violation> violations;
  std::optional<std::vector<Span>> timeline;  // while somebody records it

  void configure(const Settings& wanted);

  // Starts an operation on `stream`; raises a violation that could not be raised where it was found.
  uint64_t begin(StreamId stream);

  // Checks an access against what others do with the same bytes, and remembers it.
  void access(const Access& access);

  // Books time for a kernel or a copy.
  void charge_kernel(StreamId stream, double flops, double bytes);
  void charge_copy(StreamId stream, Direction direction, size_t bytes, bool pinned);

  // The host waits; a violation that could not be raised where it was found is raised here at the latest.
  void host_wait(const Marker& marker);
  void synchronize();

  // `report` may throw (on_violation="raise"). `report_later` never does: it is for destructors and signal handlers.
  void report(const Violation& violation);
  void report_later(const Violation& violation);

  void reset();

 private:
  void book(Engine& engine, const char* kind, StreamId stream, double duration, bool pinned);
  void wait_for_all();
  void raise_pending();

  std::optional<Violation> raise_later_;  // found where nothing could be raised
};

using Lock = std::lock_guard<std::recursive_mutex>;

// Never destroyed: tensors may outlive static destruction.
Device& device();

}  // namespace lowtide
