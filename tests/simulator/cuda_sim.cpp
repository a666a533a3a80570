// The scheduler behind cuda_sim.h: one fiber per CUDA thread, blocks one after the other, all on one CPU thread.
//
// A fiber runs until it reaches a scheduling point (barrier, vote, shuffle) or returns. Which fiber comes next is the
// schedule: a kernel that lacks a barrier gives another result, or reads poison, under one of them.
#include "cuda_sim.h"

#include <link.h>
#include <pthread.h>
#include <setjmp.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/time.h>
#if !defined(__x86_64__)
#include <ucontext.h>
#endif

#include "watch.h"

uint3 threadIdx, blockIdx;
dim3 blockDim, gridDim;

// Defined in the assembly that sim.py generates: one segment that every `extern __shared__` name points at.
extern "C" thread_local unsigned char cuda_sim_dynamic[];
// Defined beside the kernel.
extern "C" void cuda_sim_entry(void** params);

namespace cuda_sim {
namespace {

constexpr int kMaxThreads = 1024;
constexpr int kWarps = kMaxThreads / 32;
constexpr size_t kStackBytes = 128 * 1024;  // the lowest page is a guard
constexpr size_t kPage = 4096;
constexpr int kMaxDynamic = CUDA_SIM_DYNAMIC_BYTES;
constexpr int kMostTurns = 1000;
constexpr int kDynamicGuard = CUDA_SIM_GUARD_BYTES;
constexpr uint16_t kPoison = 0xffa5;  // NaN as bfloat16 and float16, and as float32 when repeated
constexpr unsigned long long kPoisonBits = 0xffa5ffa5ffa5ffa5ull;

enum class Schedule : int { kForward, kReverse, kShuffled, kRandom, kGreedy };
enum class State : unsigned char { kReady, kWarp, kBarrier, kDone };

// Bytes that the grid before this one writes: what they are before it has ended, and afterwards.
struct Written {
  unsigned char* at;
  const unsigned char *earlier, *real;
  size_t bytes;
};

struct Fiber {
#if defined(__x86_64__)
  void* stack_pointer;
#else
  ucontext_t context;
#endif
  uint3 thread;
  unsigned mask;
  WarpOp op;
  int source;
  int predicate;
  Place place;
  unsigned long long value, result;
};

Fiber fibers[kMaxThreads];
State states[kMaxThreads];
unsigned live[kWarps];     // lanes that have not returned
unsigned waiting[kWarps];  // lanes at a warp operation
unsigned char* stacks;
int threads, current, running, at_barrier, barrier_count;
bool failed;
unsigned long long progress;  // grows whenever a fiber becomes ready
char message[4096];
char reason[3072];
void** entry_params;
sigjmp_buf escape;
pthread_t launcher;
uint64_t random_state;
const Written* written;
int written_count;
bool previous_ended;
bool at_wait[kMaxThreads];  // it has called previous_grid_ends

// ---- switching ----------------------------------------------------------------------------------------------------

#if defined(__x86_64__)
void* scheduler_pointer;

// Saves the callee-saved registers on the old stack and takes them from the new one.
extern "C" void cuda_sim_switch(void** save, void* load);
asm(R"(
    .text
    .p2align 4
    .type cuda_sim_switch, @function
cuda_sim_switch:
    pushq %rbp
    pushq %rbx
    pushq %r12
    pushq %r13
    pushq %r14
    pushq %r15
    movq %rsp, (%rdi)
    movq %rsi, %rsp
    popq %r15
    popq %r14
    popq %r13
    popq %r12
    popq %rbx
    popq %rbp
    popq %rcx
    jmpq *%rcx
    .size cuda_sim_switch, .-cuda_sim_switch
)");

inline void to_scheduler() { cuda_sim_switch(&fibers[current].stack_pointer, scheduler_pointer); }
inline void to_fiber(int index) { cuda_sim_switch(&scheduler_pointer, fibers[index].stack_pointer); }
#else
ucontext_t scheduler_context;

inline void to_scheduler() { swapcontext(&fibers[current].context, &scheduler_context); }
inline void to_fiber(int index) { swapcontext(&scheduler_context, &fibers[index].context); }
#endif

uint64_t next_random() {  // splitmix64
  uint64_t z = (random_state += 0x9e3779b97f4a7c15ull);
  z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9ull;
  z = (z ^ (z >> 27)) * 0x94d049bb133111ebull;
  return z ^ (z >> 31);
}

void shuffle_order(int* order, int count) {
  for (int i = count - 1; i > 0; --i) {
    const int j = static_cast<int>(next_random() % static_cast<uint64_t>(i + 1));
    const int swapped = order[i];
    order[i] = order[j];
    order[j] = swapped;
  }
}

void poison(void* begin, size_t bytes) {
  auto* p = static_cast<unsigned char*>(begin);
  for (size_t i = 0; i < bytes; ++i) p[i] = static_cast<unsigned char>(kPoison >> (i % 2 ? 8 : 0));
}

// ---- the grid before this one -------------------------------------------------------------------------------------

void set_previous(bool ended) {
  if (ended == previous_ended) return;
  for (const Written* w = written; w < written + written_count; ++w)
    memcpy(w->at, ended ? w->real : w->earlier, w->bytes);
  previous_ended = ended || written_count == 0;
}

// ---- completing barriers and warp operations ----------------------------------------------------------------------

void make_ready(int index) {
  states[index] = State::kReady;
  ++progress;
}

bool same_place(const Place& a, const Place& b) { return a.line == b.line && strcmp(a.file, b.file) == 0; }

// Called when a thread arrives or returns: threads that have returned are no longer waited for, as on a GPU.
void try_barrier() {
  if (at_barrier == 0 || at_barrier != running) return;
  barrier_count = 0;
  int previous = -1;
  for (int i = 0; i < threads; ++i) {
    if (states[i] != State::kBarrier) continue;
    barrier_count += fibers[i].predicate != 0;
    // Warps may meet from different places of the code, the lanes of one warp may not.
    if (previous >= 0 && previous / 32 == i / 32 && !same_place(fibers[previous].place, fibers[i].place)) {
      snprintf(reason, sizeof reason,
               "lanes of one warp meet at different barriers: thread %d at %s:%d, thread %d "
               "at %s:%d",
               previous, fibers[previous].place.file, fibers[previous].place.line, i, fibers[i].place.file,
               fibers[i].place.line);
      failed = true;
      return;
    }
    previous = i;
  }
  at_barrier = 0;
  watch_barrier();
  for (int i = 0; i < threads; ++i) {
    if (states[i] != State::kBarrier) continue;
    fibers[i].result = static_cast<unsigned long long>(barrier_count);
    make_ready(i);
  }
}

// Completes the operation of `mask` in that warp once every live lane of the mask waits with the same mask.
void try_warp(int warp, unsigned mask) {
  const unsigned need = mask & live[warp];
  if (need == 0 || (waiting[warp] & need) != need) return;
  Fiber* const lanes = fibers + warp * 32;
  const Fiber& first = lanes[__builtin_ctz(need)];
  unsigned ballot = 0;
  for (unsigned rest = need; rest != 0; rest &= rest - 1) {
    const Fiber& fiber = lanes[__builtin_ctz(rest)];
    if (fiber.mask != mask) return;
    if (fiber.value != 0) ballot |= rest & -rest;
  }
  for (unsigned rest = need; rest != 0; rest &= rest - 1) {
    const int lane = __builtin_ctz(rest);
    Fiber& fiber = lanes[lane];
    if (fiber.op != first.op) {
      snprintf(reason, sizeof reason,
               "lanes of one warp meet at different operations: lane %d at %s:%d, lane %d "
               "at %s:%d",
               static_cast<int>(&first - lanes), first.place.file, first.place.line, lane, fiber.place.file,
               fiber.place.line);
      failed = true;
      return;
    }
    if (fiber.op == WarpOp::kBallot) fiber.result = ballot;
    if (fiber.op == WarpOp::kShuffle) {  // a lane outside the mask, or gone, gives poison
      const bool given = need >> (fiber.source & 31) & 1u;
      fiber.result = given ? lanes[fiber.source & 31].value : kPoisonBits;
    }
    make_ready(warp * 32 + lane);
  }
  waiting[warp] &= ~need;
  if (first.op == WarpOp::kSync) watch_warp(warp, need);
}

[[noreturn]] void fiber_main() {
  cuda_sim_entry(entry_params);
  const int warp = current / 32;
  states[current] = State::kDone;
  ++progress;
  --running;
  live[warp] &= ~(1u << current % 32);
  for (unsigned rest = waiting[warp]; rest != 0; rest &= rest - 1) {
    if (waiting[warp] & rest & -rest) try_warp(warp, fibers[warp * 32 + __builtin_ctz(rest)].mask);
  }
  try_barrier();
  to_scheduler();
  __builtin_unreachable();
}

void start_fiber(int index) {
  // Tops differ by a few cache lines: equal ones would all fall into the same sets of the CPU's first cache.
  unsigned char* const top = stacks + (index + 1) * kStackBytes - index % 32 * 128;
#if defined(__x86_64__)
  void** frame = reinterpret_cast<void**>(top);
  *--frame = nullptr;  // where fiber_main would return to
  *--frame = reinterpret_cast<void*>(&fiber_main);
  for (int saved = 0; saved < 6; ++saved) *--frame = nullptr;
  fibers[index].stack_pointer = frame;
#else
  ucontext_t& context = fibers[index].context;
  getcontext(&context);
  context.uc_stack.ss_sp = stacks + index * kStackBytes + kPage;
  context.uc_stack.ss_size = static_cast<size_t>(top - (stacks + index * kStackBytes + kPage));
  context.uc_link = nullptr;
  makecontext(&context, reinterpret_cast<void (*)()>(&fiber_main), 0);
#endif
}

// ---- one block ----------------------------------------------------------------------------------------------------

inline void resume(int index) {
  if (states[index] != State::kReady) return;
  current = index;
  threadIdx = fibers[index].thread;
  to_fiber(index);
}

void describe_deadlock() {
  int left = snprintf(reason, sizeof reason, "deadlock: no thread of the block can go on (%d of %d have returned)",
                      threads - running, threads);
  int shown = 0;
  for (int i = 0; i < threads && shown < 8; ++i) {
    if (states[i] == State::kDone) continue;
    const Fiber& fiber = fibers[i];
    // Neighbours that wait at the same place tell nothing new.
    if (shown > 0 && i > 0 && states[i - 1] == states[i] && same_place(fibers[i - 1].place, fiber.place)) continue;
    ++shown;
    left += snprintf(reason + left, sizeof reason - static_cast<size_t>(left), "\n  thread (%u, %u, %u) waits at %s:%d",
                     fiber.thread.x, fiber.thread.y, fiber.thread.z, fiber.place.file, fiber.place.line);
    if (left > static_cast<int>(sizeof reason) - 512) break;
    if (states[i] == State::kWarp) {
      left += snprintf(reason + left, sizeof reason - static_cast<size_t>(left), " with mask 0x%08x", fiber.mask);
    } else {
      left += snprintf(reason + left, sizeof reason - static_cast<size_t>(left), " for the block");
    }
  }
}

// Runs the block to its end; false when it failed.
bool run_block(Schedule schedule) {
  static int order[kMaxThreads];
  const int warps = (threads + 31) / 32;
  running = threads;
  at_barrier = 0;
  for (int w = 0; w < warps; ++w) {
    waiting[w] = 0;
    live[w] = threads - w * 32 >= 32 ? 0xffffffffu : (1u << (threads - w * 32)) - 1u;
  }
  for (int i = 0; i < threads; ++i) {
    const auto index = static_cast<unsigned>(i);
    fibers[i].thread = {index % blockDim.x, index / blockDim.x % blockDim.y, index / blockDim.x / blockDim.y};
    states[i] = State::kReady;
    at_wait[i] = false;
    start_fiber(i);
    order[i] = schedule == Schedule::kReverse ? threads - 1 - i : i;
  }
  if (schedule == Schedule::kShuffled || schedule == Schedule::kRandom) shuffle_order(order, threads);
  if (schedule == Schedule::kGreedy) {  // warps in random order, and random order inside each
    int warp_order[kWarps];
    for (int w = 0; w < warps; ++w) warp_order[w] = w;
    shuffle_order(warp_order, warps);
    for (int w = 0, at = 0; w < warps; ++w) {
      const int begin = at;
      for (int i = warp_order[w] * 32; i < threads && i < warp_order[w] * 32 + 32; ++i) order[at++] = i;
      shuffle_order(order + begin, at - begin);
    }
  }
  while (running > 0) {
    const unsigned long long before = progress;
    const int running_before = running;
    if (schedule == Schedule::kGreedy) {
      // One warp runs as far as it can before the next one moves at all.
      for (int begin = 0; begin < threads;) {
        int end = begin + 1;
        while (end < threads && order[end] / 32 == order[begin] / 32) ++end;
        unsigned long long seen;
        do {
          seen = progress;
          for (int i = begin; i < end; ++i) {
            resume(order[i]);
            if (failed) return false;
          }
        } while (seen != progress);
        begin = end;
      }
    } else {
      if (schedule == Schedule::kRandom) shuffle_order(order, threads);
      for (int i = 0; i < threads; ++i) {
        resume(order[i]);
        if (failed) return false;
      }
    }
    if (progress == before && running == running_before) {
      bool ready = false;
      for (int i = 0; i < threads; ++i) ready |= states[i] == State::kReady;
      if (ready) continue;
      describe_deadlock();
      failed = true;
      return false;
    }
  }
  return true;
}

// ---- faults -------------------------------------------------------------------------------------------------------

const int kSignals[] = {SIGSEGV, SIGBUS, SIGFPE, SIGILL, SIGVTALRM};
constexpr int kSignalCount = sizeof kSignals / sizeof kSignals[0];

void on_signal(int signal, siginfo_t* info, void*) {
  if (!pthread_equal(pthread_self(), launcher)) {
    if (signal == SIGVTALRM) {
      pthread_kill(launcher, SIGVTALRM);
      return;
    }
    ::signal(signal, SIG_DFL);
    raise(signal);
    return;
  }
  const auto* address = static_cast<unsigned char*>(info->si_addr);
  if (signal == SIGVTALRM) {
    snprintf(reason, sizeof reason, "the launch ran longer than its time limit");
  } else if (signal == SIGFPE) {
    snprintf(reason, sizeof reason, "division by zero");
  } else if (signal == SIGILL) {
    snprintf(reason, sizeof reason, "the kernel reached code that cannot be reached");
  } else if (address >= stacks && address < stacks + kMaxThreads * kStackBytes) {
    snprintf(reason, sizeof reason, "a thread used more than %zu bytes of stack", kStackBytes - kPage);
  } else if (address == nullptr) {
    snprintf(reason, sizeof reason, "access through a null pointer, or a misaligned vector access");
  } else {
    snprintf(reason, sizeof reason, "access to address %p, which is not mapped", info->si_addr);
  }
  siglongjmp(escape, 1);
}

struct Segment {
  unsigned char* begin;
  size_t bytes;
};

// The thread-local segment of this library holds the static shared variables and the dynamic shared memory.
int find_segment(dl_phdr_info* info, size_t, void* data) {
  auto* segment = static_cast<Segment*>(data);
  auto* begin = static_cast<unsigned char*>(info->dlpi_tls_data);
  for (int i = 0; i < info->dlpi_phnum; ++i) {
    const auto& header = info->dlpi_phdr[i];
    if (header.p_type != PT_TLS || begin == nullptr) continue;
    if (cuda_sim_dynamic < begin || cuda_sim_dynamic >= begin + header.p_memsz) continue;
    *segment = {begin, header.p_memsz};
    return 1;
  }
  return 0;
}

}  // namespace

// ---- what kernels call --------------------------------------------------------------------------------------------

// Not before every other thread that can go on has come here: on a GPU the lanes of a warp read the same, before or
// after. One that only waits for a value in memory can go on for ever: hence a limit.
void previous_grid_ends() {
  at_wait[current] = true;
  for (int turns = 0; !previous_ended; ++turns) {
    bool others = false;
    for (int i = 0; i < threads && !others; ++i) others = states[i] == State::kReady && !at_wait[i];
    if (!others || turns == kMostTurns) {
      set_previous(true);
    } else {
      to_scheduler();
    }
  }
}

int lane() { return current % 32; }
int current_thread() { return current; }
unsigned live_lanes() { return live[current / 32]; }

void fail(const char* text) {
  snprintf(reason, sizeof reason, "%s", text);
  failed = true;
  to_scheduler();
  __builtin_unreachable();
}

unsigned long long warp_collective(WarpOp op, unsigned mask, unsigned long long value, int source, Place place) {
  Fiber& fiber = fibers[current];
  const int warp = current / 32;
  fiber.op = op;
  fiber.mask = mask;
  fiber.value = value;
  fiber.source = source;
  fiber.place = place;
  if (!(mask >> current % 32 & 1u)) {
    char text[512];
    snprintf(text, sizeof text, "%s:%d: the mask 0x%08x does not name the calling lane %d", place.file, place.line,
             mask, current % 32);
    fail(text);
  }
  states[current] = State::kWarp;
  waiting[warp] |= 1u << current % 32;
  try_warp(warp, mask);
  to_scheduler();
  return fiber.result;
}

void yield() { to_scheduler(); }

int block_barrier(int predicate, Place place) {
  Fiber& fiber = fibers[current];
  fiber.predicate = predicate;
  fiber.place = place;
  states[current] = State::kBarrier;
  ++at_barrier;
  try_barrier();
  to_scheduler();
  return static_cast<int>(fiber.result);
}

namespace {

// Runs the grid; false with `reason` filled when a block failed.
bool run_grid(int smem, uint64_t seed, Schedule schedule, const Segment& segment) {
  const uint64_t blocks = static_cast<uint64_t>(gridDim.x) * gridDim.y * gridDim.z;
  // Blocks may run in any order, so they do: a step of the grid that has no common divisor with it.
  uint64_t step = 1, first = 0;
  if (schedule == Schedule::kReverse) {
    first = blocks - 1;
    step = blocks - 1;
  } else if (schedule != Schedule::kForward && blocks > 2) {
    random_state = seed;
    first = next_random() % blocks;
    for (step = next_random() % blocks;; step = (step + 1) % blocks) {
      uint64_t a = step, b = blocks;
      while (b != 0) {
        const uint64_t r = a % b;
        a = b;
        b = r;
      }
      if (a == 1) break;
    }
  }
  unsigned char* const dynamic = cuda_sim_dynamic;
  for (uint64_t done = 0, block = first; done < blocks; ++done, block = (block + step) % blocks) {
    blockIdx = {static_cast<unsigned>(block % gridDim.x), static_cast<unsigned>(block / gridDim.x % gridDim.y),
                static_cast<unsigned>(block / gridDim.x / gridDim.y)};
    random_state = seed * 0x100000001b3ull + block;
    poison(segment.begin, static_cast<size_t>(dynamic - segment.begin));
    unsigned char* const after = dynamic + kMaxDynamic + kDynamicGuard;
    poison(after, static_cast<size_t>(segment.begin + segment.bytes - after));
    poison(dynamic, static_cast<size_t>(smem + kDynamicGuard));
    watch_block(done + 1);
    set_previous(false);
    if (!run_block(schedule)) return false;
    for (int i = 0; i < kDynamicGuard; ++i) {
      const auto clean = static_cast<unsigned char>(kPoison >> ((smem + i) % 2 ? 8 : 0));
      if (dynamic[smem + i] == clean) continue;
      snprintf(reason, sizeof reason, "write past the end of dynamic shared memory: byte %d of %d", smem + i, smem);
      return false;
    }
  }
  return true;
}

}  // namespace
}  // namespace cuda_sim

// One set of stacks serves every library of the process: their guard pages would exhaust its map entries otherwise.
extern "C" __attribute__((visibility("default"))) unsigned char* cuda_sim_make_stacks() {
  using namespace cuda_sim;
  void* memory = mmap(nullptr, kMaxThreads * kStackBytes, PROT_READ | PROT_WRITE,
                      MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (memory == MAP_FAILED) return nullptr;
  auto* const made = static_cast<unsigned char*>(memory);
  for (int i = 0; i < kMaxThreads; ++i) mprotect(made + i * kStackBytes, kPage, PROT_NONE);
  return made;
}

// Returns null, or the text of the error. span_count < 0: accesses are not watched.
extern "C" __attribute__((visibility("default"))) const char* cuda_sim_launch(
    const unsigned* grid, const unsigned* block, int smem, void** params, unsigned long long seed, int schedule,
    double seconds, unsigned char* given_stacks, const cuda_sim::Span* spans, int span_count, int bounded,
    const cuda_sim::Written* given_written, int given_written_count) {
  using namespace cuda_sim;
  stacks = given_stacks;
  gridDim = dim3(grid[0], grid[1], grid[2]);
  blockDim = dim3(block[0], block[1], block[2]);
  threads = static_cast<int>(block[0] * block[1] * block[2]);
  entry_params = params;
  launcher = pthread_self();
  failed = false;
  current = 0;
  written = given_written;
  written_count = given_written_count;
  previous_ended = true;
  cuda_sim_dynamic[0] = 0;  // makes the loader allocate the segment
  Segment segment = {nullptr, 0};
  dl_iterate_phdr(find_segment, &segment);
  if (segment.begin == nullptr) return "the thread-local segment was not found";
  const auto fixed = static_cast<int>(segment.bytes) - kMaxDynamic - kDynamicGuard;
  if (smem < 0 || smem > kMaxDynamic - fixed) {
    snprintf(message, sizeof message, "%d bytes of dynamic shared memory: at most %d beside %d static ones", smem,
             kMaxDynamic - fixed, fixed);
    return message;
  }
  if (span_count >= 0) {
    const char* const error = watch_launch(
        {spans, span_count, bounded != 0, static_cast<uint64_t>(grid[0]) * grid[1] * grid[2], segment.begin,
         cuda_sim_dynamic, segment.bytes, static_cast<size_t>(smem), stacks, stacks + kMaxThreads * kStackBytes});
    if (error != nullptr) return error;
  }

  static unsigned char signal_stack[64 * 1024];
  stack_t alternate = {}, old_alternate = {};
  alternate.ss_sp = signal_stack;
  alternate.ss_size = sizeof signal_stack;
  sigaltstack(&alternate, &old_alternate);
  struct sigaction action = {}, old_actions[kSignalCount];
  action.sa_sigaction = on_signal;
  action.sa_flags = SA_SIGINFO | SA_ONSTACK;
  sigemptyset(&action.sa_mask);
  for (int i = 0; i < kSignalCount; ++i) sigaction(kSignals[i], &action, &old_actions[i]);
  itimerval limit = {}, old_limit = {};
  limit.it_value.tv_sec = static_cast<time_t>(seconds);
  limit.it_value.tv_usec = static_cast<suseconds_t>((seconds - static_cast<double>(limit.it_value.tv_sec)) * 1e6);
  setitimer(ITIMER_VIRTUAL, &limit, &old_limit);

  bool ok = false;
  if (sigsetjmp(escape, 1) == 0) {
    ok = run_grid(smem, seed, static_cast<Schedule>(schedule), segment);
  }

  previous_ended = false;  // whatever it was: the launch may have ended in the middle of a change
  set_previous(true);
  watch_end();
  setitimer(ITIMER_VIRTUAL, &old_limit, nullptr);
  for (int i = 0; i < kSignalCount; ++i) sigaction(kSignals[i], &old_actions[i], nullptr);
  sigaltstack(&old_alternate, nullptr);
  if (ok) return nullptr;
  snprintf(message, sizeof message, "block (%u, %u, %u) thread (%u, %u, %u): %s", blockIdx.x, blockIdx.y, blockIdx.z,
           threadIdx.x, threadIdx.y, threadIdx.z, reason);
  return message;
}

// ---- the undefined-behaviour checks of g++ ------------------------------------------------------------------------
// A kernel built with -fsanitize=undefined calls these. The real run-time library would end the process; here the
// launch ends with an error. Every record begins with the place in the source.

namespace {
struct SourceLocation {
  const char* file;
  uint32_t line, column;
};
[[noreturn]] void undefined_behaviour(const void* record, const char* what) {
  const auto* place = static_cast<const SourceLocation*>(record);
  char text[1024];
  snprintf(text, sizeof text, "%s:%u:%u: %s", place->file, place->line, place->column, what);
  cuda_sim::fail(text);
}
struct TypeMismatch {
  SourceLocation place;
  const void* type;
  unsigned char log2_alignment, access;
};
}  // namespace

#define CUDA_SIM_CHECK(name, what)                                                           \
  extern "C" void __ubsan_handle_##name(void* record) { undefined_behaviour(record, what); } \
  extern "C" void __ubsan_handle_##name##_abort(void* record) { undefined_behaviour(record, what); }
CUDA_SIM_CHECK(add_overflow, "signed overflow in an addition")
CUDA_SIM_CHECK(sub_overflow, "signed overflow in a subtraction")
CUDA_SIM_CHECK(mul_overflow, "signed overflow in a multiplication")
CUDA_SIM_CHECK(negate_overflow, "signed overflow in a negation")
CUDA_SIM_CHECK(divrem_overflow, "division by zero, or overflow in a division")
CUDA_SIM_CHECK(shift_out_of_bounds, "shift by more bits than the type has, or of a negative number")
CUDA_SIM_CHECK(out_of_bounds, "index outside the array")
CUDA_SIM_CHECK(pointer_overflow, "pointer arithmetic that wraps around")
CUDA_SIM_CHECK(vla_bound_not_positive, "array bound that is not positive")
CUDA_SIM_CHECK(load_invalid_value, "value that its type does not have")
CUDA_SIM_CHECK(builtin_unreachable, "reached code that cannot be reached")
CUDA_SIM_CHECK(missing_return, "function without its return")
CUDA_SIM_CHECK(nonnull_arg, "null for an argument that must not be")
CUDA_SIM_CHECK(nonnull_return_v1, "null returned where it must not be")
CUDA_SIM_CHECK(invalid_builtin, "bit count of 0")
CUDA_SIM_CHECK(float_cast_overflow, "floating-point value outside the integer type")
#undef CUDA_SIM_CHECK

extern "C" void __ubsan_handle_type_mismatch_v1(void* record, unsigned long pointer) {
  const auto* mismatch = static_cast<const TypeMismatch*>(record);
  char text[128];
  const unsigned long alignment = 1ul << mismatch->log2_alignment;
  if (pointer != 0 && pointer % alignment != 0) {
    snprintf(text, sizeof text, "misaligned access: %lu bytes past a multiple of %lu", pointer % alignment, alignment);
  } else {
    snprintf(text, sizeof text, "%s", pointer == 0 ? "access through a null pointer" : "access beyond the object");
  }
  undefined_behaviour(record, text);
}
extern "C" void __ubsan_handle_type_mismatch_v1_abort(void* record, unsigned long pointer) {
  __ubsan_handle_type_mismatch_v1(record, pointer);
}
