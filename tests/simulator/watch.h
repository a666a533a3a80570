// Between the scheduler (cuda_sim.cpp) and the watcher of memory accesses (watch.cpp).
#pragma once

#include <stddef.h>
#include <stdint.h>

namespace cuda_sim {

// One array that the kernel was given. `owned` has one byte for each of its bytes, 0 where no element lies.
struct Span {
  unsigned char* begin;
  size_t bytes;
  const unsigned char* owned;
  int parameter;
};

struct Launch {
  const Span* spans;
  int span_count;
  bool bounded;  // false: the kernel was given bare addresses, so that nothing is known about bounds
  uint64_t blocks;
  unsigned char *shared, *dynamic;  // the static shared variables end where the dynamic shared memory begins
  size_t shared_bytes, dynamic_bytes;
  const unsigned char *stacks, *stacks_end;
};

const char* watch_launch(const Launch& launch);  // before the first block; null, or the text of an error
void watch_block(uint64_t serial);               // before each block; serials count from 1
void watch_barrier();                            // when a barrier of the block completes
void watch_warp(int warp, unsigned lanes);       // when __syncwarp of these lanes completes
void watch_end();

int current_thread();

}  // namespace cuda_sim
