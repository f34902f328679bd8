#include "streams.h"

#include <algorithm>
#include <utility>

namespace lowtide {

namespace {
thread_local StreamId current_stream = kDefaultStream;
}

void Stream::push(std::function<void()> task) {
  ++submitted_;
  queue_.push_back(std::move(task));
}

void Stream::run_until(uint64_t sequence) {
  while (executed_ < sequence && !queue_.empty()) {
    auto task = std::move(queue_.front());
    queue_.pop_front();
    ++executed_;
    task();
  }
}

StreamId Streams::current() { return current_stream; }

StreamId Streams::exchange_current(StreamId id) { return std::exchange(current_stream, id); }

StreamId Streams::next_from_pool() { return 1 + handed_out_++ % kPoolStreams; }

uint64_t Streams::begin(StreamId id) {
  Stream& stream = streams_.at(id);
  stream.clock.join(host_clock_);
  return stream.clock.advance(id);
}

Marker Streams::mark(StreamId id) {
  Stream& stream = streams_.at(id);
  stream.clock.join(host_clock_);
  return {id, stream.submitted(), stream.clock, std::max(stream.ready, time_.host), time_.epoch};
}

void Streams::wait(StreamId id, const Marker& marker) {
  Stream& stream = streams_.at(id);
  stream.clock.join(marker.clock);
  stream.ready = std::max(stream.ready, time_of(marker));
  if (marker.stream == id || streams_.at(marker.stream).has_run(marker.sequence)) return;
  stream.push([this, source = marker.stream, sequence = marker.sequence] { streams_[source].run_until(sequence); });
}

void Streams::host_wait(const Marker& marker) {
  streams_.at(marker.stream).run_until(marker.sequence);
  time_.host_waits_until(time_of(marker));
  host_clock_.join(marker.clock);
}

bool Streams::reached(const Marker& marker) const { return time_of(marker) <= time_.host; }

double Streams::time_of(const Marker& marker) const { return marker.epoch == time_.epoch ? marker.time : 0; }

double Streams::latest() const {
  double latest = time_.host;
  for (const Stream& stream : streams_) latest = std::max(latest, stream.ready);
  return latest;
}

void Streams::reset_times() {
  for (Stream& stream : streams_) stream.ready = 0;
}

}  // namespace lowtide
