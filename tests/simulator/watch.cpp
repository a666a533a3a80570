// Looks at every memory access of a kernel built with -fsanitize=thread: g++ calls the functions at the end of this
// file before each access, and the launch ends with an error when
//
//   - the access lies in no array that the kernel was given, between its elements, or past the shared memory;
//   - another thread reads or writes the same byte, one of the two writes, and nothing orders them.
//
// What orders two accesses: __syncthreads; __syncwarp for the lanes that it names (shuffles and votes order nothing,
// as in CUDA); between blocks, atomics of both. Two atomics never conflict.
#include "watch.h"

#include <dlfcn.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>

#include "cuda_sim.h"

namespace cuda_sim {
namespace {

enum class Kind : uint8_t { kRead, kWrite, kAtomic };

// One access. block 0: none yet.
struct Access {
  uint32_t block, epoch, time, code;
  uint16_t thread;
  Kind kind;
};

// What is remembered of a byte: the last write, and two reads since, of different warps where possible.
struct Cell {
  Access write, reads[2];
};

constexpr int kMaxSpans = 64;

Launch launch;
Cell* cells[kMaxSpans + 1];  // of each span, and of the shared memory
size_t cell_bytes[kMaxSpans + 1];
bool watching;
uint32_t block, epoch;
uint32_t clocks[32][32]
               [32];     // [warp][lane][other lane]: the newest time of the other that is before the lane's present
unsigned char* atomics;  // one byte for each block: did it use an atomic on global memory?
size_t atomics_bytes;
uintptr_t code_base;

template <class T>
T* zeroed(size_t bytes) {
  void* memory = mmap(nullptr, bytes + 1, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  return memory == MAP_FAILED ? nullptr : static_cast<T*>(memory);
}

bool ordered(const Access& before, int thread, bool shared) {
  if (before.block == 0) return true;
  if (before.block != block) {  // shared memory begins anew with each block
    return shared || (atomics[before.block] && atomics[block]);
  }
  if (before.thread == thread || before.epoch < epoch) return true;
  const int warp = thread / 32;
  return before.thread / 32 == warp && clocks[warp][thread % 32][before.thread % 32] >= before.time;
}

const char* verb(Kind kind) {
  return kind == Kind::kRead ? "read" : kind == Kind::kWrite ? "written" : "changed by an atomic";
}

// "+0x..." is an offset into the library; sim.py turns it into file and line.
[[noreturn]] void report(const char* what, const char* where, const Access& now, const Access* before) {
  static char text[1024];
  int length = snprintf(text, sizeof text, "%s: %s at +0x%x", what, where, now.code);
  if (before != nullptr) {
    const unsigned x = before->thread % blockDim.x, y = before->thread / blockDim.x % blockDim.y,
                   z = before->thread / blockDim.x / blockDim.y;
    length += snprintf(text + length, sizeof text - static_cast<size_t>(length),
                       ", %s here and %s by thread "
                       "(%u, %u, %u) of %s at +0x%x, with nothing to order the two",
                       verb(now.kind), verb(before->kind), x, y, z,
                       before->block == block ? "this block" : "another block", before->code);
  }
  fail(text);
}

void compare(const Access& before, const Access& now, bool shared, const char* where) {
  if (before.kind == Kind::kAtomic && now.kind == Kind::kAtomic) return;
  if (!ordered(before, now.thread, shared)) report("race", where, now, &before);
}

void access(Cell& cell, const Access& now, bool shared, const char* where) {
  compare(cell.write, now, shared, where);
  if (now.kind == Kind::kRead) {
    for (Access& read : cell.reads) {
      if (ordered(read, now.thread, shared)) {
        read = now;
        return;
      }
    }
    if (cell.reads[0].thread / 32 == cell.reads[1].thread / 32) cell.reads[1] = now;
    return;
  }
  for (const Access& read : cell.reads) compare(read, now, shared, where);
  cell.write = now;
  cell.reads[0].block = cell.reads[1].block = 0;
}

void look(const void* pointer, size_t bytes, Kind kind, const void* caller) {
  if (!watching) return;
  auto* const p = static_cast<const unsigned char*>(pointer);
  if (p >= launch.stacks && p < launch.stacks_end) return;
  const int thread = current_thread();
  const Access now = {block,
                      epoch,
                      clocks[thread / 32][thread % 32][thread % 32],
                      static_cast<uint32_t>(reinterpret_cast<uintptr_t>(caller) - code_base),
                      static_cast<uint16_t>(thread),
                      kind};
  char where[128];
  if (p >= launch.shared && p < launch.shared + launch.shared_bytes) {
    const bool dynamic = p >= launch.dynamic;
    const auto offset = static_cast<size_t>(p - (dynamic ? launch.dynamic : launch.shared));
    snprintf(where, sizeof where, "byte %zu of %s shared memory", offset, dynamic ? "dynamic" : "static");
    if (dynamic && offset + bytes > launch.dynamic_bytes) report("out of bounds", where, now, nullptr);
    Cell* const cell = cells[kMaxSpans] + (p - launch.shared);
    for (size_t i = 0; i < bytes; ++i) access(cell[i], now, true, where);
    return;
  }
  if (kind == Kind::kAtomic) atomics[block] = 1;
  for (int s = 0; s < launch.span_count; ++s) {
    const Span& span = launch.spans[s];
    if (p < span.begin || p >= span.begin + span.bytes) continue;
    const auto offset = static_cast<size_t>(p - span.begin);
    snprintf(where, sizeof where, "parameter %d, address %p", span.parameter, pointer);
    for (size_t i = 0; i < bytes; ++i) {
      const bool inside = offset + i < span.bytes && (span.owned == nullptr || span.owned[offset + i]);
      if (!inside) report("out of bounds", where, now, nullptr);
      access(cells[s][offset + i], now, false, where);
    }
    return;
  }
  Dl_info library;
  if (!launch.bounded || dladdr(pointer, &library) != 0) return;  // a constant table of the kernel
  snprintf(where, sizeof where, "address %p, in none of the arrays", pointer);
  report("out of bounds", where, now, nullptr);
}

}  // namespace

const char* watch_launch(const Launch& given) {
  launch = given;
  if (launch.span_count > kMaxSpans) return "too many arrays to watch";
  for (int s = 0; s <= kMaxSpans; ++s) {
    if (s >= launch.span_count && s != kMaxSpans) continue;
    cell_bytes[s] = (s == kMaxSpans ? launch.shared_bytes : launch.spans[s].bytes) * sizeof(Cell);
    cells[s] = zeroed<Cell>(cell_bytes[s]);
    if (cells[s] == nullptr) return "no memory for the watcher";
  }
  atomics_bytes = launch.blocks + 1;
  atomics = zeroed<unsigned char>(atomics_bytes);
  if (atomics == nullptr) return "no memory for the watcher";
  Dl_info library;
  dladdr(reinterpret_cast<const void*>(&watch_launch), &library);
  code_base = reinterpret_cast<uintptr_t>(library.dli_fbase);
  watching = true;
  return nullptr;
}

void watch_block(uint64_t serial) {
  block = static_cast<uint32_t>(serial);
  epoch = 0;
  if (!watching) return;
  memset(clocks, 0, sizeof clocks);
  for (auto& warp : clocks) {
    for (int lane = 0; lane < 32; ++lane) warp[lane][lane] = 1;
  }
}

void watch_barrier() { ++epoch; }

void watch_warp(int warp, unsigned lanes) {
  if (!watching) return;
  uint32_t newest[32] = {};
  for (unsigned rest = lanes; rest != 0; rest &= rest - 1) {
    const uint32_t* clock = clocks[warp][__builtin_ctz(rest)];
    for (int other = 0; other < 32; ++other) newest[other] = max(newest[other], clock[other]);
  }
  for (unsigned rest = lanes; rest != 0; rest &= rest - 1) {
    const int lane = __builtin_ctz(rest);
    memcpy(clocks[warp][lane], newest, sizeof newest);
    ++clocks[warp][lane][lane];
  }
}

void watch_end() {
  if (!watching) return;
  watching = false;
  for (int s = 0; s <= kMaxSpans; ++s) {
    if (cells[s] != nullptr) munmap(cells[s], cell_bytes[s] + 1);
    cells[s] = nullptr;
  }
  munmap(atomics, atomics_bytes + 1);
}

void atomic_access(const void* p, size_t bytes) { look(p, bytes, Kind::kAtomic, __builtin_return_address(0)); }

}  // namespace cuda_sim

// ---- what g++ calls -----------------------------------------------------------------------------------------------

extern "C" void __tsan_init() {}

#define CUDA_SIM_LOOK(bytes)                                                       \
  extern "C" void __tsan_read##bytes(void* p) {                                    \
    cuda_sim::look(p, bytes, cuda_sim::Kind::kRead, __builtin_return_address(0));  \
  }                                                                                \
  extern "C" void __tsan_write##bytes(void* p) {                                   \
    cuda_sim::look(p, bytes, cuda_sim::Kind::kWrite, __builtin_return_address(0)); \
  }                                                                                \
  extern "C" void __tsan_unaligned_read##bytes(void* p) {                          \
    cuda_sim::look(p, bytes, cuda_sim::Kind::kRead, __builtin_return_address(0));  \
  }                                                                                \
  extern "C" void __tsan_unaligned_write##bytes(void* p) {                         \
    cuda_sim::look(p, bytes, cuda_sim::Kind::kWrite, __builtin_return_address(0)); \
  }
CUDA_SIM_LOOK(1)
CUDA_SIM_LOOK(2)
CUDA_SIM_LOOK(4)
CUDA_SIM_LOOK(8)
CUDA_SIM_LOOK(16)
#undef CUDA_SIM_LOOK

extern "C" void __tsan_read_range(void* p, unsigned long bytes) {
  cuda_sim::look(p, bytes, cuda_sim::Kind::kRead, __builtin_return_address(0));
}
extern "C" void __tsan_write_range(void* p, unsigned long bytes) {
  cuda_sim::look(p, bytes, cuda_sim::Kind::kWrite, __builtin_return_address(0));
}
