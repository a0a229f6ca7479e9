// How a kernel of a compiled image is called; libhiprtc.so puts this after the source, and one HIPHOST_KERNEL for each
// name expression.
#pragma once
#include <cstddef>
#include <tuple>
#include <type_traits>

namespace hiphost {

struct Kernel {  // as in module.c
    std::size_t bytes;
    void (*pack)(void *to, void *const *params);
    void (*run)(const void *packed, const unsigned *block, const unsigned *grid);
};

template <auto function>
struct Entry;

template <class... Args, void (*function)(Args...)>
struct Entry<function> {
    static_assert((std::is_trivially_copyable_v<Args> && ...), "arguments of kernels are copied as bytes");
    using Packed = std::tuple<Args...>;

    template <std::size_t... i>
    static void unpack(Packed &packed, void *const *params, std::index_sequence<i...>) {
        ((std::get<i>(packed) = *static_cast<std::tuple_element_t<i, Packed> *>(params[i])), ...);
    }
    static void pack(void *to, void *const *params) {
        unpack(*static_cast<Packed *>(to), params, std::index_sequence_for<Args...>{});
    }
    static void run(const void *packed, const unsigned *block, const unsigned *grid) {
        blockIdx.x = block[0], blockIdx.y = block[1], blockIdx.z = block[2];
        gridDim.x = grid[0], gridDim.y = grid[1], gridDim.z = grid[2];
        std::apply(function, *static_cast<const Packed *>(packed));
    }
    static constexpr Kernel kernel{sizeof(Packed), pack, run};
};

}  // namespace hiphost

#define HIPHOST_KERNEL(name, ...) \
    extern "C" __attribute__((visibility("default"))) const hiphost::Kernel name = hiphost::Entry<&__VA_ARGS__>::kernel;
