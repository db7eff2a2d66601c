// Runs a kernel's source on the CPU, to see what it computes: each thread is a fiber, each block of a cluster
// a thread of the host. What CUDA C++ and PTX have and C++ has not stands here under its own name, an
// instruction as `ptx_` and the instruction's name; `source.py` turns asm statements into calls.
//
// A block's fibers run one after another, each until it waits for others, in the order that EMULATED_ORDER
// says: a missing barrier gives different results in different orders, and a barrier that some never reach
// ends the program. Copies that a kernel starts and waits for later are done at once or only when it waits
// (EMULATED_LATE_COPIES).
#pragma once

#include <setjmp.h>
#include <ucontext.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <thread>
#include <type_traits>
#include <utility>
#include <vector>

#define __global__
#define __device__
#define __host__
#define __forceinline__ inline
#define __noinline__
#define __restrict__
#define __launch_bounds__(...)
#define __cluster_dims__(...)
#define __align__(bytes) __attribute__((aligned(bytes)))
#define __shared__ static thread_local
#define __CUDA_ARCH__ 1000

// ---- types ----------------------------------------------------------------------------------------------

struct uint3 {
  unsigned x = 1, y = 1, z = 1;
};
struct alignas(8) uint2 {
  unsigned x, y;
};
struct alignas(16) uint4 {
  unsigned x, y, z, w;
};
struct alignas(8) float2 {
  float x, y;
};
struct alignas(16) float4 {
  float x, y, z, w;
};
inline uint2 make_uint2(unsigned x, unsigned y) { return {x, y}; }
inline uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }
inline float2 make_float2(float x, float y) { return {x, y}; }
inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }

template <typename To, typename From>
To bits_as(From from) {
  static_assert(sizeof(To) == sizeof(From));
  To to;
  std::memcpy(&to, &from, sizeof(to));
  return to;
}

struct __half {
  _Float16 value;
};
struct __nv_bfloat16 {
  std::uint16_t bits;
};
struct __half2 {
  __half x, y;
};
struct __nv_bfloat162 {
  __nv_bfloat16 x, y;
};
inline float __half2float(__half h) { return static_cast<float>(h.value); }
inline __half __float2half_rn(float f) { return {static_cast<_Float16>(f)}; }
inline float __bfloat162float(__nv_bfloat16 b) { return bits_as<float>(std::uint32_t{b.bits} << 16); }
inline __nv_bfloat16 __float2bfloat16_rn(float f) {
  if (std::isnan(f)) return {0x7fff};
  const auto bits = bits_as<std::uint32_t>(f);
  return {static_cast<std::uint16_t>((bits + 0x7fff + (bits >> 16 & 1)) >> 16)};
}
inline __half2 __hmul2(__half2 a, __half2 b) {
  return {__float2half_rn(__half2float(a.x) * __half2float(b.x)),
          __float2half_rn(__half2float(a.y) * __half2float(b.y))};
}
inline __nv_bfloat162 __hmul2(__nv_bfloat162 a, __nv_bfloat162 b) {
  return {__float2bfloat16_rn(__bfloat162float(a.x) * __bfloat162float(b.x)),
          __float2bfloat16_rn(__bfloat162float(a.y) * __bfloat162float(b.y))};
}

// ---- fibers ---------------------------------------------------------------------------------------------

namespace emulated {

constexpr std::size_t STACK_BYTES = 128 << 10;
constexpr std::size_t SHARED_BYTES = 227 << 10;  // what a block of sm_90 or sm_100 may have
constexpr int LANES = 32;
constexpr unsigned OVER = ~0u;
constexpr unsigned WORDS = 16;  // of 32 bits that a lane shows its warp at a time

struct Copy {
  void* to;
  const void* from;  // null: zeros
};

struct Fiber {
  ucontext_t context;
  jmp_buf place;  // where it waits
  bool begun = false;
  std::unique_ptr<unsigned char[]> stack;
  uint3 thread;
  int index = 0;
  bool done = false;
  std::function<bool()> ready;  // what it waits for
  std::vector<Copy> copies;     // started and in no group yet
  std::deque<std::vector<Copy>> groups;
  unsigned arrivals = 0, waits = 0;  // at the barrier of the cluster
  unsigned warp_phase = 0;
};

struct Warp {
  unsigned arrived = 0, generation = 0;
  std::uint32_t shown[2][LANES][WORDS];
};

// Blocks that run at the same time, each in a thread of the host.
struct Cluster {
  std::vector<unsigned char*> shared;  // of each block
  std::mutex lock;
  unsigned running;                // threads that have not ended
  unsigned missing;                // of these, who have not arrived in this phase
  std::atomic<unsigned> phase{0};  // how often all have arrived
  std::atomic<unsigned> moves{0};  // rounds of a block in which one of its threads could go on,
  std::vector<std::atomic<unsigned>> idle_rounds;  // and in which none could, by block; OVER: it has ended

  Cluster(unsigned blocks, unsigned threads)
      : shared(blocks), running(blocks * threads), missing(running), idle_rounds(blocks) {}

  void arrive() {
    const std::lock_guard guard(lock);
    count_arrival();
  }
  // Of a thread that has arrived `arrivals` times: who has ended is not waited for.
  void end(unsigned arrivals) {
    const std::lock_guard guard(lock);
    --running;
    if (arrivals == phase) count_arrival();
  }

 private:
  void count_arrival() {
    if (--missing > 0) return;
    missing = running;
    ++phase;
  }
};

struct Block {
  std::vector<Fiber> fibers;
  std::vector<Warp> warps;
  ucontext_t context;
  jmp_buf scheduler;
  unsigned arrived = 0, generation = 0, running = 0;
  int rank = 0;
  Cluster* cluster = nullptr;
};

inline thread_local Block* block = nullptr;
inline thread_local Fiber* self = nullptr;
inline thread_local uint3 block_index;
inline thread_local uint3 block_size, grid_size;
alignas(1024) inline thread_local unsigned char shared_bytes[SHARED_BYTES];
inline thread_local std::size_t shared_limit = 0;
inline bool late_copies = false;
inline std::function<void()> body;
inline std::mutex error_lock;
inline char error[256];
inline std::atomic<bool> failed{false};

// Ends the launch with this message, the first that there is; called in a fiber it does not return.
inline void fail(const char* what) {
  {
    const std::lock_guard lock(error_lock);
    if (!failed) std::snprintf(error, sizeof(error), "%s", what);
    failed = true;
  }
  if (self != nullptr) _longjmp(block->scheduler, 1);
}

inline void wait_for(std::function<bool()> ready) {
  if (ready()) return;
  self->ready = std::move(ready);
  if (_setjmp(self->place) == 0) _longjmp(block->scheduler, 1);
}

inline Warp& warp() { return block->warps[self->index / LANES]; }
inline unsigned lane() { return self->index % LANES; }

// All lanes of `mask` meet.
inline void meet(unsigned mask) {
  Warp& own = warp();
  const unsigned generation = own.generation;
  if (++own.arrived == static_cast<unsigned>(__builtin_popcount(mask))) {
    own.arrived = 0;
    ++own.generation;
  }
  wait_for([&own, generation] { return own.generation != generation; });
}

// Show the lanes of `mask` some words; -> what all of them show. The next call but one uses the place again.
inline std::uint32_t (*show(unsigned mask, const std::uint32_t* words, unsigned count)) [WORDS] {
  auto& shown = warp().shown[self->warp_phase++ % 2];
  std::memcpy(shown[lane()], words, count * sizeof(*words));
  meet(mask);
  return shown;
}

template <typename T>
T from_lane(unsigned mask, T value, int source) {
  static_assert(sizeof(T) % 4 == 0 && sizeof(T) <= 4 * WORDS);
  std::uint32_t words[sizeof(T) / 4];
  std::memcpy(words, &value, sizeof(T));
  const auto shown = show(mask, words, sizeof(T) / 4);
  if (source >= 0 && source < LANES && (mask >> source & 1)) std::memcpy(&value, shown[source], sizeof(T));
  return value;
}

inline void check_shared(const void* at, std::size_t bytes, const unsigned char* base) {
  const auto* first = static_cast<const unsigned char*>(at);
  if (first < base || first + bytes > base + shared_limit)
    fail("an access outside of the block's shared memory");
  if ((first - base) % bytes != 0) fail("a misaligned access to shared memory");
}

inline void release_if_all_are_here() {
  if (block->arrived < block->running) return;
  block->arrived = 0;
  ++block->generation;
}

inline void entry() {
  body();
  self->done = true;
  --block->running;
  release_if_all_are_here();  // who has ended is not waited for
  block->cluster->end(self->arrivals);
  _longjmp(block->scheduler, 1);
}

// Lets a fiber run until it waits or ends. Only its first step goes by swapcontext, which asks the system
// each time.
inline void resume(Fiber& fiber) {
  self = &fiber;
  if (_setjmp(block->scheduler) == 0) {
    if (std::exchange(fiber.begun, true)) _longjmp(fiber.place, 1);
    swapcontext(&block->context, &fiber.context);
  }
  self = nullptr;
}

inline std::vector<int> order(int count) {
  std::vector<int> found(count);
  for (int i = 0; i < count; ++i) found[i] = i;
  const char* const wanted = std::getenv("EMULATED_ORDER");
  if (wanted != nullptr && std::strcmp(wanted, "last_first") == 0) std::reverse(found.begin(), found.end());
  return found;
}

// Whether all blocks of a cluster wait for each other: each has found nobody twice since anybody moved.
struct Watch {
  explicit Watch(Cluster& watched) : cluster(watched), since(cluster.shared.size()) {}

  bool nobody_can_go_on(int rank) {
    ++cluster.idle_rounds[rank];
    if (!watching || seen != cluster.moves) {
      watching = true, seen = cluster.moves;
      for (std::size_t i = 0; i < since.size(); ++i) since[i] = cluster.idle_rounds[i];
      return false;
    }
    for (std::size_t i = 0; i < since.size(); ++i) {
      const unsigned rounds = cluster.idle_rounds[i];
      if (rounds != OVER && rounds - since[i] < 2) return false;
    }
    return seen == cluster.moves;
  }

  Cluster& cluster;
  std::vector<unsigned> since;
  unsigned seen = 0;
  bool watching = false;
};

inline void run_block(Cluster& cluster, int rank, uint3 index, uint3 grid, uint3 size,
                      std::size_t dynamic_bytes) {
  const int threads = size.x * size.y * size.z;
  static thread_local Block own;
  own.cluster = &cluster;
  own.rank = rank;
  own.arrived = own.generation = 0;
  own.running = threads;
  own.warps.assign((threads + LANES - 1) / LANES, {});
  if (own.fibers.size() < static_cast<std::size_t>(threads)) own.fibers.resize(threads);
  block = &own, block_index = index, block_size = size, grid_size = grid, shared_limit = dynamic_bytes;
  std::memset(shared_bytes, 0xff, dynamic_bytes);  // NaN: what nobody wrote is found
  for (int i = 0; i < threads; ++i) {
    Fiber& fiber = own.fibers[i];
    if (fiber.stack == nullptr) fiber.stack.reset(new unsigned char[STACK_BYTES]);
    getcontext(&fiber.context);
    fiber.context.uc_stack.ss_sp = fiber.stack.get();
    fiber.context.uc_stack.ss_size = STACK_BYTES;
    makecontext(&fiber.context, entry, 0);
    fiber.index = i;
    fiber.thread = {i % size.x, i / size.x % size.y, i / size.x / size.y};
    fiber.done = fiber.begun = false;
    fiber.ready = [] { return true; };
    fiber.copies.clear(), fiber.groups.clear();
    fiber.arrivals = fiber.waits = fiber.warp_phase = 0;
  }
  const std::vector<int> turns = order(threads);
  Watch watch(cluster);
  while (own.running > 0) {
    bool moved = false;
    for (const int turn : turns) {
      Fiber& fiber = own.fibers[turn];
      if (fiber.done || !fiber.ready()) continue;
      moved = true;
      resume(fiber);
      if (failed) break;
    }
    if (!moved && watch.nobody_can_go_on(rank)) fail("threads wait for some that never come");
    if (failed) break;
    if (moved) {
      ++cluster.moves;
    } else {
      std::this_thread::yield();
    }
  }
  cluster.idle_rounds[rank] = OVER;
}

// Runs the whole grid, cluster after cluster; -> what went wrong, or null.
inline const char* run(uint3 grid, uint3 size, unsigned dynamic_bytes, unsigned cluster_size,
                       std::function<void()> kernel) {
  if (dynamic_bytes > SHARED_BYTES) return "more shared memory than a block may have";
  failed = false;
  const char* const late = std::getenv("EMULATED_LATE_COPIES");
  late_copies = late != nullptr && late[0] == '1';
  body = std::move(kernel);
  for (unsigned z = 0; z < grid.z; ++z) {
    for (unsigned y = 0; y < grid.y; ++y) {
      for (unsigned x = 0; x < grid.x; x += cluster_size) {
        Cluster cluster(cluster_size, size.x * size.y * size.z);
        if (cluster_size == 1) {
          cluster.shared[0] = shared_bytes;
          run_block(cluster, 0, {x, y, z}, grid, size, dynamic_bytes);
          if (failed) return error;
          continue;
        }
        std::atomic<unsigned> here{0};
        std::vector<std::thread> blocks;
        for (unsigned rank = 0; rank < cluster_size; ++rank) {
          blocks.emplace_back([&, rank] {
            cluster.shared[rank] = shared_bytes;
            ++here;
            while (here < cluster_size) std::this_thread::yield();
            run_block(cluster, rank, {x + rank, y, z}, grid, size, dynamic_bytes);
            ++here;  // its shared memory lasts until all have ended, as on a device once they have met a last
                     // time
            while (here < 2 * cluster_size) std::this_thread::yield();
          });
        }
        for (std::thread& thread : blocks) thread.join();
        if (failed) return error;
      }
    }
  }
  return nullptr;
}

template <typename... P, std::size_t... I>
void call(void (*kernel)(P...), void** arguments, std::index_sequence<I...>) {
  kernel(*static_cast<std::decay_t<P>*>(arguments[I])...);
}

// A launch as cuLaunchKernel has it: `arguments` point to the kernel's arguments.
template <typename... P>
const char* launch(void (*kernel)(P...), const unsigned* grid, const unsigned* size, unsigned dynamic_bytes,
                   unsigned cluster_size, void** arguments) {
  return run({grid[0], grid[1], grid[2]}, {size[0], size[1], size[2]}, dynamic_bytes, cluster_size,
             [=] { call(kernel, arguments, std::index_sequence_for<P...>{}); });
}

}  // namespace emulated

#define threadIdx (emulated::self->thread)
#define blockIdx (emulated::block_index)
#define blockDim (emulated::block_size)
#define gridDim (emulated::grid_size)

// ---- CUDA C++ -------------------------------------------------------------------------------------------

using std::isfinite;
using std::isinf;
using std::isnan;
using std::max;
using std::min;

inline void __syncthreads() {
  emulated::Block& own = *emulated::block;
  const unsigned generation = own.generation;
  ++own.arrived;
  emulated::release_if_all_are_here();
  emulated::wait_for([&own, generation] { return own.generation != generation; });
}
inline void __syncwarp(unsigned mask = ~0u) { emulated::meet(mask); }
inline void __threadfence() {}

template <typename T>
T __shfl_sync(unsigned mask, T value, int source) {
  return emulated::from_lane(mask, value, source % emulated::LANES);
}
template <typename T>
T __shfl_xor_sync(unsigned mask, T value, int distance) {
  return emulated::from_lane(mask, value, static_cast<int>(emulated::lane()) ^ distance);
}
template <typename T>
T __shfl_up_sync(unsigned mask, T value, unsigned distance) {
  return emulated::from_lane(mask, value, static_cast<int>(emulated::lane()) - static_cast<int>(distance));
}
inline unsigned __ballot_sync(unsigned mask, int predicate) {
  const std::uint32_t word = predicate != 0;
  const auto shown = emulated::show(mask, &word, 1);
  unsigned votes = 0;
  for (int lane = 0; lane < emulated::LANES; ++lane) {
    if (mask >> lane & 1) votes |= shown[lane][0] << lane;
  }
  return votes;
}
inline int __any_sync(unsigned mask, int predicate) { return __ballot_sync(mask, predicate) != 0; }
inline unsigned __reduce_add_sync(unsigned mask, unsigned value) {
  const auto shown = emulated::show(mask, &value, 1);
  unsigned sum = 0;
  for (int lane = 0; lane < emulated::LANES; ++lane) {
    if (mask >> lane & 1) sum += shown[lane][0];
  }
  return sum;
}

inline int __popc(unsigned v) { return __builtin_popcount(v); }
inline int __ffs(int v) { return __builtin_ffs(v); }
inline int __clz(int v) { return v == 0 ? 32 : __builtin_clz(v); }
inline unsigned __umulhi(unsigned a, unsigned b) { return static_cast<std::uint64_t>(a) * b >> 32; }
inline float __int_as_float(int v) { return bits_as<float>(v); }
inline float __uint_as_float(unsigned v) { return bits_as<float>(v); }
inline unsigned __float_as_uint(float v) { return bits_as<unsigned>(v); }
inline float __uint2float_rn(unsigned v) { return static_cast<float>(v); }
inline unsigned __float2uint_rz(float v) {
  return !(v > 0) ? 0 : v >= 4294967296.0f ? ~0u : static_cast<unsigned>(v);
}
inline float __fmul_rn(float a, float b) { return a * b; }
inline float __fdiv_rn(float a, float b) { return a / b; }
inline float __fdividef(float a, float b) { return a / b; }
inline float __expf(float v) { return std::exp(v); }
inline float __logf(float v) { return std::log(v); }
inline void sincospif(float v, float* sine, float* cosine) {
  *sine = std::sin(M_PI * v), *cosine = std::cos(M_PI * v);
}
inline float rsqrtf(float v) { return 1.0f / std::sqrt(v); }
template <typename T>
T __ldcg(const T* from) {
  return *from;
}

// One fiber of one block runs at a time, blocks of a cluster apart.
template <typename T>
T atomicAdd(T* to, std::type_identity_t<T> value) {
  return reinterpret_cast<std::atomic<T>*>(to)->fetch_add(value);
}
template <typename T>
T atomicOr(T* to, std::type_identity_t<T> value) {
  return reinterpret_cast<std::atomic<T>*>(to)->fetch_or(value);
}
template <typename T>
T atomicMax(T* to, std::type_identity_t<T> value) {
  T before = *to;
  *to = std::max(before, value);
  return before;
}

inline std::uint32_t __cvta_generic_to_shared(const void* pointer) {
  return static_cast<const unsigned char*>(pointer) - emulated::shared_bytes;
}

// ---- PTX ------------------------------------------------------------------------------------------------

namespace emulated {

constexpr std::uint32_t RANK_SHIFT = 24;  // of a block's rank in an address of the cluster's shared memory

inline unsigned char* at(std::uint32_t address, std::size_t bytes) {
  const unsigned rank = address >> RANK_SHIFT;
  unsigned char* const base = rank == 0 ? shared_bytes : block->cluster->shared[rank - 1];
  unsigned char* const place = base + (address & ((1u << RANK_SHIFT) - 1));
  check_shared(place, bytes, base);
  return place;
}

inline void copy_16(const Copy& copy) {
  if (copy.from == nullptr) {
    std::memset(copy.to, 0, 16);
  } else {
    std::memcpy(copy.to, copy.from, 16);
  }
}

inline void start_copy(std::uint32_t to, const void* from, int bytes) {
  if (reinterpret_cast<std::uintptr_t>(from) % 16 != 0) fail("a copy from a misaligned address");
  const Copy copy{at(to, 16), bytes == 0 ? nullptr : from};
  if (late_copies) {
    self->copies.push_back(copy);
  } else {
    copy_16(copy);
  }
}

template <typename T>
float low(std::uint32_t word);
template <typename T>
float high(std::uint32_t word);
template <>
inline float low<__half>(std::uint32_t word) {
  return __half2float({bits_as<_Float16>(static_cast<std::uint16_t>(word))});
}
template <>
inline float high<__half>(std::uint32_t word) {
  return low<__half>(word >> 16);
}
template <>
inline float low<__nv_bfloat16>(std::uint32_t word) {
  return bits_as<float>(word << 16);
}
template <>
inline float high<__nv_bfloat16>(std::uint32_t word) {
  return bits_as<float>(word & 0xffff0000u);
}

template <typename T>
void mma_m16n8k16(float& c0, float& c1, float& c2, float& c3, std::uint32_t a0, std::uint32_t a1,
                  std::uint32_t a2, std::uint32_t a3, std::uint32_t b0, std::uint32_t b1) {
  const std::uint32_t words[] = {a0, a1, a2, a3, b0, b1};
  const auto shown = show(~0u, words, 6);
  float* const c[] = {&c0, &c1, &c2, &c3};
  const int g = lane() / 4, t = lane() % 4;
  for (int i = 0; i < 4; ++i) {
    const int row = g + i / 2 * 8, column = 2 * t + i % 2;
    float sum = *c[i];
    for (int k = 0; k < 16; k += 2) {
      const std::uint32_t a = shown[row % 8 * 4 + k % 8 / 2][row / 8 + k / 8 * 2];
      const std::uint32_t b = shown[column * 4 + k % 8 / 2][4 + k / 8];
      sum += low<T>(a) * low<T>(b);
      sum += high<T>(a) * high<T>(b);
    }
    *c[i] = sum;
  }
}

template <bool TRANSPOSED>
void ldmatrix(std::uint32_t& r0, std::uint32_t& r1, std::uint32_t& r2, std::uint32_t& r3,
              std::uint32_t address) {
  const auto shown = show(~0u, &address, 1);
  std::uint32_t* const r[] = {&r0, &r1, &r2, &r3};
  for (int matrix = 0; matrix < 4; ++matrix) {
    const int g = lane() / 4, t = lane() % 4;
    for (int half = 0; half < 2; ++half) {
      const int row = TRANSPOSED ? 2 * t + half : g, column = TRANSPOSED ? g : 2 * t + half;
      std::uint16_t element;
      std::memcpy(&element, at(shown[matrix * 8 + row][0], 16) + column * 2, 2);
      const std::uint32_t shifted = std::uint32_t{element} << half * 16;
      *r[matrix] = half == 0 ? shifted : *r[matrix] | shifted;
    }
  }
}

}  // namespace emulated

inline void ptx_ex2_approx_ftz_f32(float& y, float x) {
  y = std::exp2(x);
  if (y < 1.17549435e-38f) y = 0;
}
inline void ptx_rcp_approx_ftz_f32(float& y, float x) { y = 1.0f / x; }
inline void ptx_griddepcontrol_wait() {}
inline void ptx_griddepcontrol_launch_dependents() {}

inline void ptx_createpolicy_fractional_L2__evict_first_b64(unsigned long long& policy) { policy = 1; }
inline void ptx_createpolicy_fractional_L2__evict_unchanged_b64(unsigned long long& policy) { policy = 2; }
inline void ptx_cp_async_cg_shared_global_L2__128B(std::uint32_t to, const void* from, int bytes) {
  emulated::start_copy(to, from, bytes);
}
inline void ptx_cp_async_cg_shared_global_L2__cache_hint_L2__128B(std::uint32_t to, const void* from,
                                                                  int bytes, unsigned long long policy) {
  if (policy != 1 && policy != 2) emulated::fail("a copy with a policy that nobody made");
  emulated::start_copy(to, from, bytes);
}
inline void ptx_cp_async_commit_group() {
  emulated::self->groups.push_back(std::move(emulated::self->copies));
  emulated::self->copies.clear();
}
inline void ptx_cp_async_wait_group(int pending) {
  auto& groups = emulated::self->groups;
  for (; static_cast<int>(groups.size()) > pending; groups.pop_front()) {
    for (const emulated::Copy& copy : groups.front()) emulated::copy_16(copy);
  }
}

inline void ptx_ld_global_nc_L1__no_allocate_v4_u32(unsigned& x, unsigned& y, unsigned& z, unsigned& w,
                                                    const void* from) {
  const uint4 v = *static_cast<const uint4*>(from);
  x = v.x, y = v.y, z = v.z, w = v.w;
}
inline void ptx_ld_global_L1__no_allocate_u32(unsigned& v, const void* from) {
  v = *static_cast<const unsigned*>(from);
}
inline void ptx_ld_global_L1__no_allocate_v2_u32(unsigned& x, unsigned& y, const void* from) {
  const uint2 v = *static_cast<const uint2*>(from);
  x = v.x, y = v.y;
}
inline void ptx_ld_global_L1__no_allocate_v4_u32(unsigned& x, unsigned& y, unsigned& z, unsigned& w,
                                                 const void* from) {
  ptx_ld_global_nc_L1__no_allocate_v4_u32(x, y, z, w, from);
}
inline void ptx_atom_acq_rel_gpu_global_inc_u32(unsigned& before, unsigned* counter, unsigned last) {
  std::atomic<unsigned>& value = *reinterpret_cast<std::atomic<unsigned>*>(counter);
  before = value;
  while (!value.compare_exchange_weak(before, before >= last ? 0 : before + 1)) {
  }
}

template <typename... P>
void ptx_mma_sync_aligned_m16n8k16_row_col_f32_bf16_bf16_f32(P&&... operands) {
  emulated::mma_m16n8k16<__nv_bfloat16>(operands...);
}
template <typename... P>
void ptx_mma_sync_aligned_m16n8k16_row_col_f32_f16_f16_f32(P&&... operands) {
  emulated::mma_m16n8k16<__half>(operands...);
}
template <typename... P>
void ptx_ldmatrix_sync_aligned_m8n8_x4_shared_b16(P&&... operands) {
  emulated::ldmatrix<false>(operands...);
}
template <typename... P>
void ptx_ldmatrix_sync_aligned_m8n8_x4_trans_shared_b16(P&&... operands) {
  emulated::ldmatrix<true>(operands...);
}

inline void ptx_cvt_rn_bf16x2_f32(unsigned& packed, float high, float low) {
  packed = std::uint32_t{__float2bfloat16_rn(high).bits} << 16 | __float2bfloat16_rn(low).bits;
}
inline void ptx_cvt_rn_f16x2_f32(unsigned& packed, float high, float low) {
  const auto bits = [](float f) { return std::uint32_t{bits_as<std::uint16_t>(__float2half_rn(f).value)}; };
  packed = bits(high) << 16 | bits(low);
}

inline void ptx_mov_u32_cluster_ctarank(int& rank) { rank = emulated::block->rank; }
inline void ptx_barrier_cluster_arrive_release_aligned() {
  if (emulated::self->arrivals++ > emulated::self->waits) {
    emulated::fail("a thread arrives at a cluster twice and does not wait between");
  }
  emulated::block->cluster->arrive();
}
inline void ptx_barrier_cluster_wait_acquire_aligned() {
  if (emulated::self->arrivals == emulated::self->waits++) {
    emulated::fail("a thread waits for a cluster at which it has not arrived");
  }
  emulated::Cluster& cluster = *emulated::block->cluster;
  const unsigned wanted = emulated::self->waits;
  emulated::wait_for([&cluster, wanted] { return cluster.phase >= wanted; });
}
inline void check_rank(int rank) {
  if (rank < 0 || rank >= static_cast<int>(emulated::block->cluster->shared.size())) {
    emulated::fail("a block that is not of the cluster");
  }
}
inline void ptx_mapa_u64(unsigned long long& address, unsigned long long own, int rank) {
  check_rank(rank);
  address = own - reinterpret_cast<std::uintptr_t>(emulated::shared_bytes) +
            reinterpret_cast<std::uintptr_t>(emulated::block->cluster->shared[rank]);
}
inline void ptx_mapa_shared__cluster_u32(unsigned& address, unsigned own, int rank) {
  check_rank(rank);
  address = own | (rank + 1u) << emulated::RANK_SHIFT;
}
inline void ptx_ld_shared__cluster_v2_f32(float& x, float& y, unsigned address) {
  const float2 v = *reinterpret_cast<const float2*>(emulated::at(address, sizeof(float2)));
  x = v.x, y = v.y;
}
