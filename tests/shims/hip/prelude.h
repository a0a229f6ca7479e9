// The words of HIP that a kernel needs, for plain C++: a block has one thread, which is a thread of the host.
#pragma once
#include <atomic>
#include <cstddef>
#include <cstdint>

#define __global__
#define __device__
#define __host__
#define __constant__
#define __forceinline__ inline
#define __noinline__ __attribute__((noinline))
#define __launch_bounds__(...)
#define __shared__ static thread_local

struct uint3 {
    unsigned x, y, z;
};
struct dim3 {
    unsigned x = 1, y = 1, z = 1;
};

inline thread_local uint3 blockIdx{0, 0, 0};
inline thread_local dim3 gridDim;
inline constexpr uint3 threadIdx{0, 0, 0};
inline constexpr dim3 blockDim;

inline void __syncthreads() {}
inline void __threadfence_block() { std::atomic_thread_fence(std::memory_order_seq_cst); }
inline void __threadfence() { std::atomic_thread_fence(std::memory_order_seq_cst); }
inline void __threadfence_system() { std::atomic_thread_fence(std::memory_order_seq_cst); }
