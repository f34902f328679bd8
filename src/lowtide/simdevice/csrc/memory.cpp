#include "memory.h"

#include <c10/util/Exception.h>
#include <sys/mman.h>

#include <bit>
#include <cstdlib>
#include <cstring>

#include "device.h"

namespace lowtide {

namespace {

constexpr int kPoison = 0xFF;              // NaN in every floating-point format, -1 in every integer
constexpr size_t kDeviceGranularity = 512;  // CUDA's caching allocator rounds to this
constexpr size_t kPage = 4096;

// Whether a caching allocator could serve a request from a free block. CUDA's keeps small blocks in a pool of their own.
bool could_hold(size_t free_bytes, size_t wanted) {
  constexpr size_t kSmall = 1 << 20;
  return (free_bytes <= kSmall) == (wanted <= kSmall) && wanted <= free_bytes;
}

size_t round_up(size_t bytes, size_t multiple) { return (bytes + multiple - 1) / multiple * multiple; }

std::shared_ptr<char> heap_memory(size_t bytes) {
  void* memory = std::aligned_alloc(kDeviceGranularity, bytes);
  TORCH_CHECK(memory, "sim: the machine itself is out of memory for a device block of ", bytes, " bytes");
  return {static_cast<char*>(memory), [](char* data) { std::free(data); }};
}

// Pinned memory has pages of its own, so that HostWatch can protect them.
std::shared_ptr<char> mapped_memory(size_t bytes) {
  void* memory = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  TORCH_CHECK(memory != MAP_FAILED, "sim: mmap of ", bytes, " bytes of pinned memory failed: ", std::strerror(errno));
  return {static_cast<char*>(memory), [bytes](char* data) { munmap(data, bytes); }};
}

void poison(const Block& block) { std::memset(block.backing.get(), kPoison, block.size); }

}  // namespace

void Usage::add(size_t bytes) {
  live += bytes;
  peak = std::max(peak, live);
}

std::shared_ptr<char> BackingPool::take(size_t bytes) {
  auto& spare = spare_[bytes];
  if (spare.empty()) return nullptr;
  auto backing = std::move(spare.back());
  spare.pop_back();
  held_ -= bytes;
  return backing;
}

void BackingPool::give(std::shared_ptr<char> backing, size_t bytes, size_t limit) {
  if (held_ + bytes > limit) return;
  held_ += bytes;
  spare_[bytes].push_back(std::move(backing));
}

void Memory::make_room(size_t bytes) {
  const size_t capacity = device_.settings.memory;
  reap();
  if (device_usage.live + bytes > capacity) reap(/*wait=*/true);
  if (device_usage.live + bytes <= capacity) return;
  ++device_.counters.ooms;
  TORCH_CHECK_WITH(OutOfMemoryError, false, "sim out of memory: tried to allocate ", bytes, " bytes, ",
                   device_usage.live, " bytes are in use, the capacity is ", capacity, " bytes");
}

char* Memory::add(Block block) {
  char* data = block.backing.get();
  if (block.kind == Kind::device) {
    device_usage.add(block.accounted);
    inherit_previous_lives(block);
  } else {
    pinned_usage.add(block.accounted);
  }
  bool inserted = blocks_.emplace(data, std::move(block)).second;
  TORCH_INTERNAL_ASSERT(inserted, "sim: two blocks at one address");
  return data;
}

void Memory::inherit_previous_lives(Block& block) {
  auto lives = previous_lives_.find({block.owner, block.accounted});
  if (lives != previous_lives_.end() && !lives->second.empty()) {
    for (const Access& access : lives->second.back().accesses()) block.history.inherit(access, block.range());
    lives->second.pop_back();
  }
  VectorClock now = device_.streams[block.owner].clock;
  now.join(device_.streams.host_clock());
  auto& abandoned = abandoned_[block.owner];
  std::erase_if(abandoned, [&](const Abandoned& left) { return now.covers(left.user.stream, left.user.tick); });
  for (const Abandoned& left : abandoned)
    if (could_hold(left.bytes, block.accounted)) block.history.inherit(left.user, block.range());
}

void Memory::settle(const Access& reported) {
  for (auto& [owner, abandoned] : abandoned_)
    std::erase_if(abandoned, [&](const Abandoned& left) {
      return left.user.stream == reported.stream && left.user.tick == reported.tick;
    });
}

void Memory::forget_previous_lives() {
  previous_lives_.clear();
  abandoned_.clear();
}

char* Memory::allocate_device(size_t bytes) {
  const size_t size = round_up(bytes, kDeviceGranularity);
  make_room(size);
  auto backing = device_pool_.take(size);
  if (!backing) backing = heap_memory(size);
  Block block{Kind::device, Streams::current(), size, size, /*poolable=*/true, std::move(backing)};
  poison(block);
  return add(std::move(block));
}

char* Memory::adopt(std::shared_ptr<char> backing, size_t bytes) {
  const size_t size = round_up(bytes, kDeviceGranularity);
  make_room(size);
  return add({Kind::device, Streams::current(), size, bytes, /*poolable=*/false, std::move(backing)});
}

char* Memory::allocate_pinned(size_t bytes) {
  reap();
  const size_t accounted = std::bit_ceil(bytes);  // as torch's caching host allocator does
  const size_t size = round_up(bytes, kPage);
  auto backing = pinned_pool_.take(size);
  if (!backing) backing = mapped_memory(size);
  Block block{Kind::pinned, Streams::current(), accounted, size, /*poolable=*/true, std::move(backing)};
  poison(block);
  return add(std::move(block));
}

Block* Memory::find(const void* address) {
  auto after = blocks_.upper_bound(static_cast<const char*>(address));
  if (after == blocks_.begin()) return nullptr;
  Block& block = std::prev(after)->second;
  return address < block.range().end ? &block : nullptr;
}

void Memory::record_stream(const void* pointer, StreamId stream) {
  Block* block = find(pointer);
  if (block && stream != block->owner) block->recorded.push_back(stream);
}

Block Memory::take(void* pointer) {
  auto found = blocks_.find(static_cast<const char*>(pointer));
  TORCH_INTERNAL_ASSERT(found != blocks_.end(), "sim: free of an unknown pointer");
  Block block = std::move(found->second);
  blocks_.erase(found);
  return block;
}

void Memory::free(void* pointer) {
  Block block = take(pointer);
  if (block.kind == Kind::device) {
    free_device(std::move(block));
  } else {
    free_pinned(std::move(block));
  }
}

void Memory::free_device(Block block) {
  VectorClock now = device_.streams[block.owner].clock;
  now.join(device_.streams.host_clock());

  std::vector<Marker> until;
  std::vector<Access> abandoned;
  for (const Access& user : block.history.accesses()) {
    if (now.covers(user.stream, user.tick)) continue;
    if (std::count(block.recorded.begin(), block.recorded.end(), user.stream)) {
      until.push_back(device_.streams.mark(user.stream));
    } else if (device_.streams[user.stream].has_run(user.queued)) {
      abandoned.push_back(user);
    } else {
      device_.report_later(use_after_free(user, block.owner, block.accounted));
      device_usage.remove(block.accounted);
      give_back(block);  // poisoned under the hands of its user, which then sees NaN
      return;
    }
  }
  for (const Access& user : abandoned) {
    block.history.forget(user.stream);
    abandoned_[block.owner].push_back({user, block.accounted});
  }
  if (until.empty()) {
    release(std::move(block));
  } else {
    deferred_.push_back({std::move(block), std::move(until)});
  }
}

void Memory::free_pinned(Block block) {
  std::vector<Marker> until;
  for (const Access& user : block.history.accesses())
    if (!device_.streams.host_clock().covers(user.stream, user.tick)) until.push_back(device_.streams.mark(user.stream));
  if (until.empty()) {
    release(std::move(block));
  } else {
    deferred_.push_back({std::move(block), std::move(until)});
  }
}

void Memory::release(Block block) {
  if (block.kind == Kind::pinned) {
    pinned_usage.remove(block.accounted);
    device_.watch.forget(block.range());
    give_back(block);
    return;
  }
  device_usage.remove(block.accounted);
  if (block.history.first_unordered(device_.streams.host_clock()))
    previous_lives_[{block.owner, block.accounted}].push_back(std::move(block.history));
  Stream& owner = device_.streams[block.owner];
  if (owner.idle()) {
    give_back(block);
  } else {
    owner.push([this, block = std::move(block)] { give_back(block); });
  }
}

void Memory::give_back(const Block& block) {
  poison(block);
  if (!block.poolable) return;
  auto& pool = block.kind == Kind::device ? device_pool_ : pinned_pool_;
  pool.give(block.backing, block.size, device_.settings.memory);
}

void Memory::reap(bool wait) {
  std::vector<Deferred> waiting = std::exchange(deferred_, {});
  for (Deferred& entry : waiting) {
    bool done = true;
    for (const Marker& marker : entry.until) {
      if (wait) device_.clock.host_waits_until(device_.streams.time_of(marker));
      done = done && device_.streams.reached(marker);
    }
    if (!done) {
      deferred_.push_back(std::move(entry));
      continue;
    }
    for (const Marker& marker : entry.until) {
      device_.streams[marker.stream].run_until(marker.sequence);
      entry.block.history.forget(marker.stream);
    }
    release(std::move(entry.block));
  }
}

}  // namespace lowtide
