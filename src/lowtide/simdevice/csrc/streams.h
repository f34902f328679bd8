// Streams and events: queues of work that runs as late as it may.
//
// A real device may run a queued copy at any moment before something waits for it. This one always picks the latest
// moment: a copy sits in its stream's queue until a kernel on that stream, an event that is waited for, or the host
// needs it. A program that forgot a wait therefore reads the poison that the allocator left, every time.
#pragma once

#include <array>
#include <cstdint>
#include <deque>
#include <functional>

#include "clock.h"
#include "vector_clock.h"

namespace lowtide {

// A point in a stream: everything submitted up to here. Events are markers that the user holds.
struct Marker {
  StreamId stream = kDefaultStream;
  uint64_t sequence = 0;  // the last operation included
  VectorClock clock;      // what is ordered before this point
  double time = 0;        // when it is reached, in virtual seconds of `epoch`
  uint64_t epoch = 0;
};

class Stream {
 public:
  VectorClock clock;  // what the next operation on this stream is ordered after
  double ready = 0;   // virtual time at which all submitted work is done

  bool idle() const { return queue_.empty(); }
  uint64_t submitted() const { return submitted_; }
  bool has_run(uint64_t sequence) const { return executed_ >= sequence; }

  void push(std::function<void()> task);
  void run_until(uint64_t sequence);

 private:
  std::deque<std::function<void()>> queue_;
  uint64_t submitted_ = 0;
  uint64_t executed_ = 0;
};

class Streams {
 public:
  explicit Streams(Clock& time) : time_(time) {}

  Stream& operator[](StreamId id) { return streams_.at(id); }

  // The thread's current stream.
  static StreamId current();
  static StreamId exchange_current(StreamId id);

  // Pool streams are handed out in turn.
  StreamId next_from_pool();

  // Starts an operation on `id`: it is ordered after all that the stream and the host have waited for.
  uint64_t begin(StreamId id);

  // Queued work of a stream runs now. The host learns nothing from it.
  void drain(StreamId id) { streams_[id].run_until(streams_[id].submitted()); }

  Marker mark(StreamId id);
  void wait(StreamId id, const Marker& marker);        // the stream waits
  void host_wait(const Marker& marker);                // the host waits
  bool reached(const Marker& marker) const;            // has virtual time passed it?
  double time_of(const Marker& marker) const;          // 0 if it lies before the last reset
  const VectorClock& host_clock() const { return host_clock_; }
  double latest() const;                               // when the whole device is done
  void reset_times();

 private:
  Clock& time_;
  VectorClock host_clock_;  // what the host has waited for
  std::array<Stream, kStreams> streams_;
  StreamId handed_out_ = 0;
};

}  // namespace lowtide
