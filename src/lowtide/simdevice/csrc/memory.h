// Emulated memory: a capped, poisoned device heap and pinned host memory.
//
// What counts against the cap and what the process really holds are two things. Blocks are accounted when they are
// allocated and freed in program order, as a caching allocator does; their backing memory is only poisoned and reused
// once the queued work that may still touch it has run.
#pragma once

#include <cstddef>
#include <map>
#include <memory>
#include <utility>
#include <vector>

#include "race.h"
#include "streams.h"

namespace lowtide {

struct Device;

enum class Kind { device, pinned };

struct Block {
  Kind kind;
  StreamId owner;     // the stream that was current at allocation: a free is ordered on it
  size_t accounted;   // bytes that count: rounded as torch's allocators round them
  size_t size;        // bytes that are there
  bool poolable;      // the backing memory is ours, and can be handed out again
  std::shared_ptr<char> backing;
  AccessHistory history = {};
  std::vector<StreamId> recorded = {};  // streams named by record_stream

  Range range() const { return {backing.get(), backing.get() + size}; }
};

struct Usage {
  size_t live = 0;
  size_t peak = 0;

  void add(size_t bytes);
  void remove(size_t bytes) { live -= bytes; }
  void reset_peak() { peak = live; }
};

// Backing memory that was given back, by size: memory that was touched before is far cheaper than fresh memory.
class BackingPool {
 public:
  std::shared_ptr<char> take(size_t bytes);
  void give(std::shared_ptr<char> backing, size_t bytes, size_t limit);

 private:
  std::map<size_t, std::vector<std::shared_ptr<char>>> spare_;
  size_t held_ = 0;
};

class Memory {
 public:
  explicit Memory(Device& device) : device_(device) {}

  Usage device_usage, pinned_usage;

  // Each returns memory filled with poison: every float in it is NaN.
  char* allocate_device(size_t bytes);
  char* allocate_pinned(size_t bytes);

  // Makes the result of a CPU kernel a device block, without a copy.
  char* adopt(std::shared_ptr<char> backing, size_t bytes);

  void free(void* pointer);
  void record_stream(const void* pointer, StreamId stream);

  // The block that holds an address, or nothing.
  Block* find(const void* address);

  // Gives back deferred blocks whose work is done; with `wait`, all of them.
  void reap(bool wait = false);

  // A use of freed memory was reported: once is enough.
  void settle(const Access& reported);

  // The host has waited for everything: no earlier life of any memory can be in use.
  void forget_previous_lives();

 private:
  struct Deferred {
    Block block;
    std::vector<Marker> until;
  };

  void make_room(size_t bytes);
  char* add(Block block);
  Block take(void* pointer);
  void inherit_previous_lives(Block& block);
  void free_device(Block block);
  void free_pinned(Block block);
  void release(Block block);
  void give_back(const Block& block);

  Device& device_;
  std::map<const char*, Block> blocks_;
  std::vector<Deferred> deferred_;

  // What blocks to come must be ordered after. Memory goes to the next block of the same size and stream. Where another
  // stream was not waited for at the free, any block of the stream that fits may get it, until the stream has waited.
  struct Abandoned {
    Access user;
    size_t bytes;
  };
  std::map<std::pair<StreamId, size_t>, std::vector<AccessHistory>> previous_lives_;
  std::map<StreamId, std::vector<Abandoned>> abandoned_;

  BackingPool device_pool_, pinned_pool_;
};

}  // namespace lowtide
