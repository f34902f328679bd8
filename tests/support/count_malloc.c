// Counts what a process asks of the C library: live bytes in large blocks, and their peak. Loaded with LD_PRELOAD.
#define _GNU_SOURCE
#include <dlfcn.h>
#include <malloc.h>
#include <stdatomic.h>
#include <stddef.h>

enum { SMALLEST = 2048 };  // Python's own objects are smaller than any tensor that matters

static _Atomic long live_bytes, peak_bytes;

static void* next(const char* name) { return dlsym(RTLD_NEXT, name); }

static void* taken(void* block) {
  long size = block ? (long)malloc_usable_size(block) : 0;
  if (size < SMALLEST) return block;
  long now = atomic_fetch_add(&live_bytes, size) + size;
  long peak = atomic_load(&peak_bytes);
  while (now > peak && !atomic_compare_exchange_weak(&peak_bytes, &peak, now)) {
  }
  return block;
}

static void given_back(void* block) {
  long size = block ? (long)malloc_usable_size(block) : 0;
  if (size >= SMALLEST) atomic_fetch_sub(&live_bytes, size);
}

void* malloc(size_t size) {
  static void* (*real)(size_t);
  if (!real) real = next("malloc");
  return taken(real(size));
}

void free(void* block) {
  static void (*real)(void*);
  if (!real) real = next("free");
  given_back(block);
  real(block);
}

void* realloc(void* block, size_t size) {
  static void* (*real)(void*, size_t);
  if (!real) real = next("realloc");
  given_back(block);
  return taken(real(block, size));
}

void* memalign(size_t alignment, size_t size) {
  static void* (*real)(size_t, size_t);
  if (!real) real = next("memalign");
  return taken(real(alignment, size));
}

void* aligned_alloc(size_t alignment, size_t size) {
  static void* (*real)(size_t, size_t);
  if (!real) real = next("aligned_alloc");
  return taken(real(alignment, size));
}

int posix_memalign(void** block, size_t alignment, size_t size) {
  static int (*real)(void**, size_t, size_t);
  if (!real) real = next("posix_memalign");
  int failed = real(block, alignment, size);
  if (!failed) taken(*block);
  return failed;
}

long counted_live(void) { return live_bytes; }
long counted_peak(void) { return peak_bytes; }
void forget_peak(void) { peak_bytes = live_bytes; }
