// The virtual clock: a discrete-event model of one device with three engines (compute, H2D, D2H).
//
// Nothing here looks at the wall clock, so the same program gives the same figures on any machine. Work is placed
// when it is submitted: it starts once its stream is free, the host has submitted it and its engine has a gap that is
// long enough. Each engine does one thing at a time.
#pragma once

#include <cstdint>
#include <map>

namespace lowtide {

class Engine {
 public:
  // Books the earliest gap of `duration` that starts at or after `ready`, and returns when it ends.
  double reserve(double ready, double duration);

  // Drops bookings that end at or before `now`: nothing can be placed before the host's present any more.
  void forget_before(double now);

  double busy() const { return busy_; }
  void reset();

 private:
  std::map<double, double> slots_;  // start -> end; disjoint, touching slots merged
  double busy_ = 0;
};

struct Clock {
  Engine compute, h2d, d2h;
  double host = 0;     // when the host thread is, in virtual seconds
  uint64_t epoch = 0;  // counts resets: a time from an earlier epoch lies in the past

  // The host spends `seconds`, e.g. on launching a kernel.
  void host_spends(double seconds) { host_waits_until(host + seconds); }
  void host_waits_until(double time);
  void reset();
};

}  // namespace lowtide
